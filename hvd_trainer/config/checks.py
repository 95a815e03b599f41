"""Metadata of option fields (ranges, marks), and the check of values against it.

    epochs: Annotated[int, Ge(1), COMMON] = 3

Ranges are `Ge`, `Gt` and `Lt` of annotated-types. None is within every range, and all mistakes are
raised as one error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, get_type_hints

from annotated_types import Ge, Gt, Lt

from hvd_trainer.errors import OptionError

COMMON = "common"
"""Marks an option that `--help` shows; without any mark in a group it shows the whole group."""


@dataclass(frozen=True)
class ParsedBy:
    """Names the function that an option's text must pass through without an `OptionError`."""

    parse: Callable[[str], Any]


def annotations_of(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Return what each field of a dataclass is annotated with, beside its type."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


def refuse(mistakes: Iterable[str]) -> None:
    """Raise all mistakes as one error.

    Raises:
        OptionError: there are any.
    """
    if text := "; ".join(mistakes):
        raise OptionError(text)


def range_errors(options: Any) -> Iterator[str]:
    """Yield a message for each field, in groups too, whose value is out of its range or cannot be parsed."""
    annotations = annotations_of(type(options))
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            yield from range_errors(value)
        elif value is not None:
            yield from value_errors(field.name, value, annotations[field.name])


def value_errors(name: str, value: Any, annotations: Iterable[Any]) -> Iterator[str]:
    """Yield a message for each annotation of an option that its value breaks."""
    for annotation in annotations:
        if isinstance(annotation, ParsedBy):
            try:
                annotation.parse(value)
            except OptionError as error:
                yield str(error)
        elif (bound := read_range(annotation)) and not bound.holds(value, bound.limit):
            yield f"{flag(name)} must be {bound.words}, not {value}"
            return  # NaN is in no range: one message is enough


class Range(NamedTuple):
    """Values that an option may have: those for which `holds(value, limit)`."""

    holds: Callable[[Any, Any], bool]
    limit: Any
    words: str
    """`1 or more`"""


def read_range(annotation: Any) -> Range | None:
    """Return the range that an annotation sets; None for annotations of another kind."""
    match annotation:
        case Ge(ge=limit):
            return Range(operator.ge, limit, f"{limit} or more")
        case Gt(gt=limit):
            return Range(operator.gt, limit, f"more than {limit}")
        case Lt(lt=limit):
            return Range(operator.lt, limit, f"less than {limit}")
    return None


def flag(name: str) -> str:
    """Return an option as it is typed: `batch_size` as `--batch-size`."""
    return f"--{name.replace('_', '-')}"


def switch(name: str, on: bool) -> str:
    """Return a yes-or-no option as it is typed: `--quiet` or `--no-quiet`."""
    return flag(name) if on else flag(f"no_{name}")
