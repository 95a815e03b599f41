"""Hosts on one machine: each has a name, an address, processes, /dev/shm, /tmp and an ssh server of its own.

    with hosts("hosta", "hostb") as (a, b):
        a.run(["ssh", "hostb", "hostname"])

They are namespaces of Linux (network, names, processes, mounts, shared memory), joined by a bridge in another:

    hosta                      switch                    hostb
    eth0 10.77.0.1 -- port0 -- bridge -- port1 -- eth0 10.77.0.2

and, for who asks for two networks, the same once more with eth1 and 10.78.0.1, over a bridge of its own.

Files but those under /tmp and /dev/shm are the machine's, as in a cluster whose home folders are shared. root may
enter every host from every host by a key made for it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
NETWORKS = ("10.77.0", "10.78.0")
SSHD = "/usr/sbin/sshd"
ISOLATED = ("--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child")
START_S = 20.0


@cache
def missing() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    programs = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "ssh": "openssh-client"}
    lacking = [package for program, package in programs.items() if shutil.which(program) is None]
    if not Path(SSHD).exists():
        lacking.append("openssh-server")
    if lacking:
        return f"not on this machine: apt-get install {' '.join(dict.fromkeys(lacking))}"
    if os.geteuid() != 0:
        return "hosts of one's own need root"
    tried = subprocess.run(
        ["unshare", *ISOLATED, "ip", "link", "add", "name", "bridge", "type", "bridge"], check=False
    )
    return "this kernel has no namespaces, or no bridge" if tried.returncode != 0 else None


@dataclass
class Host:
    """One of the hosts.

    Args:
        name: by which the others know it.
        address: its own.
        keeper: the process that keeps its namespaces: with it the host is gone.
    """

    name: str
    address: str
    keeper: subprocess.Popen[bytes]
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> psutil.Process:
        """Its process 1."""
        (first,) = psutil.Process(self.keeper.pid).children()
        return first

    def command(self, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command line that runs `argv` on this host, to be started anywhere."""
        entered = ["nsenter", "--target", str(self.first.pid), "--all", "--wd=" + os.getcwd(), "--"]
        return [*entered, *map(str, argv)]

    def run(
        self, argv: Sequence[str | os.PathLike[str]], *, check: bool = True, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command here to its end."""
        return subprocess.run(
            self.command(argv), check=check, timeout=timeout_s, capture_output=True, text=True, env=self.environ
        )

    def processes(self) -> list[psutil.Process]:
        """All that runs here but its process 1 and its ssh server's; nothing once the host is dead."""
        if self.keeper.poll() is not None:
            return []
        first, kept = self.first, ("sshd", "sleep")
        here = _namespace(first.pid)
        # Not by their parents: that of a `command` is outside.
        return [
            one
            for one in psutil.process_iter(["name"])
            if one.pid != first.pid and one.info["name"] not in kept and _namespace(one.pid) == here
        ]

    def end_all(self) -> None:
        """Ends what is left of a job here, and what that starts meanwhile."""
        with suppress(psutil.NoSuchProcess):
            while left := self.processes():
                for one in left:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
                psutil.wait_procs(left, timeout=5)

    def die(self) -> None:
        """As if its power were cut: all its processes are gone at once, and nobody says goodbye."""
        self.run(["ip", "link", "set", "eth0", "down"])
        self.first.send_signal(signal.SIGKILL)
        self.keeper.wait()


def _namespace(pid: int) -> str | None:
    """By which the processes of a host are told from others; None of one that is gone."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


@dataclass
class Cluster:
    """Some hosts, and the switch between them."""

    hosts: list[Host]
    switch: subprocess.Popen[bytes]
    folder: Path

    def new_folder(self) -> Path:
        """A folder that all of them see: /tmp is each one's own."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def _at_switch(self, *argv: str) -> list[str]:
        (first,) = psutil.Process(self.switch.pid).children()
        return ["nsenter", "--target", str(first.pid), "--net", "--", *argv]

    def at_switch(self, *argv: str) -> None:
        """Runs a command where the cables end."""
        subprocess.run(self._at_switch(*argv), check=True)

    def cut(self, host: Host) -> None:
        """Pulls the plug at the switch: the host sees its cable as it was, and nothing comes through."""
        self.at_switch("ip", "link", "set", f"port{self.hosts.index(host)}.0", "nomaster")

    def mend(self, host: Host) -> None:
        """Puts it in again."""
        self.at_switch("ip", "link", "set", f"port{self.hosts.index(host)}.0", "master", "bridge0")

    @contextmanager
    def slow(self, host: Host, *, mbit: float, delay_ms: float) -> Iterator[None]:
        """Its cable is as slow as that, each way, as long as the block lasts."""
        place = self.hosts.index(host)
        port, end, inner = f"port{place}.0", f"end{place}", f"inner{place}"
        self.at_switch("ip", "link", "add", "name", end, "type", "veth", "peer", "name", inner)
        self.at_switch("ip", "link", "set", port, "nomaster")
        self.at_switch("ip", "link", "set", inner, "master", "bridge0", "up")
        self.at_switch("ip", "link", "set", end, "up")
        speed = ["--mbit", str(mbit), "--delay-ms", str(delay_ms)]
        words = self._at_switch(sys.executable, str(Path(__file__).with_name("slow_cable.py")), port, end, *speed)
        with subprocess.Popen(words, stdout=subprocess.PIPE) as cable:
            try:
                assert cable.stdout is not None
                assert cable.stdout.readline() == b"ready\n"
                yield
            finally:
                cable.kill()
                self.at_switch("ip", "link", "delete", end)
                self.mend(host)

    @contextmanager
    def slow_between(self, hosts: Sequence[Host], *, mbit: float, delay_ms: float) -> Iterator[None]:
        """Between any two of these hosts it is as slow as that, each way, as long as the block lasts.

        Between two of them it is one cable. Of more, every one has its own, with half of the delay.
        """
        cables, share = (hosts[1:], 1.0) if len(hosts) == 2 else (hosts, 0.5)
        with ExitStack() as stack:
            for host in cables:
                stack.enter_context(self.slow(host, mbit=mbit, delay_ms=share * delay_ms))
            yield


@contextmanager
def hosts(*names: str, networks: int = 1) -> Iterator[Cluster]:
    """Such hosts as long as the block lasts.

    Args:
        names: theirs.
        networks: that join them, each by cables of its own. Names lead to addresses in the first.

    Raises:
        TimeoutError: an ssh server does not come up.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd-hosts-", dir="/var/tmp")))
        _write_files(folder, names)
        bridges = [f"bridge{number}" for number in range(networks)]
        made = [f"ip link add {name} type bridge && ip link set {name} up" for name in bridges]
        switch = stack.enter_context(_isolated("switch", " && ".join(made)))
        cluster = Cluster([], switch, folder)
        for place, name in enumerate(names):
            address = f"{NETWORKS[0]}.{place + 1}"
            keeper = stack.enter_context(_isolated(name, _at_start(folder, name)))
            host = Host(name, address, keeper, os.environ | {"HOME": str(folder / "home")})
            cluster.hosts.append(host)
            for network in range(networks):
                _plug_in(cluster, host, network)
        for host in cluster.hosts:
            _wait(partial(_answers, host), f"the ssh server of {host.name}")
        yield cluster


def _write_files(folder: Path, names: Sequence[str]) -> None:
    """The keys, what ssh reads, and who is where."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    public = (folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
    (folder / "known_hosts").write_text("".join(f"{name} {public}\n" for name in names))
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "home").mkdir()
    for own in names:
        others = "".join(f"{NETWORKS[0]}.{place + 1} {name}\n" for place, name in enumerate(names) if name != own)
        # As Debian's installer writes it: a host's own name leads to itself, and not to where others find it.
        (folder / f"hosts-{own}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n{others}")
    (folder / "ssh_config").write_text(
        f"Host *\n IdentityFile {folder}/user_key\n GlobalKnownHostsFile {folder}/known_hosts\n"
        f" UserKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n BatchMode yes\n LogLevel ERROR\n"
    )
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
        f"PermitRootLogin prohibit-password\nPidFile none\nMaxStartups 100\nPrintMotd no\nPrintLastLog no\n"
        f"SetEnv HOME={folder}/home PATH={Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin\n"
    )


def _at_start(folder: Path, name: str) -> str:
    """What process 1 of a host does, in a shell."""
    return " && ".join(
        [
            f"mount --bind {folder}/hosts-{name} /etc/hosts",
            f"mount --bind {folder}/ssh_config /etc/ssh/ssh_config",
            "mount -t tmpfs tmpfs /dev/shm",
            *_own_tmp(folder),
            "mkdir -p /run/sshd",
            "ip link set lo up",
            f"{SSHD} -f {folder}/sshd_config",
        ]
    )


def _own_tmp(folder: Path) -> list[str]:
    """A /tmp of its own, in which a repository that lies in the machine's is at its place."""
    kept = [path for path in (REPOSITORY, Path(sys.prefix)) if path.is_relative_to("/tmp")]
    machines = folder / "tmp"
    return [
        f"mkdir -p {machines}",
        f"mount --bind /tmp {machines}",
        "mount -t tmpfs tmpfs /tmp",
        *(f"mkdir -p {path} && mount --bind {machines}/{path.relative_to('/tmp')} {path}" for path in kept),
    ]


@contextmanager
def _isolated(name: str, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Namespaces in which the script has run, kept by a process 1 that takes in orphans."""
    whole = f"hostname {name} && {script} && echo ready && while :; do sleep 1000 & wait; done"
    keeper = subprocess.Popen(["unshare", *ISOLATED, "sh", "-c", whole], stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    try:
        said = keeper.stdout.readline()
        if said != b"ready\n":
            raise RuntimeError(f"{name} did not start: {said.decode()}")
        yield keeper
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()


def _plug_in(cluster: Cluster, host: Host, network: int) -> None:
    """A cable from the host to the switch."""
    place = cluster.hosts.index(host)
    card, port = f"eth{network}", f"port{place}.{network}"
    (switch,) = psutil.Process(cluster.switch.pid).children()
    # fmt: off
    host.run(["ip", "link", "add", card, "type", "veth", "peer", "name", port])
    subprocess.run(["nsenter", "--target", str(host.first.pid), "--net", "--",
                    "ip", "link", "set", port, "netns", str(switch.pid)], check=True)
    # fmt: on
    host.run(["ip", "address", "add", f"{NETWORKS[network]}.{place + 1}/24", "dev", card])
    host.run(["ip", "link", "set", card, "up"])
    cluster.at_switch("ip", "link", "set", port, "master", f"bridge{network}", "up")


def _answers(host: Host) -> bool:
    return host.run(["ssh", host.name, "true"], check=False, timeout_s=10).returncode == 0


def _wait(happened: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_S
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {START_S:.0f} s for {what}")
        time.sleep(0.05)
