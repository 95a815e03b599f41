"""Check this machine's network: interfaces, which of them the engines take, names, and the port of torchrun."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import psutil

from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.findings import Finding, error, ok, warning
from hvd_trainer.utils.network import LOOPBACK, TEST_NET_ADDRESS, interface_name, is_loopback, source_address

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
"""The last holds prefixes of interfaces' names, the others full names."""
TORCHRUN_PORT = 29500

Interfaces = Mapping[str, Sequence[str]]
"""The IPv4 addresses of the interfaces that are up, by name."""


def usable_interfaces() -> dict[str, list[str]]:
    """Return the interfaces that are up and have an IPv4 address."""
    states = psutil.net_if_stats()
    interfaces = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    return {name: addresses for name, addresses in interfaces.items() if addresses}


def _leads_out(addresses: Sequence[str]) -> bool:
    return not any(map(is_loopback, addresses))


def check_interfaces(context: Context) -> Iterator[Finding]:
    """Check the interfaces, and the variables that choose among them."""
    usable = usable_interfaces()
    text = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in usable.items()) or "none"
    if rest := [name for name in psutil.net_if_addrs() if name not in usable]:
        text += f"; not in use: {', '.join(rest)}"
    if all(map(_leads_out, usable.values())):
        yield error("interfaces", f"{text}; the loopback is down, by which ranks meet", "ip link set lo up")
        return
    yield ok("interfaces", text)
    better = next((name for name, addresses in usable.items() if _leads_out(addresses)), None)
    for variable in INTERFACE_VARIABLES:
        value = context.environ.get(variable)
        if value and (problem := _interface_problem(variable, value, usable, context.several_hosts)):
            remedy = f"unset {variable}" + (f"    (or export {variable}={better})" if better else "")
            yield error(variable, f"{value} {problem}; there are {', '.join(usable)}", remedy)


def _interface_problem(variable: str, value: str, usable: Interfaces, several_hosts: bool) -> str:
    """Return what is wrong with the value of a variable that chooses interfaces; empty if it is right."""
    chosen = select_interfaces(value, usable) if variable == INTERFACE_VARIABLES[-1] else value.split(",")
    if not chosen or not set(chosen) <= usable.keys():
        return "names no interface that is up"
    leads_out = any(_leads_out(usable[name]) for name in chosen)
    return "leads to no other host" if several_hosts and not leads_out else ""


def select_interfaces(pattern: str, names: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Select the names that NCCL would take: `eth,ib` all that begin so, `=eth0` one, `^docker` all others."""
    without = pattern.startswith("^")
    exact = pattern.lstrip("^").startswith("=")
    words = [word for word in pattern.lstrip("^").lstrip("=").split(",") if word]
    fits = [name for name in names if any(name == w if exact else name.startswith(w) for w in words)]
    return [name for name in names if name not in fits] if without else fits


def check_route(context: Context) -> list[Finding]:
    """Check which interface the engines take: the loopback, or on several hosts that which leads to the others."""
    chosen = [f"{name}={context.environ[name]}" for name in INTERFACE_VARIABLES if context.environ.get(name)]
    own = f"; {', '.join(chosen)} in this shell comes first" if chosen else ""
    if not context.several_hosts:
        text = f"on this host alone both engines use {interface_name(LOOPBACK)}"
        with suppress(OSError):
            address = source_address(TEST_NET_ADDRESS, 1)
            text += f"; other hosts would be reached by {interface_name(address)} ({address})"
        return [ok("network", text + own)]
    hosts: dict[str | None, list[str]] = {}
    for host in context.hosts:
        way = next((a for a in context.addresses(host.name) if ":" not in a), None)
        if way is not None and not context.is_here(host):
            hosts.setdefault(_way_to(way), []).append(host.name)
    if None in hosts:
        return [error("network", f"no way leads to {', '.join(hosts[None])}{own}", "ip route")]
    text = "; ".join(f"{way} to reach {', '.join(names)}" for way, names in hosts.items())
    if len(hosts) > 1 and not chosen:
        problem = f"the engines take one interface, and several ways lead from this host: {text}"
        remedy = "--network-interface NAME    (that joins all; and horovodrun --network-interfaces NAME)"
        return [warning("network", problem, remedy)]
    return [ok("network", f"the engines use {text}{own}")] if hosts else []


def _way_to(address: str) -> str | None:
    """Return the interface that leads to an address; None if there is no route."""
    with suppress(OSError):
        source = source_address(address, 1)
        return interface_name(source) or source
    return None


def check_names(context: Context) -> Iterator[Finding]:
    """Check the names of this host and of all others, and the addresses to which they lead."""
    own, several_hosts = socket.gethostname(), context.several_hosts
    for name in context.lookups:
        addresses = context.addresses(name)
        text = ", ".join(addresses[:3])
        if name == own:
            ways = [addresses for addresses in usable_interfaces().values() if _leads_out(addresses)]
            remedy = f"echo '{ways[0][0] if ways else 'ADDRESS'} {name}' >> /etc/hosts"
            if not addresses:
                say = error if several_hosts else warning
                yield say("host name", f"{name}, this host's own, leads to no address", remedy)
            elif several_hosts and all(map(is_loopback, addresses)):
                remedy += f"    (and take out the line with {addresses[0]}; so on each host)"
                yield warning("host name", f"{name} is {text}, which each other host takes for itself", remedy)
            else:
                yield ok("host name", f"{name} is {text}")
        elif name == "localhost":
            if LOOPBACK not in addresses:
                text = f"leads to {text or 'no address'}, and ranks of one host meet at {LOOPBACK}"
                yield error("localhost", text, f"echo '{LOOPBACK} localhost' >> /etc/hosts")
        elif not addresses:
            remedy = (
                f"getent hosts {name}    (mend its spelling, or write its address into /etc/hosts on all hosts)"
            )
            yield error(f"host {name}", "the name leads to no address", remedy)
        elif all(":" in address for address in addresses):
            text = "has IPv6 addresses only, and ranks meet by IPv4"
            yield error(f"host {name}", text, f"getent ahostsv4 {name}")
        elif addresses != [name]:
            yield ok(f"host {name}", text)


def check_port(context: Context) -> list[Finding]:
    """Check MASTER_PORT, or else torchrun's port."""
    chosen = context.environ.get("MASTER_PORT", "")
    if chosen and not (re.fullmatch(r"[0-9]{1,6}", chosen) and 0 < int(chosen) < 65536):
        return [warning("port", f"MASTER_PORT={chosen} in this shell is no port", "unset MASTER_PORT")]
    port, whose = TORCHRUN_PORT, "torchrun's, if it is told no other"
    if chosen:
        port, whose = int(chosen), "MASTER_PORT in this shell"
    if is_free(port):
        return [ok(f"port {port}", f"free ({whose})")]
    other = next((number for number in range(port + 1, 65536) if is_free(number)), 0)
    remedy = f"torchrun --master-port {other}    (or --standalone on one host)"
    if port != TORCHRUN_PORT:
        remedy = f"export MASTER_PORT={other}"
    return [warning(f"port {port}", f"in use by {_listener(port)} ({whose})", remedy)]


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
