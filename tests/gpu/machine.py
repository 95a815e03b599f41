"""The machine that the tests run on: its GPUs, and how ranks share them.

Imported before the suite hides GPUs from its own process.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import launchers
import own_host
import pytest
import torch

from hvd_trainer.utils import accelerator

KIND = accelerator.kind()
COUNT = accelerator.count(KIND)
ON_CUDA = KIND == "cuda"
SMI = "nvidia-smi"
LIMIT_S = 120.0
"""Time limit of each launch: one that takes longer hangs, and the other tests need the time."""
ANSWER_S = 30.0
launch = partial(launchers.launch, timeout_s=LIMIT_S)
InRanks = Callable[..., list[Any]]
Record = Callable[[str, object], None]
"""Types of the fixtures `in_ranks` and `record_property`."""
cuda_only = pytest.mark.skipif(not ON_CUDA, reason=f"needs CUDA (the device here: {KIND})")


def gpus(number: int) -> pytest.MarkDecorator:
    """Return a mark that skips a test where there are fewer."""
    return pytest.mark.skipif(number > COUNT, reason=f"needs {number} GPUs (here: {COUNT})")


def variables_of(ranks: int) -> dict[str, str]:
    """Return those of so many ranks: for equal bits in each run, and own hosts if they share a GPU."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(own_host.VARIABLES if ranks > COUNT else {})}


def output_of(*command: str) -> str:
    """Return what a program prints, or that it is not here."""
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} has not answered within {ANSWER_S:g} s"
    return re.sub(r"\x1b\[[0-9;]*m", "", asked.stdout or asked.stderr).strip()


def gpus_and_driver() -> str:
    """Return a line on NVIDIA's GPUs."""
    query = "--query-gpu=name,memory.total,driver_version,compute_mode"
    return output_of(SMI, query, "--format=csv,noheader").replace("\n", "; ")


def facts() -> dict[str, str]:
    """Return what a reader of the report must know of the machine."""
    return {
        "device": f"{COUNT} x {KIND}",
        SMI: gpus_and_driver(),
        "links": output_of(SMI, "topo", "-m"),
        "built for": torch.__version__,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if ON_CUDA else "-",
        "nvcc": output_of("nvcc", "--version").rpartition("\n")[2],
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
    }
