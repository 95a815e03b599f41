"""Check this machine's network: interfaces, which of them the engines take, names, ports."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.finding import Finding, error, ok, warning
from hvd_trainer.utils.network import LOOPBACK, TEST_NET_ADDRESS, interface_name, source_address

INTERFACE_LISTS = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
"""Variables that hold full names of interfaces."""
INTERFACE_PATTERN = "NCCL_SOCKET_IFNAME"
"""The variable that holds prefixes of names."""
TORCHRUN_PORT = 29500
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
NUM_TRIAL_PORTS, MIN_EPHEMERAL_PORTS = 16, 1000


@dataclass(frozen=True)
class Interface:
    """A network interface, and its IPv4 addresses."""

    addresses: tuple[str, ...]
    is_up: bool

    @property
    def is_loopback(self) -> bool:
        return any(address.startswith("127.") for address in self.addresses)


def interfaces() -> dict[str, Interface]:
    """List this machine's interfaces by name."""
    states = psutil.net_if_stats()
    return {
        name: Interface(
            tuple(entry.address for entry in entries if entry.family == socket.AF_INET),
            name in states and states[name].isup,
        )
        for name, entries in psutil.net_if_addrs().items()
    }


def check_interfaces(context: Context) -> list[Finding]:
    """Check the interfaces, and the variables that choose among them."""
    found = interfaces()
    usable = {name: its for name, its in found.items() if its.is_up and its.addresses}
    text = ", ".join(f"{name} {' '.join(its.addresses)}" for name, its in usable.items())
    rest = [name for name in found if name not in usable]
    summary = (text or "none") + (f"; not in use: {', '.join(rest)}" if rest else "")
    if not any(its.is_loopback for its in usable.values()):
        return [error("interfaces", f"{summary}; the loopback is down, by which ranks meet", "ip link set lo up")]
    wrong = judge_interface_variables(context.environ, found, context.several_hosts)
    return [ok("interfaces", summary), *wrong]


def judge_interface_variables(
    environ: Mapping[str, str], found: Mapping[str, Interface], several: bool
) -> list[Finding]:
    """Return one error for each variable that chooses an unusable interface, under the variable's name.

    Args:
        several: whether there are other hosts, too.
    """
    findings = []
    there = [name for name, its in found.items() if its.is_up and its.addresses]
    better = next((name for name in there if not found[name].is_loopback), None)
    for variable in (*INTERFACE_LISTS, INTERFACE_PATTERN):
        value = environ.get(variable)
        if not value:
            continue
        chosen = select_interfaces(value, found) if variable == INTERFACE_PATTERN else value.split(",")
        usable = [name for name in chosen if name in found and found[name].is_up]
        if not usable or (variable != INTERFACE_PATTERN and len(usable) < len(chosen)):
            problem = "names no interface that is up"
        elif several and all(found[name].is_loopback for name in usable):
            problem = "leads to no other host"
        else:
            continue
        remedy = f"unset {variable}" + (f"    (or export {variable}={better})" if better else "")
        findings.append(error(variable, f"{value} {problem}; there are {', '.join(there)}", remedy))
    return findings


def select_interfaces(pattern: str, names: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Select the names that NCCL would take: `eth,ib` all that begin so, `=eth0` that one, `^docker` all
    others.
    """
    without = pattern.startswith("^")
    exact = pattern.lstrip("^").startswith("=")
    words = [word for word in pattern.lstrip("^").lstrip("=").split(",") if word]
    fits = [name for name in names if any(name == w if exact else name.startswith(w) for w in words)]
    return [name for name in names if name not in fits] if without else fits


def check_route(context: Context) -> list[Finding]:
    """Check which interface the engines take: on one host the loopback, on several the one that leads to the
    others.
    """
    chosen = [
        f"{name}={context.environ[name]}"
        for name in (*INTERFACE_LISTS, INTERFACE_PATTERN)
        if context.environ.get(name)
    ]
    own = f"; {', '.join(chosen)} in this shell comes first" if chosen else ""
    if not context.several_hosts:
        text = f"on this host alone both engines use {interface_name(LOOPBACK)}"
        with suppress(OSError):
            address = source_address(TEST_NET_ADDRESS, 1)
            text += f"; other hosts would be reached by {interface_name(address)} ({address})"
        return [ok("network", text + own)]
    ways = _routes(context)
    cut_off = [host for host, way in ways.items() if way is None]
    if cut_off:
        return [error("network", f"no way leads to {', '.join(cut_off)}{own}", "ip route")]
    taken = dict.fromkeys(ways.values())
    text = "; ".join(f"{way} to reach {', '.join(h for h, w in ways.items() if w == way)}" for way in taken)
    if len(taken) > 1 and not chosen:
        found = f"the engines take one interface, and several ways lead from this host: {text}"
        remedy = "--network-interface NAME    (that joins all; and horovodrun --network-interfaces NAME)"
        return [warning("network", found, remedy)]
    return [ok("network", f"the engines use {text}{own}")] if ways else []


def _routes(context: Context) -> dict[str, str | None]:
    """Return the interface that leads to each other host with an IPv4 address; None if there is no route."""
    ways: dict[str, str | None] = {}
    for host in context.hosts:
        address = next((a for a in _addresses(context, host.name) if ":" not in a), None)
        if address is None or context.is_here(host):
            continue
        ways[host.name] = None
        with suppress(OSError):
            mine = source_address(address, 1)
            ways[host.name] = interface_name(mine) or mine
    return ways


def check_names(context: Context) -> list[Finding]:
    """Check the names of this host and of all others, and the addresses to which they lead."""
    mine, findings = socket.gethostname(), []
    for name in context.lookups:
        found = _addresses(context, name)
        if name == mine:
            findings.append(judge_own_name(name, found, context.several_hosts))
        elif name == "localhost":
            findings += judge_localhost(found)
        elif found != [name]:
            findings.append(_judge_name(name, found))
    return findings


def judge_localhost(found: Sequence[str]) -> list[Finding]:
    """Return an error if localhost does not lead to the loopback; nothing if it does, as nearly everywhere."""
    if LOOPBACK in found:
        return []
    text = f"leads to {', '.join(found) or 'no address'}, and ranks of one host meet at {LOOPBACK}"
    return [error("localhost", text, f"echo '{LOOPBACK} localhost' >> /etc/hosts")]


def _addresses(context: Context, name: str) -> list[str]:
    try:
        return context.addresses(name)
    except OSError:
        return []


def judge_own_name(name: str, found: Sequence[str], several_hosts: bool) -> Finding:
    """Return the finding for this host's own name and its addresses."""
    own = next(
        (a for its in interfaces().values() if its.is_up and not its.is_loopback for a in its.addresses), None
    )
    remedy = f"echo '{own or 'ADDRESS'} {name}' >> /etc/hosts"
    if not found:
        say = error if several_hosts else warning
        return say("host name", f"{name}, this host's own, leads to no address", remedy)
    text = f"{name} is {', '.join(found[:3])}"
    if several_hosts and all(address.startswith("127.") or address == "::1" for address in found):
        text += ", which each other host takes for itself"
        return warning("host name", text, f"{remedy}    (and take out the line with {found[0]}; so on each host)")
    return ok("host name", text)


def _judge_name(name: str, found: Sequence[str]) -> Finding:
    if not found:
        remedy = f"getent hosts {name}    (mend its spelling, or write its address into /etc/hosts on all hosts)"
        return error(f"host {name}", "the name leads to no address", remedy)
    if all(":" in address for address in found):
        return error(f"host {name}", "has IPv6 addresses only, and ranks meet by IPv4", f"getent ahostsv4 {name}")
    return ok(f"host {name}", ", ".join(found[:3]))


def check_ports(context: Context) -> list[Finding]:
    """Check MASTER_PORT, or else torchrun's port, and the ports that the system hands out."""
    chosen = context.environ.get("MASTER_PORT", "")
    if chosen.isdecimal() and 0 < int(chosen[:6]) < 65536:
        port, whose = int(chosen), "MASTER_PORT in this shell"
    else:
        port, whose = TORCHRUN_PORT, "torchrun's, if it is told no other"
    name = f"port {port}"
    if is_free(port):
        return [ok(name, f"free ({whose})"), _judge_ephemeral_ports()]
    other = next((number for number in range(port + 1, 65536) if is_free(number)), 0)
    remedy = f"torchrun --master-port {other}    (or --standalone on one host)"
    if port != TORCHRUN_PORT:
        remedy = f"export MASTER_PORT={other}"
    return [warning(name, f"in use by {_listener(port)} ({whose})", remedy), _judge_ephemeral_ports()]


def is_free(port: int) -> bool:
    """Return whether a server may listen at a port, on all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        # PyTorch's store sets it, too: connections of a job that has ended do not block the port.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as wrong:
            if wrong.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _listener(port: int) -> str:
    """Name the process that listens at a port: root sees all processes, others their own."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "a process of another user"


def _judge_ephemeral_ports() -> Finding:
    name, remedy = "free ports", "sysctl net.ipv4.ip_local_port_range='32768 60999'"
    with suppress(OSError, ValueError):
        first, last = map(int, EPHEMERAL_RANGE.read_text().split())
        if last - first < MIN_EPHEMERAL_PORTS:
            return warning(
                name, f"the system hands out {first} to {last} only, and each rank takes several", remedy
            )
    with ExitStack() as held:
        try:
            for _ in range(NUM_TRIAL_PORTS):
                held.enter_context(socket.create_server(("", 0)))
        except OSError as wrong:
            found = f"the system has none to hand out ({wrong.strerror})"
            return error(name, found, "ss --tcp --all --numeric | wc -l    (and end what holds them)")
    return ok(name, "the system hands them out")
