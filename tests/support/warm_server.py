"""Start Python processes that need not import PyTorch, for tests to which it does not matter how they are started.

`python warm_server.py SOCKET` imports once what trainings need, and forks for each client (warm_client.py):

    server ---- launch ---- rank 0        their variables are those of ranks that were started by hand
             |          \\---- rank 1        the launch ends them all when one fails, or when its client is gone
             |
             \\---- guard ---- process     what a launcher started, and stands in for it; killed with its client
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import own_host
from child_environment import STARTUP
from process_tree import MARK

from hvd_trainer.launch.launchers import CHOICE, find_launcher
from hvd_trainer.launch.world import is_rank
from hvd_trainer.measure.message import SITE
from hvd_trainer.measure.trial_files import guard_files

NEEDED = (
    *("torch._dynamo", "torch.distributed.nn.functional", "torch.utils.tensorboard", "tyro", "pytest"),
    *("hvd_trainer.training.job", "hvd_trainer.jobs.models", "hvd_trainer.training.spawn"),
    *("hvd_trainer.training.trainer", "hvd_trainer.backends.ddp"),
)
FAILED_S, POLL_S = 5.0, 0.02
ORPHAN_S = 30.0
"""How long processes may outlive the ranks: those of a loader look for their parent every 5 seconds."""
RUN = ["-m", "hvd_trainer", "run"]
REPLACED = ("horovod.", "hvd_trainer.hvd.", "hvd_trainer.c10d.", "hvd_trainer.backends.horovod")
"""Beginnings of the names, with a dot at their end, of what `hvd_trainer run` gives to a script or imports."""
PARENT_S = 1.0
"""How often to see whether pytest is still there: one that was killed does not end its server."""
INTERRUPTED = -signal.SIGINT
OUTSIDE = (__file__, runpy.__file__, "<frozen runpy>")
"""Files whose frames stand above a program's own in a traceback."""
LEFT_BEHIND = 98
"""The exit code where ranks have left something running."""
AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "KMP_", "TORCH_LOGS")
"""Variables that are read when a process starts, or when PyTorch is imported: those with these names are equal."""
STARTED_WITH = dict(os.environ)
HERE, _, REPOSITORY = (str(folder) for folder in list(Path(__file__).absolute().parents)[:3])
NAMESPACES = ("net", "uts", "ipc", "pid", "mnt")
PORTS = range(12000, 19000)
"""Below those that the system and tests/support/slurm_cluster.py give out."""


def main(address: str) -> None:
    """Serve clients until this process, or the one that started it, is killed."""
    parent = os.getppid()
    for name in NEEDED:
        importlib.import_module(name)
    with contextlib.suppress(ImportError), contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module("hvd_trainer.backends.horovod")
        importlib.import_module("horovod.torch")
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: what was imported cannot be forked"
    listener = socket.socket(socket.AF_UNIX)
    # Who finds it may connect to it.
    listener.bind(f"{address}.new")
    listener.listen()
    os.rename(f"{address}.new", address)
    ports = ports_of(os.getpid())
    while os.getppid() == parent:
        if not select.select([listener], [], [], PARENT_S)[0]:
            continue
        connection, _ = listener.accept()
        port = next(ports)
        if os.fork() == 0:
            listener.close()
            serve(connection, port)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)
    os._exit(0)  # at a usual exit the bindings of Triton print a list of leaks


def ports_of(server: int) -> Iterator[int]:
    """Yield ports that nobody uses; two servers begin at different ones."""
    number = server * 97
    while True:
        number += 1
        port = PORTS[number % len(PORTS)]
        with socket.socket() as probe:
            free = probe.connect_ex(("127.0.0.1", port)) != 0
        if free:
            yield port


def serve(connection: socket.socket, port: int) -> NoReturn:
    """Start what the client wants."""
    os.setsid()
    text, files, *_ = socket.recv_fds(connection, 1 << 20, 253)
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            os._exit(1)  # the client was killed meanwhile
        text += more
    wanted = json.loads(text)
    if "size" in wanted:
        launch(wanted, files, connection, port)
    keep(wanted, files, connection)


def launch(wanted: dict[str, Any], files: list[int], connection: socket.socket, port: int) -> NoReturn:
    """Start the ranks and wait for their end."""
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"], MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    size, ranks = wanted["size"], set()
    for rank in range(size):
        ranks.add(os.fork())
        if 0 in ranks:
            connection.close()
            os.environ.update(dict(zip(("RANK", "LOCAL_RANK"), [str(rank)] * 2, strict=True)))
            os.environ.update(dict(zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), [str(size)] * 2, strict=True)))
            own_host.enter()
            run(wanted["argv"])
    connection.send(json.dumps(end_of(ranks, connection)).encode())
    os._exit(0)


def keep(wanted: dict[str, Any], files: list[int], connection: socket.socket) -> NoReturn:
    """Start a process in the place of the client, kill it if the client is killed, and tell the client its end."""
    if not can_run(wanted):
        connection.send(b"0\n")
        os._exit(0)
    enter_namespaces_of(connection)
    process = os.fork()
    if process == 0:
        connection.send(f"{os.getpid()}\n".encode())
        connection.close()
        if wanted["leads_group"]:
            os.setsid()
        become(wanted, files)
        run(wanted["argv"])
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    for file in (0, 1, 2, *files):
        os.close(file)
    ended = os.pidfd_open(process)
    if ended not in select.select([ended, connection], [], [])[0]:
        signal.pidfd_send_signal(ended, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        connection.send(f"{os.waitpid(process, 0)[1]}\n".encode())
    os._exit(0)


def can_run(wanted: dict[str, Any]) -> bool:
    """Return whether a process forked from here is what the client would become."""
    env = wanted["env"]
    is_asked = not {"-np", "--np"}.isdisjoint(wanted["argv"]) and not is_rank(env)
    if wanted["argv"][:3] == RUN and (is_asked or CHOICE in env or find_launcher(env) is None):
        return False  # it imports no PyTorch: its ranks do
    return (
        wanted["executable"] == sys.executable
        and at_start(env) == at_start(STARTED_WITH)
        # A process that a script under `hvd_trainer run` has started has its hooks from the beginning.
        and "HVD_TRAINER_ENGINE" not in env
    )


def enter_namespaces_of(client: socket.socket) -> None:
    """Enter the client's host (benchmarks/hosts.py); the next fork is a process of it."""
    process, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    for name in NAMESPACES:
        path = f"/proc/{process}/ns/{name}"
        if os.readlink(path) != os.readlink(f"/proc/self/ns/{name}"):
            with open(path) as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns of {path}")


def at_start(environ: Mapping[str, str]) -> dict[str, object]:
    """Return those of the variables that a process reads when it starts."""
    found: dict[str, object] = {name: value for name, value in environ.items() if name.startswith(AT_START)}
    found.pop("PYTHONUNBUFFERED", None)
    # Where the packages are that are already imported.
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    known = (REPOSITORY, HERE, STARTUP, str(SITE))
    return found | {"PYTHONPATH": [folder for folder in folders if folder not in known]}


def become(wanted: dict[str, Any], files: list[int]) -> None:
    """Take over the client's files, variables, limits and folder, and what /proc shows of it."""
    # First out of the way of the numbers that they shall have.
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    os.closerange(0, 1000)
    for file, number in zip(apart, wanted["files"], strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    tempfile.tempdir = None
    guard_files(os.environ)
    os.sched_setaffinity(0, wanted["affinity"])
    os.umask(wanted["umask"])
    for name, limits in wanted["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    for number in wanted["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.orig_argv = wanted["orig_argv"]
    os.getppid = partial(parent_of, wanted["pid"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(
            line_buffering=stream is sys.stderr or stream.isatty(), write_through=wanted["unbuffered"]
        )
    show(wanted)
    if wanted["argv"][:3] == RUN:
        forget(REPLACED)


def forget(packages: tuple[str, ...]) -> None:
    """Let modules be imported as in a new process, for hooks that answer their import with others."""
    for name in [name for name in sys.modules if f"{name}.".startswith(packages)]:
        parent, _, child = name.rpartition(".")
        vars(sys.modules.get(parent, sys)).pop(child, None)
        del sys.modules[name]


def parent_of(client: int) -> int:
    """Return the process that started the client: a launcher, or what took its place when it ended."""
    return int(Path(f"/proc/{client}/stat").read_text().rpartition(")")[2].split()[1])


def show(wanted: dict[str, Any]) -> None:
    """Write this process's command line and its test's mark where /proc/PID/cmdline and environ are read from."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, numbers[45:49])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        command = b"\0".join(map(os.fsencode, wanted["orig_argv"])) + b"\0"
        size = arguments_end - arguments
        memory.seek(arguments)
        memory.write(command[: size - 1].ljust(size, b"\0"))
        memory.seek(variables)
        mark = f"{MARK}=".encode()
        block = memory.read(variables_end - variables)
        start = block.find(mark) + len(mark)
        size = block.index(b"\0", start) - start
        memory.seek(variables + start)
        memory.write(os.fsencode(wanted["env"].get(MARK, ""))[:size].ljust(size, b"/"))


def end_of(ranks: set[int], connection: socket.socket) -> int:
    """Wait for all ranks; return the exit code of the first that failed."""
    code, end_at = 0, float("inf")
    while ranks:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            ranks.discard(ended)
            if status and not code:
                found = os.waitstatus_to_exitcode(status)
                code, end_at = found if found > 0 else 128 - found, time.monotonic() + FAILED_S
            continue
        gone = bool(select.select([connection], [], [], POLL_S)[0])
        if gone or time.monotonic() > end_at:
            for process in in_session():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + ORPHAN_S
    while left := in_session():
        if time.monotonic() > deadline:
            for process in left:
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    print(f"left behind: process {process}: {command}", file=sys.stderr, flush=True)
                    os.kill(process, signal.SIGKILL)
            return LEFT_BEHIND
        time.sleep(POLL_S)
    return code


def in_session() -> list[int]:
    """Return the living processes of this launch, but itself."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(session) == os.getsid(0) and state != "Z" and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def run(argv: list[str]) -> NoReturn:
    """Do what `python ARGV` does, but for the interpreter's shutdown, which takes seconds."""
    code = 0
    try:
        run_code(argv)
    except SystemExit as leaving:
        if leaving.code is not None and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in OUTSIDE:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def run_code(argv: list[str]) -> None:
    paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, *rest = argv
    sys.argv = rest if kind == "-m" else ["-c", *rest[1:]] if kind == "-c" else argv
    folder = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    sys.path[:1] = [folder, *paths]
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
