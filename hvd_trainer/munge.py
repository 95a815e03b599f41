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


def seal(text: str) -> str:
    """A letter that this user's processes can open for five minutes; the open text where there is no MUNGE."""
    command = ["munge", *option(), "--restrict-uid", str(os.getuid())]
    try:
        sealed = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=WAIT_S)
    except (OSError, subprocess.SubprocessError):
        return text
    return sealed.stdout.strip()


def open_letter(letter: str) -> str:
    """What is in a letter of `seal`.

    Raises:
        LaunchError: it is for somebody else, or MUNGE cannot be asked here.
    """
    if not letter.startswith(MARK):
        return letter
    command = ["unmunge", *option(), "--metadata", os.devnull, "--output", "-"]
    try:
        opened = subprocess.run(command, input=letter, capture_output=True, text=True, timeout=WAIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"Rank 0's address came in a letter by MUNGE, which cannot be opened here: {error}. Type on this "
            f"host: apt-get install munge    (or: export HVD_TRAINER_SECRET_FILE=FILE on all hosts)"
        ) from error
    # A second rank of a host opens the same letter, which MUNGE calls a replay, and shows it all the same.
    if not opened.stdout:
        raise LaunchError(
            f"Rank 0's address came in a letter by MUNGE, which says here: {opened.stderr.strip()}. Type on both "
            f"hosts, for their clocks and keys: munge -n | ssh THE_OTHER unmunge"
        )
    return opened.stdout.strip()
