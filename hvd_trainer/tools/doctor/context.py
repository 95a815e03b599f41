"""Define the input of all checks: the options, the other hosts, the environment, the probe of PyTorch."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import tyro
from annotated_types import Ge, Gt

from hvd_trainer.config.checks import range_errors, refuse
from hvd_trainer.errors import OptionError
from hvd_trainer.horovod_build import facts
from hvd_trainer.horovod_build.facts import Facts
from hvd_trainer.tools.doctor.programs import Programs


@dataclass(frozen=True)
class Options:
    """Look at all that training needs here, and say what is wrong with it and what to type.

    Each line is ok, a warning (training works, but ...) or an error. The exit code is 1 if there is an error.
    """

    hosts: Annotated[str | None, tyro.conf.arg(metavar="HOST[:N],...")] = None
    """the hosts of the job, as for horovodrun -H: are they reached by ssh, and have they all that is here?"""
    ssh_port: Annotated[int | None, Ge(1), tyro.conf.arg(metavar="PORT")] = None
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
    timeout_s: Annotated[float, Gt(0)] = 30.0
    """how long all checks together may take, in seconds (--run comes on top)"""

    def check(self) -> None:
        """Refuse invalid values, with all mistakes in one error.

        Raises:
            OptionError: an option is out of its range.
        """
        mistakes = [*range_errors(self)]
        if self.ssh_identity_file is not None and not self.ssh_identity_file.expanduser().is_file():
            mistakes.append(f"--ssh-identity-file {self.ssh_identity_file}: there is no such file")
        refuse(mistakes)


@dataclass(frozen=True)
class Host:
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
    for name in names:
        if names.count(name) > 1:
            raise OptionError(
                f"--hosts names {name} twice: put the number of its ranks behind it, such as {name}:4"
            )
    return tuple(hosts)


@dataclass(frozen=True)
class Context:
    """The input of a check."""

    options: Options
    hosts: tuple[Host, ...]
    environ: Mapping[str, str]
    programs: Programs
    probe: Future[Facts]
    lookups: Mapping[str, Future[list[str]]]
    """addresses of this host, localhost, all `hosts` and MASTER_ADDR, by name"""

    @property
    def facts(self) -> Facts:
        """The state of PyTorch and Horovod; blocks until the probe has ended."""
        return self.probe.result()

    def addresses(self, name: str) -> list[str]:
        """Return the addresses of a host, IPv4 first.

        Raises:
            OSError: the name is unknown, or nobody answered in time.
        """
        try:
            return self.lookups[name].result(self.programs.program_left_s)
        except FutureTimeoutError:
            raise OSError("no name server has answered in time") from None

    def is_here(self, host: Host) -> bool:
        """Return whether a host is this machine."""
        if host.name in ("localhost", socket.gethostname()):
            return True
        try:
            found = set(self.addresses(host.name))
        except OSError:
            return False
        return bool(found & {entry.address for entries in psutil.net_if_addrs().values() for entry in entries})

    @property
    def several_hosts(self) -> bool:
        return any(not self.is_here(host) for host in self.hosts)


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
