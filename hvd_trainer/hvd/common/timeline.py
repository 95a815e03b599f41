"""A trace of operations, which chrome://tracing and Perfetto open: Horovod's timeline, with its names of phases.

    NEGOTIATE_ALLREDUCE   from this rank's request until all ranks have asked for the operation
    ALLREDUCE             its execution
    CYCLE_START           a round of the controller, if asked for

Every operation's name has a row of its own. Rank 0 writes the file, which is complete JSON after each write: while
the job runs, and after a crash.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_trainer.hvd.common.request import Request

logger = logging.getLogger(__name__)

END = b"\n]\n"
"""of the file; the next event overwrites it"""


class Timeline:
    """Writes events to a file as they come, until closed.

    Args:
        path: of the file, which is replaced.
        mark_cycles: whether to record rounds.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self._path = Path(path).expanduser()
        self._file = self._path.open("wb", buffering=0)
        self._size = 0  # without END
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._start = time.monotonic()
        self._mark_cycles = mark_cycles
        self._write(
            name="process_name",
            ph="M",
            pid=0,
            args={"name": "rounds", "start_time_since_epoch_in_micros": time.time_ns() // 1000},
        )

    def _write(self, **event: Any) -> None:
        with self._lock:
            if self._file.closed:
                return
            text = (b",\n" if self._size else b"[\n") + json.dumps(event).encode() + END
            try:
                written = os.pwrite(self._file.fileno(), text, self._size)
                if written < len(text):
                    os.pwrite(self._file.fileno(), text[written:], self._size + written)
            except OSError as error:
                logger.warning("The timeline %s ends here, and the training continues: %s", self._path, error)
                self._end()
                return
            self._size += len(text) - len(END)

    def _end(self) -> None:
        """Leave the file as it was before the last event, which is complete JSON."""
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), self._size)
            os.pwrite(self._file.fileno(), END, self._size)
        self._file.close()

    def _row(self, name: str) -> int:
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1
            self._write(name="process_name", ph="M", pid=self._rows[name], args={"name": name})
        return self._rows[name]

    def _span(self, name: str, row: str, began: float, ended: float) -> None:
        begin_us, duration_us = (began - self._start) * 1e6, (ended - began) * 1e6
        self._write(name=name, ph="X", pid=self._row(row), tid=0, ts=round(begin_us, 1), dur=round(duration_us, 1))

    def add_cycle(self) -> None:
        """Record the begin of a round."""
        if self._mark_cycles:
            at_us = round((time.monotonic() - self._start) * 1e6, 1)
            self._write(name="CYCLE_START", ph="i", s="p", pid=0, tid=0, ts=at_us)

    def add_operations(self, requests: Sequence[Request]) -> None:
        """Record operations that have just been executed."""
        ended = time.monotonic()
        for request in requests:
            kind, row = request.signature.kind.upper(), request.signature.name
            self._span(f"NEGOTIATE_{kind}", row, request.submitted_at, request.began_at)
            self._span(kind, row, request.began_at, ended)

    def close(self) -> None:
        """Complete the file."""
        self._write(name="end", ph="i", s="g", pid=0, tid=0, ts=round((time.monotonic() - self._start) * 1e6, 1))
        with self._lock:
            self._file.close()
