"""Count how often a `DataLoader` starts processes, and what their start, first batch and end take."""

from __future__ import annotations

import functools
import time
from typing import Any
from weakref import WeakSet

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hvd_trainer.measure.stack_record import LoaderStarts


class LoaderWatch:
    """Counts from `install` on."""

    def __init__(self) -> None:
        self.starts = LoaderStarts()
        self._new: WeakSet[Any] = WeakSet()

    def install(self) -> None:
        """Look at each loader's iterator of this process."""
        kind: Any = _MultiProcessingDataLoaderIter
        begin, fetch, end = kind.__init__, kind._next_data, kind._shutdown_workers

        @functools.wraps(begin)
        def timed_begin(iterator: Any, *args: Any, **kwargs: Any) -> None:
            starts, began = self.starts, time.perf_counter()
            begin(iterator, *args, **kwargs)
            starts.times += 1
            starts.processes += iterator._num_workers
            starts.seconds += time.perf_counter() - began
            self._new.add(iterator)

        @functools.wraps(fetch)
        def timed_fetch(iterator: Any) -> Any:
            if iterator not in self._new:
                return fetch(iterator)
            self._new.discard(iterator)
            return self._timed(fetch, iterator)

        @functools.wraps(end)
        def timed_end(iterator: Any) -> None:
            self._timed(end, iterator)

        kind.__init__, kind._next_data, kind._shutdown_workers = timed_begin, timed_fetch, timed_end

    def clear(self) -> None:
        """Forget what was counted."""
        self.starts = LoaderStarts()

    def _timed(self, function: Any, iterator: Any) -> Any:
        starts, began = self.starts, time.perf_counter()
        try:
            return function(iterator)
        finally:
            starts.seconds += time.perf_counter() - began
