"""Stop a training from outside: by a signal to any rank, or because horovodrun changes the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from hvd_trainer.errors import PreemptedError
from hvd_trainer.faults.elastic import RescaleError
from hvd_trainer.faults.preemption import StopRequest, listen_for_signals, requeue
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.training.consensus import StepConsensus
from hvd_trainer.training.evaluation import Evaluation
from hvd_trainer.training.run import TrainingRun

T = TypeVar("T")
SAVE, STOP, RESCALE, END = "save", "stop", "rescale", "end"
LEFT = "left"
LEAVING = frozenset({STOP, RESCALE})
"""Requests for which an evaluation is left."""


class _InterruptedError(Exception):
    """All ranks have agreed to leave an evaluation that is not finished."""


class Interrupts:
    """Acts on all ranks after the same step on what one rank has noticed. Making one is a collective.

    In an evaluation it acts between two batches, as after the last step.

    SAVE      rank 0's clock: the last checkpoint is older than --save-every-s
    STOP      SIGTERM or SIGUSR1 on any rank: save, and end the job
    RESCALE   horovodrun is about to add or remove ranks: remember this step, and leave the world
    END       a callback has called `RunView.stop`: train no further
    LEFT      in an evaluation: a rank has batches left
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self.backend, self.manager, self.progress = run.backend, run.manager, run.progress
        self._consensus = StepConsensus(self.backend, [SAVE, STOP, RESCALE, END])
        self._signal: StopRequest | None = None
        # One rank alone may have callbacks.
        (any_callbacks,) = self.backend.collectives.all_reduce_numbers([run.has_callbacks], "max")
        self._polls = bool(any_callbacks) or self.manager.is_enabled or self.backend.session.driver is not None

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Listen for signals inside. Where nothing can be saved, a signal ends the process as usual."""
        if not self.manager.is_enabled:
            yield
            return
        with listen_for_signals(lambda _: self._consensus.request(STOP), self.backend.activity) as self._signal:
            yield

    def after_step(self, meter: Meter, *, now: bool = False) -> None:
        """Save, stop or rescale after this step, as all ranks have agreed. A collective after some steps.

        Args:
            meter: of the running epoch.
            now: agree whatever the number of the step; the same on all ranks.

        Raises:
            PreemptedError: a signal has stopped the job; everything is saved.
            RescaleError: ranks are about to come or go; every rank remembers this step.
        """
        if not self._polls:
            return
        driver = self.backend.session.driver
        if self.manager.is_overdue:
            self._consensus.request(SAVE)
        if driver is not None and driver.hosts_changed.is_set():
            self._consensus.request(RESCALE)
        if self._run.stop_reason:
            self._consensus.request(END)
        agreed = self._consensus.poll(now=now or (bool(self._run.stop_reason) and self.backend.world.size == 1))
        if self._signal is not None:
            self._signal.granted = STOP in agreed
        if END in agreed:
            self.agree_to_end()
        self.manager.after_step(meter, save=bool(agreed & {SAVE, STOP}), commit=RESCALE in agreed)
        if STOP in agreed:
            self._stop()
        if RESCALE in agreed:
            self.manager.wait()  # raises if the last checkpoint of this world could not be written
            raise RescaleError(f"after step {self.progress.step:,}")

    def evaluate(self, evaluation: Evaluation, meter: Meter) -> dict[str, float]:
        """Return the figures of an evaluation; stop or rescale between two of its batches, as after the last step.

        A resumed run evaluates again.

        Args:
            meter: of the running epoch.

        Raises:
            PreemptedError, RescaleError: as `after_step`.
        """
        try:
            return evaluation(self._between_batches)
        except _InterruptedError:
            pass  # what it has changed is restored now
        self.after_step(meter, now=True)
        raise AssertionError("all ranks have agreed to stop or to rescale")

    def _between_batches(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield this rank's batches of an evaluation. A collective after some of them, and when none is left.

        Raises:
            _InterruptedError: all ranks have agreed to leave it.
        """
        if not self.manager.is_enabled and self.backend.session.driver is None:
            yield from batches
            return
        consensus = StepConsensus(self.backend, [LEFT, STOP, RESCALE])
        for batch in batches:
            yield batch
            consensus.request(LEFT)
            self._poll_in_evaluation(consensus)
        while LEFT in self._poll_in_evaluation(consensus, now=True):
            pass

    def _poll_in_evaluation(self, consensus: StepConsensus, *, now: bool = False) -> frozenset[str]:
        driver = self.backend.session.driver
        if driver is not None and driver.hosts_changed.is_set():
            self._consensus.request(RESCALE)
        consensus.requested |= self._consensus.requested & LEAVING
        agreed = consensus.poll(now=now)
        if agreed & LEAVING:
            raise _InterruptedError
        return agreed

    def agree_to_end(self) -> None:
        """End the training here if a callback of any rank has called `RunView.stop`. A collective."""
        (any_reason,) = self.backend.collectives.all_reduce_numbers([bool(self._run.stop_reason)], "max")
        if any_reason and not self.progress.stopped:
            reasons = self.backend.collectives.all_gather_object(self._run.stop_reason)
            self.progress.stopped = next(filter(None, reasons))

    def _stop(self) -> None:
        self.manager.wait()
        self.backend.session.stopping = True
        what = f"stopped by a signal after step {self.progress.step:,}, and saved"
        requeues = self.manager.options.requeue and self.backend.world.is_first
        said = requeue(self.backend.session.slurm_job.job_id if requeues else None, what)
        # The first rank to end takes the others with it, so none may before the checkpoint is there.
        self.backend.collectives.barrier()
        raise PreemptedError(said)
