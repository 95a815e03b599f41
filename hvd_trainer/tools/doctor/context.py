"""Define the input of all checks: the options, the other hosts, the programs they start, the probe of PyTorch."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
import tyro

from hvd_trainer.config.checks import Count, Positive, find_wrong_values, refuse
from hvd_trainer.errors import OptionError
from hvd_trainer.horovod_build import facts
from hvd_trainer.horovod_build.facts import Facts
from hvd_trainer.measure.start import NOTHING, Start, end_processes, run_to_end
from hvd_trainer.utils.process import start_in_thread

MARGIN_S = 1.0
"""A program is killed this long before the checks' deadline, so that its check can still report it."""


@dataclass(frozen=True)
class Options:
    """Look at all that training needs here, and say what is wrong with it and what to type.

    Each line is ok, a warning (training works, but ...) or an error. The exit code is 1 if there is an error.
    """

    hosts: Annotated[str | None, tyro.conf.arg(metavar="HOST[:N],...")] = None
    """the hosts of the job, as for horovodrun -H: are they reached by ssh, and have they all that is here?"""
    ssh_port: Annotated[Count | None, tyro.conf.arg(metavar="PORT")] = None
    """port of ssh on all hosts, as for horovodrun"""
    ssh_identity_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """file with the private key for ssh, as for horovodrun"""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """folder with the data sets; without it: the cache folder that the jobs use then"""
    log_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """folder for logs and checkpoints; without it none is looked at"""
    run: bool = False
    """also start two ranks on each engine, prove that they can exchange tensors, and time it"""
    json: bool = False
    """print one JSON document instead of lines"""
    timeout_s: Positive = 30.0
    """how long all checks together may take, in seconds (--run comes on top)"""

    def check(self) -> None:
        """Refuse invalid values, with all mistakes in one error.

        Raises:
            OptionError: an option is out of its range.
        """
        mistakes = list(find_wrong_values(self).values())
        if self.ssh_identity_file is not None and not self.ssh_identity_file.expanduser().is_file():
            mistakes.append(f"--ssh-identity-file {self.ssh_identity_file}: there is no such file")
        refuse(mistakes)


class Host(NamedTuple):
    """A host named in `--hosts`."""

    name: str
    slots: int | None = None
    """ranks on it; None: not given"""


def read_hosts(text: str | None) -> tuple[Host, ...]:
    """Parse the value of `--hosts`: `"node1:4,node2"` is four ranks on node1, and node2 without a number.

    Raises:
        OptionError: the text is not of that form, or names a host twice.
    """
    hosts = []
    for part in [] if text is None else text.split(","):
        # A name that began with `-` would be an option of ssh.
        match = re.fullmatch(r"([A-Za-z0-9_][\w.-]*)(?::([1-9][0-9]{0,5}))?", part.strip(), re.ASCII)
        if match is None:
            raise OptionError(f"--hosts should look like node1:4,node2:4, and {part.strip()!r} in it does not")
        hosts.append(Host(match[1], int(match[2]) if match[2] else None))
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(f"--hosts names {twice} twice: put the number of its ranks behind it, such as {twice}:4")
    return tuple(hosts)


class Answer(NamedTuple):
    """The output of a program."""

    code: int | None
    """the exit code; None: its time was up"""
    out: str
    """of stdout and stderr"""

    @property
    def last_line(self) -> str:
        """The last line that it printed; else how it ended."""
        if self.code is None:
            return "no answer in time"
        return [f"exit code {self.code}", *self.out.strip().splitlines()][-1].strip()


@dataclass(frozen=True)
class Programs:
    """The programs that the checks start."""

    environ: Mapping[str, str]
    """their environment"""
    deadline: float
    """when all of them must have ended, by `time.monotonic`"""
    folder: Path
    """for the output of each; without it none is started"""

    def left_s(self, margin_s: float = 0.0) -> float:
        """Return how long a check may still take, or a program, with `MARGIN_S`, in seconds."""
        return max(0.0, self.deadline - time.monotonic() - margin_s)

    def find(self, name: str) -> str | None:
        """Find a program on PATH, or where Linux keeps those of the administrator; None if there is none."""
        path = os.pathsep.join([self.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        return shutil.which(name, path=path)

    def ask(self, *command: str, limit_s: float = inf, stdin: Path = NOTHING) -> Answer:
        """Run a program to its end, or kill it when its time is up, and return its output.

        Args:
            limit_s: in seconds, if not until the deadline.
            stdin: the file that it reads.

        Raises:
            FileNotFoundError: the checks have ended.
        """
        place = Path(tempfile.mkdtemp(dir=self.folder))
        start, output = Start(command, self.environ, stdin=stdin), place / "output"
        code = run_to_end(start, place, output, limit_s=min(limit_s, self.left_s(MARGIN_S)))
        return Answer(code, output.read_text(errors="replace"))


@contextmanager
def ending_programs(environ: Mapping[str, str], deadline: float) -> Iterator[Programs]:
    """Yield what starts programs, none of which outlives the `with` block."""
    with tempfile.TemporaryDirectory(prefix="hvd_trainer-doctor-", ignore_cleanup_errors=True) as folder:
        programs = Programs(environ, deadline, Path(folder))
        try:
            yield programs
        finally:
            for place in programs.folder.iterdir():
                end_processes(place)


def look_up(name: str) -> list[str]:
    """Look up the addresses of a host, IPv4 first; blocks until the name server answers.

    Raises:
        OSError: there is no such name.
    """
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    ordered = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))


class Context:
    """The input of all checks. It looks for PyTorch and for hosts' addresses meanwhile.

    Args:
        options: of the command.
        programs: that the checks start.
        environ: the variables of the shell.
        look_up: returns the addresses of a name, as the function of that name.
        find_facts: returns the state of PyTorch and Horovod; None: a new process of this Python does.

    Raises:
        OptionError: `--hosts` is not of its form.
    """

    def __init__(
        self,
        options: Options,
        programs: Programs,
        environ: Mapping[str, str],
        look_up: Callable[[str], list[str]] = look_up,
        find_facts: Callable[[], Facts] | None = None,
    ) -> None:
        self.options, self.programs, self.environ = options, programs, environ
        self.hosts = read_hosts(options.hosts)
        names = [socket.gethostname(), "localhost", *(host.name for host in self.hosts)]
        names += filter(None, [environ.get("MASTER_ADDR")])
        self.lookups = {name: start_in_thread(partial(look_up, name), "doctor") for name in dict.fromkeys(names)}
        self.probe = start_in_thread(find_facts or self._find_facts, "doctor")

    def _find_facts(self) -> Facts:
        answer = self.programs.ask(sys.executable, "-m", facts.__name__)
        return facts.parse_facts(answer.out, answer.code, answer.last_line)

    @property
    def facts(self) -> Facts:
        """The state of PyTorch and Horovod; blocks until it is known."""
        return self.probe.result()

    def addresses(self, name: str) -> list[str]:
        """Return the addresses of a host, IPv4 first; none if its name is unknown, or nobody answers in time."""
        with suppress(OSError, FutureTimeoutError):
            return self.lookups[name].result(self.programs.left_s(MARGIN_S))
        return []

    def is_here(self, host: Host) -> bool:
        """Return whether a host is this machine."""
        if host.name in ("localhost", socket.gethostname()):
            return True
        own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
        return not own.isdisjoint(self.addresses(host.name))

    @property
    def several_hosts(self) -> bool:
        return not all(map(self.is_here, self.hosts))
