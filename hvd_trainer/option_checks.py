"""What is wrong with the values of options, in words."""

from __future__ import annotations


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


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"
