"""Trace the first steps of a training: every rank writes what it computes to the log folder."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from hvd_trainer.backends import StepResult
from hvd_trainer.config.parser import flatten
from hvd_trainer.data import Batch
from hvd_trainer.measure.trace_format import ModelParts, TraceWriter, host_copies, sample_checksums
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.observe.summary import facts


class TrainerTrace(Observer):
    """Writes what this rank computes in the first steps of a training, in the format of `trace_format.py`.

    Args:
        log: the folder of the recordings.
    """

    needs_norm = True

    def __init__(self, log: Path, rank: int, size: int, steps: int) -> None:
        self._steps, self._first = steps, 0
        self._writer = TraceWriter(log, rank, size, steps)
        self._drawn: deque[list[str]] = deque()
        self._gradients: dict[str, Tensor] = {}
        self._rates: list[float] = []
        self._tracing = True
        self._last: int | None = None

    @contextmanager
    def around_training(self, run: RunView) -> Iterator[None]:
        """Trace the first steps that run inside.

        Raises:
            OSError: the folder cannot be written to.
        """
        self._first = run.progress.step
        parts, known = ModelParts.of(run.model), facts(run) | {"options": flatten(run.options)}
        state = parts.state(run.optimizer)
        self._writer.begin(self._first, parts, run.optimizer, state, known, run.backend.replica_group)
        hook = run.optimizer.register_step_pre_hook(lambda *_: self._copy_gradients(run))
        try:
            yield
        finally:
            hook.remove()

    def on_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, and note the checksums of their samples."""
        self._drawn = deque()
        for batch in batches:
            if self._tracing:
                self._drawn.append(sample_checksums(batch))
            yield batch

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        if not self._tracing:
            return
        # The batches of the next step may have been drawn already. Only an epoch's last step has fewer.
        batches = [self._drawn.popleft() for _ in range(min(run.plan.passes, len(self._drawn)))]
        figures = {
            "epoch": run.progress.epoch + 1,
            "samples": [sample for batch in batches for sample in batch],
            "counts": [len(batch) for batch in batches],
            "losses": [float(loss) for loss in result.losses],
            "weights": [float(weight) for weight in result.weights],
            "lr": self._rates or [run.rate.last],
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            "skipped": bool(result.skipped),
        }
        self._last = run.progress.step
        state = ModelParts.of(run.model).state(run.optimizer)
        self._writer.write("step", self._last, figures, gradients=self._gradients, **state)
        self._gradients, self._rates = {}, []
        self._tracing = self._last - self._first < self._steps

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        if run.progress.step == self._last:
            figures = {name: value for name, value in record.items() if name.startswith("test_")}
            buffers = host_copies(run.model.named_buffers())
            self._writer.write("evaluation", self._last, {"figures": figures}, buffers=buffers)

    def _copy_gradients(self, run: RunView) -> None:
        """Copy the gradients as the update takes them: averaged, unscaled and clipped."""
        if self._tracing:
            self._rates = [float(group["lr"]) for group in run.optimizer.param_groups]
            self._gradients = ModelParts.of(run.model).gradients()
