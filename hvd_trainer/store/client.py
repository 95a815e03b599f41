"""How rank 0 starts the server of a job's store, and all ranks come to it: by a ticket that only they have."""

from __future__ import annotations

import hmac
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hvd_trainer.errors import LaunchError
from hvd_trainer.network import listen

SECRET_FILE = "HVD_TRAINER_SECRET_FILE"
"""The environment's name of a file with a secret, for ranks to which no launcher tells a token in private."""
SHORTEST_SECRET = 16
PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from hvd_trainer.store.server import main; main(int(sys.argv[2]))"
)
"""Without site-packages, whose start-up hooks take longer than the server itself."""
ENDS_S = 5.0
_SERVERS: dict[tuple[int, str, int], _Server] = {}
"""Of this process: by its number, since a fork is no owner of its parent's, the address and the wanted port."""


@dataclass
class _Server:
    """A process that serves, and how many tickets to it are in use."""

    process: subprocess.Popen[bytes]
    port: int
    tickets: int = 0


@dataclass(frozen=True)
class Ticket:
    """Where a store is, and the word that opens it."""

    host: str
    port: int
    token: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.token}"

    @classmethod
    def read(cls, text: str) -> Ticket:
        """The ticket that `str` has written."""
        place, _, token = text.partition("/")
        host, _, port = place.rpartition(":")
        return cls(host, int(port), token)

    @property
    def place(self) -> str:
        """What may be said aloud."""
        return f"{self.host}:{self.port}"


def serve(address: str, port: int = 0, *, token: str | None = None) -> Ticket:
    """Starts a server in a process of its own, or goes on using it, and has it take one more token.

    It ends with this process, or when all its tickets are retired.

    Args:
        address: of this machine, to which the server is bound; empty: to all that it has.
        port: 0: one that the system picks.
        token: None: a new one.

    Raises:
        OSError: the port is in use, or the address is not of this machine.
    """
    key = (os.getpid(), address, port)
    if key not in _SERVERS:
        _SERVERS[key] = _start(address, port)
    server = _SERVERS[key]
    server.tickets += 1
    ticket = Ticket(address, server.port, token or secrets.token_hex(16))
    _say(server, ticket.token)
    return ticket


def _say(server: _Server, word: str) -> None:
    pipe = server.process.stdin
    assert pipe is not None
    pipe.write(f"{word}\n".encode())


def retire(ticket: Ticket) -> None:
    """Ends the server that this process has for a ticket, unless there are other tickets to it."""
    for key, server in list(_SERVERS.items()):
        if key[:2] == (os.getpid(), ticket.host) and server.port == ticket.port:
            server.tickets -= 1
            if not server.tickets:
                del _SERVERS[key]
                server.process.communicate(timeout=ENDS_S)


def _start(address: str, port: int) -> _Server:
    with listen(address, port) as listener:
        number = listener.fileno()
        # Its outputs are not ours: whoever reads ours to the end would wait for it, too.
        process = subprocess.Popen(
            [sys.executable, "-ISc", PROGRAM, str(Path(__file__).parents[2]), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(number,),
            bufsize=0,
        )
        return _Server(process, listener.getsockname()[1])


def join(ticket: Ticket, timeout: timedelta) -> dist.Store:
    """The store, for a rank with a ticket to it; it waits for the server to come.

    Raises:
        torch.distributed.DistError: nobody answers there in time.
    """
    client = dist.TCPStore(ticket.host, ticket.port, is_master=False, timeout=timeout)
    return dist.PrefixStore(ticket.token, client)


def shared_secret(environ: Mapping[str, str]) -> str | None:
    """What is in the file that the environment names, if it names one.

    Raises:
        LaunchError: it is not there, is too short, or others may read it.
    """
    if not (name := environ.get(SECRET_FILE)):
        return None
    try:
        mode = os.stat(name).st_mode
        secret = Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{SECRET_FILE}={name} cannot be read: {error}.") from error
    if mode & 0o077:
        raise LaunchError(f"{name} ({SECRET_FILE}) may be read by others. Type: chmod 600 {name}")
    if len(secret) < SHORTEST_SECRET:
        raise LaunchError(
            f"{name} ({SECRET_FILE}) should hold {SHORTEST_SECRET} characters or more, and holds {len(secret)}. "
            f"Type: (umask 077; openssl rand -hex 16 > {name}), and copy it to the other hosts"
        )
    return secret


def derived_token(secret: str, name: str) -> str:
    """A token that only those know who have the secret; one for each name."""
    return hmac.new(secret.encode(), name.encode(), "sha256").hexdigest()[:32]
