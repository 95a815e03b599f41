"""Letters that only the same user can read, by MUNGE: the service by which Slurm's hosts know their users.

Its programs `munge` and `unmunge` are on all hosts of a cluster that uses it, and the hosts share its key.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache

from hvd_trainer.errors import LaunchError

MARK = "MUNGE:"
WAIT_S = 10.0


@cache
def option() -> list[str]:
    """The option for the service's socket, where Slurm is set to another one than MUNGE's own."""
    try:
        shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=WAIT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    match = re.search(r"^AuthInfo\s*=.*\bsocket=([^,\s]+)", shown.stdout, re.MULTILINE)
    return ["--socket", match[1]] if match else []


def encode(text: str) -> str:
    """A letter that this user's processes can open for five minutes; the open text where there is no MUNGE."""
    command = ["munge", *option(), "--restrict-uid", str(os.getuid())]
    try:
        sealed = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=WAIT_S)
    except (OSError, subprocess.SubprocessError):
        return text
    return sealed.stdout.strip()


@cache
def is_available() -> bool:
    """Whether letters can be sealed here, and so are expected."""
    return encode("") != ""


def decode(letter: str) -> str | None:
    """What is in a letter of `seal` by this user; None if it is by or for somebody else, or should be sealed.

    Raises:
        LaunchError: it is sealed, and there is nothing to open it with.
    """
    if not letter.startswith(MARK):
        return None if is_available() else letter
    command = ["unmunge", *option()]
    try:
        opened = subprocess.run(command, input=letter, capture_output=True, text=True, timeout=WAIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"Rank 0's address came in a letter by MUNGE, which cannot be opened here: {error}. Type on this "
            f"host: apt-get install munge    (or: export HVD_TRAINER_SECRET_FILE=FILE on all hosts)"
        ) from error
    # A second rank of a host opens the same letter, which MUNGE calls a replay, and shows it all the same.
    about, _, text = opened.stdout.partition("\n\n")
    sender = re.search(r"^UID:.*\((\d+)\)$", about, re.MULTILINE)
    return text.strip() if text and sender and int(sender[1]) == os.getuid() else None
