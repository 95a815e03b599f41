"""Build the Horovod wheel in a folder of its own, and keep it under the plan's name.

    <wheel dir>/lock                  one build at a time
    <wheel dir>/.build-XXXX/          sources, tools, temporary files; removed afterwards
    <wheel dir>/<name>.log            everything that the build printed
    <wheel dir>/<name>/horovod-*.whl  put there by a rename: whole or not at all

A wheel is code that will be run, so only its user (and root) may be able to write there: a file or folder to which
others could have written is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hvd_trainer.horovod_build.build_plan import BuildPlan
from hvd_trainer.horovod_build.build_steps import BuildSteps, build_environment
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.patch_set import apply_patches
from hvd_trainer.horovod_build.toolchain import find_cxx
from hvd_trainer.utils.text import INSTALL_HOROVOD

# Sources 60 MB, tools 120 MB, objects up to 100 MB.
MIN_FREE_MB = 800
OWNER_WRITES = 0o755
"""The mode of the folders, whatever the umask is."""


def cached_wheel(wheel_dir: Path, name: str) -> Path | None:
    """Return the wheel that an earlier build left under this name, or None.

    Raises:
        InstallError: others could have written it.
    """
    folder = wheel_dir / name
    wheel = next(iter(folder.glob("horovod-*.whl")), None)
    for path in (folder, wheel) if wheel is not None else ():
        require_private(path, f"rm -r {folder}, and the same command again, which builds it again")
    return wheel


def require_private(path: Path, remedy: str) -> None:
    """Refuse a file or folder that other users own or can write to.

    Raises:
        InstallError: others than this user and root own it or can write to it.
    """
    status = path.lstat()
    if status.st_uid not in (0, os.geteuid()):
        why = f"{path} belongs to another user (number {status.st_uid})"
    elif stat.S_ISLNK(status.st_mode):
        why = f"{path} is a link"
    elif status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        why = f"other users may write to {path} ({stat.filemode(status.st_mode)})"
    else:
        return
    raise InstallError(
        "Built wheels are code that is run, so only you may write where they are kept.", why, remedy
    )


@contextlib.contextmanager
def lock_wheels(wheel_dir: Path) -> Iterator[bool]:
    """Hold the wheel dir's lock; yield whether another installer had to be waited for.

    Raises:
        InstallError: the folder cannot be made or written to, or others may write to it.
    """
    try:
        wheel_dir.mkdir(OWNER_WRITES, parents=True, exist_ok=True)
        remedy = f"chmod go-w {wheel_dir} if it is yours, or --wheel-dir FOLDER that only you may write to"
        require_private(wheel_dir, remedy)
        lock = (wheel_dir / "lock").open("w")
    except OSError as error:
        raise InstallError(
            f"Built wheels are to be kept in {wheel_dir}.",
            f"it cannot be written to: {error.strerror}",
            f"{INSTALL_HOROVOD} --wheel-dir FOLDER",
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
    """Fetch, patch and compile Horovod; the caller holds the lock.

    Raises:
        InstallError: no compiler, no space, or a step failed; the message names the cause and the log.
        PatchError: the source is not the published one.
    """
    cxx = find_cxx(plan.torch.cxx_standard)
    for leftover in wheel_dir.glob(".build-*"):  # of an installer that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    _require_space(wheel_dir)
    log = wheel_dir / f"{plan.name}.log"
    log.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=wheel_dir, prefix=".build-") as name:
            folder = Path(name)
            steps = BuildSteps(folder, log)
            steps.fetch_tools()
            source = steps.fetch_source()
            standard, record = plan.torch.cxx_standard, plan.record
            apply_patches(source, steps.tools, cxx_standard=standard, record=record)
            wheel = steps.compile(source, build_environment(plan, cxx, folder))
            target = wheel_dir / plan.name
            target.mkdir(OWNER_WRITES, exist_ok=True)
            wheel.chmod(wheel.stat().st_mode & OWNER_WRITES)
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
    if free_mb < MIN_FREE_MB:
        raise InstallError(
            f"The build needs about {MIN_FREE_MB} MB in {wheel_dir}.",
            f"{free_mb} MB are free: the disk is full",
            f"free some space, or {INSTALL_HOROVOD} --wheel-dir FOLDER on another disk",
        )
