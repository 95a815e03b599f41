"""Start and stop the profiler by counting steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.config.profile_plan import ProfilePlan
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.observe.phases import Clock
from hvd_trainer.observe.profiler.recorder import Recorder
from hvd_trainer.observe.profiler.report import FOLDER, Report
from hvd_trainer.observe.run_log import RunLog

MIN_COMPARED, MAX_COMPARED = 3, 50
"""Steps before the profiled ones that are timed for comparison."""


class Profile(Observer):
    """Profiles some steps of a training.

    The ranks write and merge when the last of these steps has ended, and not at the end of the training, which may
    be days away. The steps that follow run without a profiler.

    Args:
        backend: the engine, made with `timeline=True` so that it records its exchanges.
        log_dir: the log folder, on this rank's node.
    """

    def __init__(self, backend: Backend, log: RunLog, log_dir: str, plan: ProfilePlan) -> None:
        self._backend, self._log, self._plan = backend, log, plan
        self._report = Report(backend, log, Path(log_dir).expanduser() / FOLDER)
        self._clock = Clock(backend.device)
        self._before: deque[tuple[Any, Any]] = deque(maxlen=MAX_COMPARED)
        self._last: Any = None
        self._recorder: Recorder | None = None
        self._seen, self._running, self._over = 0, False, False

    @contextmanager
    def around_training(self, run: RunView) -> Iterator[None]:
        """Profile the steps that run inside; after an error other ranks may be gone, and nothing is written."""
        self._advance()
        try:
            yield
        except BaseException:
            self._drop()
            raise
        if not self._over:
            self._end_early()

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        if self._over:
            return
        self._seen += 1
        if self._running:
            assert self._recorder is not None
            self._recorder.phases.end_step(run.progress.step)
        elif self._seen <= self._plan.skip:
            now = self._clock.mark()
            if self._last is not None:  # the first step sets much up
                self._before.append((self._last, now))
            self._last = now
        self._advance()

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        if self._running:
            assert self._recorder is not None
            self._recorder.phases.end_epoch()
        elif self._last is not None:
            self._last = self._clock.mark()

    def _advance(self) -> None:
        """Warm up, start or finish the recorder where the number of steps says so."""
        since, activity = self._seen - self._plan.skip, self._backend.activity
        if since not in (0, 1, 1 + self._plan.steps):
            return
        phase = activity.phase
        activity.enter("callback")  # which may take as long as the start
        if since == 0:
            self._recorder = Recorder(self._backend, self._plan)
            self._recorder.warm_up()
        elif since == 1:
            assert self._recorder is not None
            self._report.clear()
            self._recorder.start()
            self._running = True
        else:
            self._finish()
        activity.enter(phase)

    def _finish(self) -> None:
        assert self._recorder is not None
        self._running, self._over = False, True
        self._clock.settle()
        before = [self._clock.seconds(began, ended) for began, ended in self._before]
        self._report.make(self._recorder, median(before) if len(before) >= MIN_COMPARED else None)
        self._recorder = None

    def _end_early(self) -> None:
        plan, backend = self._plan, self._backend
        done = max(0, self._seen - plan.skip - 1)
        if self._running and done:
            self._log.info(f"profile  the training has ended after {done} of the {plan.steps} steps")
            backend.activity.enter("callback")
            self._finish()
            return
        self._drop()
        self._log.info(
            f"profile  nothing: the training had {self._seen} steps, and the first {plan.skip} and one more are "
            f"left out. Train longer, or type --profile steps={plan.steps},skip=0"
        )

    def _drop(self) -> None:
        recorder, self._recorder = self._recorder, None
        self._running, self._over = False, True
        if recorder is not None:
            recorder.drop()
