"""The figure that a training aims at, and ends with: `--until test_accuracy=0.99`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hvd_trainer.config.checks import refuse
from hvd_trainer.errors import OptionError


def is_better_lower(figure: str) -> bool:
    """Whether the lowest of a figure is the best: of a loss, and of nothing else."""
    return figure.endswith("loss")


@dataclass(frozen=True)
class StopCondition:
    """A figure of an epoch's record, and the value that it should reach; without a figure, none ever does."""

    figure: str = ""
    value: float = 0.0

    @classmethod
    def parse(cls, text: str | None) -> StopCondition:
        """Reads the option.

        Raises:
            OptionError: it is not of that form.
        """
        if text is None:
            return cls()
        refuse(cls.mistakes(text))
        figure, _, value = text.partition("=")
        return cls(figure, float(value))

    @staticmethod
    def mistakes(text: str | None) -> list[str]:
        """What is wrong with it."""
        if text is None or re.fullmatch(r"\w+=[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text):
            return []
        return [f"--until is a figure and its value, such as test_accuracy=0.99 or test_loss=0.05, not {text!r}"]

    def is_reached(self, figures: Mapping[str, float]) -> bool:
        """Whether the figures are as good; False where this one is not among them, or is not a number."""
        if self.figure not in figures:
            return False
        found = figures[self.figure]
        return found <= self.value if is_better_lower(self.figure) else found >= self.value

    def check(self, known: Collection[str]) -> None:
        """Refuses a figure that the epochs' records will not have.

        Raises:
            OptionError: it is not among the known ones.
        """
        if self.figure and self.figure not in known:
            raise OptionError(f"--until {self}: this job has no {self.figure}, but {', '.join(sorted(known))}")

    def told(self, figures: Mapping[str, float]) -> str | None:
        """What came of it, for a person; None if nothing was aimed at."""
        if not self.figure:
            return None
        found = f"{figures.get(self.figure, math.nan):g}"
        return f"until    {self}: {'reached' if self.is_reached(figures) else 'not reached'}, with {found}"

    def __str__(self) -> str:
        return f"{self.figure}={self.value:g}"
