"""A training keeps the memory of what it frees: the next step does not get it from the system page by page."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION").lower(), reason="needs glibc")
@pytest.mark.parametrize(("wish", "most"), [({}, 50_000), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, None)])
def test_freed_memory_is_used_again(wish: dict[str, str], most: int | None) -> None:
    """A user who tells glibc something else has the last word."""
    result = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, **wish}, capture_output=True, text=True, check=True
    )
    faults = int(result.stdout)
    assert faults > 400_000 if most is None else faults < most, faults
