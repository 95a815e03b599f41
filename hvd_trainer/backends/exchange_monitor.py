"""Whether an accelerator has finished the exchanges in its queue.

The host only queues exchanges and runs ahead. Where it stops when the queue is full tells nothing of what the
device waits for.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from hvd_trainer.utils import accelerator
from hvd_trainer.utils.threads import start_thread

MAX_ANSWER_S = 0.2
"""How long to wait for the device before it counts as busy."""


class ExchangeMonitor:
    """Follow one event through the device's queue; it is recorded again after each step's exchange.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, accelerator.blocking_event(device)
        self._marks, self._awaited_mark = 0, 0
        self._reached = threading.Event()

    def mark(self) -> None:
        """Note that a step's exchange has been put into the queue."""
        accelerator.record(self._event, self._device)
        self._marks += 1

    def is_exchanging(self) -> bool:
        """Return whether the device has not reached the last mark yet; may take `MAX_ANSWER_S`.

        A thread waits for the event, one per mark that is asked about: PyTorch's `query` holds the GIL, and can
        block while another thread waits for room in the device's queue.
        """
        if self._marks == 0:
            return False
        if self._awaited_mark != self._marks:
            self._awaited_mark, self._reached = self._marks, threading.Event()
            start_thread(self._wait, "exchange", self._reached, device=self._device)
        return not self._reached.wait(MAX_ANSWER_S)

    def _wait(self, reached: threading.Event) -> None:
        with suppress(RuntimeError):  # the training thread gets the device's error, too
            self._event.synchronize()
        reached.set()
