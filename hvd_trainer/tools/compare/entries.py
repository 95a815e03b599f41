"""The entries of a comparison: the job on one engine, or another script beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.runner.command import LAUNCHER_OF


@dataclass(frozen=True)
class Entry:
    """An engine under the job, or a script beside it that brings its own."""

    name: str
    engine: str
    script: tuple[str, ...] | None = None
    """the words that follow `python`, of a `--baseline`, whose engine is not replaced; None: the job's"""

    @property
    def is_job(self) -> bool:
        return self.script is None


def read_entries(
    engines: Sequence[str], baselines: Sequence[str], *, max_ranks: int, num_gpus: int
) -> list[Entry]:
    """Return the entries in the order of the tables.

    Args:
        engines: names, as typed.
        baselines: an engine and a script each, as typed.
        max_ranks: the largest number of ranks.
        num_gpus: that are visible.

    Raises:
        OptionError: a name is unknown or comes twice, a baseline names no launcher or file, or GPUs are too few.
    """
    entries = []
    for name in engines:
        if name not in LAUNCHER_OF:
            raise OptionError(f"--engines {name}: there are {', '.join(LAUNCHER_OF)}")
        if name == "data-parallel" and not 2 <= max_ranks <= num_gpus:
            raise OptionError(
                f"--engines data-parallel needs as many GPUs as ranks, two at least (here: {num_gpus}, and --np "
                f"{max_ranks}): leave it out"
            )
        entries.append(Entry(name, name))
    for text in baselines:
        engine, *words = text.split()
        if engine not in ("horovod", "ddp") or not words:
            raise OptionError(
                f"--baseline {text!r}: say what starts it, and the script with its arguments, such as "
                f"--baseline 'ddp examples/mnist/plain_ddp.py --epochs 1'"
            )
        if words[0] != "-m" and not Path(words[0]).is_file():
            raise OptionError(f"--baseline {text!r}: there is no file {words[0]}")
        script = words[1] if words[0] == "-m" and len(words) > 1 else Path(words[0]).name
        entries.append(Entry(script, engine, tuple(words)))
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"{name} takes part twice: leave one out, or give the file another name")
    return entries
