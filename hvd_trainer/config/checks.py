"""Check options, from code, YAML or a command line, against the types, choices and ranges of their fields.

    epochs: Annotated[Count, COMMON] = 3
    dropout: Annotated[float, Meta(ge=0, lt=1)] | None = None

msgspec checks them; a range is its `Meta`, inside of `| None`. All mistakes are raised as one error.
"""

from __future__ import annotations

import builtins
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hvd_trainer.errors import OptionError

Count = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]

COMMON = "common"
"""Marks an option that `--help` shows; without any mark in a group it shows the whole group."""
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
RANGES = {"ge": "{:g} or more", "gt": "more than {:g}", "lt": "less than {:g}", "le": "at most {:g}"}


@dataclass(frozen=True)
class ParsedBy:
    """Names the function that an option's text must pass through without an `OptionError`."""

    parse: Callable[[str], Any]


def refuse(mistakes: Iterable[str]) -> None:
    """Raise all mistakes as one error.

    Raises:
        OptionError: there are any.
    """
    if text := "; ".join(mistakes):
        raise OptionError(text)


def find_wrong_values(options: Any) -> dict[str, str]:
    """Return a message for each field of a dataclass, and of its groups, whose value it may not have, by names."""
    hints = get_type_hints(type(options), include_extras=True)
    wrong: dict[str, str] = {}
    for field in fields(options):
        value, hint = getattr(options, field.name), hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, hint):
            wrong |= find_wrong_values(value)
        elif message := wrong_value(field.name, value, hint):
            wrong[field.name] = message
    return wrong


def wrong_value(name: str, value: Any, hint: Any) -> str | None:
    """Return what is wrong with the value of an option; None if nothing is.

    Raises:
        TypeError: the option has a range that msgspec does not understand.
    """
    marks = getattr(hint, "__metadata__", ())
    try:
        msgspec.convert(_plain(value), hint)
        for mark in marks:
            if isinstance(mark, ParsedBy) and value is not None:
                mark.parse(value)
    except msgspec.ValidationError:
        return f"{flag(name)} must be {describe(hint)}, not {value!r}"
    except OptionError as error:
        return str(error)
    except TypeError:
        # A union of a job's own types, which msgspec cannot tell apart.
        if any(isinstance(mark, Meta) for mark in marks):
            raise
    return None


def _plain(value: Any) -> Any:
    """Return a value with what stands for members of an enumeration."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.value if isinstance(value, Enum) else value


def describe(hint: Any, choice: str = "{}") -> str:
    """Return in words which values an option may have: `a whole number, 1 or more, or None`.

    Args:
        choice: the form of each of several words to choose from.
    """
    parts = get_args(hint)
    match get_origin(hint):
        case typing.Annotated:
            limits = [(text, getattr(mark, name, None)) for mark in parts[1:] for name, text in RANGES.items()]
            ranges = [text.format(limit) for text, limit in limits if limit is not None]
            return ", ".join([describe(parts[0], choice), *ranges])
        case typing.Literal:
            return f"one of {', '.join(map(choice.format, parts))}"
        case typing.Union | types.UnionType:
            return ", or ".join(describe(part, choice) for part in parts)
        case builtins.tuple:
            return f"any number of: {describe(parts[0], choice).removeprefix('one of ')}"
    return KINDS.get(hint) or str(getattr(hint, "__name__", hint))


def default_of(kind: type[Any], name: str) -> Any:
    """Return the default of a dataclass's field; `MISSING` if it has none."""
    field = kind.__dataclass_fields__[name]
    return field.default if field.default_factory is MISSING else field.default_factory()


def flag(name: str) -> str:
    """Return an option as it is typed: `batch_size` as `--batch-size`."""
    return f"--{name.replace('_', '-')}"


def switch(name: str, on: bool) -> str:
    """Return a yes-or-no option as it is typed: `--quiet` or `--no-quiet`."""
    return flag(name) if on else flag(f"no_{name}")
