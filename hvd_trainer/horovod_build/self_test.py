"""Prove an installed Horovod by real collectives, and mark it as proved.

Its ranks run `python -m hvd_trainer.horovod_build.self_test cpu`.

The mark is written to `RECORD_FILE`, a file of the wheel, and so removed with it: what is installed next counts as
not proved.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hvd_trainer.horovod_build.build_plan import BuildPlan
from hvd_trainer.horovod_build.build_steps import run_logged
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.patch_set import RECORD_FILE
from hvd_trainer.measure.start import Start
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
    ranks = ("-np", str(num_processes), "-H", f"localhost:{num_processes}")
    command = [str(horovodrun), controller, *ranks, sys.executable, "-m", __name__, device]
    # An empty PYTHONOPTIMIZE keeps the assertions.
    start = Start(command, {"PYTHONOPTIMIZE": ""}, threads=1, left_out=("HOROVOD_", "OMPI_", "PMIX_"))
    asked = f"Horovod was installed, but {num_processes} ranks could not exchange {device} tensors."
    try:
        run_logged(asked, start, log, SELF_TEST_TIMEOUT_S)
    except InstallError as error:
        # horovodrun takes a localhost without an address for another host, and reports only that ssh failed.
        try:
            socket.gethostbyname("localhost")
        except OSError:
            raise InstallError(
                asked,
                "the name localhost leads to no address (an empty /etc/hosts?)",
                "echo '127.0.0.1 localhost' >> /etc/hosts    (as root), then the same command again",
                log,
            ) from error
        raise
    print(f"proved: {num_processes} ranks, {device} tensors, {controller[2:]} controller", flush=True)


def check_collectives(device_name: str) -> str:
    """Run allreduce, broadcast and one optimizer step on "cpu" or "cuda"; return what was proved.

    Raises:
        AssertionError: a collective gave a wrong number, or the build's record is wrong.
    """
    import horovod.torch as hvd
    import torch
    from horovod.common import util

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device("cuda", hvd.local_rank()) if device_name == "cuda" else torch.device("cpu")
    ranks = torch.full((1000,), float(rank), device=device)
    mean = hvd.allreduce(ranks, op=hvd.Average, name="mean")
    assert torch.equal(mean, torch.full_like(mean, (size - 1) / 2)), mean
    total = hvd.allreduce(torch.tensor([rank + 1], device=device), op=hvd.Sum, name="total")
    assert total.item() == size * (size + 1) // 2, total
    first = hvd.broadcast(ranks, root_rank=0, name="first")
    assert not first.any(), first
    _check_optimizer(hvd, torch, device)
    # horovodrun chooses its controller by the first pair; the second is what was compiled.
    assert (util.mpi_built(), util.gloo_built()) == (hvd.mpi_built(), hvd.gloo_built())
    hvd.shutdown()
    return f"rank {rank} of {size} on {device}: collectives and one optimizer step are right"


def _check_optimizer(hvd: Any, torch: Any, device: Any) -> None:
    """Check one step: with loss = rank * weight the averaged gradient, and so the step, is the mean rank."""
    weight = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)])
    (weight * hvd.rank()).sum().backward()
    optimizer.step()
    assert torch.equal(weight.data, torch.full_like(weight, -(hvd.size() - 1) / 2)), weight


if __name__ == "__main__":
    print(check_collectives(sys.argv[1]), flush=True)
