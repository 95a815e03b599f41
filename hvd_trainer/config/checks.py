"""Collect the mistakes in values of options, and raise them as one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from annotated_types import Ge, Gt, Lt

from hvd_trainer.config.annotations import ParsedBy, annotations_of
from hvd_trainer.errors import OptionError


def refuse(mistakes: Iterable[str]) -> None:
    """Raise all mistakes as one error.

    Raises:
        OptionError: there are any.
    """
    if text := "; ".join(mistakes):
        raise OptionError(text)


def collect_errors(*cases: tuple[bool, str]) -> list[str]:
    """Return the texts of the cases that are true."""
    return [text for is_so, text in cases if is_so]


def check_ranges(options: Any) -> None:
    """Check all fields of a dataclass against their ranges.

    Raises:
        OptionError: with one message for each value that is out of its range.
    """
    refuse(range_errors(options))


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
        elif (bound := read_range(annotation)) and not bound.contains(value):
            yield f"{flag(name)} must be {bound.words}, not {value}"
            return  # NaN is in no range: one message is enough


class Range(NamedTuple):
    """Values that an option may have."""

    contains: Callable[[Any], bool]
    words: str
    """`1 or more`"""


def read_range(annotation: Any) -> Range | None:
    """Return the range that an annotation sets; None for annotations of another kind."""
    match annotation:
        case Ge(ge=bound):
            return Range(lambda value: bool(value >= bound), f"{bound} or more")
        case Gt(gt=bound):
            return Range(lambda value: bool(value > bound), f"more than {bound}")
        case Lt(lt=bound):
            return Range(lambda value: bool(value < bound), f"less than {bound}")
    return None


def flag(name: str) -> str:
    """Return an option as it is typed: `batch_size` as `--batch-size`."""
    return f"--{name.replace('_', '-')}"


def switch(name: str, on: bool) -> str:
    """Return a yes-or-no option as it is typed: `--quiet` or `--no-quiet`."""
    return flag(name) if on else flag(f"no_{name}")
