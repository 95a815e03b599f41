"""One optimizer step: the only place with forward, backward, exchange and update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.data import Batch, samples_in
from hvd_trainer.metrics import Meter

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


class TrainStep:
    """Data-parallel step with accumulation, mixed precision and clipping.

    Args:
        backend: the engine.
        model, optimizer: as returned by `backend.prepare`.
        loss: gives the mean loss of a batch from outputs and targets.
        max_norm: clip the averaged gradient's norm to this.
        precision: fp32, bf16 or fp16; fp16 scales the loss.
    """

    def __init__(
        self,
        backend: Backend,
        model: nn.Module,
        optimizer: Optimizer,
        loss: LossFunction,
        *,
        max_norm: float | None = None,
        precision: str = "fp32",
    ) -> None:
        self.backend, self.model, self.optimizer, self.loss = backend, model, optimizer, loss
        self.max_norm, self.precision = max_norm, precision
        self.scaler = torch.amp.GradScaler(backend.device.type) if precision == "fp16" else None

    def __call__(self, window: list[Batch], meter: Meter, meanwhile: Callable[[], None]) -> StepResult:
        """Trains on one window of micro-batches: one update from their averaged gradient.

        Each micro-batch counts by its samples, so that the shorter window at an epoch's end is divided
        by its real size. `meanwhile` is called while gradients are on the way.
        """
        counts = [samples_in(batch) for batch in window]
        last = len(window) - 1
        for position, (batch, count) in enumerate(zip(window, counts, strict=True)):
            with self.backend.gradient_sync(self.model, enabled=position == last):
                self.backward(batch, 1 if last == 0 else count / sum(counts), meter)
        meanwhile()
        result = self.backend.step(self.optimizer, max_norm=self.max_norm, scaler=self.scaler)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def backward(self, batch: Batch, weight: float, meter: Meter) -> None:
        """Forward and backward of one batch, whose mean loss counts by `weight`."""
        inputs, targets = batch
        with mixed_precision(self.backend.device, self.precision):
            outputs = self.model(inputs)
            loss = self.loss(outputs, targets)
        share = loss if weight == 1 else loss * weight
        (share if self.scaler is None else self.scaler.scale(share)).backward()
        meter.add(loss, outputs, targets, samples_in(batch))
