"""Builds the Horovod wheel in a folder of its own and keeps it under a key.

<wheel dir>/lock                        one build at a time
<wheel dir>/.build-XXXX/                sources, tools, temporary files; gone afterwards
<wheel dir>/<key>.log                   everything that the build printed
<wheel dir>/<key>/horovod-...whl        put there by a rename: whole or not at all
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hvd_trainer.tools.horovod.errors import InstallError
from hvd_trainer.tools.horovod.patches import apply_patches
from hvd_trainer.tools.horovod.plan import BuildKey, BuildPlan
from hvd_trainer.tools.horovod.steps import BuildSteps, build_environment
from hvd_trainer.tools.horovod.toolchain import find_cxx

# Sources 60 MB, tools 120 MB, objects with debug information 250 MB (CPU) to 600 MB (NCCL).
NEEDED_MB = 800


def cached_wheel(wheel_dir: Path, key: BuildKey) -> Path | None:
    """The wheel that an earlier build left under this key."""
    return next(iter((wheel_dir / key.name).glob("horovod-*.whl")), None)


@contextlib.contextmanager
def locked(wheel_dir: Path) -> Iterator[bool]:
    """Holds the wheel dir's lock; yields whether it had to wait for another installer.

    Raises:
        InstallError: the folder cannot be made or written to.
    """
    try:
        wheel_dir.mkdir(parents=True, exist_ok=True)
        lock = (wheel_dir / "lock").open("w")
    except OSError as error:
        raise InstallError(
            f"Built wheels are to be kept in {wheel_dir}.",
            f"it cannot be written to: {error.strerror}",
            "python -m hvd_trainer install-horovod --wheel-dir FOLDER",
        ) from error
    with lock:
        waited = False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another installer that is using {wheel_dir} ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
            waited = True
        yield waited


def build_wheel(plan: BuildPlan, wheel_dir: Path) -> Path:
    """Fetches, changes and compiles Horovod; the caller holds the lock.

    Raises:
        InstallError: no compiler, no space, or a step failed; the message names cause and log.
    """
    cxx = find_cxx(plan.torch.cxx_standard)
    for leftover in wheel_dir.glob(".build-*"):  # of an installer that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    _require_space(wheel_dir)
    log = wheel_dir / f"{plan.key.name}.log"
    log.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=wheel_dir, prefix=".build-") as name:
            folder = Path(name)
            steps = BuildSteps(folder, log)
            steps.fetch_tools()
            source = steps.fetch_source()
            apply_patches(source, plan.torch.cxx_standard, plan.key.record())
            wheel = steps.compile(source, build_environment(plan, cxx, folder))
            target = wheel_dir / plan.key.name
            target.mkdir(exist_ok=True)
            return wheel.replace(target / wheel.name)
    except OSError as error:
        raise InstallError(
            "Horovod could not be built.",
            f"{error.strerror} ({error.filename})",
            "free some space, or --wheel-dir on another disk",
            log,
        ) from error


def _require_space(wheel_dir: Path) -> None:
    free_mb = shutil.disk_usage(wheel_dir).free // 2**20
    if free_mb < NEEDED_MB:
        raise InstallError(
            f"The build needs about {NEEDED_MB} MB in {wheel_dir}.",
            f"{free_mb} MB are free: the disk is full",
            "free some space, or python -m hvd_trainer install-horovod --wheel-dir FOLDER on another disk",
        )
