"""What is kept of a training beside its results, where its options ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_trainer.config.profile_plan import ProfilePlan
from hvd_trainer.observe.callback import Observer
from hvd_trainer.observe.profiler.profiler import Profile
from hvd_trainer.observe.step_timer import StepTimes
from hvd_trainer.observe.step_trace import StepTrace

if TYPE_CHECKING:
    from hvd_trainer.training.trainer import Trainer


def make_observers(trainer: Trainer) -> list[Observer]:
    """All that the options ask for; each writes to the log folder, which they are refused without."""
    measure, log_dir = trainer.options.measure, trainer.options.log.log_dir
    found: list[Observer] = []
    if log_dir is None:
        return found
    if measure.record_steps:
        found.append(StepTimes(trainer, log_dir))
    if measure.trace_steps is not None:
        found.append(StepTrace(trainer, log_dir, measure.trace_steps))
    if measure.profile is not None:
        found.append(Profile(trainer, log_dir, ProfilePlan.parse(measure.profile)))
    return found
