"""A ticket: where a job's store is, and the token that opens it; how it is told to ranks, and believed by them.

Where it is told in public, it can be made of a secret that the ranks share:

    told       10.0.0.1:40123/NONCE/SIGNATURE      a signature of address and nonce: nobody else can say this
    token      another signature of the nonce      nobody else can make this of it
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvd_trainer.errors import LaunchError

SECRET_FILE = "HVD_TRAINER_SECRET_FILE"
"""The environment's name of a file with a secret, for ranks to which no launcher tells a token in private."""
MIN_SECRET_BYTES = 16


@dataclass(frozen=True)
class Endpoint:
    """Where a store is, and the token that opens it: 32 hexadecimal digits."""

    host: str
    port: int
    token: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.place}/{self.token}"

    @property
    def place(self) -> str:
        """What may be said aloud."""
        return f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """The ticket that `str` has written.

    Raises:
        LaunchError: it is none.
    """
    ticket = verify_endpoint(text, None)
    if ticket is None:
        raise LaunchError(f"{text[:60]!r} should be the ticket to a job's store, HOST:PORT/TOKEN, and is not.")
    return ticket


def create_token(secret: str | None) -> tuple[str, str]:
    """A token for a new store, and the nonce that it is made of by the secret; without one, that is the token."""
    nonce = secrets.token_hex(16)
    return (nonce if secret is None else _signed(secret, "token", nonce)), nonce


def sign_endpoint(ticket: Endpoint, nonce: str, secret: str | None) -> str:
    """What rank 0 says of its store, to be `believed`."""
    if secret is None:
        return str(ticket)
    return f"{ticket.place}/{nonce}/{_signed(secret, ticket.place, nonce)}"


def verify_endpoint(text: str, secret: str | None) -> Endpoint | None:
    """The ticket that was told; None if that is not what rank 0 says.

    Raises:
        LaunchError: only one side has a secret.
    """
    match = re.fullmatch(r"(\S+):(\d{1,5})/([0-9a-f]{32})(?:/([0-9a-f]{32}))?", text)
    if match is None:
        return None
    host, port, nonce, signature = match.groups()
    if (secret is None) != (signature is None):
        has, has_not = ("rank 0", "this rank") if secret is None else ("this rank", "rank 0")
        raise LaunchError(f"{has} has {SECRET_FILE}, and {has_not} has not. Set it on all hosts, or on none.")
    if secret is None:
        return Endpoint(host, int(port), nonce)
    if not hmac.compare_digest(signature, _signed(secret, f"{host}:{port}", nonce)):
        return None
    return Endpoint(host, int(port), _signed(secret, "token", nonce))


def read_secret(environ: Mapping[str, str]) -> str | None:
    """What is in the file that the environment names, if it names one.

    Raises:
        LaunchError: it is not there, is too short, or others may read it.
    """
    if not (name := environ.get(SECRET_FILE)):
        return None
    try:
        found = os.stat(name)
        secret = Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{SECRET_FILE}={name} cannot be read: {error}.") from error
    # What root has laid down for a group, it means to be read by that: so Kubernetes gives a pod its secrets.
    if found.st_mode & (0o037 if found.st_uid == 0 else 0o077):
        raise LaunchError(f"{name} ({SECRET_FILE}) may be read by others. Type: chmod 600 {name}")
    if len(secret) < MIN_SECRET_BYTES:
        raise LaunchError(
            f"{name} ({SECRET_FILE}) should hold {MIN_SECRET_BYTES} characters or more, and holds {len(secret)}. "
            f"Type: (umask 077; openssl rand -hex 16 > {name}), and copy it to the other hosts"
        )
    return secret


def _signed(secret: str, *words: str) -> str:
    """What only those can say of these words who have the secret, in 32 characters."""
    return hmac.new(secret.encode(), "\n".join(words).encode(), "sha256").hexdigest()[:32]
