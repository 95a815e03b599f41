"""What a field of options carries beside its type: its range, how its text is parsed, whether most people need it.

    epochs: Annotated[int, Ge(1), COMMON] = 3

Ranges are `Ge`, `Gt`, `Le` and `Lt` of annotated-types. None is within every range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Common:
    """Marks an option that `--help` shows; without any mark in a group it shows the whole group."""


COMMON = Common()


@dataclass(frozen=True)
class ParsedBy:
    """Names the function that an option's text must pass through without an `OptionError`."""

    parse: Callable[[str], Any]


def annotations_of(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Return what each field of a dataclass is annotated with, beside its type."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
