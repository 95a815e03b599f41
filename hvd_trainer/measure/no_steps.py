"""Say what was seen of a script that has ended without a step that counts."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from hvd_trainer.measure.listener import Listener
from hvd_trainer.measure.message import NO_STEPS

BY_HAND = (
    "its backward() was seen, and no step() of a torch.optim.Optimizer after it: a tool sees no update by hand"
)
NO_BACKWARD = (
    "its steps were seen, and no backward() before them: a tool counts those after one, as of torch.optim"
)
NOTHING = "neither a backward() nor a step() was seen in its process: is it asked to train, and in this process?"


class NoSteps(Listener):
    """Writes at the script's end why none of its steps counts, if none does."""

    def __init__(self, log: Path) -> None:
        self._file = log / NO_STEPS
        self._reason = NOTHING
        atexit.register(self._write)

    def on_backward(self, loss: Any) -> None:
        if self._reason == NOTHING:
            self._reason = BY_HAND

    def before_step(self, optimizer: Optimizer) -> None:
        if self._reason == NOTHING:
            self._reason = NO_BACKWARD

    def on_start(self, device: torch.device, *, on_trainer: bool) -> None:
        self.stop()

    def stop(self) -> None:
        atexit.unregister(self._write)

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self._reason)
