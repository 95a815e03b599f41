"""Several devices of one process, each with a part of the model.

    ticks       0    1    2    3    4          chunk 1 is on the first device while chunk 0 is on the second
    cuda:0      F0   F1   F2
    cuda:1           F0   F1   F2
    cuda:2                F0   F1   F2

What is asked of a GPU, copies too, goes into its queue, and Python goes on to the next one. The order is that of
torchgpipe (Kim et al., 2020). Backward goes chunk by chunk, and overlaps for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hvd_trainer.parallel.microbatch import MicroBatch
from hvd_trainer.parallel.microbatch_loss import MicroBatchLoss
from hvd_trainer.parallel.stage_module import MicroBatchRNG, StageModule


def ticks(parts: int, chunks: int) -> Iterator[list[tuple[int, int]]]:
    """What is computed at the same time: (part, chunk) pairs, tick by tick."""
    for tick in range(parts + chunks - 1):
        yield [(part, tick - part) for part in range(parts) if 0 <= tick - part < chunks]


class DevicePipeline:
    """All parts in this process, one after the other on their devices.

    Args:
        parts: the model's, in order; outputs come back to the first one's device.
        devices: of the parts.
    """

    def __init__(self, parts: Sequence[StageModule], devices: Sequence[torch.device]) -> None:
        self._parts, self._devices = parts, devices
        self.group: dist.ProcessGroup | None = None

    def train(
        self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss, draws: Callable[[int], MicroBatchRNG]
    ) -> None:
        """Forward and backward of all chunks."""
        for part in self._parts:
            part.draws_of = draws
        for share in self._forward(chunks, loss):
            share.backward()

    def evaluate(self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss) -> None:
        """Forward of all chunks."""
        self._forward(chunks, loss)

    def _forward(self, chunks: Sequence[MicroBatch], loss: MicroBatchLoss) -> list[Tensor]:
        values = [chunk.inputs for chunk in chunks]
        for together in ticks(len(self._parts), len(chunks)):
            for part, chunk in together:
                self._parts[part].chunk = chunk
                values[chunk] = self._parts[part](moved(values[chunk], self._devices[part]))
        return [loss(moved(value, self._devices[0]), number) for number, value in enumerate(values)]


def moved(value: object, device: torch.device) -> object:
    """A copy on the device, of which Python does not wait for the end; the value itself if it is there."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)
