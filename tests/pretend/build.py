"""Build the pretend device's library, once for each version of PyTorch and of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
NAME = "pretend_device"


def cache() -> Path:
    """Return the folder of this version's library, which may not be there yet."""
    import torch

    content = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    key = hashlib.sha256(content + torch.__version__.encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "hvd_trainer" / "pretend" / key


def missing() -> str | None:
    """Return what this machine lacks to build the library; None if it is there or can be built."""
    if library().exists() or shutil.which(os.environ.get("CXX", "g++")):
        return None
    return "a C++ compiler, to build the pretend device: apt-get install g++"


def library() -> Path:
    return cache() / f"{NAME}.so"


def build() -> Path:
    """Return the library; build it if it is not there, in about a minute."""
    path = library()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes of one run ask for it at the same time
        if not path.exists():
            # What is left of a build that was killed keeps PyTorch from building again: each has a new folder.
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                # PyTorch changes this process when it compiles (sys.path).
                subprocess.run([sys.executable, __file__, folder], check=True)
                os.replace(Path(folder) / path.name, path)
    return path


def compile_in(folder: str) -> None:
    """Build the library in a new folder."""
    from torch.utils import cpp_extension

    # PyTorch's headers at -O0: the kernels are PyTorch's own, and these are only called.
    cpp_extension.load(
        NAME,
        [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=["-O0", "-g0", "-w"],
        build_directory=folder,
        with_cuda=False,
        is_python_module=False,
    )


if __name__ == "__main__":
    compile_in(sys.argv[1])
