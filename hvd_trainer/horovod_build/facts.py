"""Find out which PyTorch, GPUs and Horovod this Python has, and what a host has; in a process of its own.

Importing PyTorch takes seconds, may crash, and never ends where a GPU's driver hangs; a broken Horovod can end its
process, too. So `python -m hvd_trainer.horovod_build.facts` prints two JSON objects, a line each: PyTorch with its
GPUs, then Horovod. Lines that were printed before a crash or a time-out are used.

`doctor` sends the text of this file to other hosts by ssh, where `python - FOLDER` runs it and prints the host's
facts. So its top imports the standard library only: this package may be missing there, or another version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PROBE_TIMEOUT_S = 300
LIBRARY_NAMES = ("libnccl.so.2", "libnccl.so")
LIBRARY_FOLDERS = ("lib", "lib64", f"lib/{platform.machine()}-linux-gnu", "targets/*/lib")
HOST_MARK = "hvd_trainer doctor "
"""The prefix of the line with a host's facts: a login script may print, too."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees, of any maker."""

    name: str
    memory: int
    """bytes"""
    capability: str
    """`9.0`; the name of the architecture where it is AMD's; empty where it is Intel's"""
    uuid: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """This Python's PyTorch, and the GPUs that it sees."""

    error: str | None = None
    """why it cannot be imported; the rest then has no meaning"""
    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    cxx_standard: int = 0
    kind: str | None = None
    """the type of the devices that it is built for, such as `cuda`, if ranks train on them"""
    unsupported: str | None = None
    """the type of an accelerator that is here and that ranks cannot train on"""
    nccl: str | None = None
    """the version that it was built with"""
    nccl_home: str | None = None
    """the folder of the NCCL wheel that it loads"""
    nccl_version: str | None = None
    """the version of that wheel"""
    architectures: Sequence[str] = ()
    """the GPU architectures it has code for: sm_80, compute_90 ..."""
    gpu_count: int = 0
    """NVIDIA's GPUs, counted without their initialization"""
    gpus: Sequence[Gpu] = ()
    gpu_error: str | None = None
    """why it sees no GPU"""

    @property
    def compute_capabilities(self) -> str:
        """The GPUs to compile for ("75,80,90"); without them nvcc compiles for every GPU that it knows."""
        numbers = {match[1] for text in self.architectures if (match := re.fullmatch(r"sm_(\d+)", text))}
        return ",".join(sorted(numbers, key=int))


@dataclass(frozen=True)
class HorovodFacts:
    """An installed Horovod: why it cannot be used, and what it was built for if it is ours."""

    error: str | None = None
    path: str = ""
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """The result of the probe."""

    torch: TorchFacts
    horovod: HorovodFacts | None = None
    """None: none is installed, or the process ended before it was found"""
    ended: str = ""
    """how the process ended, if it ended so early"""
    is_timeout: bool = False
    """whether its time was up then"""


class Answer(NamedTuple):
    """The output of a program, all of it or what it wrote in time."""

    out: str
    err: str
    code: int | None
    """its exit code; None: its time was up"""


def ask(command: Sequence[str], limit_s: float) -> Answer:
    """Run a program to its end, or kill it after so many seconds.

    Raises:
        OSError: it cannot be started.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as late:
        out, err, code = late.stdout or b"", late.stderr or b"", None
    else:
        out, err, code = done.stdout, done.stderr, done.returncode
    return Answer(out.decode(errors="replace"), err.decode(errors="replace"), code)


def probe() -> Facts:
    """Run the probe in a new process of this Python."""
    answer = ask([sys.executable, "-m", __name__], PROBE_TIMEOUT_S)
    if answer.code is None:
        said = f"no end within {PROBE_TIMEOUT_S} s"
    else:
        said = answer.err.strip()[-2000:] or f"the probe ended with status {answer.code}"
    return parse_facts(answer.out, answer.code, said)


def parse_facts(out: str, code: int | None, said: str) -> Facts:
    """Parse what the probe printed, in whole or in part.

    Args:
        out: its stdout.
        code: its exit code; None: its time was up.
        said: the reason that it gave, if it failed.
    """
    printed: dict[str, Any] = {}
    for line in out.splitlines():
        # Horovod without its extension prints a warning, and the last line may be incomplete.
        with suppress(ValueError, TypeError):
            printed.update(json.loads(line))
    ended = f"it was killed by signal {-code}" if code is not None and code < 0 else said
    if "torch" not in printed:
        return Facts(TorchFacts(error=ended), ended=ended, is_timeout=code is None)
    torch = TorchFacts(**{**printed["torch"], "gpus": [Gpu(**gpu) for gpu in printed["torch"]["gpus"]]})
    if "horovod" not in printed:
        return Facts(torch, ended=ended, is_timeout=code is None)
    return Facts(torch, printed["horovod"] and HorovodFacts(**printed["horovod"]))


def _torch_facts() -> TorchFacts:
    try:
        import torch
    except Exception as error:  # a broken PyTorch raises anything from OSError to RuntimeError
        return TorchFacts(error=f"{type(error).__name__}: {error}")
    from hvd_trainer.utils import accelerator

    built_for = torch.accelerator.current_accelerator()
    kind = built_for.type if built_for is not None and built_for.type in accelerator.COLLECTIVES else None
    gpus, gpu_error = _gpus(torch, kind) if kind else ([], None)
    nccl = find_nccl(_package_folders("nvidia.nccl"))
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cxx_standard=_cxx_standard(Path(torch.__file__).parent),
        kind=kind,
        unsupported=accelerator.unsupported(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        nccl_home=str(nccl.include.parent) if nccl else None,
        nccl_version=nccl.version if nccl else None,
        # In older releases torch.cuda.get_arch_list is empty where there is no GPU.
        architectures=(torch._C._cuda_getArchFlags() or "").split() if torch.version.cuda else (),
        gpu_count=torch.cuda.device_count() if torch.version.cuda else 0,
        gpus=gpus,
        gpu_error=gpu_error,
    )


def _gpus(torch: Any, kind: str) -> tuple[list[Gpu], str | None]:
    from hvd_trainer.errors import first_line

    module = torch.get_device_module(kind)
    try:
        module.init()
        properties = [module.get_device_properties(number) for number in range(module.device_count())]
    except Exception as error:  # no driver, one that is too old, a broken GPU
        return [], first_line(error)
    gpus = []
    for gpu in properties:
        # PyTorch fills in both attributes on CUDA and ROCm, and only one is meaningful on each.
        capability = f"{gpu.major}.{gpu.minor}" if kind == "cuda" else ""
        capability = str(gpu.gcnArchName) if torch.version.hip else capability
        gpus.append(Gpu(gpu.name, gpu.total_memory, capability, str(getattr(gpu, "uuid", ""))))
    return gpus, None


@dataclass(frozen=True)
class Nccl:
    """The folder with nccl.h, the library's file, and the version that the header names."""

    include: Path
    library: Path
    version: str


def find_nccl(homes: Iterable[str | Path]) -> Nccl | None:
    """Return the NCCL of the first of `homes` that has both header and library.

    home                          header      library
    .../site-packages/nvidia/nccl include     lib
    /usr (Debian, NGC)            include     lib/x86_64-linux-gnu
    /usr (RHEL, SUSE)             include     lib64
    /usr/local/cuda               include     targets/x86_64-linux/lib, lib64
    """
    for home in map(Path, homes):
        header = home / "include/nccl.h"
        folders = (path for pattern in LIBRARY_FOLDERS for path in sorted(home.glob(pattern)))
        libraries = [folder / name for folder in folders for name in LIBRARY_NAMES if (folder / name).is_file()]
        if header.is_file() and libraries:
            text = header.read_text(encoding="utf-8")
            parts = dict(re.findall(r"^\s*#define NCCL_(MAJOR|MINOR|PATCH) (\d+)", text, re.MULTILINE))
            version = ".".join(parts.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))
            return Nccl(header.parent, libraries[0], version)
    return None


def _cxx_standard(torch_folder: Path) -> int:
    """Return the C++ standard with which this PyTorch compiles extensions: 17, or 20 of late."""
    text = (torch_folder / "utils/cpp_extension.py").read_text(encoding="utf-8")
    return max((int(standard) for standard in re.findall(r"-std=c\+\+(\d\d)\b", text)), default=17)


def _horovod_facts() -> HorovodFacts | None:
    spec = importlib.util.find_spec("horovod")
    if spec is None:
        return None
    wrong: str | None = None
    record: dict[str, Any] = {}
    try:
        # Horovod without its extension prints a warning, imports all the same, and has no `init`.
        import horovod.torch

        if not hasattr(horovod.torch, "init"):
            wrong = "it has no PyTorch extension for this Python"
    except Exception as error:  # an extension for another PyTorch can raise anything
        wrong = f"{type(error).__name__}: {error}"
    with suppress(ImportError):
        from horovod.hvd_trainer_build import RECORD

        record = RECORD
    return HorovodFacts(wrong, str(spec.origin), record)


def host_facts(folder: str) -> dict[str, Any]:
    """Return the versions that all hosts must have alike, the numbers of CPUs and GPUs, and whether `folder`
    exists. No package that it looks for is imported.
    """
    packages = {name: installed_version(name) or "" for name in ("hvd_trainer", "torch", "horovod")}
    gpus = Path("/proc/driver/nvidia/gpus")
    return {
        "versions": {"python": platform.python_version(), **packages},
        "files": {"hvd_trainer": _digest("hvd_trainer", "**/*.py"), "horovod": _digest("horovod", "*_build.py")},
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": len(list(gpus.iterdir())) if gpus.is_dir() else 0,
        "folder": os.path.isdir(folder),
    }


def installed_version(package: str) -> str | None:
    """Return the version of a package in this environment; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(package: str, pattern: str) -> str:
    """Return the SHA-256 of a package's files, without importing it."""
    digest = hashlib.sha256()
    for place in _package_folders(package):
        for file in sorted(Path(place).glob(pattern)):
            digest.update(str(file.relative_to(place)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _package_folders(package: str) -> Sequence[str]:
    """Return the folders of a package's modules, without importing it; none if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the package around it
        return []
    return (spec.submodule_search_locations or []) if spec is not None else []


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if os.path.isdir(sys.argv[1]):
            # horovodrun would start the ranks in that folder, where a package in it comes before an installed one.
            os.chdir(sys.argv[1])
        print(HOST_MARK + json.dumps(host_facts(sys.argv[1])), flush=True)
    else:
        torch_facts = _torch_facts()
        print(json.dumps({"torch": asdict(torch_facts)}), flush=True)
        horovod_facts = None if torch_facts.error is not None else _horovod_facts()
        print("\n" + json.dumps({"horovod": horovod_facts and asdict(horovod_facts)}), flush=True)
