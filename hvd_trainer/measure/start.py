"""Start a program as a user would, with a time limit, in a folder of a tool, and leave nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import NamedTuple, NoReturn

import psutil

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import LAUNCHERS

MARK = "HVD_TRAINER_RUN"
"""The environment variable by which the processes of a run are found; its value is the command's folder. Launchers
put ranks into sessions of their own, which a signal to a process group does not reach."""
END_S, POLL_S = 20.0, 1.0
NOTHING = Path(os.devnull)


class Start(NamedTuple):
    """How to start a run."""

    command: Sequence[str]
    variables: Mapping[str, str] = MappingProxyType({})
    """further environment variables"""
    threads: int | None = None
    """of each rank, on the CPU; None: as this process's environment says"""
    cwd: Path | None = None
    """working folder; None: this process's"""
    stdin: Path = NOTHING
    """the file that it reads"""
    left_out: tuple[str, ...] = ()
    """beginnings of further variables of this process's that the program does not get"""


def run_to_end(
    start: Start, folder: Path, output: Path, *, limit_s: float, meanwhile: Callable[[], object] = lambda: None
) -> int | None:
    """Return the exit code of a program; None if it ran past the limit. All its processes are ended.

    Args:
        start: how to start it.
        folder, output: as in `launched`.
        limit_s: after which it is killed, in seconds.
        meanwhile: called every second, and at the end.
    """
    deadline = time.monotonic() + limit_s
    with launched(start, folder, output) as process:
        code = None
        while code is None and (left := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(POLL_S, left))
            meanwhile()
    return code


@contextmanager
def launched(start: Start, folder: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and end all its processes at the end of the context.

    Args:
        start: how to start it.
        folder: by which `find_processes` finds its processes.
        output: the file to which what they print is appended.
    """
    # Whatever launcher may have started the tool: its ranks are not those of the run.
    others = {name for launcher in LAUNCHERS for name in launcher.traces() - {launcher.port}}
    environment = {
        **{n: value for n, value in os.environ.items() if n not in others and not n.startswith(start.left_out)},
        # By itself torchrun gives many ranks one thread each, and a single rank all cores.
        **({} if start.threads is None else {"OMP_NUM_THREADS": str(start.threads)}),
        # torchrun copies there what the failed rank says is the reason.
        "TORCHELASTIC_ERROR_FILE": str(output.with_name("error.json")),
        **start.variables,
        MARK: str(folder),
    }
    process = None
    try:
        with output.open("ab") as file, start.stdin.open("rb") as given:
            process = subprocess.Popen(
                start.command,
                env=environment,
                cwd=start.cwd,
                stdin=given,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        yield process
    finally:
        if process is not None:
            process.kill()  # it has no environment yet while it is being started
        # Found by their environment: also one whose start a signal has interrupted.
        end_processes(folder)
        if process is not None:
            process.wait()  # or it would stay as a zombie


def end_processes(folder: Path) -> None:
    """Kill all processes of a run in this folder.

    Raises:
        LaunchError: it cannot be killed.
    """
    deadline = time.monotonic() + END_S
    # Again and again: one may start another meanwhile.
    while processes := find_processes(folder):
        if time.monotonic() > deadline:
            raise LaunchError(f"These processes of a run do not end: {', '.join(str(p.pid) for p in processes)}")
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=0.5)


def find_processes(folder: Path) -> list[psutil.Process]:
    """Return the living processes of a run in this folder, or below it: of a tool that the run has started."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mark = process.environ().get(MARK)
            if mark is not None and Path(mark).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return [process for process in processes if process.pid != os.getpid()]


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM, and SIGHUP of a terminal that is closed, into SystemExit, so that what was started is ended.

    A further one has no effect then. Under `nohup` SIGHUP has none at all.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
