"""The options that measure a job instead of training something: `--profile steps=10,skip=5,memory` and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hvd_trainer.config.checks import collect_errors, refuse

if TYPE_CHECKING:
    from hvd_trainer.config.options import TrainerOptions

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
        refuse(mistakes)
        return cls(**found)


@dataclass(frozen=True)
class MeasureOptions:
    """What a step's time goes to, and what it computes."""

    record_steps: bool = False
    """keep in the log folder, for each rank, how long each part of each step took"""
    profile: str | None = None
    """steps=10: what all ranks do in so many steps, as one trace for ui.perfetto.dev in the log folder, and as a
    table; with commas also skip=5 (how many steps before), memory, stacks, shapes"""
    trace_steps: int | None = None
    """keep in the log folder, for each rank, what its first so many steps compute, as `parity` compares it"""
    leave_out: tuple[Literal["exchange", "data"], ...] = ()
    """train without it, to see what it costs: the exchange of gradients; fetching data (the first batch comes
    again and again). What is trained so is of no use, and not saved"""

    def mistakes(self, options: TrainerOptions) -> list[str]:
        """What is wrong with these, and what does not go together with the other options."""
        kept = {
            "--record-steps": self.record_steps,
            "--profile": self.profile is not None,
            "--trace-steps": self.trace_steps is not None,
        }
        return [
            *([] if self.profile is None else _read(self.profile)[0]),
            *(
                f"{name} writes to the log folder: add --log-dir DIR"
                for name, is_wanted in kept.items()
                if is_wanted and options.log.log_dir is None
            ),
            *self._left_out_mistakes(options),
        ]

    def _left_out_mistakes(self, options: TrainerOptions) -> list[str]:
        if not self.leave_out:
            return []
        what, resume = f"--leave-out {' '.join(self.leave_out)}", options.save.resume
        alone = "exchange" in self.leave_out
        return collect_errors(
            (resume != "none", f"{what} trains nothing of use: leave out --resume {resume}"),
            (
                alone and options.parallel.shard == "full",
                f"--shard full cannot compute without exchanging parameters: leave out {what}",
            ),
            (
                alone and options.train.reproducible is not None,
                f"--reproducible sums gradients itself, so {what} has nothing to leave out",
            ),
        )


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
