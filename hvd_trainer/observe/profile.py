"""Run PyTorch's profiler over some steps (`--profile-steps`): a trace of each rank, and who waited for whom.

Waiting for other ranks has two causes, the exchange itself and the slowest rank:

rank 0   computes  |  waits  waits  |  exchange |
rank 1   computes  computes  computes| exchange |       exchange = the shortest `collective` of a step; what a
                                                        rank waits beyond that, it waits for that last rank
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.errors import first_line
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.observe.phases import COLLECTIVE, PHASES, Clock, Phases, exchange_s
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.files import atomic_write
from hvd_trainer.utils.process import set_variables
from hvd_trainer.utils.text import plural

FOLDER = "profile"
ROWS = 16
"""Rows of the table. Of more ranks, those are listed that the others waited for most often."""
LOG_LEVEL = "KINETO_LOG_LEVEL"
"""From 0 to 5; 6 lets nothing through."""
COMPRESSION = 3
"""The level of gzip. Level 6 takes 2.4 times as long, for a file of 87% of the size."""


class Profile(Observer):
    """Profiles some steps of a training.

    The ranks write their traces when the last of these steps has ended: the end of the training may be days away.
    The steps that follow run without a profiler.

    Args:
        log_dir: the log folder, on this rank's node.
        steps: how many are profiled.
        skip: how many come before them, and before one more in which the profiler sets itself up.
    """

    def __init__(self, backend: Backend, log: RunLog, log_dir: str, steps: int, skip: int) -> None:
        self._backend, self._log, self._steps, self._skip = backend, log, steps, skip
        self._folder = Path(log_dir).expanduser() / FOLDER
        self._clock = Clock(backend.device)
        self._phases = Phases(self._clock)
        self._numbers: list[int] = []  # of the profiled steps
        self._thread = threading.get_ident()
        self._phase: record_function | None = None
        self._done = -skip - 1  # profiled steps; below 0 before them
        self._over = False
        activities = [ProfilerActivity.CPU]
        if not accelerator.is_host(backend.device):
            activities.append(getattr(ProfilerActivity, backend.device.type.upper()))
        plan = schedule(wait=skip, warmup=1, active=steps, repeat=1)
        self._profiler = profile(activities=activities, schedule=plan)

    @contextmanager
    def around_training(self, run: RunView) -> Iterator[None]:
        """Profile the steps that run inside; after an error other ranks may be gone, and nothing is written."""
        with _quietly():
            self._profiler.start()
        try:
            yield
        except BaseException:
            if not self._over:
                with suppress(Exception):  # it would hide why the training has ended
                    self._stop()
            raise
        if not self._over:
            self._end_early()

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        if self._over:
            return
        activity = self._backend.activity
        phase = activity.phase
        activity.enter("callback")  # which may take as long as the start, and so may what the profiler does
        self._leave_phase()
        if self._done >= 0:
            self._phases.end_step()
            self._numbers.append(run.progress.step)
        with _quietly():
            self._profiler.step()
        self._done += 1
        if self._done == 0:
            self._backend.collectives.barrier()
            self._phases.begin()
            activity.listeners.append(self._enter_phase)
        elif self._done == self._steps:
            self._finish()
        activity.enter(phase)

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        if self._done >= 0 and not self._over:
            self._phases.begin()

    def _enter_phase(self, phase: str) -> None:
        self._phases.enter(phase)
        if threading.get_ident() == self._thread:  # PyTorch pairs begin and end within a thread
            self._leave_phase()
            self._phase = record_function(phase)
            self._phase.__enter__()

    def _leave_phase(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    def _stop(self) -> None:
        self._over = True
        self._leave_phase()
        listeners = self._backend.activity.listeners
        if self._enter_phase in listeners:
            listeners.remove(self._enter_phase)
        self._profiler.stop()

    def _end_early(self) -> None:
        if self._done > 0:
            self._log.info(f"profile  the training has ended after {self._done} of the {self._steps} steps")
            self._backend.activity.enter("callback")
            self._finish()
            return
        self._stop()
        self._log.info(
            f"profile  nothing: the training had {plural(self._profiler.step_num, 'step')}, and the first "
            f"{self._skip} and one more are left out. Train longer, or type --profile-skip 0"
        )

    def _finish(self) -> None:
        """Write the traces, and print what the ranks have waited for. A collective.

        A failure is logged, and the training continues.
        """
        began, backend, rank = time.perf_counter(), self._backend, self._backend.world.rank
        self._stop()
        self._clock.settle()
        seconds = backend.collectives.all_gather_object(torch.from_numpy(self._phases.take_seconds()))
        troubles = backend.collectives.all_gather_object(self._write(rank))
        lines = waiting_table(self._numbers, np.stack([of_rank.numpy() for of_rank in seconds]))
        lines += [f"rank {other} has no trace: {why}" for other, why in enumerate(troubles) if why]
        lines.append(f"traces: rank-N.json.gz in {self._folder}, for https://ui.perfetto.dev")
        del self._profiler  # what it has recorded may be large
        lines.append(f"the training stood still for {time.perf_counter() - began:.1f} s meanwhile")
        self._log.info("\n".join(f"{'' if at else 'profile':8} {line}" for at, line in enumerate(lines)))
        backend.collectives.barrier()

    def _write(self, rank: int) -> str:
        """Write this rank's trace; return why there is none, or nothing."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / f"rank-{rank}.json.gz"
            with (
                tempfile.TemporaryDirectory(prefix="hvd_trainer-profile-") as folder,
                atomic_write(file) as written,
            ):
                raw = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(raw))
                with raw.open("rb") as trace, gzip.open(written, "wb", COMPRESSION) as packed:
                    shutil.copyfileobj(trace, packed)
        except Exception as error:  # such as a full disk: the other ranks wait, and the training continues
            return first_line(error)
        return ""


def _quietly() -> AbstractContextManager[None]:
    """Return a context without the profiler's own messages: of a machine without GPUs it would report an error."""
    return set_variables({} if LOG_LEVEL in os.environ else {LOG_LEVEL: "6"})


def waiting_table(numbers: Sequence[int], seconds: Any) -> list[str]:
    """Return a row for each rank: the mean of its steps, and how long it waited for the last rank.

    Args:
        numbers: of the steps.
        seconds: of their parts, shape (ranks, steps, parts).
    """
    ranks = len(seconds)
    waited = seconds[:, :, COLLECTIVE] - exchange_s(seconds)
    lasts = np.bincount(seconds[:, :, COLLECTIVE].argmin(axis=0), minlength=ranks)
    table = 1000 * np.column_stack([seconds.mean(axis=1), seconds.sum(axis=2).mean(axis=1), waited.mean(axis=1)])
    shown = sorted(np.argsort(-lasts, kind="stable")[:ROWS])
    cells = [["rank", *PHASES, "whole", "waited", "last in"]]
    cells += [[str(rank), *(f"{ms:.2f}" for ms in table[rank]), f"{lasts[rank]} steps"] for rank in shown]
    return [
        f"steps {numbers[0]} to {numbers[-1]} of {plural(ranks, 'rank')}, mean in ms (waited: of collective, for "
        "the last rank)",
        *(row[0].rjust(4) + "".join(cell.rjust(12) for cell in row[1:]) for row in cells),
    ]
