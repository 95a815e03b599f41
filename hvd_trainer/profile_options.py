"""What `--profile steps=10,skip=5,memory,stacks,shapes` asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_trainer.errors import OptionError

FORM = "type steps=N, and behind it with commas what you need of skip=N, memory, stacks, shapes"
NUMBERS, SWITCHES = {"steps": 1, "skip": 0}, ("memory", "stacks", "shapes")
"""Parts with a number, each with the least that it may be, and those without one."""


@dataclass(frozen=True)
class ProfilePlan:
    """Which steps are profiled, and what is kept of them."""

    steps: int
    """to profile"""
    skip: int = 5
    """steps before that, in which caches fill and libraries choose how to compute; one more follows, for the
    profiler to set itself up"""
    memory: bool = False
    """keep each allocation"""
    stacks: bool = False
    """keep the lines of Python that called each operator: large, and slow"""
    shapes: bool = False
    """keep the shapes of each operator's inputs"""

    @classmethod
    def parse(cls, text: str) -> ProfilePlan:
        """Reads the option.

        Raises:
            OptionError: it is not of that form.
        """
        mistakes, found = _read(text)
        if mistakes:
            raise OptionError("; ".join(mistakes))
        return cls(**found)


def profile_mistakes(text: str) -> list[str]:
    """What is wrong with the option, one text per mistake."""
    return _read(text)[0]


def _read(text: str) -> tuple[list[str], dict[str, Any]]:
    wrong: list[str] = []
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name in found:
            wrong.append(f"{name} is there twice")
        elif name in NUMBERS:
            number = int(value) if value.isascii() and value.isdigit() else -1
            if number < NUMBERS[name]:
                wrong.append(f"{name} needs a number of steps, {NUMBERS[name]} or more: {name}=10")
            found[name] = number
        elif name in SWITCHES and not equals:
            found[name] = True
        else:
            wrong.append(f"{part!r} is nothing that it knows")
    if "steps" not in found:
        wrong.append("steps=N is missing")
    return [f"--profile {text}: {', '.join(wrong)}; {FORM}"] if wrong else [], found
