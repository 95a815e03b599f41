"""The Horovod that we build when a GPU or another rank fails, on stand-ins for CUDA and NCCL.

All of its own code runs, from the tensor that is enqueued to the result: only CUDA's and NCCL's functions are
replaced.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from install_checks import installed_record
from launchers import SUPPORT, requires
from waiting import PATIENCE_S

pytestmark = [pytest.mark.long, requires("horovod")]
STAND_IN, JOB = SUPPORT / "gpu_stand_in", SUPPORT / "gpu_failures_job.py"
BUILD_FLAGS = ("GPU", "CUDA", "NCCL", "GLOO")
KERNELS = {"end": "0", "wait for another rank": "1", "fail": "2"}
"""By number in gpu_stand_in/device.cc."""
NO_LATE_QUERY = "0 questions to a communicator that was gone"


@pytest.fixture(scope="module")
def libraries(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not installed_record().get("cuda"):
        pytest.skip("needs a Horovod with NCCL (nvcc and: python -m hvd_trainer install-horovod --gpu nccl)")
    if shutil.which("g++") is None:
        pytest.skip("needs g++: apt-get install g++")
    folder = tmp_path_factory.mktemp("stand_in")
    defined = [f"-DHAVE_{name}=1" for name in BUILD_FLAGS]
    options = ["-std=c++17", "-shared", "-fPIC", *defined, f"-I{STAND_IN}", f"-I{patched}"]
    made = {name: folder / f"{name}.so" for name in ("device", "exchange")}
    for name, library in made.items():
        subprocess.run(["g++", *options, "-o", str(library), str(STAND_IN / f"{name}.cc")], check=True)
    return made


@pytest.mark.parametrize(
    ("kernels", "aborts", "answer"),
    [
        ("end", "1", "ok"),
        # As published, the process was ended by SIGABRT.
        ("fail", "0", "cudaEventSynchronize failed: device-side assert triggered"),
        ("fail", "1", "cudaEventQuery failed: device-side assert triggered"),
        # As published, the end of Horovod waited for the kernel, and the kernel for ever.
        ("wait for another rank", "1", "the exchange on NCCL was given up: a rank is gone or has failed"),
    ],
)
def test_horovod_reports_gpu_failures(libraries: dict[str, Path], kernels: str, aborts: str, answer: str) -> None:
    environment = {
        **os.environ,
        "HOROVOD_NCCL_ABORT": aborts,
        "HOROVOD_FUSION_THRESHOLD": "0",
        "LD_PRELOAD": str(libraries["device"]),
    }
    done = subprocess.run(
        [sys.executable, str(JOB), KERNELS[kernels], str(libraries["exchange"])],
        env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [answer] * 3 + [NO_LATE_QUERY]
