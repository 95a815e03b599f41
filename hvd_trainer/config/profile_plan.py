"""Parse `--profile steps=10,skip=5,memory`: which steps are profiled, and what is kept of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_trainer.errors import OptionError

FORM = "type steps=N, and behind it with commas what you need of skip=N, memory, stacks, shapes"
MIN_NUMBERS = {"steps": 1, "skip": 0}
SWITCHES = ("memory", "stacks", "shapes")


@dataclass(frozen=True)
class ProfilePlan:
    """The steps that are profiled, and what is kept of them."""

    steps: int
    """number of profiled steps"""
    skip: int = 5
    """number of steps before these, in which caches fill and libraries choose how to compute; one more follows,
    for the profiler to set itself up"""
    memory: bool = False
    """keep each allocation"""
    stacks: bool = False
    """keep the lines of Python that called each operator: large, and slow"""
    shapes: bool = False
    """keep the shapes of each operator's inputs"""

    @classmethod
    def parse(cls, text: str) -> ProfilePlan:
        """Read the value of `--profile`.

        Raises:
            OptionError: with all that is wrong with it.
        """
        mistakes: list[str] = []
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if name in found:
                mistakes.append(f"{name} is there twice")
            elif name in MIN_NUMBERS:
                found[name] = int(value) if value.isascii() and value.isdigit() else -1
                if found[name] < MIN_NUMBERS[name]:
                    mistakes.append(f"{name} needs a number of steps, {MIN_NUMBERS[name]} or more: {name}=10")
            elif name in SWITCHES and not equals:
                found[name] = True
            else:
                mistakes.append(f"{part!r} is nothing that it knows")
        if "steps" not in found:
            mistakes.append("steps=N is missing")
        if mistakes:
            raise OptionError(f"--profile {text}: {', '.join(mistakes)}; {FORM}")
        return cls(**found)
