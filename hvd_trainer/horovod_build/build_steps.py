"""The steps of the build, each a pip command with its output in the log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_trainer.horovod_build.build_plan import VERSION, BuildPlan
from hvd_trainer.horovod_build.errors import InstallError, explain
from hvd_trainer.horovod_build.nccl import Nccl
from hvd_trainer.horovod_build.toolchain import cpu_flags

# Of the published source package; pip checks it before anything in it runs.
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# The bundled gloo's CMake files predate CMake 4; setuptools 81 ended what setup.py relies on.
BUILD_TOOLS = ("cmake>=3.26,<4", "setuptools>=70.1,<81", "wheel", "patch-ng>=1.19,<2")
# For a step that is told to end, in seconds.
GRACE_S = 20
SOURCE_ONLY = ("--no-deps", "--no-build-isolation", "--use-pep517")


@dataclass(frozen=True)
class BuildSteps:
    """pip's three jobs, each in `folder` and each writing to `log`."""

    folder: Path
    log: Path

    @property
    def tools(self) -> Path:
        return self.folder / "tools"

    def environment(self) -> dict[str, str]:
        """This process's, with the build tools first and temporary files in `folder`."""
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, [str(self.tools), os.environ.get("PYTHONPATH")]))
        kept = {name: value for name, value in os.environ.items() if not _is_build_option(name)}
        return kept | {"PYTHONPATH": path, "TMPDIR": str(temporary), "PIP_NO_INPUT": "1"}

    def fetch_tools(self) -> None:
        """Fetch CMake, setuptools and patch-ng into `folder`: the environment's own stay as they are."""
        run_logged(
            "The build tools must be fetched (cmake, setuptools, patch-ng).",
            [*pip("install"), "--target", str(self.tools), *BUILD_TOOLS],
            self.log,
            self.environment(),
        )

    def fetch_source(self) -> Path:
        """The source, checked and unpacked; returns the folder with setup.py."""
        wanted = self.folder / "horovod.txt"
        wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
        run_logged(
            f"The source of Horovod {VERSION} must be fetched.",
            [
                *pip("download"),
                *SOURCE_ONLY,
                "--no-binary=horovod",
                "--require-hashes",
                "--dest",
                str(self.folder),
                "--requirement",
                str(wanted),
            ],
            self.log,
            self.environment(),
        )
        with tarfile.open(self.folder / f"horovod-{VERSION}.tar.gz") as archive:
            archive.extractall(self.folder)  # the archive is a known one: pip has checked its hash
        return self.folder / f"horovod-{VERSION}"

    def compile(self, source: Path, options: Mapping[str, str]) -> Path:
        """The wheel, still in `folder`."""
        out = self.folder / "wheel"
        cmake = self.tools / "cmake/data/bin/cmake"
        run_logged(
            "Horovod must be compiled.",
            [
                *pip("wheel"),
                *SOURCE_ONLY,
                "--verbose",
                "--no-index",
                "--no-cache-dir",
                "--wheel-dir",
                str(out),
                str(source),
            ],
            self.log,
            self.environment() | {"HOROVOD_CMAKE": str(cmake)} | dict(options),
        )
        return next(out.glob("horovod-*.whl"))


def pip(command: str) -> list[str]:
    """This Python's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", command]


def _is_build_option(name: str) -> bool:
    """Horovod's build reads its options from the environment; a forgotten one must not leak in."""
    return name.startswith("HOROVOD_") or name in ("CMAKE_GENERATOR", "MAKEFLAGS", "MFLAGS")


def build_environment(plan: BuildPlan, cxx: str, folder: Path) -> dict[str, str]:
    """The options of Horovod's setup.py and CMake files, all of them explicit."""
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


def run_logged(
    asked: str,
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    timeout_s: float | None = None,
) -> None:
    """Runs one step with its output appended to `log`; its processes never outlive it.

    Raises:
        InstallError: it failed or did not end in time; `asked` begins the message.
    """
    with log.open("ab") as output, contextlib.ExitStack() as at_last:
        since = output.tell()
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        with _signals_held_back():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
            at_last.callback(_end, process)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise InstallError(
                asked, f"no end after {error.timeout:.0f} s", f"look at the log: {log}", log
            ) from error
    if status != 0:
        raise explain(asked, log, since)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """SIGTERM and Ctrl-C come after the block: a step whose start they interrupt would run on, known to nobody."""
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.signal(number, lambda number, frame: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a step that is still running, with all that it started.

    SIGTERM first: horovodrun keeps its ranks in sessions of their own and ends them itself.
    """
    if process.poll() is None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
