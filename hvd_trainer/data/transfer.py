"""Copies of batches to an accelerator, overlapped with its computations; on the CPU nothing is copied.

copy stream      | batch 1 | batch 2 |         | batch 3 |
compute stream             | step 1            | step 2            | step 3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from hvd_trainer.data.batch import to_device
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import tensors_in

T = TypeVar("T")


class Transfer:
    """Move batches to a device, one batch ahead of the consumer, on a stream of its own.

    Args:
        device: the destination; on the CPU batches are passed on as they come.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if accelerator.is_host(device) else torch.Stream(device)

    def move(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches with all their tensors on the device.

        Args:
            batches: of tensors in tuples, lists and dictionaries; from page-locked memory they are copied
                asynchronously. PyTorch's allocators know of the copy and do not reuse the memory before its end.
        """
        if self._stream is None:
            for batch in batches:
                yield to_device(batch, self._device)
            return
        started: tuple[T, accelerator.Point] | None = None
        for batch in batches:
            following = self._start(batch, self._stream)
            if started is not None:
                yield self._finish(*started)
            started = following
        if started is not None:
            yield self._finish(*started)

    def _start(self, batch: T, stream: torch.Stream) -> tuple[T, accelerator.Point]:
        """Start to copy a batch on a stream; return the copy and the point of its arrival."""
        with accelerator.on_stream(stream):
            moved = to_device(batch, self._device, tensors_only=True)
            return moved, accelerator.Point(self._device)

    def _finish(self, moved: T, arrival: accelerator.Point) -> T:
        """Make the computations that follow wait for a batch, and keep its memory until they are done with it."""
        arrival.block()
        current = torch.accelerator.current_stream(self._device)
        for tensor in tensors_in(moved):
            if not accelerator.is_host(tensor.device):
                tensor.record_stream(current)
        # Objects on the stream that uses them: which memory they have, to keep it, is not known.
        whole: T = to_device(moved, self._device)
        return whole
