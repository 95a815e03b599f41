"""When to save, and saving beside the training: only the copy to host memory holds it up.

training   ... step | copy | step  step  step ...
writer              |      | write, sync, rename, remove old ones |
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_trainer import accelerator, checkpoint
from hvd_trainer.config import SaveOptions


class Saver:
    """Writes rank 0's checkpoints; on other ranks it only knows when.

    Args:
        folder: the run's `checkpoints` folder; None on other ranks than 0 and where nothing is kept.
        options: when to save and what to keep.

    Attributes:
        stalled_s: how long training stood still for saving so far, in seconds, on this rank.
        saves: how many times.

    Raises:
        CheckpointError: what killed saves have left cannot be removed.
    """

    def __init__(self, folder: Path | None, options: SaveOptions) -> None:
        self._folder, self._options = folder, options
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")
        self._writing: Future[None] | None = None
        self._last = time.monotonic()
        self.stalled_s, self.saves = 0.0, 0
        self._tried = False
        if folder is not None:
            checkpoint.sweep(folder)

    @property
    def overdue(self) -> bool:
        """Whether the last save is longer ago than `--save-every-s`; by this rank's clock."""
        every = self._options.save_every_s
        return every is not None and time.monotonic() - self._last >= every

    def after_step(self, step: int) -> bool:
        """Whether to save after this step because of its number; the same on all ranks."""
        every = self._options.save_every_steps
        return every is not None and step % every == 0

    def after_epoch(self, epoch: int, *, last: bool) -> bool:
        """Whether to save after so many epochs; at the end of a run always."""
        every = self._options.save_every_epochs
        return every is not None and (epoch % every == 0 or last)

    def hand_over(
        self, began: float, state: Mapping[str, Any] | None, *, step: int, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Copies the state to host memory and has it written; the state may change afterwards.

        Waits for the save before, if that is still being written. All ranks call it.

        Args:
            began: when training stopped for this save, by `time.perf_counter`.
            state: from `RunState.collect`.
            step, epoch, figures: as in `checkpoint.Manifest`.

        Raises:
            CheckpointError: the save before could not be written.
        """
        self.wait()
        if self._folder is not None and state is not None:
            self._writing = self._writer.submit(self._write, on_host(state), step, epoch, dict(figures))
        self._last = time.monotonic()
        self.saves += 1
        self.stalled_s += time.perf_counter() - began

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
            CheckpointError: what was being written could not be.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Lets the writer end what it began; its errors have been told by `wait`."""
        self._writer.shutdown()

    def _write(self, state: Mapping[str, Any], step: int, epoch: int, figures: Mapping[str, float]) -> None:
        assert self._folder is not None
        path = checkpoint.save(self._folder, state, step=step, epoch=epoch, figures=figures)
        if not self._tried:
            # An object that cannot be read back shall be known now, and not when the run must go on from it.
            checkpoint.load(path)
            self._tried = True
        checkpoint.prune(self._folder, keep=self._options.keep, best=self._options.keep_best)


def on_host(value: Any) -> Any:
    """A copy of nested dictionaries, lists and tuples with every tensor copied to host memory.

    Copies from a GPU are started all together and waited for once.
    """
    devices: set[torch.device] = set()
    copied = _copied(value, devices)
    for device in devices:
        accelerator.synchronize(device)
    return copied


def _copied(value: Any, devices: set[torch.device]) -> Any:
    if isinstance(value, Tensor):
        tensor = value.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        devices.add(tensor.device)
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    if isinstance(value, dict):
        # Of its own kind: some schedulers keep a Counter.
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copied(item, devices)
        return copied
    if isinstance(value, list | tuple):
        items = [_copied(item, devices) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
