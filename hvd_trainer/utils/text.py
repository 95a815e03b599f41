"""Texts for people."""

from __future__ import annotations

COMMAND = "python -m hvd_trainer"
"""How messages name this package's commands: unlike `hvd-trainer` it needs no folder of scripts on PATH."""
INSTALL_HOROVOD = f"{COMMAND} install-horovod"


def plural(count: float, word: str, words: str | None = None) -> str:
    """`1 rank`, `2 ranks`."""
    return (
        f"{f'{count:,}' if isinstance(count, int) else f'{count:g}'} {word if count == 1 else words or word + 's'}"
    )
