"""What is wrong with the values of options, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvd_trainer.errors import OptionError


def refuse(mistakes: Iterable[str]) -> None:
    """Tells all mistakes at once.

    Raises:
        OptionError: there are any.
    """
    if text := "; ".join(mistakes):
        raise OptionError(text)


def collect_errors(*cases: tuple[bool, str]) -> list[str]:
    """The texts of those cases that are so."""
    return [text for is_so, text in cases if is_so]


def at_least(least: float, **values: float | None) -> list[str]:
    """One text for each value below `least` (or not a number), by the option's name."""
    return [
        f"{flag(k)} must be {least:g} or more, not {v}"
        for k, v in values.items()
        if v is not None and not v >= least
    ]


def more_than(bound: float, **values: float | None) -> list[str]:
    """One text for each value not above `bound`, by the option's name."""
    return [
        f"{flag(k)} must be more than {bound:g}, not {v}"
        for k, v in values.items()
        if v is not None and not v > bound
    ]


def non_default(options: Any, names: Iterable[str]) -> list[str]:
    """Those of the named options, as they are typed, that are not as they are by themselves."""
    defaults = type(options)()
    changed = (name for name in names if getattr(options, name) != getattr(defaults, name))
    return [flag_value(name, on=getattr(options, name) is not False) for name in changed]


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def flag_value(name: str, on: bool) -> str:
    """An option that is either on or off, as it is typed."""
    return flag(name) if on else f"--no-{name.replace('_', '-')}"
