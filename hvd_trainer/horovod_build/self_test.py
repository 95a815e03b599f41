"""Prove an installed Horovod by real collectives, and mark it as proved.

The mark is written to `RECORD_FILE`, a file of the wheel, and so removed with it: what is installed next counts as
not proved.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

from hvd_trainer.horovod_build import self_test_job
from hvd_trainer.horovod_build.build_plan import BuildPlan
from hvd_trainer.horovod_build.build_steps import run_logged
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.patch_set import RECORD_FILE
from hvd_trainer.utils.files import atomic_write

SELF_TEST_TIMEOUT_S = 300
MARK = '\nRECORD["proved"] = True\n'


def prove(plan: BuildPlan, log: Path) -> None:
    """Run two ranks on the CPU, and with NCCL and a visible GPU also on up to two GPUs; then mark it as proved.

    Raises:
        InstallError: a run failed or did not end in time.
    """
    _run_self_test("cpu", 2, log, "--gloo")
    if plan.mpi and shutil.which("mpirun"):
        _run_self_test("cpu", 2, log, "--mpi")
    if plan.cuda and plan.torch.gpu_count:
        # NCCL refuses two ranks on one GPU.
        _run_self_test("cuda", min(2, plan.torch.gpu_count), log, "--gloo")
    _mark_as_proved()


def _mark_as_proved() -> None:
    importlib.invalidate_caches()  # another process has installed it
    spec = importlib.util.find_spec("horovod")
    assert spec is not None, "ranks of this Python have just imported it"
    assert spec.origin is not None
    record = Path(spec.origin).parent.parent / RECORD_FILE
    with atomic_write(record) as temporary:
        temporary.write_text(record.read_text(encoding="utf-8") + MARK, encoding="utf-8")


def _run_self_test(device: str, num_processes: int, log: Path, controller: str) -> None:
    horovodrun = Path(sysconfig.get_path("scripts")) / "horovodrun"
    command = [
        str(horovodrun),
        controller,
        "-np",
        str(num_processes),
        "-H",
        f"localhost:{num_processes}",
        sys.executable,
        "-m",
        self_test_job.__name__,
        device,
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_", "PMIX_"))
    }
    asked = f"Horovod was installed, but {num_processes} ranks could not exchange {device} tensors."
    try:
        run_logged(
            asked,
            command,
            log,
            # An empty PYTHONOPTIMIZE keeps the assertions.
            environment | {"OMP_NUM_THREADS": "1", "PYTHONOPTIMIZE": ""},
            timeout_s=SELF_TEST_TIMEOUT_S,
        )
    except InstallError as error:
        # horovodrun takes a localhost without an address for another host, and reports only that ssh failed.
        if not _has_address("localhost"):
            raise InstallError(
                asked,
                "the name localhost leads to no address (an empty /etc/hosts?)",
                "echo '127.0.0.1 localhost' >> /etc/hosts    (as root), then the same command again",
                log,
            ) from error
        raise
    print(f"proved: {num_processes} ranks, {device} tensors, {controller[2:]} controller", flush=True)


def _has_address(host: str) -> bool:
    try:
        socket.gethostbyname(host)
    except OSError:
        return False
    return True
