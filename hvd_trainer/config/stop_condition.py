"""Parse and test the figure with which a training ends: `--until val_accuracy=0.99`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hvd_trainer.errors import OptionError


def is_better_lower(figure: str) -> bool:
    """Return whether the lowest value of a figure is the best: that of a loss, and of nothing else."""
    return figure.endswith("loss")


@dataclass(frozen=True)
class StopCondition:
    """A figure of an epoch's record, and the value at which to stop; without a figure, training never does."""

    figure: str = ""
    value: float = 0.0

    @classmethod
    def parse(cls, text: str | None) -> StopCondition:
        """Read the value of `--until`.

        Raises:
            OptionError: it is not of that form.
        """
        if text is None:
            return cls()
        if not re.fullmatch(r"\w+=[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text):
            raise OptionError(
                f"--until is a figure and its value, such as val_accuracy=0.99 or val_loss=0.05, not {text!r}"
            )
        figure, _, value = text.partition("=")
        return cls(figure, float(value))

    def is_reached(self, figures: Mapping[str, float]) -> bool:
        """Return whether the figure is as good as this; False if it is missing, or is not a number."""
        if self.figure not in figures:
            return False
        value = figures[self.figure]
        return value <= self.value if is_better_lower(self.figure) else value >= self.value

    def check(self, known: Collection[str]) -> None:
        """Check that the epochs' records will have the figure.

        Raises:
            OptionError: it is none of `known`.
        """
        if self.figure and self.figure not in known:
            raise OptionError(f"--until {self}: this job has no {self.figure}, but {', '.join(sorted(known))}")

    def outcome_line(self, figures: Mapping[str, float]) -> str | None:
        """Return the line of the summary that says whether it was reached; None without a figure."""
        if not self.figure:
            return None
        value = f"{figures.get(self.figure, math.nan):g}"
        return f"until    {self}: {'reached' if self.is_reached(figures) else 'not reached'}, with {value}"

    def __str__(self) -> str:
        return f"{self.figure}={self.value:g}"
