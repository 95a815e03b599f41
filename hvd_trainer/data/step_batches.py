"""The batches of each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hvd_trainer.data.batch import Batch


class StepBatches:
    """Group batches by optimizer step, the last group possibly shorter, and load the next group ahead.

    Args:
        batches: this rank's.
        accumulate: batches per step.
    """

    def __init__(self, batches: Iterator[Batch], accumulate: int) -> None:
        self._batches, self._accumulate = batches, accumulate
        self._next: list[Batch] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        self.prefetch()
        while self._next:
            group, self._next = self._next, None
            yield group
            self.prefetch()

    @property
    def is_exhausted(self) -> bool:
        """Whether no batches are left."""
        self.prefetch()
        return not self._next

    def prefetch(self) -> None:
        """Load the next group, unless that was done."""
        if self._next is None:
            self._next = list(islice(self._batches, self._accumulate))
