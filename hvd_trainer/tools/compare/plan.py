"""The plan of a comparison: a trial for each entry on each number of ranks, with each combination of `--vary`."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten
from hvd_trainer.errors import OptionError
from hvd_trainer.jobs.options import ImdbOptions, MnistOptions
from hvd_trainer.measure.command import LAUNCHER_OF, option_of, option_values, read_backends, with_options
from hvd_trainer.measure.machine import threads_per_rank
from hvd_trainer.measure.measured import SAME_NUMBERS, MeasuredTrial
from hvd_trainer.tools.compare.options import CompareOptions, read_ranks
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.text import plural

ENTRIES, RANKS = "engine", "ranks"
"""The axes that every comparison has."""
BUNDLED: Mapping[str, type[TrainerOptions]] = {"hvd_trainer.mnist": MnistOptions, "hvd_trainer.imdb": ImdbOptions}
"""Jobs whose options are known before they are started."""
OWN_OPTION = {"ranks": "--np 1,2,4", "np": "--np 1,2,4", "backend": "--backend horovod,ddp"}
"""Axes that have options of their own."""
RUN_OPTIONS = {"bucket_mb", "fusion_threshold_mb", "cycle_time_ms"}
"""Axes that are options of `run`, which lies beneath a script, where the job's command has no such option."""
TRAINER_OPTIONS = {"bucket_mb", "threads"}
"""Axes beneath a script that a job on the Trainer has as options of its own, perhaps in its --config."""


class Axis(NamedTuple):
    """An option of the job, and the values that it takes."""

    name: str
    values: tuple[str, ...]
    typed: str
    """as its user spells it: `--batch_size`"""

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def varies(self) -> bool:
        return len(self.values) > 1


class Entry(NamedTuple):
    """An engine under the job, or a script beside it that brings its own."""

    name: str
    engine: str
    script: tuple[str, ...] | None = None
    """the words that follow `python`, of a `--baseline`, whose engine is not replaced; None: the job's"""


@dataclass(frozen=True, kw_only=True)
class CompareTrial(MeasuredTrial):
    """One entry on one number of ranks, with one combination of values."""

    entry: str
    """its name"""
    variant: str
    """`stages 2, chunks 4`: the values of all options that vary"""
    values: Mapping[str, str]
    """its place on each axis"""

    is_first: bool
    """whether each option that varies has its first value"""
    settings: Sequence[tuple[str, str]]
    """the options that vary, as they are typed, with their values"""

    @property
    def series(self) -> str:
        """`ddp, chunks 4`: its entry and variant."""
        return ", ".join(filter(None, (self.entry, self.variant)))

    def read(self, log: Path) -> dict[str, Any] | None:
        """Return the figures of a run of it; None if it did not come to its end.

        Raises:
            OptionError: all its steps belong to the warm-up, or each rank has trained alone.
        """
        figures = super().read(log)
        if figures is None:
            return None
        work = figures["work"]
        if work.get("world_size", self.processes) != self.processes:
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
        return figures


def plan(
    job: Sequence[str], axes: Sequence[Axis], options: CompareOptions, conditions: Mapping[str, Any]
) -> list[CompareTrial]:
    """Return all trials; those that differ only in their entry stand side by side.

    `single` is on one rank only, `data-parallel` never is.

    Args:
        conditions: what their figures depend on besides, such as the machine.

    Raises:
        OptionError: an option is not what it should be.
    """
    numbers = read_ranks(options.np)
    entries = read_entries(options.backend, options.baseline, max_ranks=max(numbers))
    threads = options.threads or threads_per_rank(max(numbers))
    steps = None if options.steps is None else options.warmup_steps + options.steps
    variants = [list(zip(axes, values, strict=True)) for values in itertools.product(*(a.values for a in axes))]
    trials = []
    for ranks, pairs, entry in itertools.product(numbers, variants, entries):
        if entry.engine == ("data-parallel" if ranks == 1 else "single"):
            continue
        variant = ", ".join(f"{axis.label} {value}" for axis, value in pairs if axis.varies)
        beneath = {axis.name: value for axis, value in pairs if is_beneath(axis.typed, job)}
        settings = [(axis.typed, value) for axis, value in pairs]
        own = [(axis.typed, value) for axis, value in pairs if axis.name not in beneath]
        run = [(f"--{name.replace('_', '-')}", beneath[name]) for name in beneath if name in RUN_OPTIONS]
        trials.append(
            CompareTrial(
                entry=entry.name,
                variant=variant,
                values={ENTRIES: entry.name, RANKS: str(ranks)} | {axis.name: value for axis, value in pairs},
                is_first=all(value == axis.values[0] for axis, value in pairs),
                settings=settings,
                job=entry.script or with_options(job, own),
                engine=entry.engine,
                ranks=ranks,
                threads=_number(beneath["threads"]) if "threads" in beneath else threads,
                run_options=(*SAME_NUMBERS, *itertools.chain(*run)),
                options={name: yaml.safe_load(beneath[name]) for name in TRAINER_OPTIONS & {*beneath}},
                steps=steps,
                warmup_steps=options.warmup_steps,
                native=entry.script is not None,
                label=", ".join(filter(None, (f"{entry.name} x {ranks}", variant))),
                conditions={"entry": entry.name, **conditions},
            )
        )
    if not trials:
        raise OptionError(
            f"--np {options.np} with --backend {options.backend}: a single process has one rank. Type: --np 1"
        )
    return trials


def is_beneath(option: str, job: Sequence[str]) -> bool:
    """Return whether an option that varies is no word of the job's command: CPU threads, and options of `run`."""
    name = option.lstrip("-").replace("-", "_")
    return name in {"threads", *RUN_OPTIONS} and not option_values(job, option_of(option))


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise OptionError(f"--vary threads={text}: type numbers of CPU threads, such as --vary threads=1,2")
    return int(text)


def read_entries(backends: str, baselines: Sequence[str], *, max_ranks: int) -> list[Entry]:
    """Return the entries, from what was typed, in the order of the tables.

    Raises:
        OptionError: a name is unknown or comes twice, a baseline names no launcher or file, or GPUs are too few.
    """
    engines, num_gpus = read_backends(backends, LAUNCHER_OF), accelerator.count(accelerator.kind())
    if "data-parallel" in engines and not 2 <= max_ranks <= num_gpus:
        raise OptionError(
            f"--backend data-parallel needs as many GPUs as ranks, two at least (here: {num_gpus}, and --np "
            f"{max_ranks}): leave it out"
        )
    entries = [*(Entry(name, name) for name in engines), *map(_read_baseline, baselines)]
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


def read_axes(texts: Sequence[str], job: Sequence[str] = ()) -> list[Axis]:
    """Return the axes of `--vary chunks=1,2,4`.

    Raises:
        OptionError: one has no name or no values, comes twice or has a value twice, has an option of its own, or
            is no option of the job, as far as its options are known.
    """
    axes: list[Axis] = []
    kind = BUNDLED.get(job[1]) if job[:1] == ("-m",) else None
    known = {} if kind is None else flatten(kind())
    for text in texts:
        typed, _, values = text.partition("=")
        typed = typed.strip().lstrip("-")
        name, listed = typed.replace("-", "_"), [value.strip() for value in values.split(",")]
        if not name or not all(listed):
            raise OptionError(
                f"--vary {text}: type an option of the job and its values with commas between them, such as "
                f"--vary chunks=1,2,4"
            )
        if name in OWN_OPTION:
            raise OptionError(f"--vary {text}: type {OWN_OPTION[name]}")
        if known and name not in known and not is_beneath(typed, job):
            near = "".join(f": did you mean {other}?" for other in get_close_matches(name, known, 1)) or "."
            near = near.replace("_", "-")
            raise OptionError(f"--vary {text}: {job[1]} has no option --{typed}{near} See its --help-all")
        if any(axis.name == name for axis in axes):
            raise OptionError(f"--vary {name} is given twice: put all its values into one list")
        if len({*listed}) < len(listed):
            raise OptionError(f"--vary {text}: a value is there twice, and each is compared with the first")
        axes.append(Axis(name, tuple(listed), f"--{typed}"))
    return axes
