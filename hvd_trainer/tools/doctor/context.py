"""Define the input of all checks: the options, the other hosts, the programs they start, the probe of PyTorch."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
import tyro
from annotated_types import Ge, Gt

from hvd_trainer.config.checks import ParsedBy
from hvd_trainer.errors import OptionError
from hvd_trainer.horovod_build import facts
from hvd_trainer.horovod_build.facts import Facts
from hvd_trainer.measure.start import Start, end_processes, run_to_end

MARGIN_S = 1.0
"""A program is killed this long before the checks' deadline, so that its check can still report it."""


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


def find_key(file: Path) -> Path:
    """Return the path of a private key.

    Raises:
        OptionError: there is no such file.
    """
    if not file.expanduser().is_file():
        raise OptionError(f"--ssh-identity-file {file}: there is no such file")
    return file.expanduser()


@dataclass(frozen=True)
class Options:
    """Look at all that training needs here, and say what is wrong with it and what to type.

    Each line is ok, a warning (training works, but ...) or an error. The exit code is 1 if there is an error.
    """

    hosts: Annotated[str | None, ParsedBy(read_hosts), tyro.conf.arg(metavar="HOST[:N],...")] = None
    """the hosts of the job, as for horovodrun -H: are they reached by ssh, and have they all that is here?"""
    ssh_port: Annotated[int | None, Ge(1), tyro.conf.arg(metavar="PORT")] = None
    """port of ssh on all hosts, as for horovodrun"""
    ssh_identity_file: Annotated[Path | None, ParsedBy(find_key), tyro.conf.arg(metavar="FILE")] = None
    """file with the private key for ssh, as for horovodrun"""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """folder with the data sets; without it: the cache folder that the jobs use then"""
    log_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """folder for logs and checkpoints; without it none is looked at"""
    run: bool = False
    """also start two ranks on each engine, prove that they can exchange tensors, and time it"""
    json: bool = False
    """print one JSON document instead of lines"""
    timeout_s: Annotated[float, Gt(0)] = 30.0
    """how long all checks together may take, in seconds (--run comes on top)"""


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
    deadline: float
    """when all of them must have ended, by `time.monotonic`"""
    folder: Path
    """for their output"""

    def left_s(self, margin: float = 0.0) -> float:
        """Return the time until so long before the deadline, in seconds."""
        return max(0.0, self.deadline - time.monotonic() - margin)

    def find(self, name: str) -> str | None:
        """Find a program on PATH, or where Linux keeps those of the administrator; None if there is none."""
        path = os.pathsep.join([self.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        return shutil.which(name, path=path)

    def ask(self, *command: str) -> Answer:
        """Run a program to its end, or kill it shortly before the deadline, and return its output."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        output = folder / "output"
        code = run_to_end(Start(command, self.environ), folder, output, limit_s=self.left_s(MARGIN_S))
        return Answer(code, output.read_text(errors="replace"))

    def end(self) -> None:
        """End all of them."""
        for folder in self.folder.iterdir():
            end_processes(folder)


@dataclass(frozen=True)
class Context:
    """The input of a check."""

    options: Options
    hosts: tuple[Host, ...]
    programs: Programs
    probe: Future[Facts]
    lookups: Mapping[str, Future[list[str]]]
    """addresses of this host, localhost, all `hosts` and MASTER_ADDR, by name"""

    @property
    def environ(self) -> Mapping[str, str]:
        return self.programs.environ

    @property
    def facts(self) -> Facts:
        """The state of PyTorch and Horovod; blocks until the probe has ended."""
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


def run_probe(programs: Programs) -> Facts:
    """Look at PyTorch and Horovod in a new process of this Python."""
    answer = programs.ask(sys.executable, "-m", facts.__name__)
    return facts.parse_facts(answer.out, answer.code, answer.last_line)


def look_up(name: str) -> list[str]:
    """Look up the addresses of a host, IPv4 first; blocks until the name server answers.

    Raises:
        OSError: there is no such name.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))
