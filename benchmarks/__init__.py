"""Training speed, measured side by side: ``python -m benchmarks --help``. See README.md here."""

import compileall
import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NO_GPUS = {
    "CUDA_VISIBLE_DEVICES": "",
    # An empty list of AMD's GPUs is taken as no list.
    "HIP_VISIBLE_DEVICES": "-1",
    # Intel's GPUs: only CPUs are left.
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
}
"""Environment variables that hide all GPUs from a process that has not looked for them yet."""


def prepare_environment() -> None:
    """From now on all that is started finds the modules of this repository, with bytecode, and no GPU.

    pip has compiled PyTorch's modules; under PYTHONDONTWRITEBYTECODE these would be compiled in each start.
    """
    for package in ("hvd_trainer", "benchmarks"):
        compileall.compile_dir(REPOSITORY / package, quiet=1)
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    os.environ.update(NO_GPUS, PYTHONPATH=path)
