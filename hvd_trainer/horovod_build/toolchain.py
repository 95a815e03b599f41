"""Find the C++ compiler, the CUDA toolkit, NCCL and MPI for the build of Horovod."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.facts import LIBRARY_FOLDERS, Nccl, TorchFacts, ask, find_nccl
from hvd_trainer.utils.text import INSTALL_HOROVOD

USUAL_CUDA_HOME = "/usr/local/cuda"
USUAL_NCCL_HOMES = ("/usr", "/usr/local")
LIMIT_S = 60
"""How long a compiler or its wrapper may take to answer, in seconds."""

# PyTorch's headers use these; the first g++ that has them all is 9 (C++17) or 11 (C++20).
CXX_TRIALS = {
    17: "#include <filesystem>\nint main() { std::filesystem::path path; return 0; }\n",
    20: "#include <concepts>\n#include <source_location>\n#include <span>\n"
    "enum class Kind { one };\nint main() { using enum Kind; return static_cast<int>(one); }\n",
}


@dataclass(frozen=True)
class CudaToolkit:
    """A CUDA toolkit: a folder with bin/nvcc and include/cuda_runtime.h."""

    home: Path
    version: str

    @property
    def major(self) -> str:
        return self.version.partition(".")[0]

    def compute_capabilities(self, wanted: str) -> str:
        """Return those of `wanted` ("75,80,90") that this toolkit's compiler knows."""
        known = re.findall(r"compute_(\d+)", _output([str(self.home / "bin/nvcc"), "--list-gpu-arch"]))
        return ",".join(item for item in wanted.split(",") if item in known)


def find_cxx(standard: int) -> str:
    """Return the C++ compiler ($CXX, else g++), after it has compiled a file that needs `standard`.

    Raises:
        InstallError: there is none, it is too old, or `make` or Python's headers are missing.
    """
    asked, name = "Horovod must be compiled, and there is no", os.environ.get("CXX") or "g++"
    remedy = "apt-get install g++    (or set CXX to a compiler that you have)"
    path = _require_program(name, f"{asked} C++ compiler.", remedy)
    _require_program("make", f"{asked} make.", "apt-get install make")
    _require_standard(path, standard)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise InstallError(
            "Horovod must be compiled, and this Python has no C headers.",
            f"{header} is not there",
            "apt-get install python3-dev    (or use a Python from python.org, pyenv or conda)",
        )
    return path


def _require_program(name: str, asked: str, remedy: str) -> str:
    """Return the path of a program on PATH, or raise InstallError."""
    if (path := shutil.which(name)) is None:
        raise InstallError(asked, f"looked for {name!r} on PATH", remedy)
    return path


def _require_standard(compiler: str, standard: int) -> None:
    trial = CXX_TRIALS[20 if standard >= 20 else 17]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "trial.cc")
        source.write_text(trial, encoding="utf-8")
        command = [compiler, f"-std=c++{standard}", "-fsyntax-only", str(source)]
        answer = ask(command, LIMIT_S)
    if answer.code is None:
        raise InstallError(
            f"This PyTorch's headers need a compiler for C++{standard}.",
            f"{compiler} did not end within {LIMIT_S} s, for a program of a few lines",
            "name another one, for example CXX=g++-12",
        )
    if answer.code != 0:
        version = _output([compiler, "--version"]).partition("\n")[0] or "of unknown version"
        complaint = answer.err.strip().partition("\n")[0]
        newest = "g++ 11" if standard >= 20 else "g++ 9"
        raise InstallError(
            f"This PyTorch's headers need a compiler for C++{standard}.",
            f"{compiler} ({version}) cannot: {complaint}",
            f"install {newest} or later and name it, for example CXX=g++-12",
        )


def find_toolkits() -> list[CudaToolkit]:
    """Return every CUDA toolkit that is found, those named by variables first."""
    homes = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    homes += [_home_of_nvcc(), USUAL_CUDA_HOME]
    toolkits: dict[Path, CudaToolkit] = {}
    for home in (Path(item).resolve() for item in homes if item):
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime.h").is_file():
            version = re.search(r"release (\d+\.\d+)", _output([str(home / "bin/nvcc"), "--version"]))
            if version:
                toolkits.setdefault(home, CudaToolkit(home, version.group(1)))
    return list(toolkits.values())


def _home_of_nvcc() -> str | None:
    """Return the toolkit of the nvcc on PATH, which may be a link, or a script that calls another."""
    if shutil.which("nvcc") is None:
        return None
    top = re.search(r"^#\$ TOP=(.+)$", _output(["nvcc", "-dryrun", "-x", "cu", os.devnull]), re.M)
    return top.group(1).strip() if top else None


def find_cuda(torch: TorchFacts) -> CudaToolkit:
    """Return the toolkit for an NCCL build against this PyTorch.

    Raises:
        InstallError: PyTorch has no CUDA or no NCCL, or no toolkit of its major version is there.
    """
    asked = "An NCCL build was asked for (--gpu nccl)"
    cpu_instead = f"{INSTALL_HOROVOD} --gpu none    (a build for the CPU)"
    if torch.hip is not None:
        raise InstallError(
            f"{asked}, but this PyTorch is built for ROCm.",
            f"torch {torch.version}; Horovod 0.28.1's code for ROCm does not fit ROCm 6 and later",
            f"train on GPUs by --backend ddp, which uses RCCL, or {cpu_instead}",
        )
    if torch.cuda is None:
        raise InstallError(
            f"{asked}, but this PyTorch is built without CUDA.",
            f"torch {torch.version}",
            f"pip install a CUDA build of torch, or {cpu_instead}",
        )
    if nccl_for(torch) is None:
        homes, folders = ", ".join(map(str, _nccl_homes(torch))), ", ".join(LIBRARY_FOLDERS)
        raise InstallError(
            f"{asked}, but NCCL's header and library are not there.",
            f"no package nvidia-nccl, and no include/nccl.h with libnccl.so in {folders} below {homes}",
            f"pip install nvidia-nccl-cu{torch.cuda.partition('.')[0]}, or apt-get install libnccl-dev, "
            f"or set HOROVOD_NCCL_HOME to the folder with both, or {cpu_instead}",
        )
    toolkits = find_toolkits()
    major = torch.cuda.partition(".")[0]
    for toolkit in toolkits:
        if toolkit.major == major:
            return toolkit
    if not toolkits:
        raise InstallError(
            f"{asked}, but there is no CUDA toolkit (nvcc and its headers).",
            "no CUDA toolkit in HOROVOD_CUDA_HOME, CUDA_HOME, CUDA_PATH, on PATH (nvcc) or in /usr/local/cuda",
            f"install CUDA {major} and set CUDA_HOME, or {cpu_instead}",
        )
    seen = ", ".join(f"CUDA {toolkit.version} in {toolkit.home}" for toolkit in toolkits)
    raise InstallError(
        f"{asked}, but the CUDA toolkit and PyTorch are of different major versions.",
        f"torch {torch.version} is built for CUDA {torch.cuda}; found {seen}",
        f"install CUDA {major} and set CUDA_HOME, or {cpu_instead}",
    )


def nccl_for(torch: TorchFacts) -> Nccl | None:
    """Return the NCCL to build against: PyTorch's wheel; if there is none, HOROVOD_NCCL_HOME's or the system's."""
    return find_nccl(_nccl_homes(torch))


def _nccl_homes(torch: TorchFacts) -> list[str | Path]:
    named = [home for home in (torch.nccl_home, os.environ.get("HOROVOD_NCCL_HOME")) if home]
    return [*named, *(toolkit.home for toolkit in find_toolkits()), *USUAL_NCCL_HOMES]


def find_mpi() -> str:
    """Return the MPI's version, which its C++ compiler wrapper prints.

    Raises:
        InstallError: `mpicxx` is not on PATH.
    """
    asked = "A build with MPI was asked for (--mpi), but there is no MPI compiler."
    _require_program(
        "mpicxx", asked, "apt-get install libopenmpi-dev openmpi-bin    (or load your cluster's MPI module)"
    )
    shown = _output(["mpicxx", "--showme:version"]) or _output(["mpicxx", "-v"])
    version = re.search(r"\d+(\.\d+)+", shown)
    return version.group(0) if version else "unknown"


def cpu_flags() -> list[str]:
    """Return the x86 extensions that Horovod's fp16 code uses and this processor has; none on others.

    An emulated ARM sees the flags of the x86 machine that emulates it.
    """
    if platform.machine() != "x86_64":
        return []
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    present = flags.group(1).split() if flags else []
    return [name for name in ("f16c", "avx", "fma") if name in present]


def _output(command: list[str]) -> str:
    """Return what a program prints; empty if it cannot be started or does not end."""
    try:
        answer = ask(command, LIMIT_S)
    except OSError:
        return ""
    return "" if answer.code is None else answer.out + answer.err
