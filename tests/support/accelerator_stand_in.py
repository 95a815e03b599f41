"""A stand-in for the accelerator that records what it is asked for; tensors stay on the CPU.

What streams do is shown on the pretended device (tests/pretend).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvd_trainer.utils import accelerator


class StandIn:
    """Replace functions of `hvd_trainer.utils.accelerator`, those named as its methods: every device is one.

    So are PyTorch's figures of memory.

    Args:
        monkeypatch: what puts it there, for as long as the test runs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.free, self.peak = 1000, 0
        for name in vars(StandIn):
            if not name.startswith("_"):
                monkeypatch.setattr(accelerator, name, getattr(self, name))
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (self.free, self.free))
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: self.peak)

    def is_host(self, device: torch.device) -> bool:
        return False

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(f"synchronize {device}")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.calls.append(f"pin {tuple(shape)} of {dtype}")
        return torch.empty(shape, dtype=dtype)
