"""Choose the observers of a training by its options."""

from __future__ import annotations

from hvd_trainer.backends import Backend
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.profile_plan import ProfilePlan
from hvd_trainer.observe.callback import Observer
from hvd_trainer.observe.profiler.profiler import Profile
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.observe.stacks import StackSamples
from hvd_trainer.observe.step_timer import StepTimes
from hvd_trainer.observe.step_trace import StepTrace


def make_observers(options: TrainerOptions, backend: Backend, log: RunLog) -> list[Observer]:
    """Return the step timer, the stack sampler, the step trace and the profiler, as the options ask for them.

    Each writes to the log folder, without which the options refuse it.
    """
    measure, log_dir = options.measure, options.log.log_dir
    observers: list[Observer] = []
    if log_dir is None:
        return observers
    if measure.record_steps:
        observers.append(StepTimes(backend, log_dir))
    if measure.sample_stacks:
        observers.append(StackSamples(log_dir, backend.world.rank))
    if measure.trace_steps is not None:
        observers.append(StepTrace(backend, log_dir, measure.trace_steps))
    if measure.profile is not None:
        observers.append(Profile(backend, log, log_dir, ProfilePlan.parse(measure.profile)))
    return observers
