"""Write checkpoints in a thread beside the training, which waits only for the copy to host memory.

training   ... step | copy | step  step  step ...
writer              |      | write, sync, rename, remove old ones |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.backends.session import Session
from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.parts import CheckpointParts
from hvd_trainer.checkpoint.storage import OpenCheckpoint
from hvd_trainer.config.figures import BestFigure
from hvd_trainer.config.options import SaveOptions
from hvd_trainer.utils import accelerator

ALIGNED_BYTES = 64
"""Each tensor begins at a multiple of this, which is a multiple of the size of every type."""
MAX_WAIT_S = 30.0
"""How long a rank that ends waits for the parts of others, one of which may have failed."""
MAX_SINGLE_BLOCK_BYTES = 2**26
"""Up to so many bytes in all, tensors are in one block of page-locked memory."""


class AsyncWriter:
    """Writes checkpoints: rank 0, and each rank its part if they have shards or stages; and tells when one is due.

    Use it as a context manager: it removes what killed saves have left, and waits on exit for the last save.

    Args:
        folder: the run's `checkpoints` folder; None on other ranks than 0 and without --log-dir.
        options: when to save and what to keep.
        session: in which each rank writes a part; None: rank 0 writes all.
        fit: number of the training among those of the session.

    Attributes:
        stalled_s: seconds for which saves have stopped the training on this rank.
        saves: number of saves.

    Raises:
        CheckpointError: on entry, if what killed saves have left cannot be removed.
    """

    def __init__(
        self, folder: Path | None, options: SaveOptions, session: Session | None = None, fit: int = 0
    ) -> None:
        self._folder, self._options = folder, options
        self._best = None if options.keep_best is None else BestFigure.parse(options.keep_best)
        self._session, self._fit, self._given_up = session, fit, threading.Event()
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")
        self._writing: Future[None] | None = None
        self._memory = PinnedMemory()
        self._last = time.monotonic()
        self.stalled_s, self.saves = 0.0, 0

    def __enter__(self) -> AsyncWriter:
        self._last = time.monotonic()
        if self._folder is not None:
            storage.remove_leftovers(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is being written, for other ranks' parts only so long; `wait` has raised its errors."""
        limit = threading.Timer(MAX_WAIT_S, self._given_up.set)
        limit.start()
        self._writer.shutdown()
        limit.cancel()

    @property
    def is_overdue(self) -> bool:
        """Whether --save-every-s have passed since the last save, by this rank's clock."""
        every = self._options.save_every_s
        return every is not None and time.monotonic() - self._last >= every

    def is_due_after_step(self, step: int) -> bool:
        """Whether to save after this step because of its number; the same on all ranks."""
        every = self._options.save_every_steps
        return every is not None and step % every == 0

    def is_due_after_epoch(self, epoch: int, *, last: bool) -> bool:
        """Whether to save after this number of epochs; after the last one always, if epochs are saved at all."""
        every = self._options.save_every_epochs
        return every is not None and (epoch % every == 0 or last)

    def submit(
        self, began: float, state: Mapping[str, Any] | None, *, step: int, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Copy the state to host memory and have the thread write it; the state may change afterwards.

        Waits for the previous save, if that is still being written. All ranks call it.

        Args:
            began: time at which training stopped for this save, by `time.perf_counter`.
            state: what this rank writes; None: nothing.

        Raises:
            CheckpointError: the previous save could not be written, or the state holds what a checkpoint cannot.
        """
        self.wait()  # the new copy takes the memory of the previous one
        if state is not None and (self._folder is not None or self._session is not None):
            copied = copy_to_host(state, self._memory)
            self._writing = self._writer.submit(self._write, self.saves, copied, step, epoch, dict(figures))
        self._last = time.monotonic()
        self.saves += 1
        self.stalled_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the last save could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(
        self, number: int, copied: OpenCheckpoint, step: int, epoch: int, figures: Mapping[str, float]
    ) -> None:
        parts = None
        if self._session is not None:
            parts = CheckpointParts(self._session, f"{self._fit}.{number}", self._given_up)
        if self._folder is not None:
            storage.save(self._folder, copied, step=step, epoch=epoch, figures=figures, others=parts)
            storage.prune(self._folder, keep=self._options.keep, best=self._best)
        elif parts is not None:
            parts.write(copied)


class PinnedMemory:
    """Page-locked memory for copies of an accelerator's tensors, reused by the next save.

    It is a few large blocks of a power of two bytes each: PyTorch would round each tensor up to a power of two.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def allocate_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a contiguous tensor of each one's type and shape; those of the previous call are overwritten."""
        before = len(self._blocks[0]) if self._blocks else 0
        size, places = place_in_blocks([tensor.nbytes for tensor in tensors], before)
        if size > before:
            self._blocks.clear()
        while len(self._blocks) <= places[-1][0]:
            self._blocks.append(accelerator.pinned((size,), torch.uint8))
        return [
            self._blocks[block][offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, (block, offset) in zip(tensors, places, strict=True)
        ]


def place_in_blocks(sizes: Sequence[int], min_block_bytes: int = 0) -> tuple[int, list[tuple[int, int]]]:
    """Place tensors into blocks of equal size, one after the other.

    Returns:
        The bytes of each block: enough for the largest tensor, for a sixteenth of all, and for all if they are
        few. And for each tensor the number of its block and its offset there.
    """
    sizes = [-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes]
    needed = max(*sizes, sum(sizes) // 16, min(sum(sizes), MAX_SINGLE_BLOCK_BYTES), 1)
    block_size = max(min_block_bytes, 1 << (needed - 1).bit_length())
    places, block, used = [], 0, 0
    for size in sizes:
        if used + size > block_size:
            block, used = block + 1, 0
        places.append((block, used))
        used += size
    return block_size, places


def copy_to_host(state: Any, memory: PinnedMemory | None = None) -> OpenCheckpoint:
    """Return a copy of a state with every tensor copied to host memory.

    Copies from an accelerator are started all together and waited for once. They run after the work in its queue;
    training waits for them, because its next forward pass changes buffers.

    Args:
        state: as for `utils.serialization.flatten`.
        memory: for copies from an accelerator; those of the previous call are overwritten. None: new memory.

    Raises:
        CheckpointError: it holds what a checkpoint cannot.
    """
    split = OpenCheckpoint.of_state(state)
    remote = {name: tensor for name, tensor in split.tensors.items() if not accelerator.is_host(tensor.device)}
    copies = {name: tensor.clone() for name, tensor in split.tensors.items() if name not in remote}
    if remote:
        pinned = (memory or PinnedMemory()).allocate_like(list(remote.values()))
        for (name, tensor), copy in zip(remote.items(), pinned, strict=True):
            copies[name] = copy.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in remote.values()}:
            accelerator.synchronize(device)
    return OpenCheckpoint(split.tree, copies)
