"""MUNGE credentials: the service by which the hosts of a Slurm cluster authenticate users.

Its programs `munge` and `unmunge` are on all hosts of a cluster that uses it, and the hosts share its key.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache

from hvd_trainer.errors import LaunchError

PREFIX = "MUNGE:"
"""How each credential begins."""
TIMEOUT_S = 10.0


@cache
def socket_option() -> list[str]:
    """Return the option for the service's socket, if Slurm is configured to use another one than MUNGE's own."""
    try:
        shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    match = re.search(r"^AuthInfo\s*=.*\bsocket=([^,\s]+)", shown.stdout, re.MULTILINE)
    return ["--socket", match[1]] if match else []


def encode(text: str) -> str:
    """Return a credential that only this user can decode, for five minutes; without MUNGE, the text itself."""
    command = ["munge", *socket_option(), "--restrict-uid", str(os.getuid())]
    try:
        encoded = subprocess.run(
            command, input=text, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return text
    return encoded.stdout.strip()


@cache
def is_available() -> bool:
    """Return True if credentials can be encoded here: then plain text is not accepted."""
    return encode("") != ""


def decode(credential: str) -> str | None:
    """Return the text of a credential by this user; None if it is by or for another user, or plain text.

    Without MUNGE on this host, plain text is returned as it is.

    Raises:
        LaunchError: it is a credential, and this host has no MUNGE.
    """
    if not credential.startswith(PREFIX):
        return None if is_available() else credential
    command = ["unmunge", *socket_option()]
    try:
        decoded = subprocess.run(command, input=credential, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"Rank 0's address came as a MUNGE credential, which cannot be decoded here: {error}. Type on this "
            f"host: apt-get install munge    (or: export HVD_TRAINER_SECRET_FILE=FILE on all hosts)"
        ) from error
    # The second rank of a host that decodes a credential gets the text and an error, that it was replayed: the
    # exit code does not count.
    metadata, _, text = decoded.stdout.partition("\n\n")
    sender = re.search(r"^UID:.*\((\d+)\)$", metadata, re.MULTILINE)
    return text.strip() if text and sender and int(sender[1]) == os.getuid() else None
