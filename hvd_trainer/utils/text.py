"""Texts for people."""

from __future__ import annotations

COMMAND = "python -m hvd_trainer"
"""How messages name this package's commands: unlike `hvd-trainer` it needs no folder of scripts on PATH."""
INSTALL_HOROVOD = f"{COMMAND} install-horovod"


def plural(count: float, singular: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 rank`, `2 ranks`; the plural adds an s if none is given."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {singular if count == 1 else plural or singular + 's'}"
