"""Run the trials of a tool in its folder, and record each run that has ended, so that the same command goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hvd_trainer.tools.runner.measured import Start
from hvd_trainer.tools.runner.runs import RunRecord, append_run, key_of, log_dir, read_runs, run_once


class TrialRunner:
    """Runs trials one after the other; a run that came to its end in this folder is not repeated.

    Args:
        folder: of the tool, which it has locked.
        limit_s: after which a run is killed, in seconds.
        are_figures: whether these, from a file, can be the figures of a run that is done.
    """

    def __init__(
        self, folder: Path, *, limit_s: float, are_figures: Callable[[Mapping[str, Any]], bool] = bool
    ) -> None:
        self.folder, self._limit_s = folder, limit_s
        self.last = {(run.key, run.round): run for run in read_runs(folder, are_figures)}
        """the last run of each trial and round"""

    def is_done(self, key: str, round_: int) -> bool:
        """Return whether a run came to its end, now or before."""
        run = self.last.get((key, round_))
        return run is not None and run.state == "done"

    def run(
        self,
        start: Callable[[Path], Start],
        identity: Mapping[str, Any],
        round_: int,
        *,
        threads: int | None,
        read: Callable[[Path], Mapping[str, Any] | None],
        check: Callable[[RunRecord], None] = lambda run: None,
    ) -> RunRecord:
        """Run a trial, or take its run from the folder, and return the record.

        Args:
            start: how to start it, from its log folder.
            identity: all that decides on its figures.
            round_: counted from 1.
            threads, read: as in `run_once`.
            check: raises if the run must not be recorded.
        """
        place = key_of(identity), round_
        if not self.is_done(*place):
            command, variables = start(log_dir(self.folder))
            run = run_once(
                command,
                self.folder,
                identity,
                round_,
                threads=threads,
                limit_s=self._limit_s,
                read=read,
                variables=variables,
            )
            check(run)
            append_run(self.folder, run)
            self.last[place] = run
        return self.last[place]

    def time_left(self, keys: Sequence[str]) -> str:
        """Return `, about 3 min left` for runs to come, by the keys of their trials, from how long others took."""
        if not keys:
            return ""
        seconds: dict[str, list[float]] = {}
        for run in self.last.values():
            seconds.setdefault(run.key, []).append(run.seconds)
        usual = [value for values in seconds.values() for value in values]
        left = sum(median(seconds.get(key, usual)) for key in keys)
        return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
