"""Have warm_server.py run what this process should: it has PyTorch imported, which takes two seconds.

Two ways lead here:

- `python -S warm_client.py SOCKET RANKS ARGV...` starts so many ranks of `python ARGV`, and ends as they do;
- `sitecustomize.py` calls `hand_over` in each Python process of a warm launch. What a launcher started is then a
  stand-in of this size: it lends its arguments, variables, files, limits and working directory to a process that
  the server forks, passes on signals, and ends with the same exit code or signal. If it is killed, so is that one.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys

NAME = "warm-client"
"""The name in /proc/PID/comm of a process that stands in for another one."""
PROGRAMS = ("horovodrun", "torchrun")
MODULES = ("hvd_trainer", "torch.distributed.run")
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def start_ranks(address: str, size: str, *argv: str) -> int | str:
    """Start ranks whose variables are those of ranks started by hand; return the exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        wanted = {"argv": argv, "size": int(size), "cwd": os.getcwd(), "env": dict(os.environ)}
        socket.send_fds(server, [json.dumps(wanted).encode() + b"\n"], [1, 2])
        answer = server.recv(100)
    return json.loads(answer) if answer else "the server of warm ranks has ended"


def hand_over(address: str) -> None:
    """Run this process's program in the server and exit as it does; return where the server cannot run it."""
    argv = sys.orig_argv[1:]
    unbuffered = bool(sys.stdout.write_through)
    while argv and argv[0] in ("-u", "-B"):
        del argv[0]
    if not _is_served(argv):
        return
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except OSError:  # another file system, or the session has ended
        return
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if number != server.fileno()]
    files = [number for number in files if os.path.exists(f"/proc/self/fd/{number}")]
    wanted = {
        "argv": argv,
        "pid": os.getpid(),
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "files": files,
        "unbuffered": unbuffered,
        "leads_group": os.getpgrp() == os.getpid(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "umask": _umask(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "ignored": [number for number in range(1, 32) if signal.getsignal(number) == signal.SIG_IGN],
    }
    socket.send_fds(server, [json.dumps(wanted).encode() + b"\n"], files)
    answers = server.makefile("rb")
    pid = json.loads(answers.readline() or b"0")
    if not pid:
        server.close()
        return
    with open("/proc/self/comm", "w") as comm:
        comm.write(NAME)
    _pass_on_signals(pid)
    _end_as(json.loads(answers.readline() or b"9"))


def _umask() -> int:
    """Return the mask of new files, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _is_served(argv: list[str]) -> bool:
    """Return whether these arguments are a script or module that imports PyTorch, with no options of Python's."""
    if argv[:1] == ["-m"]:
        return any(f"{argv[1]}.".startswith(f"{name}.") for name in MODULES)
    if argv[:1] == ["-c"]:
        return argv[1].startswith("from multiprocessing.spawn import")
    script = argv[0] if argv else ""
    return script.endswith(".py") and script[:1] != "-" or os.path.basename(script) in PROGRAMS


def _pass_on_signals(pid: int) -> None:
    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            # A terminal, or who stands in for one in a test, sends these to the whole process group.
            if number in (signal.SIGINT, signal.SIGQUIT):
                os.killpg(os.getpgid(pid), number)
            else:
                os.kill(pid, number)

    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        if number <= 31 and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)


def _end_as(status: int) -> None:
    """End with a process's status as `os.waitpid` returns it."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(start_ranks(*sys.argv[1:]))
