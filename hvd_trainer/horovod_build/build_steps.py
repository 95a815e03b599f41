"""Run the steps of the build, each a pip command with its output in the log."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_trainer.horovod_build.build_plan import VERSION, BuildPlan
from hvd_trainer.horovod_build.errors import InstallError, explain
from hvd_trainer.horovod_build.facts import Nccl
from hvd_trainer.horovod_build.toolchain import cpu_flags
from hvd_trainer.measure.start import Start, run_to_end

SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Of the published source package; pip checks it before anything in it runs."""

# The bundled gloo's CMake files predate CMake 4; setuptools 81 ended what setup.py relies on.
BUILD_TOOLS = ("cmake>=3.26,<4", "setuptools>=70.1,<81", "wheel", "patch-ng>=1.19,<2")
SOURCE_ONLY = ("--no-deps", "--no-build-isolation", "--use-pep517")
BUILD_OPTIONS = ("HOROVOD_", "CMAKE_GENERATOR", "MAKEFLAGS", "MFLAGS")
"""Beginnings of variables from which Horovod's build would take an option, perhaps a forgotten one."""


@dataclass(frozen=True)
class BuildSteps:
    """The three steps by pip, each in `folder` and with its output appended to `log`."""

    folder: Path
    log: Path

    @property
    def tools(self) -> Path:
        return self.folder / "tools"

    def variables(self) -> dict[str, str]:
        """Return the variables by which the build tools come first, and temporary files are in `folder`."""
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, [str(self.tools), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": path, "TMPDIR": str(temporary), "PIP_NO_INPUT": "1"}

    def fetch_tools(self) -> None:
        """Fetch CMake, setuptools and patch-ng into `folder`: the environment's own stay as they are."""
        asked = "The build tools must be fetched (cmake, setuptools, patch-ng)."
        self._pip(asked, "install", "--target", str(self.tools), *BUILD_TOOLS)

    def fetch_source(self) -> Path:
        """Fetch, check and unpack the source; return the folder with setup.py."""
        wanted = self.folder / "horovod.txt"
        wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SOURCE_SHA256}\n", encoding="utf-8")
        asked = f"The source of Horovod {VERSION} must be fetched."
        where = ("--dest", str(self.folder), "--requirement", str(wanted))
        self._pip(asked, "download", *SOURCE_ONLY, "--no-binary=horovod", "--require-hashes", *where)
        with tarfile.open(self.folder / f"horovod-{VERSION}.tar.gz") as archive:
            archive.extractall(self.folder)  # pip has checked its hash
        return self.folder / f"horovod-{VERSION}"

    def compile(self, source: Path, options: Mapping[str, str]) -> Path:
        """Compile the wheel; return its path in `folder`."""
        out = self.folder / "wheel"
        variables = {"HOROVOD_CMAKE": str(self.tools / "cmake/data/bin/cmake"), **options}
        words = ("--verbose", "--no-index", "--no-cache-dir", "--wheel-dir", str(out), str(source))
        self._pip("Horovod must be compiled.", "wheel", *SOURCE_ONLY, *words, variables=variables)
        return next(out.glob("horovod-*.whl"))

    def _pip(self, asked: str, *words: str, variables: Mapping[str, str] | None = None) -> None:
        start = Start(pip(*words), {**self.variables(), **(variables or {})}, left_out=BUILD_OPTIONS)
        run_logged(asked, start, self.log)


def pip(*words: str) -> list[str]:
    """Return the command line of this Python's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]


def build_environment(plan: BuildPlan, cxx: str, folder: Path) -> dict[str, str]:
    """Return the options of Horovod's setup.py and CMake files as variables, all of them explicit."""
    options = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if plan.mpi else "HOROVOD_WITHOUT_MPI": "1",
        # CUDA 13 has no library of it any more.
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": " ".join(f"-m{name}" for name in cpu_flags()),
        "CXX": cxx,
        "CMAKE_GENERATOR": "Unix Makefiles",
        "MAKEFLAGS": f"-j{plan.jobs}",
    }
    if shutil.which("ccache") is not None:
        # The build's folder has another name each time, which must not count.
        options |= {"CMAKE_C_COMPILER_LAUNCHER": "ccache", "CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}
        options |= {"CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1"}
    if plan.cuda and plan.nccl:
        if plan.torch.nccl_home is None:  # so that it is not beside PyTorch, either, when Horovod is loaded
            options["HVD_TRAINER_NCCL_FOLDER"] = str(plan.nccl.library.parent)
        options |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": str(_linkable_nccl(plan.nccl, folder)),
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_CUDA_HOME": str(plan.cuda.home),
            "CUDA_HOME": str(plan.cuda.home),
            "CUDAToolkit_ROOT": str(plan.cuda.home),
            "HOROVOD_BUILD_CUDA_CC_LIST": plan.cuda.compute_capabilities(plan.torch.compute_capabilities),
            "PATH": os.pathsep.join([str(plan.cuda.home / "bin"), os.environ["PATH"]]),
        }
    return options


def _linkable_nccl(nccl: Nccl, folder: Path) -> Path:
    """Make a folder of links, with lib/libnccl.so: the wheel has none of that name, and Debian's is not in lib."""
    links = folder / "nccl"
    for name in ("lib", "include"):
        (links / name).mkdir(parents=True)
    for header in nccl.include.glob("nccl*"):
        (links / "include" / header.name).symlink_to(header)
    (links / "lib/libnccl.so").symlink_to(nccl.library)
    return links


def run_logged(asked: str, start: Start, log: Path, limit_s: float = math.inf) -> None:
    """Run one step with its output appended to `log`, and end its processes with it.

    Raises:
        InstallError: it failed or did not end in time; `asked` begins the message.
    """
    with log.open("ab") as output:
        since = output.tell()
        output.write(f"\n$ {' '.join(start.command)}\n".encode())
    status = run_to_end(start, log.parent, log, limit_s=limit_s)
    if status is None:
        raise InstallError(asked, f"no end after {limit_s:.0f} s", f"look at the log: {log}", log)
    if status != 0:
        raise explain(asked, log, since)
