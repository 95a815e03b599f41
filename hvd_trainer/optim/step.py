"""One optimizer step: the only place with forward, backward, exchange and update.

The way of a step's batches, and the three calls in which the engines differ (`backends/base.py`):

    TrainStep.__call__          the batches of one step, each a micro-batch of it, weighed (`weights.py`)
      backend.gradient_sync     engine: keep this micro-batch's gradients local, or average them after the last one
      forward_backward          model, loss, and backward, during which the engine already exchanges gradients that
                                are complete: `backend.prepare` has put its hooks into the model
      prefetch                  the loader fetches the batches of the next step, while gradients are on their way
      backend.step              engine: wait for the averaged gradients; then unscale, clip and update
      guard, meter              note losses and norm; count the batches in the metrics
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.data import Batch, mean_samples, samples_in
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.observe.progress import Progress
from hvd_trainer.optim.loss_module import is_trained
from hvd_trainer.optim.non_finite import NonFiniteGuard
from hvd_trainer.optim.weights import LossFunction, Share, WeightFunction, fractions, mean_loss, weight_of
from hvd_trainer.utils.tensors import detached

WHOLE = Share(1.0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return a context in which forward passes run in the given precision: fp32, bf16 or fp16."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


class ForwardResult(NamedTuple):
    """The result of a forward pass, as `Meter.add` takes it."""

    loss: Tensor
    outputs: Any
    targets: Any
    samples: int
    weight: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class EvaluationStep:
    """What evaluates a batch."""

    backend: Backend
    eval_model: nn.Module
    """the module to evaluate, without the engine's wrapper"""
    loss: LossFunction
    """returns the mean loss of a batch from outputs and targets"""
    precision: str = "fp32"
    """fp32, bf16 or fp16; in training, fp16 scales the loss"""
    weight: WeightFunction | None = None
    """returns a batch's weight in the step and in means; None: its samples"""

    def weigh(self, batch: Batch) -> Tensor | None:
        """Return a batch's weight, if there is a weight function."""
        return None if self.weight is None else self._weight_of(self.weight, batch)

    def _weight_of(self, function: WeightFunction, batch: Batch) -> Tensor:
        weight = weight_of(function, batch, self.backend.device)
        return weight if samples_in(batch) else torch.zeros_like(weight)

    def evaluate(self, batch: Batch | None, meter: Meter) -> None:
        """Add loss and metrics of one batch to the meter, without gradients.

        Args:
            batch: None where this rank has no batch left and must take part for others, as in
                `ModelPlacement.evaluation`.
            meter: counts it.
        """
        assert batch is not None
        inputs, targets = batch
        weight = self.weigh(batch)
        with mixed_precision(self.backend.device, self.precision):
            outputs = self.eval_model(inputs)
            loss = mean_loss(self.loss, outputs, targets, weight)
        meter.add(loss, outputs, targets, samples_in(batch), weight)


@dataclass(kw_only=True, eq=False)
class StepParts(EvaluationStep):
    """All that a step is made of; the loss is a part of `train_model`, if it has parameters."""

    train_model: nn.Module
    """the module to train, as returned by `backend.prepare`"""
    optimizer: Optimizer
    progress: Progress
    """has the number of the step"""
    guard: NonFiniteGuard
    """checks each step's losses and gradient"""
    max_norm: float | None = None
    """clip the averaged gradient's norm to this"""
    needs_norm: bool = False
    """return the gradient's norm with each step, also where nothing is clipped"""


class TrainStep(StepParts):
    """Data-parallel step with gradient accumulation, mixed precision, clipping, and a guard against NaN and Inf.

    Attributes:
        scaler: the loss scaler of fp16; None otherwise.
        skips: whether a step with a non-finite gradient is left out (`--non-finite skip`).
    """

    def __init__(self, parts: StepParts) -> None:
        vars(self).update(vars(parts))
        fp16 = self.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.backend.device.type) if fp16 else None
        self.skips = self.guard.policy == "skip"
        self._precision = mixed_precision(self.backend.device, self.precision)
        self._is_last_pass = True
        self._trains_loss = is_trained(self.loss)
        self._losses: list[Tensor] = []
        self._weights: tuple[Tensor, ...] = ()
        self._uncounted: list[ForwardResult] = []

    def __call__(self, batches: list[Batch], meter: Meter, prefetch: Callable[[], None]) -> StepResult:
        """Train on the batches of one step: one update with their averaged gradient.

        Args:
            batches: micro-batches. Each is weighted, by its samples unless there is a weight function, so that the
                shorter last step of an epoch is divided by its real size.
            meter: counts losses and metrics.
            prefetch: called while gradients are exchanged.
        """
        before = [(buffer, buffer.clone()) for buffer in self.buffers()] if self.skips else []
        shares, last = self.shares(batches), len(batches) - 1
        for position, (batch, share) in enumerate(zip(batches, shares, strict=True)):
            self._is_last_pass = position == last
            with self.backend.gradient_sync(self.train_model, enabled=self._is_last_pass):
                self.backward(batch, share, meter)
        self.backend.activity.enter("data")
        prefetch()
        return self.update(meter, before)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that a step calls: that to train, and a loss that is a module by itself."""
        if isinstance(self.loss, nn.Module) and not self._trains_loss:
            return [self.train_model, self.loss]
        return [self.train_model]

    def buffers(self) -> list[Tensor]:
        """Return the buffers that a step may change."""
        return [buffer for module in self.modules for buffer in module.buffers() if buffer.numel()]

    def shares(self, batches: list[Batch]) -> list[Share]:
        """Return what each batch is of the step. With a weight function a collective."""
        if self.weight is None:
            samples = [samples_in(batch) for batch in batches]
            if len(batches) == 1 and type(batches[0]) is tuple:  # as many samples on all ranks
                return [WHOLE]
            whole = sum(map(mean_samples, batches))
            return [Share(number / whole) for number in samples]
        self._weights = tuple(self._weight_of(self.weight, batch) for batch in batches)
        self.backend.activity.enter("collective")
        weights = torch.stack(self._weights)
        factors = fractions(weights, self.mean_weight(weights))
        return [Share(factor, weight) for factor, weight in zip(factors, self._weights, strict=True)]

    def mean_weight(self, weights: Tensor) -> Tensor:
        """Return the weight of a step, over the number of replicas whose gradients are averaged. A collective.

        Args:
            weights: those of this rank's passes.
        """
        whole, replicas = weights.sum(), len(self.backend.replica_group)
        if replicas > 1:
            whole = self.backend.collectives.all_reduce(whole, replicas=True) / replicas
        return whole

    def backward(self, batch: Batch, share: Share, meter: Meter) -> None:
        """Run forward and backward on one batch, and count its loss and metrics.

        Args:
            batch: a micro-batch.
            share: of the step.
            meter: counts it.
        """
        result = self.forward_backward(batch, share)
        self._losses.append(result.loss)
        self.count(result, meter)

    def count(self, result: ForwardResult, meter: Meter) -> None:
        """Add a forward pass to the meter; under `--non-finite skip` only after the update."""
        if not result.samples:  # of a batch that has none for this rank
            return
        if self.skips:
            self._uncounted.append(result)
        else:
            meter.add(*result)

    def forward_backward(self, batch: Batch, share: Share) -> ForwardResult:
        """Run forward and backward on one batch; its share of the gradients is added to `.grad`.

        Raises:
            OptionError: the loss is not a single number.
        """
        activity = self.backend.activity
        activity.enter("forward")
        inputs, targets = batch
        with self._precision:
            if self._trains_loss:
                outputs, loss = self.train_model(inputs, targets, share.weight)
            else:
                outputs = self.train_model(inputs)
                loss = mean_loss(self.loss, outputs, targets, share.weight)
        if self._is_last_pass:
            self.train_model = self.backend.follow_freezing(self.train_model, (outputs, loss))
        weighted = share.of(loss)
        scaled = weighted if self.scaler is None else self.scaler.scale(weighted)
        activity.enter("backward")
        scaled.backward(self.guard.seed(scaled))
        # A metric may keep what it is given, and with an output its whole graph.
        return ForwardResult(loss.detach(), detached(outputs), targets, samples_in(batch), share.weight)

    def update(self, meter: Meter, before: Sequence[tuple[Tensor, Tensor]]) -> StepResult:
        """Update the parameters, or skip the step: then its metrics do not count, and its buffers are restored.

        Args:
            meter: counts the batches of the step, unless `backward` did.
            before: the model's buffers, each with what it was before the step; under `--non-finite skip` only.
        """
        result = self.backend.step(
            self.optimizer,
            max_norm=self.max_norm,
            scaler=self.scaler,
            norm=self.needs_norm,
            skip_non_finite=self.skips,
            total_norm=self.total_norm,
        )
        self.optimizer.zero_grad(set_to_none=True)
        # In fp16 gradients overflow regularly, until the loss scale has settled: their norm proves no mistake.
        self.guard.note(self.progress.step + 1, self._losses, None if self.scaler else result.grad_norm)
        if self.skips and result.skipped:
            for buffer, value in before:
                buffer.copy_(value)
        else:
            for uncounted in self._uncounted:
                meter.add(*uncounted)
        losses, self._losses, self._uncounted = tuple(self._losses), [], []
        return StepResult(result.skipped, result.grad_norm, losses, self._weights)

    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient from those of this process's parameters."""
        return nn.utils.get_total_norm(grads)
