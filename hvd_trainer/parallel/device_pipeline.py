"""Pipeline over several devices of one process, each with a partition of the model.

    cycles      0    1    2    3    4          chunk 1 is on the first device while chunk 0 is on the second
    cuda:0      F0   F1   F2
    cuda:1           F0   F1   F2
    cuda:2                F0   F1   F2

Work for a GPU, copies too, goes into its queue, and Python continues with the next GPU. The order is that of
torchgpipe (Kim et al., 2020). Backward goes chunk by chunk, and overlaps for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hvd_trainer.parallel.microbatch import MicroBatch, MicroBatchLoss
from hvd_trainer.parallel.stage_module import MicroBatchRNG, StageModule
from hvd_trainer.utils import accelerator


def clock_cycles(parts: int, chunks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the (part, chunk) pairs that are computed at the same time, cycle by cycle."""
    for cycle in range(parts + chunks - 1):
        yield [(part, cycle - part) for part in range(parts) if 0 <= cycle - part < chunks]


class DevicePipeline:
    """Run all partitions in this process, each on its device."""

    def __init__(self, parts: Sequence[StageModule], devices: Sequence[torch.device]) -> None:
        self._parts, self._devices = parts, devices
        self.group: dist.ProcessGroup | None = None

    def train(
        self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss, rng: Callable[[int], MicroBatchRNG]
    ) -> None:
        """Run forward and backward of all micro-batches."""
        for part in self._parts:
            part.rng_of = rng
        for share in self._forward(chunks, loss):
            share.backward()

    def evaluate(self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss) -> None:
        """Run forward of all micro-batches."""
        self._forward(chunks, loss)

    def _forward(self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss) -> list[Tensor]:
        values = [chunk.inputs for chunk in chunks]
        for together in clock_cycles(len(self._parts), len(chunks)):
            for part, chunk in together:
                self._parts[part].chunk = chunk
                values[chunk] = self._parts[part](move_to(values[chunk], self._devices[part]))
        return [loss(move_to(value, self._devices[0]), number) for number, value in enumerate(values)]


def move_to(value: object, device: torch.device) -> object:
    """Copy a value to a device, as `copy_to` does; return it unchanged if it is there."""
    return tree_map_only(Tensor, lambda tensor: accelerator.copy_to(tensor, device), value)
