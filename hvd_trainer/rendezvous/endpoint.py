"""An endpoint: where a job's store, or a rank, listens, and its token; how ranks authenticate a published one.

If everyone can read where it is published, it can be derived from a secret that the ranks share:

    published  10.0.0.1:40123/NONCE/SIGNATURE      HMAC of address and nonce: only the ranks can create it
    token      another HMAC of the nonce           only the ranks can compute it
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
"""Variable with the name of a file with a secret, for ranks to which no launcher passes a token in private."""
MIN_SECRET_BYTES = 16


@dataclass(frozen=True)
class Endpoint:
    """An address, and the token of who listens there: 32 hexadecimal digits."""

    host: str
    port: int
    token: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.netloc}/{self.token}"

    @property
    def netloc(self) -> str:
        """Host and port: what messages may show."""
        return f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint whose `str` the text is.

    Raises:
        LaunchError: the text is none.
    """
    endpoint = verify_endpoint(text, None)
    if endpoint is None:
        raise LaunchError(f"{text[:60]!r} should be the endpoint of a job's store, HOST:PORT/TOKEN, and is not.")
    return endpoint


def create_token(secret: str | None) -> tuple[str, str]:
    """Return a token for a new store, and the nonce it is derived from; without a secret, both are the same."""
    nonce = secrets.token_hex(16)
    return (nonce if secret is None else _hmac(secret, "token", nonce)), nonce


def sign_endpoint(endpoint: Endpoint, nonce: str, secret: str | None) -> str:
    """Return the text by which rank 0 publishes its endpoint; without a secret it has the token itself."""
    if secret is None:
        return str(endpoint)
    return f"{endpoint.netloc}/{nonce}/{_hmac(secret, endpoint.netloc, nonce)}"


def verify_endpoint(text: str, secret: str | None) -> Endpoint | None:
    """Return the endpoint that was published; None if the text is malformed, or not signed with the secret.

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
    if not hmac.compare_digest(signature, _hmac(secret, f"{host}:{port}", nonce)):
        return None
    return Endpoint(host, int(port), _hmac(secret, "token", nonce))


def read_secret(environ: Mapping[str, str]) -> str | None:
    """Return the content of the file that `SECRET_FILE` names; None if it is not set.

    Raises:
        LaunchError: the file cannot be read, is too short, or others may read it.
    """
    if not (name := environ.get(SECRET_FILE)):
        return None
    try:
        status = os.stat(name)
        secret = Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{SECRET_FILE}={name} cannot be read: {error}.") from error
    # A file of root's may be readable by a group: Kubernetes mounts secrets so for a pod's user.
    if status.st_mode & (0o037 if status.st_uid == 0 else 0o077):
        raise LaunchError(f"{name} ({SECRET_FILE}) may be read by others. Type: chmod 600 {name}")
    if len(secret) < MIN_SECRET_BYTES:
        raise LaunchError(
            f"{name} ({SECRET_FILE}) should hold {MIN_SECRET_BYTES} characters or more, and holds {len(secret)}. "
            f"Type: (umask 077; openssl rand -hex 16 > {name}), and copy it to the other hosts"
        )
    return secret


def _hmac(secret: str, *fields: str) -> str:
    """Return a keyed hash (HMAC-SHA256) of some texts, in 32 hexadecimal digits."""
    return hmac.new(secret.encode(), "\n".join(fields).encode(), "sha256").hexdigest()[:32]
