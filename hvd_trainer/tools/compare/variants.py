"""The variants of a job: one for each combination of the values of `--vary`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_trainer.config.checks import flag
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import option_of

OWN_OPTION = {
    "ranks": "--np 1,2,4",
    "np": "--np 1,2,4",
    "backend": "--backend horovod,ddp",
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
    values: Mapping[str, str]
    """by axis, as typed"""
    label: str = ""
    """`stages 2, chunks 4`: the values of all options that vary"""


def read_axes(texts: Sequence[str]) -> list[Axis]:
    """Return the axes of `--vary chunks=1,2,4`.

    Raises:
        OptionError: one has no name or no values, comes twice, or has an option of its own.
    """
    axes: list[Axis] = []
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
        if any(axis.name == name for axis in axes):
            raise OptionError(f"--vary {name} is given twice: put all its values into one list")
        axes.append(Axis(name, tuple(dict.fromkeys(listed)), f"--{typed}"))
    return axes


def make_variants(job: Sequence[str], axes: Sequence[Axis]) -> list[Variant]:
    """Return the product of the axes."""
    combinations = itertools.product(*(axis.values for axis in axes))
    return [_make_variant(job, axes, values) for values in combinations]


def _make_variant(job: Sequence[str], axes: Sequence[Axis], values: Sequence[str]) -> Variant:
    """Return the job with an option of each axis: with its value, or as a switch that is there or not."""
    words, pairs = tuple(job), list(zip(axes, values, strict=True))
    for axis, value in pairs:
        words = _replaced(words, axis, value)
    return Variant(
        words=words,
        values={axis.name: value for axis, value in pairs},
        label=", ".join(f"{axis.label} {value}" for axis, value in pairs if axis.varies),
    )


def _replaced(words: tuple[str, ...], axis: Axis, value: str) -> tuple[str, ...]:
    """Return the words of a job with another value of an option, at its place, or at the end."""
    is_switch = value in ("true", "false")
    place = next((n for n, word in enumerate(words) if option_of(word) == flag(axis.name)), len(words))
    old = "".join(words[place : place + 1])
    typed = old.partition("=")[0] or axis.typed
    new = ([typed] if value == "true" else []) if is_switch else [typed, value]
    end = place + 1 if is_switch or "=" in old else place + 2
    return (*words[:place], *new, *words[end:])
