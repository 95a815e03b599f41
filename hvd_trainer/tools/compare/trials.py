"""The trials of a comparison: each entry on each number of ranks, with each variant of the job."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import LAUNCHER_OF, read_backends
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.stale import digest_of_files
from hvd_trainer.measure.trials import key_of
from hvd_trainer.tools.compare.variants import Variant
from hvd_trainer.utils.text import plural

ENTRIES, RANKS = "engine", "ranks"
"""The axes that every comparison has."""


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


def read_entries(backends: str, baselines: Sequence[str], *, max_ranks: int, num_gpus: int) -> list[Entry]:
    """Return the entries in the order of the tables.

    Args:
        backends: as typed.
        baselines: an engine and a script each, as typed.
        max_ranks: the largest number of ranks.
        num_gpus: that are visible.

    Raises:
        OptionError: a name is unknown or comes twice, a baseline names no launcher or file, or GPUs are too few.
    """
    entries = []
    for name in read_backends(backends, LAUNCHER_OF):
        if name == "data-parallel" and not 2 <= max_ranks <= num_gpus:
            raise OptionError(
                f"--backend data-parallel needs as many GPUs as ranks, two at least (here: {num_gpus}, and --np "
                f"{max_ranks}): leave it out"
            )
        entries.append(Entry(name, name))
    entries += map(_read_baseline, baselines)
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"{name} takes part twice: leave one out, or give the file another name")
    return entries


def _read_baseline(text: str) -> Entry:
    """Return the entry of a `--baseline`, whose words are split as a shell does.

    Raises:
        OptionError: it names no launcher or file, or a quote is left open.
    """
    try:
        engine, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise OptionError(f"--baseline {text!r}: {error}. Close each quote") from None
    if engine not in ("horovod", "ddp") or words in ([], ["-m"]):
        raise OptionError(
            f"--baseline {text!r}: say what starts it, and the script with its arguments, such as "
            f"--baseline 'ddp examples/mnist/plain_ddp.py --epochs 1'"
        )
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise OptionError(f"--baseline {text!r}: there is no file {words[0]}")
    name = words[1] if words[0] == "-m" else Path(words[0]).name
    return Entry(name, engine, tuple(words))


@dataclass(frozen=True, kw_only=True)
class CompareTrial(MeasuredTrial):
    """One entry on one number of ranks, with one variant of the job."""

    entry: Entry
    threads: int
    variant: Variant

    @property
    def series(self) -> str:
        """`ddp, chunks 4`: its entry and variant."""
        return ", ".join(filter(None, (self.entry.name, self.variant.label)))

    @property
    def values(self) -> Mapping[str, str]:
        """Its place on each axis."""
        return {ENTRIES: self.entry.name, RANKS: str(self.ranks), **self.variant.values}

    @cached_property
    def key(self) -> str:
        return key_of(self.identity)

    def read(self, log: Path) -> dict[str, Any] | None:
        """Return the figures of a run of it; None if it did not come to its end.

        Raises:
            OptionError: no step counts, or each rank has trained alone.
        """
        figures = super().read(log)
        if figures is not None:
            self.check_steps(figures)
        return figures

    def check_steps(self, figures: Mapping[str, Any]) -> None:
        """Check that a run has steps that count, of ranks that work together.

        Raises:
            OptionError: all of them belong to the warm-up, or each rank has trained alone.
        """
        work = figures["work"]
        # The ranks of DataParallel are GPUs of one process.
        size = 1 if self.engine == "data-parallel" else self.ranks
        if work.get("world_size", size) != size:
            raise OptionError(
                f"{self.label}: the script has started no engine with {plural(self.ranks, 'rank')}, so that each "
                f"of its processes has trained alone. Add to the script: hvd.init() of horovod.torch, or "
                f"torch.distributed.init_process_group()"
            )
        if "step_s" not in figures:
            raise OptionError(
                f"{self.label} makes {plural(work['steps'], 'step')}, and the first {self.warmup_steps} do not "
                f"count: give the job more --epochs, or type a lower --warmup-steps"
            )


def make_trials(
    entries: Sequence[Entry],
    numbers: Sequence[int],
    variants: Sequence[Variant],
    *,
    threads: int,
    conditions: Mapping[str, Any],
    steps: int | None = None,
) -> list[CompareTrial]:
    """Return all trials; those that differ only in their entry stand side by side.

    `single` is on one rank only, `data-parallel` never is.

    Args:
        conditions: what else decides on their figures: the machine, versions, steps that do not count.
    """
    trials = []
    for ranks, variant, entry in itertools.product(numbers, variants, entries):
        if entry.engine == ("data-parallel" if ranks == 1 else "single"):
            continue
        words = entry.script or variant.words
        job = {"words": [*words], "files": digest_of_files(words)}
        own = {"entry": entry.name, "engine": entry.engine, "ranks": ranks, "threads": threads, "steps": steps}
        trials.append(
            CompareTrial(
                entry=entry,
                variant=variant,
                job=words,
                engine=entry.engine,
                ranks=ranks,
                threads=threads,
                steps=steps,
                warmup_steps=conditions["warmup_steps"],
                native=not entry.is_job,
                label=", ".join(filter(None, (f"{entry.name} x {ranks}", variant.label))),
                identity={**own, **job, **conditions},
            )
        )
    return trials
