"""The variants of a job: one for each combination of the values of `--vary`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from hvd_trainer.config.checks import flag, switch
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten
from hvd_trainer.errors import OptionError
from hvd_trainer.tools.compare.job_options import JobOptions, choices, with_values
from hvd_trainer.tools.runner.command import option_of, script_checksum
from hvd_trainer.tools.runner.job_kind import is_trainer_job

NOT_APPLICABLE = "-"
"""The value of an option that changes nothing in a combination, such as the schedule of one stage."""
STAGES_ONLY, PARTS_ONLY = ("schedule", "parts_per_stage"), ("balance",)
"""Options that change nothing where there is one stage, or where the model is in one piece."""
OWN_OPTION = {
    "ranks": "--np 1,2,4",
    "np": "--np 1,2,4",
    "backend": "--engines horovod,ddp",
    "engines": "--engines",
}
"""Axes of every comparison, which have options of their own."""


@dataclass(frozen=True)
class Axis:
    """An option, or engines or ranks, and the values that it takes."""

    name: str
    values: tuple[str, ...]
    typed: str = ""
    """the option, as its user spells it: `--batch_size`"""

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def varies(self) -> bool:
        return len(self.values) > 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The job with one combination of values."""

    words: tuple[str, ...]
    """the words that follow `python`"""
    identity: Mapping[str, Any]
    """tells it from others in plain JSON, however its options were typed"""
    values: Mapping[str, str]
    """by axis, as typed, or NOT_APPLICABLE"""
    label: str = ""
    """`stages 2, chunks 4`: the values of all options that vary"""
    options: TrainerOptions | None = None
    """None without `--vary`: then nobody looks into the job"""


class Value(NamedTuple):
    """One value of an axis, as the job takes it."""

    name: str
    text: str
    words: tuple[str, ...]
    """as arguments"""
    parsed: Any


def read_axes(texts: Sequence[str]) -> list[Axis]:
    """Return the axes of `--vary chunks=1,2,4`.

    Raises:
        OptionError: one has no name or no values, comes twice, or has an option of its own.
    """
    axes: list[Axis] = []
    for text in texts:
        typed, _, values = text.partition("=")
        name = typed.strip().lstrip("-").replace("-", "_")
        listed = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
        axis = Axis(name, listed, "--" + typed.strip().lstrip("-"))
        if not name or not all(axis.values):
            raise OptionError(
                f"--vary {text}: type an option of the job and its values with commas between them, such as "
                f"--vary chunks=1,2,4"
            )
        if name in OWN_OPTION:
            raise OptionError(f"--vary {text}: type {OWN_OPTION[name]}")
        if any(axis.name == other.name for other in axes):
            raise OptionError(f"--vary {name} is given twice: put all its values into one list")
        axes.append(axis)
    return axes


def make_variants(job: Sequence[str], axes: Sequence[Axis]) -> list[Variant]:
    """Return the product of the axes; combinations that make the same options come once.

    Args:
        job: the words that follow `python`.

    Raises:
        OptionError: the job has no such option, or does not take such a value.
    """
    if axes and not is_trainer_job(job):
        return [_make_script_variant(job, axes, values) for values in itertools.product(*(a.values for a in axes))]
    if not axes:
        identity = {"words": list(job), "script": script_checksum(job)}
        return [Variant(words=tuple(job), identity=identity, values={})]
    job_options = JobOptions.find(job)
    base = job_options.parse()
    values = [[_parse(job_options, base, axis, text) for text in axis.values] for axis in axes]
    found: dict[str, Variant] = {}
    for combination in itertools.product(*values):
        variant = _make_variant(job_options, base, axes, combination)
        found.setdefault(str(variant.identity), variant)
    return list(found.values())


def _make_script_variant(job: Sequence[str], axes: Sequence[Axis], values: Sequence[str]) -> Variant:
    """Return a script with an option of each axis: with its value, or as a switch that is there or not."""
    words = tuple(job)
    for axis, value in zip(axes, values, strict=True):
        words = _replaced(words, axis, value)
    pairs = [(axis, value) for axis, value in zip(axes, values, strict=True) if axis.varies]
    return Variant(
        words=words,
        identity={"words": list(words), "script": script_checksum(words)},
        values={axis.name: value for axis, value in zip(axes, values, strict=True)},
        label=", ".join(f"{axis.label} {value}" for axis, value in pairs),
    )


def _replaced(words: Sequence[str], axis: Axis, value: str) -> tuple[str, ...]:
    """Return the words of a script with another value of an option, at its place, or at the end."""
    is_switch = value in ("true", "false")
    place = next((n for n, word in enumerate(words) if option_of(word) == flag(axis.name)), len(words))
    found = "".join(words[place : place + 1])
    typed = found.partition("=")[0] or axis.typed
    new = ([typed] if value == "true" else []) if is_switch else [typed, value]
    end = place + 1 if is_switch or "=" in found else place + 2
    return (*words[:place], *new, *words[end:])


def _make_variant(
    job: JobOptions, base: TrainerOptions, axes: Sequence[Axis], combination: Sequence[Value]
) -> Variant:
    unused = _unused(with_values(base, {value.name: value.parsed for value in combination}))
    used = [value for value in combination if value.name not in unused]
    options = with_values(base, {value.name: value.parsed for value in used})
    varying = {axis.name: axis for axis in axes if axis.varies}
    return Variant(
        words=(*job.program, *job.arguments, *(word for value in used for word in value.words)),
        identity={
            "job": list(job.program),
            "script": script_checksum(job.program),
            "options": job.changed(options),
        },
        values={value.name: value.text if value in used else NOT_APPLICABLE for value in combination},
        label=", ".join(f"{varying[value.name].label} {value.text}" for value in used if value.name in varying),
        options=options,
    )


def _unused(options: TrainerOptions) -> tuple[str, ...]:
    parallel = options.parallel
    if parallel.stages > 1:
        return ()
    return STAGES_ONLY if parallel.num_devices > 1 else (*STAGES_ONLY, *PARTS_ONLY)


def _parse(job: JobOptions, base: TrainerOptions, axis: Axis, text: str) -> Value:
    """Return a value as the job takes it.

    Raises:
        OptionError: the job does not, or it has the option already.
    """
    name, known = axis.name, flatten(base)
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"Did you mean {near[0].replace('_', '-')}?" if near else "`--help` of the job lists its options"
        raise OptionError(f"--vary {name.replace('_', '-')}: the job has no option {flag(name)}. {hint}")
    if {flag(name), switch(name, on=False)} & {option_of(word) for word in job.arguments}:
        raise OptionError(f"{flag(name)} is varied, and stands behind -- too: leave one out")
    words: tuple[str, ...] = (f"{flag(name)}={text}",)
    if isinstance(known[name], bool):
        if text not in ("true", "false"):
            raise OptionError(
                f"{flag(name)} is a switch: type --vary {name.replace('_', '-')}=true,false, not {text}"
            )
        words = (switch(name, on=text == "true"),)
    parsed = job.parse(words, f"{flag(name)} {text}{choices(job.kind, name)}")
    return Value(name, text, words, flatten(parsed)[name])
