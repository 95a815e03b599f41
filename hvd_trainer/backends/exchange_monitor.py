"""Whether an accelerator has come to the end of the exchanges that it was given.

The host only puts exchanges into the device's queue and runs ahead; where it stops in the end, for want of room
there, says nothing about whom it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from hvd_trainer.utils import accelerator

ANSWER_S = 0.2
"""How long the device is given to say that it is done."""


class ExchangeMonitor:
    """Follows one event through the device's queue, which is recorded anew after each step's exchange.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, accelerator.event(device)
        self._marks, self._asked = 0, 0
        self._is_paused = False
        self._reached = threading.Event()

    def mark(self) -> None:
        """Note that a step's exchange has been put into the queue."""
        if not self._is_paused:
            self._event.record(accelerator.current_stream(self._device))
            self._marks += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore what is put into a graph, inside, which the device does later."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def is_exchanging(self) -> bool:
        """Return True while the device has not reached the last mark; may take `ANSWER_S`.

        A thread of its own waits for the event, once for each mark that is asked about: PyTorch's `query` keeps
        Python's lock, and can block while another thread waits for room in the device's queue.
        """
        if self._marks == 0:
            return False
        if self._asked != self._marks:
            self._asked, self._reached = self._marks, threading.Event()
            threading.Thread(target=self._wait, args=(self._reached,), name="exchange", daemon=True).start()
        return not self._reached.wait(ANSWER_S)

    def _wait(self, reached: threading.Event) -> None:
        with suppress(RuntimeError):  # the training thread will be told of the device's error
            self._event.synchronize()
        reached.set()
