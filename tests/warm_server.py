"""Start ranks that need not import PyTorch, for tests to which it does not matter how ranks are started.

`python warm_server.py SOCKET` imports once what trainings need, and forks for each client (warm_client.py):

    server ---- launch ---- rank 0        their variables are those of ranks that were started by hand
                      \\---- rank 1        the launch ends them all when one fails, or when its client is gone
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

NEEDED = (
    *("torch._dynamo", "torch.distributed.nn.functional", "torch.utils.tensorboard", "tyro"),
    *(
        "hvd_trainer.training.job",
        "hvd_trainer.jobs.models",
        "hvd_trainer.training.spawn",
        "hvd_trainer.training.trainer",
    ),
    "hvd_trainer.backends.ddp",
)
FAILED_S, ORPHAN_S, POLL_S = 5.0, 5.0, 0.02
PARENT_S = 1.0
"""How often to see whether pytest is still there: one that was killed does not end its server."""
LEFT_BEHIND = 98
"""The exit code where ranks have left something running."""
PORTS = range(12000, 19000)
"""Below those that the system and tests/slurm_cluster.py give out."""


def main(address: str) -> None:
    """Serve clients until this process, or the one that started it, is killed."""
    parent = os.getppid()
    for name in NEEDED:
        importlib.import_module(name)
    with contextlib.suppress(ImportError), contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module("hvd_trainer.backends.horovod")
        importlib.import_module("horovod.torch")
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
            launch(connection, port)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


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


def launch(connection: socket.socket, port: int) -> NoReturn:
    """Start the ranks and wait for their end."""
    os.setsid()
    text, files, *_ = socket.recv_fds(connection, 1 << 20, 2)
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            os._exit(1)  # the client was killed meanwhile
        text += more
    wanted = json.loads(text)
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
            run(wanted["argv"])
    connection.send(json.dumps(end_of(ranks, connection)).encode())
    os._exit(0)


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
            print(f"left behind: processes {left}", file=sys.stderr, flush=True)
            for process in left:
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
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_code(argv: list[str]) -> None:
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    module = argv[0] == "-m"
    sys.argv = argv[1:] if module else argv
    sys.path[:1] = [os.getcwd() if module else str(Path(argv[0]).resolve().parent), *paths]
    if module:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
