"""How the ranks of a Slurm step on several nodes find rank 0: at a port that all compute from the step's number.

Rank 0 listens at the first free one of a few ports, and sends everyone who connects the name of its step and the
endpoint of its store; the other ranks try all of the ports. By the name no rank takes another step's rank 0, or
some other program at such a port, for its own:

    rank 0 of 7.0    listens at 20427
    rank 0 of 8.1    finds 20427 in use, listens at 23427
    rank 1 of 8.1    at 20427 reads "7.0 MUNGE:...", goes on; at 23427 reads "8.1 MUNGE:..."

The endpoint is sent as a MUNGE credential, by which Slurm itself authenticates its users: only the same user can
decode it, on a host with the cluster's key, and it tells who has encoded it. Without MUNGE it is sent as plain
text.
"""

from __future__ import annotations

import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.slurm import SlurmStep, read_step, slurm_job
from hvd_trainer.rendezvous import munge
from hvd_trainer.rendezvous.endpoint import Endpoint, create_token, sign_endpoint, verify_endpoint
from hvd_trainer.rendezvous.fixed_address import listen_address
from hvd_trainer.rendezvous.join import RendezvousSettings, join_store, serve_store, wait_for
from hvd_trainer.rendezvous.shared_stores import Rendezvous, shared_stores
from hvd_trainer.utils.network import listen

ANSWER_TIMEOUT_S = 2.0
MAX_LINE_BYTES = 4096
CREDENTIAL_LIFETIME_S = 60.0
"""How long one credential is sent. It is valid for five minutes by the clocks of both hosts."""


class StepDiscovery:
    """Announces rank 0's endpoint to the other ranks of a step, and finds it.

    Args:
        name: of the step, in one line.
        ports: at which rank 0 may listen.
        hosts: where it may be, for ranks that look for it: addresses by node.
    """

    def __init__(self, name: str, ports: Sequence[int], hosts: Mapping[str, str] | None = None) -> None:
        self._name, self._ports, self._hosts = f"hvd_trainer {name}", ports, hosts or {}

    def announce(self, address: str, text: str) -> None:
        """Send a text without blanks to each rank that connects, in a thread, as long as this process lives.

        Raises:
            LaunchError: all the ports are in use.
        """
        for port in self._ports:
            with suppress(OSError):
                listener = listen(address, port)
                threading.Thread(
                    target=self._serve, args=(listener, text), name="slurm-discovery", daemon=True
                ).start()
                return
        raise LaunchError(
            f"The ports {', '.join(map(str, self._ports))} of this machine are in use, and the other ranks look "
            f"for rank 0 nowhere else. Type before srun: export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"
        )

    def _serve(self, listener: socket.socket, text: str) -> None:
        credential, valid_until = "", 0.0
        while True:
            with suppress(OSError), listener.accept()[0] as connection:
                if time.monotonic() > valid_until:
                    credential = munge.encode(text)
                    valid_until = time.monotonic() + CREDENTIAL_LIFETIME_S
                # The line fits into the socket's buffer, so that sending never waits for the other side.
                connection.setblocking(False)
                connection.sendall(f"{self._name} {credential}\n".encode())

    def discover(self) -> Iterator[tuple[str, str, str]]:
        """Yield what is announced for this step by this user: node, address and text of each.

        Raises:
            LaunchError: it cannot be decoded here.
        """
        for node, host in self._hosts.items():
            for port in self._ports:
                with (
                    suppress(OSError),
                    socket.create_connection((host, port), timeout=ANSWER_TIMEOUT_S) as connection,
                ):
                    match = re.fullmatch(rf"{re.escape(self._name)} (\S+)\n", _read_line(connection))
                    text = munge.decode(match[1]) if match else None
                    if text is not None:
                        yield node, str(connection.getpeername()[0]), text


def _read_line(connection: socket.socket) -> str:
    """Return the first line that another program sends, which may be anything, and slow.

    Raises:
        TimeoutError: the line is not complete in time.
    """
    data, deadline = b"", time.monotonic() + ANSWER_TIMEOUT_S
    while not data.endswith(b"\n") and len(data) < MAX_LINE_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (more := connection.recv(MAX_LINE_BYTES)):
            break
        data += more
    return data.decode(errors="replace")


def join_by_discovery(settings: RendezvousSettings) -> Rendezvous:
    """Serve and announce a store on rank 0; discover it and join it on the other ranks of the step.

    Raises:
        LaunchError: rank 0 was not found in time, or all ports are in use.
    """
    step = read_step(settings.environ)
    name = f"{step.job}.{step.number} start {slurm_job(settings.environ).restart_count}"
    return shared_stores.get(name, lambda: _join_step(name, step, settings))


def _join_step(name: str, step: SlurmStep, settings: RendezvousSettings) -> Rendezvous:
    world, secret = settings.world, settings.secret
    if world.is_first:
        host = node_address(step.host)
        address = listen_address(host, world)
        token, nonce = create_token(secret)
        endpoint = serve_store(world, address, 0, token)
        announced = replace(endpoint, host=step.host)
        StepDiscovery(name, step.ports).announce(address, sign_endpoint(announced, nonce, secret))
        return Rendezvous(join_store(endpoint, settings).store, host)
    nodes = step.hosts if step.scattered else step.hosts[:1]
    hosts = {node: listen_address(node_address(node), world) for node in nodes}
    discovery = StepDiscovery(name, step.ports, hosts)

    def find() -> Endpoint | None:
        for node, address, text in discovery.discover():
            endpoint = verify_endpoint(text, secret)
            # An endpoint that is announced on another node than its own was copied by another process.
            if endpoint is not None and endpoint.host == node:
                return replace(endpoint, host=address)
        return None

    return join_store(wait_for(find, settings), settings)


def node_address(node: str) -> str:
    """Return the address of a node: its name if that resolves, else the address that Slurm has for it.

    Raises:
        LaunchError: neither resolves.
    """
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "--oneliner", "show", "node", node]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        fields = dict(field.partition("=")[::2] for field in shown.split())
        socket.getaddrinfo(fields.get("NodeAddr", ""), None)
        return fields["NodeAddr"]
    raise LaunchError(
        f"The address of {node}, where rank 0 runs, is known neither to this machine nor to Slurm. Type before "
        f"srun: export MASTER_ADDR=ADDRESS_OF_RANK_0 MASTER_PORT=29500"
    )
