"""One optimizer step in micro-batches, in one stage or through several.

    batch       0 1 2 3 4 5 6 7                 chunks are weighted, as batches are, so that the sum of losses is
    chunks      0 1 | 2 3 | 4 5 | 6 7           the mean of the batch, whatever the number of chunks
    stage 0     F0 F1 .  B0 F2 B1 F3 B2 .  B3
    stage 1     .  F0 B0 F1 B1 F2 B2 F3 B3 .    activations go down, their gradients come up (torch.distributed)

Every stage adds up its gradients chunk by chunk, in their order; and the random numbers of a block depend only on
step, replica, chunk and block. So the numbers are the same bits for any number of stages.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.data import Batch
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.optim.step import StepParts, TrainStep
from hvd_trainer.optim.weights import Share
from hvd_trainer.parallel.device_pipeline import DevicePipeline
from hvd_trainer.parallel.microbatch import MicroBatch, MicroBatchLoss, split_batch
from hvd_trainer.parallel.schedule import CLASSES, ONE_PART, Schedule
from hvd_trainer.parallel.stage_module import MicroBatchRNG, StageModule
from hvd_trainer.utils.tensors import parameters_of


class SingleStage:
    """Run all blocks in this process, micro-batch after micro-batch."""

    def __init__(self, blocks: StageModule) -> None:
        self._blocks = blocks
        self.group: dist.ProcessGroup | None = None

    def train(
        self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss, rng: Callable[[int], MicroBatchRNG]
    ) -> None:
        """Run forward and backward of all micro-batches."""
        self._blocks.rng_of = rng
        for number, chunk in enumerate(chunks):
            self._blocks.chunk = number
            loss(self._blocks(chunk.inputs), number).backward()

    def evaluate(self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss) -> None:
        """Run forward of all micro-batches."""
        for number, chunk in enumerate(chunks):
            loss(self._blocks(chunk.inputs), number)


class StagePipeline:
    """Run this process's partitions, and the others in the processes of its stage group, by torch's pipelining.

    Args:
        parts: of this process, by their number among all.

    Attributes:
        busy_s: how long this process has computed in training, in seconds, without waiting, sending and receiving.
    """

    def __init__(
        self,
        parts: Mapping[int, StageModule],
        num_parts: int,
        chunks: int,
        schedule: Schedule,
        group: dist.ProcessGroup,
        backend: Backend,
    ) -> None:
        from torch.distributed import pipelining

        self.group, self._backend, self._parts = group, backend, parts
        self._is_first, self._is_last = 0 in parts, num_parts - 1 in parts
        self._loss: MicroBatchLoss | None = None
        stages = [self._make_stage(part, number, num_parts) for number, part in parts.items()]
        kind = getattr(pipelining, CLASSES[schedule])
        its_stages = stages[0] if schedule in ONE_PART else stages
        self._schedule = kind(its_stages, chunks, loss_fn=self._loss_of, scale_grads=False)
        self._numbers = torch.arange(chunks)
        self.busy_s = 0.0

    def _make_stage(self, part: StageModule, number: int, num_parts: int) -> Any:
        """Make a `PipelineStage` that tells the health monitor its phase, and counts how long it computes."""
        from torch.distributed.pipelining import PipelineStage

        pipeline = self

        class Stage(PipelineStage):
            def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
                part.chunk = fwd_chunk_id
                with pipeline._working("forward"):
                    try:
                        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
                    except RuntimeError as error:
                        # PyTorch wraps a block's error in one that lists its inputs.
                        raise error.__cause__ or error from None

            def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                with pipeline._working("backward"):
                    return super().backward_one_chunk(*args, **kwargs)

            def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                with pipeline._working("backward"):
                    return super().backward_weight_one_chunk(*args, **kwargs)

        return Stage(part, number, num_parts, self._backend.device, group=self.group)

    @contextmanager
    def _working(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        with self._backend.activity.working(phase):
            yield
        self.busy_s += time.perf_counter() - began

    def _loss_of(self, outputs: Any, number: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(outputs, number)

    def train(
        self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss, rng: Callable[[int], MicroBatchRNG]
    ) -> None:
        """Run forward and backward of all micro-batches, through all stages."""
        for part in self._parts.values():
            part.rng_of = rng
        self._run(self._schedule.step, chunks, loss)

    def evaluate(self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss) -> None:
        """Run forward of all micro-batches, through all stages."""
        busy_s = self.busy_s
        self._run(self._schedule.eval, chunks, loss)
        self.busy_s = busy_s

    def _run(self, run: Callable[..., Any], chunks: Sequence[MicroBatch], loss: MicroBatchLoss) -> None:
        self._loss = loss
        inputs = _concatenate([chunk.inputs for chunk in chunks]) if self._is_first else ()
        # The schedule splits its target, too: by the numbers in it the loss finds the micro-batch.
        target: dict[str, Any] = {"target": self._numbers, "losses": []} if self._is_last else {}
        with self._backend.activity.waiting():
            run(*inputs, **target)
        self._loss = None


Runner = SingleStage | DevicePipeline | StagePipeline


class StageStep(TrainStep):
    """A step in micro-batches.

    Args:
        parts: with an optimizer of all the model's parameters; those of other stages get no gradients here.
    """

    def __init__(
        self, parts: StepParts, *, runner: Runner, chunks: int, chunk_size: int, seed: int, replica: int
    ) -> None:
        super().__init__(parts)
        backend = parts.backend
        self._runner, self._chunks, self._chunk_size = runner, chunks, chunk_size
        self._seed, self._replica = seed, replica
        self._batch = 0
        self._present: list[int] = []
        self._places = torch.empty(0, dtype=torch.long)
        if self.scaler is not None and runner.group is not None:
            # All stages must skip the update when one overflows.
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self.scaler = ShardedGradScaler(backend.device.type, process_group=runner.group)
            # The scale is created by the first call, and only the last stage has a loss to scale.
            self.scaler.scale(torch.zeros(1, device=backend.device))

    def __call__(self, batches: list[Batch], meter: Meter, prefetch: Callable[[], None]) -> StepResult:
        self._batch = 0
        return super().__call__(batches, meter, prefetch)

    def backward(self, batch: Batch, share: Share, meter: Meter) -> None:
        """Run forward and backward of one batch in micro-batches, through all stages."""
        self.backend.activity.enter("forward")
        loss = MicroBatchLoss(self.loss, chunks := self._cut(batch), share, self._begin)
        rng = functools.partial(MicroBatchRNG, self._seed, self.progress.step, self._replica, self._batch)
        self._batch += 1
        self._runner.train(chunks, loss, rng)
        mean = loss.mean()
        # One loss per batch on all ranks, because they are checked in a collective.
        self._losses.append(torch.zeros(()) if mean is None else mean)
        for _, passed in sorted(loss.passes.items()):
            self.count(passed, meter)

    def evaluate(self, batch: Batch | None, meter: Meter) -> None:
        assert batch is not None
        loss = MicroBatchLoss(self.loss, chunks := self._cut(batch), Share(1), lambda part: part)
        self._runner.evaluate(chunks, loss)
        for _, passed in sorted(loss.passes.items()):
            meter.add(*passed)

    def _cut(self, batch: Batch) -> list[MicroBatch]:
        return split_batch(batch, self._chunks, self._chunk_size, self.weigh)

    def _begin(self, part: Tensor) -> Tensor:
        scaled = part if self.scaler is None else self.scaler.scale(part)
        return scaled * self.guard.seed(scaled)

    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of all stages' gradients: the same bits for any partition of the model."""
        parameters = list(parameters_of(self.optimizer))
        present = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
        norms = torch.zeros(len(parameters), device=self.backend.device)
        if present:
            if present != self._present:
                # Kept, because a copy to an accelerator waits for it, and these are the same in each step.
                self._present, self._places = present, torch.tensor(present, device=norms.device)
            norms[self._places] = self.norms(grads)
        if self._runner.group is not None:
            with self.backend.activity.waiting():
                # Only one stage has each norm, and the others add zeros.
                dist.all_reduce(norms, group=self._runner.group)
        whole: Tensor = torch.linalg.vector_norm(norms)
        return whole

    def norms(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of each gradient."""
        return torch.stack(
            [norm.to(self.backend.device, torch.float32) for norm in torch._foreach_norm(list(grads))]
        )


def _concatenate(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the inputs of all micro-batches, concatenated, as arguments of the first stage.

    Raises:
        OptionError: they are neither tensors nor tuples of tensors.
    """
    rows = [value if isinstance(value, tuple) else (value,) for value in inputs]
    if not all(isinstance(tensor, Tensor) for row in rows for tensor in row):
        raise OptionError("With --stages the inputs of the model are a tensor or a tuple of tensors")
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))
