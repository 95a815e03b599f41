"""Batches in windows of one optimizer step each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat

from hvd_trainer.data.batch import Batch


def repeat_first(batches: Iterator[Batch], count: int | None) -> Iterator[Batch]:
    """The first batch `count` times (None: without end), so that nothing is fetched but once."""
    first = next(batches)
    return repeat(first) if count is None else repeat(first, count)


class StepBatches:
    """Groups batches into windows, the last one shorter, and can fetch the next before it is asked for."""

    def __init__(self, batches: Iterator[Batch], accumulate: int) -> None:
        self._batches, self._accumulate = batches, accumulate
        self._next: list[Batch] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        self.prefetch()
        while self._next:
            window, self._next = self._next, None
            yield window
            self.prefetch()

    @property
    def ended(self) -> bool:
        """Whether no window is left."""
        self.prefetch()
        return not self._next

    def prefetch(self) -> None:
        """Loads the next window, unless that was done."""
        if self._next is None:
            self._next = list(islice(self._batches, self._accumulate))
