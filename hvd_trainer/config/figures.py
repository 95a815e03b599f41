"""Figures of epochs' records that options name: one ends a training, one says which checkpoint is best."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvd_trainer.errors import OptionError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"


@dataclass(frozen=True)
class StopCondition:
    """A figure of an epoch's record, and the value at which to stop; without a figure, training never does."""

    figure: str = ""
    value: float = 0.0
    is_low: bool = False
    """whether the figure is to be as low as the value, and not as high"""

    @classmethod
    def parse(cls, text: str | None) -> StopCondition:
        """Read the value of `--until`: `val_accuracy>=0.99`, `val_loss<=0.05`.

        Raises:
            OptionError: it is not of that form.
        """
        if text is None:
            return cls()
        if parts := re.fullmatch(rf"(\w+)([<>]=)({NUMBER})", text):
            return cls(parts[1], float(parts[3]), parts[2] == "<=")
        typed = ("val_accuracy>=0.99", "val_loss<=0.05")
        if parts := re.fullmatch(rf"(\w+)[<>=]+({NUMBER})", text):
            typed = (f"{parts[1]}>={parts[2]}", f"{parts[1]}<={parts[2]}")
        raise OptionError(
            f"--until {text} is no figure with >= or <= and a number: type --until '{typed[0]}' or --until "
            f"'{typed[1]}', in quotes"
        )

    def is_reached(self, figures: Mapping[str, float]) -> bool:
        """Return whether the figure is as good as this; False if it is missing, or is not a number."""
        if self.figure not in figures:
            return False
        value = figures[self.figure]
        return value <= self.value if self.is_low else value >= self.value

    def outcome_line(self, figures: Mapping[str, float]) -> str | None:
        """Return the line of the summary that says whether it was reached; None without a figure."""
        if not self.figure:
            return None
        value = f"{figures.get(self.figure, math.nan):g}"
        return f"until    {self}: {'reached' if self.is_reached(figures) else 'not reached'}, with {value}"

    def __str__(self) -> str:
        return f"{self.figure}{'<=' if self.is_low else '>='}{self.value:g}"


@dataclass(frozen=True)
class BestFigure:
    """A figure of an epoch's record by which one checkpoint is better than another."""

    figure: str
    is_low: bool
    """whether the lowest is the best"""

    @classmethod
    def parse(cls, text: str) -> BestFigure:
        """Read the value of `--keep-best`: `min:val_loss`, `max:val_accuracy`.

        Raises:
            OptionError: it is not of that form.
        """
        if parts := re.fullmatch(r"(min|max):(\w+)", text):
            return cls(parts[2], parts[1] == "min")
        figure = text if re.fullmatch(r"\w+", text) else "val_loss"
        raise OptionError(
            f"--keep-best {text} does not say which way is better: type --keep-best min:{figure} or "
            f"--keep-best max:{figure}"
        )

    def rate(self, figures: Mapping[str, float]) -> float:
        """Return a number that is the lower, the better the figure is.

        Raises:
            KeyError: the figure is missing.
        """
        return figures[self.figure] if self.is_low else -figures[self.figure]
