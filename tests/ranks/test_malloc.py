"""Memory that a training frees stays in the process, so that the next step causes no page faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_trainer.backends.malloc import USER_SETTINGS

BY_ITSELF = {"MALLOC_MMAP_THRESHOLD_": "131072"}

# Faults while 40 MB, 9,766 pages, come and go fifty times.
CODE = """
import os, resource, sys
import torch
from hvd_trainer.backends import EngineOptions, create

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with create(EngineOptions(backend="single", device="cpu")):
    print(faults())
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="needs glibc")
@pytest.mark.parametrize(("wish", "faults"), [({}, range(200_000)), (BY_ITSELF, range(400_000, 600_000))])
def test_freed_memory_is_reused(wish: dict[str, str], faults: range) -> None:
    """Settings of glibc by the user take precedence."""
    if wish and "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel gives large pages, of which there are too few to count: echo madvise > that file")
    clean = {name: value for name, value in os.environ.items() if name not in USER_SETTINGS}
    result = subprocess.run(
        [sys.executable, "-c", CODE], env={**clean, **wish}, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) in faults
