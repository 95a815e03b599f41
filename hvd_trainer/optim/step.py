"""One optimizer step: the only place with forward, backward, exchange and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.data import Batch, samples_in
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.observe.progress import Progress
from hvd_trainer.optim.non_finite import NonFiniteGuard

LossFunction = Callable[[Any, Any], Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Step(Protocol):
    """What the loop calls; model parallelism puts its own in here."""

    def __call__(self, window: list[Batch], meter: Meter, meanwhile: Callable[[], None]) -> StepResult: ...


def mixed_precision(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Forward passes inside run in the given precision."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


class ForwardResult(NamedTuple):
    """What a forward pass gave, as the meter takes it."""

    loss: Tensor
    outputs: Any
    targets: Any
    samples: int


@dataclass(frozen=True)
class StepParts:
    """What a step works with."""

    backend: Backend
    model: nn.Module
    """to train, as returned by `backend.prepare`"""
    bare: nn.Module
    """to evaluate"""
    optimizer: Optimizer
    loss: LossFunction
    """gives the mean loss of a batch from outputs and targets"""
    progress: Progress
    """tells the number of the step"""
    guard: NonFiniteGuard
    """told of each step's losses and gradient"""
    max_norm: float | None = None
    """clip the averaged gradient's norm to this"""
    precision: str = "fp32"
    """fp32, bf16 or fp16; fp16 scales the loss"""
    norm: bool = False
    """give the gradient's norm with each step, also where nothing is clipped"""


class TrainStep:
    """Data-parallel step with accumulation, mixed precision, clipping, and a guard against what is not finite."""

    def __init__(self, parts: StepParts) -> None:
        self.backend, self.model, self.bare = parts.backend, parts.model, parts.bare
        self.optimizer, self.loss = parts.optimizer, parts.loss
        self.progress, self.guard = parts.progress, parts.guard
        self.max_norm, self.precision, self.norm = parts.max_norm, parts.precision, parts.norm
        fp16 = parts.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.backend.device.type) if fp16 else None
        self.skips = self.guard.policy == "skip"
        self._buffers = [b for b in self.model.buffers() if b.numel()]
        self._losses: list[Tensor] = []
        self._uncounted: list[ForwardResult] = []

    def __call__(self, window: list[Batch], meter: Meter, meanwhile: Callable[[], None]) -> StepResult:
        """Trains on one window of micro-batches: one update from their averaged gradient.

        Each micro-batch counts by its samples, so that the shorter window at an epoch's end is divided
        by its real size. `meanwhile` is called while gradients are on the way.
        """
        before = [buffer.clone() for buffer in self._buffers] if self.skips else []
        counts = [samples_in(batch) for batch in window]
        last = len(window) - 1
        for position, (batch, count) in enumerate(zip(window, counts, strict=True)):
            with self.backend.gradient_sync(self.model, enabled=position == last):
                self.backward(batch, 1 if last == 0 else count / sum(counts), meter)
        self.backend.activity.enter("data")
        meanwhile()
        return self.update(meter, before)

    def backward(self, batch: Batch, weight: float, meter: Meter) -> None:
        """Forward and backward of one batch, whose mean loss counts by `weight`, and its figures."""
        passed = self.passes(batch, weight)
        self._losses.append(passed.loss)
        if self.skips:
            self._uncounted.append(passed)
        else:
            meter.add(*passed)

    def passes(self, batch: Batch, weight: float) -> ForwardResult:
        """Forward and backward of one batch: its gradients are added to those that are there."""
        activity = self.backend.activity
        activity.enter("forward")
        inputs, targets = batch
        with mixed_precision(self.backend.device, self.precision):
            outputs = self.model(inputs)
            loss = self.loss(outputs, targets)
        if loss.numel() != 1:
            raise OptionError(f"The loss function must give one number, the mean, and gave {tuple(loss.shape)}.")
        share = loss if weight == 1 else loss * weight
        scaled = share if self.scaler is None else self.scaler.scale(share)
        activity.enter("backward")
        scaled.backward(self.guard.seed(scaled))
        return ForwardResult(loss.detach(), outputs, targets, samples_in(batch))

    def close(self) -> None:
        """Drop what holds the engine's connections: nothing here."""

    def evaluate(self, batch: Batch | None, meter: Meter) -> None:
        """Loss and metrics of one batch, without gradients.

        Args:
            batch: None where only other ranks have one left, and need this one; see `Layout.evaluation`.
        """
        assert batch is not None
        inputs, targets = batch
        with mixed_precision(self.backend.device, self.precision):
            outputs = self.bare(inputs)
            loss = self.loss(outputs, targets)
        meter.add(loss, outputs, targets, samples_in(batch))

    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient, from those of this process's parameters."""
        return nn.utils.get_total_norm(grads)

    def update(self, meter: Meter, before: list[Tensor]) -> StepResult:
        """Steps the optimizer; or leaves this step out, with its figures, and puts its first buffers back."""
        result = self.backend.step(
            self.optimizer,
            max_norm=self.max_norm,
            scaler=self.scaler,
            norm=self.norm,
            skip_non_finite=self.skips,
            total_norm=self.total_norm,
        )
        self.optimizer.zero_grad(set_to_none=True)
        # Gradients overflow in fp16 training as a matter of course, until the loss scale has found its place.
        self.guard.note(self.progress.step + 1, self._losses, None if self.scaler else result.grad_norm)
        if self.skips and result.skipped:
            for buffer, value in zip(self._buffers, before, strict=True):
                buffer.copy_(value)
        else:
            for passed in self._uncounted:
                meter.add(*passed)
        losses, self._losses, self._uncounted = tuple(self._losses), [], []
        return replace(result, losses=losses)
