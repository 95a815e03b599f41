"""What a grid consists of: axes, configurations, why some of them cannot be, and in which order they run.

Pure: nothing is started here, and what cannot be is found by the checks that the job itself would make.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from hvd_trainer import backends
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.checks import flag
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten
from hvd_trainer.config.rules import check
from hvd_trainer.errors import OptionError, UserError
from hvd_trainer.parallel.grid import check_stages
from hvd_trainer.parallel.schedule import bubble, check_chunks
from hvd_trainer.tools.grid.job_options import Job, changed, choices, flags, parsed, with_values
from hvd_trainer.tools.runner.runs import key_of

RANKS, THREADS = "ranks", "threads"
"""Axes that are no options of the job, but of its start."""
ABSENT = "-"
"""The value of an axis that has nothing to say."""
OF_STAGES, OF_PARTS = ("schedule", "parts_per_stage"), ("balance",)
"""Axes that have nothing to say where there is one stage, or where the model is in one piece."""
# The first epoch sets much up; the last one is what counts. Nothing is saved: that would be measured too.
COMMON = ("--epochs", "2", "--save-every-epochs", "None", "--save-every-s", "None", "--keep-best", "None")


@dataclass(frozen=True)
class Axis:
    """An option and the values that it takes."""

    name: str
    values: tuple[str, ...]


class Typed(NamedTuple):
    """One value of an axis, as the job takes it."""

    name: str
    words: tuple[str, ...]
    """as arguments"""
    value: Any
    """in its options"""


@dataclass(frozen=True)
class Configuration:
    """One cell of the grid."""

    values: Mapping[str, str]
    """by axis, as they were typed; ABSENT where that axis has nothing to say"""
    ranks: int
    threads: int
    """of each rank, on the CPU"""
    options: TrainerOptions
    arguments: tuple[str, ...]
    """for the job"""
    identity: Mapping[str, Any]
    """what tells its runs from all others': job, ranks, threads, and the options that are not the default"""
    reason: str | None
    """why it cannot be; None if it can, as far as is known without starting it"""

    @property
    def key(self) -> str:
        return key_of(self.identity)

    @property
    def parts(self) -> int:
        """Of the model that work at the same time."""
        parallel = self.options.parallel
        return parallel.stages * parallel.num_devices

    @property
    def chunks(self) -> int:
        return self.options.parallel.num_chunks

    @property
    def copies(self) -> int:
        """Of the model."""
        return self.ranks // self.options.parallel.stages

    @property
    def batch_size(self) -> int:
        """Of each copy, in a backward pass."""
        return BatchPlan.of(self.options.train, self.copies).batch_size

    @property
    def bubble(self) -> float | None:
        """The fraction of a step that the formula says is waiting; None where the model is in one piece."""
        parallel = self.options.parallel
        if self.parts == 1:
            return None
        if parallel.stages == 1:
            return bubble("gpipe", parallel.num_devices, self.chunks)
        return bubble(parallel.schedule, parallel.stages, self.chunks, parallel.parts_of_each)

    def named(self, axes: Sequence[Axis]) -> str:
        """`ranks 2, stages 2, chunks 4`: its place on the axes that have several values."""
        several = [axis.name for axis in axes if len(axis.values) > 1] or [RANKS]
        return ", ".join(f"{label(name)} {self.values[name]}" for name in several if self.values[name] != ABSENT)


def label(name: str) -> str:
    """An option as it is called in tables."""
    return name.replace("_", " ")


def read_axis(name: str, text: str) -> Axis:
    """`1,2,4` as an axis.

    Raises:
        OptionError: there are no values, or ranks or threads are not whole numbers from 1 on.
    """
    values = tuple(dict.fromkeys(value.strip() for value in text.split(",")))
    if "" in values:
        raise OptionError(f"{flag(name)} {text}: give values with commas between them, such as --chunks 1,2,4")
    if name in (RANKS, THREADS) and not all(value.isdecimal() and int(value) > 0 for value in values):
        raise OptionError(f"{flag(name)} {text}: give whole numbers from 1 on, such as {flag(name)} 1,2,4")
    return Axis(name, values)


def configurations(job: Job, axes: Sequence[Axis], further: Sequence[str], steps: int) -> list[Configuration]:
    """All of the product of the axes, each once; what cannot be has its reason.

    Args:
        axes: ranks and threads among them.
        further: arguments for the job, the same in all.
        steps: of an epoch, where the job's data can have any size.

    Raises:
        OptionError: the job has no such option, or it does not take such a value.
    """
    given = (*COMMON, *job.brief, *further)
    base = parsed(job, given, " ".join(further))
    if base.log.log_dir is not None:
        raise OptionError("Each run has a log folder of its own: leave out --log-dir")
    typed: dict[tuple[str, str], Typed] = {}
    for axis in axes:
        _check_axis(axis, base, further)
        typed |= {(axis.name, text): _typed(job, base, given, axis.name, text) for text in axis.values}
    sized = job.samples
    if sized is None or flag(sized) in flags(further) or sized in [axis.name for axis in axes]:
        steps = 0
    found: dict[str, Configuration] = {}
    for texts in itertools.product(*(axis.values for axis in axes)):
        values = dict(zip((axis.name for axis in axes), texts, strict=True))
        made = _configuration(job, base, given, [typed[place] for place in values.items()], values, steps)
        found.setdefault(made.key, made)
    return list(found.values())


def _configuration(
    job: Job,
    base: TrainerOptions,
    given: Sequence[str],
    typed: Sequence[Typed],
    values: Mapping[str, str],
    steps: int,
) -> Configuration:
    """The one with these values.

    Args:
        base: the options that `given` makes.
        given: the arguments that all have in common.
        typed: the values, as the job takes them.
        steps: of an epoch; 0: the data have a size.
    """
    without_a_say = _without_a_say(with_values(base, {one.name: one.value for one in typed}))
    chosen = [one for one in typed if one.name not in without_a_say]
    options = with_values(base, {one.name: one.value for one in chosen})
    words = [*given, *(word for one in chosen for word in one.words)]
    ranks, threads = int(values[RANKS]), int(values[THREADS])
    reason = why_not(options, ranks)
    if reason is None and job.samples is not None and steps > 0:
        count = steps * BatchPlan.of(options.train, ranks // options.parallel.stages).global_batch_size
        options = with_values(options, {job.samples: count})
        words.append(f"{flag(job.samples)}={count}")
    shown = {name: ABSENT if name in without_a_say else text for name, text in values.items()}
    identity = {"job": job.name, RANKS: ranks, THREADS: threads, **changed(job, options)}
    return Configuration(shown, ranks, threads, options, tuple(words), identity, reason)


def _without_a_say(options: TrainerOptions) -> tuple[str, ...]:
    parallel = options.parallel
    if parallel.stages > 1:
        return ()
    return OF_STAGES if parallel.num_devices > 1 else (*OF_STAGES, *OF_PARTS)


def why_not(options: TrainerOptions, ranks: int) -> str | None:
    """Why a job with these options cannot be started with so many ranks; None if nothing is known against it."""
    parallel = options.parallel
    try:
        check(options)
        check_stages(parallel.stages, ranks)
        _check_engine(options.engine)
        batch_size = BatchPlan.of(options.train, ranks // parallel.stages).batch_size
        if parallel.is_staged:
            check_chunks(parallel.schedule, parallel.stages, parallel.num_chunks)
    except UserError as error:
        return str(error)
    if parallel.is_staged and parallel.num_chunks > batch_size:
        return f"{parallel.num_chunks} chunks cut a batch of {batch_size} into less than one sample"
    return None


@cache
def _check_engine(options: backends.EngineOptions) -> None:
    """Makes the engine, which checks its options, and does not start it."""
    backends.create(options, {})


def in_rounds(possible: Sequence[Configuration], rounds: int) -> Iterator[tuple[int, Configuration]]:
    """All of them in each round, forwards in one and backwards in the next: (round, configuration).

    So each has nearly the same mean position in time, and a drift of the machine favours nobody.
    """
    for number in range(1, rounds + 1):
        for configuration in possible if number % 2 else reversed(possible):
            yield number, configuration


def _check_axis(axis: Axis, base: TrainerOptions, further: Sequence[str]) -> None:
    known = {RANKS, THREADS, *flatten(base)}
    if axis.name not in known:
        near = get_close_matches(axis.name, known, 1)
        hint = f"Did you mean {flag(near[0])}?" if near else "`--help` of the job lists its options"
        raise OptionError(f"There is no option {flag(axis.name)} that could be an axis. {hint}")
    if flag(axis.name) in flags(further):
        raise OptionError(f"{flag(axis.name)} is an axis, and stands behind -- too: leave one out")


def _typed(job: Job, base: TrainerOptions, given: Sequence[str], name: str, text: str) -> Typed:
    """A value as the job takes it.

    Raises:
        OptionError: it does not, or a switch is neither true nor false.
    """
    if name in (RANKS, THREADS):
        return Typed(name, (), int(text))
    words: tuple[str, ...] = (f"{flag(name)}={text}",)
    if isinstance(flatten(base)[name], bool):
        if text not in ("true", "false"):
            raise OptionError(f"{flag(name)} is a switch: type --axis {name}=true,false, not {text}")
        words = (flag(name if text == "true" else f"no_{name}"),)
    what = f"{flag(name)} {text}{choices(job.kind, name)}"
    return Typed(name, words, flatten(parsed(job, (*given, *words), what))[name])
