"""`python -m hvd_trainer export CHECKPOINT [FILE]`: the weights of a checkpoint, for use without this package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.export import export_tensors
from hvd_trainer.errors import CheckpointError
from hvd_trainer.utils.text import COMMAND


def main(argv: Sequence[str]) -> int:
    """Write the weights; return the exit code.

    Raises:
        CheckpointError: there is no whole checkpoint, or the file cannot be written.
    """
    parser = argparse.ArgumentParser(prog=f"{COMMAND} export", description=__doc__)
    parser.add_argument("checkpoint", help="a checkpoint, or a log folder, of which the newest is taken")
    parser.add_argument("file", nargs="?", type=Path, default=Path("model.safetensors"))
    options = parser.parse_args(argv)
    found = storage.restore(None, options.checkpoint)
    assert found.state is not None
    try:
        export_tensors(found.state["model"], options.file)
    except (OSError, KeyError) as error:
        raise CheckpointError(f"{options.file} cannot be written: {error}") from error
    print("\n".join([*found.notes, f"weights are in {options.file}"]))
    return 0
