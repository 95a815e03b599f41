"""A stand-in for the accelerator that records what it is asked for; tensors stay on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from hvd_trainer.utils import accelerator


class Stream:
    """A queue that only notes what it waits for."""

    device = torch.device("cuda", 1)

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    def wait_event(self, event: Event) -> None:
        self._calls.append(f"{self.name} waits for {event.number}")


class Event:
    """An event that nothing has reached until `done` is set."""

    def __init__(self, number: int, calls: list[str]) -> None:
        self.number, self.done, self._calls = number, threading.Event(), calls

    def record(self, stream: Stream) -> None:
        self._calls.append(f"event {self.number} on {stream.name}")

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait()


class StandIn:
    """Replace functions of `hvd_trainer.utils.accelerator`, those named as its methods: every device is one.

    So are PyTorch's streams, events and figures of memory.

    Args:
        monkeypatch: what puts it there, for as long as the test runs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.free, self.peak = 1000, 0
        self.used: torch.device | None = None
        self.places: list[tuple[str, torch.device]] = []
        self.events: list[Event] = []
        self.current, self._side = Stream("compute", self.calls), Stream("side", self.calls)
        for name in vars(StandIn):
            if not name.startswith("_"):
                monkeypatch.setattr(accelerator, name, getattr(self, name))
        # Types, as what PyTorch imports meanwhile has annotations with these names.
        monkeypatch.setattr(torch, "Event", type("Event", (), {"__new__": lambda _, device: self._event()}))
        monkeypatch.setattr(torch, "Stream", type("Stream", (), {"__new__": lambda _, device: self._side}))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (self.free, self.free))
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: self.peak)

    def is_host(self, device: torch.device) -> bool:
        return False

    def in_use(self) -> torch.device | None:
        return self.used

    def set_current(self, device: torch.device) -> None:
        self.places.append((threading.current_thread().name, device))

    def on_device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(f"synchronize {device}")

    def _event(self) -> Event:
        self.events.append(Event(len(self.events) + 1, self.calls))
        return self.events[-1]

    def blocking_event(self, device: torch.device) -> Event:
        return self._event()

    def record(self, event: Event, device: torch.device) -> None:
        event.record(self.current)

    def follow_default_stream(self, tensor: Tensor) -> None:
        self.calls.append(f"{self.current.name} follows")

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.calls.append(f"pin {tuple(shape)} of {dtype}")
        return torch.empty(shape, dtype=dtype)
