"""`python -m hvd_trainer export CHECKPOINT [FILE]`: the weights of a checkpoint, for use without this package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import CheckpointError
from hvd_trainer.utils.text import COMMAND


@dataclass(frozen=True)
class Options:
    """Write a checkpoint's weights as a safetensors file, for use without this package."""

    checkpoint: Annotated[Positional[str], arg(metavar="CHECKPOINT")]
    """a checkpoint, or a log folder, of which the newest is taken"""
    file: Annotated[Positional[Path], arg(metavar="[FILE]")] = Path("model.safetensors")
    """to be written"""


WRITER = {"written_by": "hvd-trainer export"}
"""What an exported file says of itself: only such a file is replaced."""


def main(argv: Sequence[str]) -> int:
    """Write the weights; return the exit code.

    Raises:
        CheckpointError: there is no whole checkpoint, or the file cannot be written, or is one of the user's.
    """
    options = read_words(Options, argv, program=f"{COMMAND} export")
    # With torch, for which help need not wait.
    from hvd_trainer.checkpoint import storage
    from hvd_trainer.checkpoint.export import export_tensors
    from hvd_trainer.checkpoint.stored import StateReader

    if os.path.lexists(options.file) and not _is_export(options.file):
        raise CheckpointError(f"{options.file} is no file that export has written. Name another file")
    restored = storage.restore(None, options.checkpoint)
    assert restored.opened is not None
    try:
        export_tensors(StateReader().load(restored.opened.state()["model"]), options.file, WRITER)
    except (OSError, KeyError) as error:
        raise CheckpointError(f"{options.file} cannot be written: {error}") from error
    print("\n".join([*restored.notes, f"weights are in {options.file}"]))
    return 0


def _is_export(file: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError), safe_open(file, "pt") as known:
        return WRITER.items() <= (known.metadata() or {}).items()
    return False
