"""The jobs that a grid can measure, and their options: from arguments, with other values, and compared."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten, parse
from hvd_trainer.errors import OptionError

T = TypeVar("T")

BRIEF: dict[str, tuple[tuple[str, ...], str | None]] = {
    "imdb": (("--dataset", "synthetic"), "synthetic_reviews"),
    "mnist": (("--dataset", "digits"), None),
}
"""Our jobs: what makes them short, and the option that says how many samples there are to train on."""


@dataclass(frozen=True)
class Job:
    """A module that ends in `run_job(options, ...)`."""

    name: str
    module: str
    kind: type[TrainerOptions]
    """its options"""
    brief: tuple[str, ...] = ()
    """arguments that make it short, where the user has given no others"""
    samples: str | None = None
    """the option that says how many samples there are to train on"""


def find_job(name: str) -> Job:
    """A job by its name.

    Raises:
        OptionError: there is none, or its module does not say what its options are.
    """
    module = f"hvd_trainer.{name}" if name in BRIEF else name
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another one
        raise OptionError(
            f"--job {name}: there is no module {module}. Type --job {' or --job '.join(BRIEF)}, or the module of "
            f"a job of yours, such as --job my_package.my_job"
        ) from None
    kinds = [
        value
        for value in vars(found).values()
        if isinstance(value, type) and issubclass(value, TrainerOptions) and value is not TrainerOptions
    ]
    if len(kinds) != 1:
        raise OptionError(
            f"--job {name}: {module} defines {len(kinds)} classes of options. Let it define one, derived from "
            f"hvd_trainer.TrainerOptions"
        )
    brief, samples = BRIEF.get(name, ((), None))
    return Job(name, module, kinds[0], brief, samples)


def parsed(job: Job, words: Sequence[str], what: str) -> TrainerOptions:
    """The options that these arguments make.

    Raises:
        OptionError: the job does not take them.
    """
    try:
        return parse(job.kind, words, outputs=False)
    except SystemExit:
        raise OptionError(
            f"The job {job.name} does not take {what}. Its options: python -m {job.module} --help"
        ) from None


def with_values(options: T, values: Mapping[str, Any]) -> T:
    """The same options with other values, in whichever group they are."""
    changes: dict[str, Any] = {}
    for entry in fields(options):  # type: ignore[arg-type]  # T is a dataclass
        value = getattr(options, entry.name)
        if is_dataclass(value):
            changes[entry.name] = with_values(value, values)
        elif entry.name in values:
            changes[entry.name] = values[entry.name]
    return replace(options, **changes)  # type: ignore[type-var]  # T is a dataclass


def changed(job: Job, options: TrainerOptions) -> dict[str, Any]:
    """The options that are not the job's default, as they come back from a file: JSON has no tuples."""
    default = flatten(job.kind())
    others = {name: value for name, value in flatten(options).items() if value != default[name]}
    plain: dict[str, Any] = json.loads(json.dumps(others, default=str))
    return plain


def flags(words: Sequence[str]) -> set[str]:
    """The options among arguments, as they are called in `--help`."""
    return {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}


def choices(kind: type[Any], name: str) -> str:
    """` (there are: fp32, bf16, fp16)` for an option that has a list of values; else nothing."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if is_dataclass(hint) and isinstance(hint, type):
            if found := choices(hint, name):
                return found
        elif entry.name == name and get_origin(hint) is Literal:
            return f" (there are: {', '.join(map(str, get_args(hint)))})"
    return ""
