"""Horovod as it is built here, and what doctor says of the machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from gpu.machine import Record, cuda_only, launch

pytestmark = pytest.mark.gpu
LIBRARY = "import horovod.torch.mpi_lib_v2 as library; print(library.__file__)"


def test_doctor_finds_no_error(horovod: float, record_property: Record) -> None:
    record_property("Horovod was there after, s", round(horovod))
    launch("python", 1, ["-m", "hvd_trainer", "doctor"])


@cuda_only
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf on this machine: apt-get install binutils")
def test_horovod_is_linked_to_nccl_and_imported_without_the_driver(horovod: float) -> None:
    library = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True).stdout
    command = ["readelf", "-d", library.split()[-1]]
    needed = re.findall(r"NEEDED.*\[(.*?)\]", subprocess.run(command, capture_output=True, text=True).stdout)
    assert any(name.startswith("libnccl") for name in needed), needed
    assert not any(name.startswith("libcuda.so") for name in needed), needed
