"""Where NCCL is found, and the libraries that a Horovod with NCCL is linked to."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from install_checks import put_nccl
from launchers import requires
from waiting import PATIENCE_S

from hvd_trainer.horovod_build import toolchain
from hvd_trainer.horovod_build.build_plan import BuildPlan
from hvd_trainer.horovod_build.build_steps import build_environment
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.facts import Nccl, TorchFacts, find_nccl

TRIPLET = f"{platform.machine()}-linux-gnu"
CUDA_TORCH = TorchFacts(version="2.15.0+cu132", cuda="13.2")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide CUDA and NCCL; return the folder that stands for this machine's /usr."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "HOROVOD_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain, "USUAL_CUDA_HOME", str(tmp_path / "no_cuda"))
    monkeypatch.setattr(toolchain, "USUAL_NCCL_HOMES", (str(tmp_path / "usr"),))
    return tmp_path / "usr"


@pytest.mark.parametrize(
    "library",
    [
        *("lib/libnccl.so.2", "lib/libnccl.so", "lib64/libnccl.so.2", f"lib/{TRIPLET}/libnccl.so.2"),
        "targets/sbsa-linux/lib/libnccl.so",
    ],
)
def test_nccl_is_found_where_packages_have_it(bare: Path, library: str) -> None:
    """NCCL from Debian or NVIDIA's images led to a StopIteration, or to a build for the CPU."""
    put_nccl(bare, library)
    assert toolchain.nccl_for(CUDA_TORCH) == Nccl(bare / "include", bare / library, "2.28.9")


def test_nccl_of_pytorch_comes_first(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, named = put_nccl(tmp_path / "wheel"), put_nccl(tmp_path / "named")
    put_nccl(bare)
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(named))
    torch = TorchFacts(version="2.15.0+cu132", cuda="13.2", nccl_home=str(wheel))
    for facts, home in ((torch, wheel), (CUDA_TORCH, named)):
        found = toolchain.nccl_for(facts)
        assert found is not None
        assert found.include == home / "include"


def test_nccl_needs_header_and_library(bare: Path, tmp_path: Path) -> None:
    homes = [put_nccl(tmp_path / "a", library=None), put_nccl(tmp_path / "b", header=False), tmp_path / "c"]
    assert find_nccl(homes) is None
    put_nccl(bare, library=None)  # libnccl2 without libnccl-dev is the other way round
    with pytest.raises(InstallError, match="NCCL's header and library are not there") as error:
        toolchain.find_cuda(CUDA_TORCH)
    assert f"lib/{TRIPLET}, targets/*/lib below {bare}" in str(error.value)
    assert "apt-get install libnccl-dev" in str(error.value)


def test_nccl_refuses_a_pytorch_for_rocm(bare: Path) -> None:
    with pytest.raises(InstallError, match=r"built for ROCm[^$]*--backend ddp, which uses RCCL"):
        toolchain.find_cuda(TorchFacts(version="2.15.0+rocm7.0", hip="7.0"))


def test_build_names_nccl_for_cmake(bare: Path, tmp_path: Path) -> None:
    nccl = find_nccl([put_nccl(bare, f"lib/{TRIPLET}/libnccl.so.2")])
    (bare / "include/stdlib.h").touch()
    plan = BuildPlan(CUDA_TORCH, toolchain.CudaToolkit(tmp_path / "cuda", "13.0"), nccl, None, 1)
    assert plan.name.endswith("-cuda13.0-nccl2.28.9")
    options = build_environment(plan, "g++", tmp_path)
    home = Path(options["HOROVOD_NCCL_HOME"])
    assert (home / "lib/libnccl.so").resolve() == bare / f"lib/{TRIPLET}/libnccl.so.2"
    assert [file.name for file in (home / "include").iterdir()] == ["nccl.h"]
    assert options["HVD_TRAINER_NCCL_FOLDER"] == str(bare / "lib" / TRIPLET)


LOAD = "import horovod.torch; print(open('/proc/self/maps').read())"


def symbols(library: Path, kind: str) -> dict[str, str]:
    """Return nm's letter for each of a library's defined or undefined symbols."""
    text = subprocess.check_output(["nm", "-D", f"--{kind}-only", str(library)], text=True)
    return {words[-1].partition("@")[0]: words[-2] for line in text.splitlines() if (words := line.split())}


@requires("horovod")
def test_horovod_links_all_libraries_of_its_symbols() -> None:
    """Horovod loads on a machine without a GPU only if it needs no library and no symbol of the driver."""
    if shutil.which("nm") is None or shutil.which("readelf") is None:
        pytest.skip("needs nm and readelf: apt-get install binutils")
    maps = subprocess.check_output([sys.executable, "-c", LOAD], text=True, timeout=PATIENCE_S)
    loaded = {Path(path) for path in re.findall(r" (/\S+)$", maps, re.MULTILINE)}
    (horovod,) = (path for path in loaded if path.name.startswith("mpi_lib_v2"))
    named = re.findall(r"\(NEEDED\).*\[(.+)\]", subprocess.check_output(["readelf", "-d", horovod], text=True))
    if not any(name.startswith("libnccl.") for name in named):
        pytest.skip("needs a Horovod with NCCL (nvcc and: python -m hvd_trainer install-horovod --gpu nccl)")
    assert not [name for name in named if name.startswith("libcuda.")]
    # libstdc++.so.6 is a link to libstdc++.so.6.0.30. Python's own symbols are in whoever loads an extension.
    providers = [path for path in loaded if path.name.startswith((*named, "libpython"))]
    there = {name for path in (*providers, Path(sys.executable).resolve()) for name in symbols(path, "defined")}
    wanted = symbols(horovod, "undefined")
    assert {"ncclAllReduce", "ncclCommAbort", "cudaEventQuery"} <= wanted.keys()
    assert [name for name, letter in wanted.items() if name not in there and letter not in "wv"] == []
