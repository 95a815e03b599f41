"""Run the trials of a tool in its folder, and record each run that has ended, so that the same command continues.

    with locked_folder(options.out, "compare") as folder:
        runner = TrialRunner(folder, limit_s=options.timeout_s)
        for trial, run in runner.run_all(runner.to_do(trials, rounds=5), describe=str):
            ...

Ctrl-C ends the running job and raises KeyboardInterrupt; what was measured before it is recorded.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.failure_reason import why_it_failed
from hvd_trainer.measure.own_files import describe_outside, in_own_folder, read_by, written_outside
from hvd_trainer.measure.stale import digests_of_read, has_changed
from hvd_trainer.measure.start import Start, launched, run_to_end
from hvd_trainer.measure.tool_folder import clear, make_inner, mark_inner, remove_inner, running
from hvd_trainer.utils.files import open_regular

RUNS = "runs.jsonl"
MAX_LINE_BYTES = 2**26
"""The largest line of runs.jsonl that is read. The learning rates of a million steps take 30 MB."""


@dataclass(frozen=True)
class RunRecord:
    """The record of one run."""

    identity: Mapping[str, Any]
    """what was run, in plain JSON"""
    round: int
    state: Literal["done", "failed", "killed"]
    """killed: by a signal or the time limit, so that it may succeed another time"""
    seconds: float
    """from start to end"""
    note: str = ""
    """why it failed, in one line"""
    figures: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    """the file with what it printed, if it failed"""
    began_at: float = 0.0
    """seconds since 1970"""
    go: float = 0.0
    """when the command began that made it, which tells those runs that ran in turn from others"""
    warnings: tuple[str, ...] = ()
    """what the command had warned of until then"""
    read: Mapping[str, str] = field(default_factory=dict)
    """the user's files that it has read, with their digests"""

    @property
    def key(self) -> str:
        return key_of(self.identity)

    def why(self, folder: Path) -> str:
        """Return why it failed, and where its output is."""
        return self.note + (f"; its output is in {folder / self.output}" if self.output else "")


def key_of(identity: Mapping[str, Any]) -> str:
    """Return the identity of a trial as text, by which its runs are found again."""
    return json.dumps(identity, sort_keys=True)


def read_runs(folder: Path, are_figures: Callable[[Mapping[str, Any]], bool] = bool) -> list[RunRecord]:
    """Return the records of all runs that have ended, in their order.

    Lines that are no records are left out, and so are runs that have read a file which has changed since.

    Args:
        folder: that of the tool; it may come from elsewhere, so that a line may hold anything.
        are_figures: whether these can be the figures of a run that is done.

    Raises:
        OptionError: the file cannot be read.
    """
    runs = []
    try:
        with suppress(FileNotFoundError), open_regular(folder / RUNS) as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                with suppress(msgspec.MsgspecError, RecursionError):
                    run = msgspec.json.decode(line, type=RunRecord)
                    if (run.state != "done" or are_figures(run.figures)) and not has_changed(run.read):
                        runs.append(run)
    except OSError as error:
        raise OptionError(f"--out {folder}: {RUNS} cannot be read: {error}") from error
    return runs


def append_run(folder: Path, run: RunRecord) -> None:
    """Append the record of a run to runs.jsonl, and wait until it is on the disk.

    JSON has no NaN and no infinity, as the loss of a training that diverged: such a figure becomes null.
    """
    file = folder / RUNS
    with file.open("ab+") as lines:
        torn = lines.tell() > 0 and (lines.seek(-1, os.SEEK_END), lines.read())[1] != b"\n"
        lines.write((b"\n" if torn else b"") + msgspec.json.encode(run, enc_hook=float) + b"\n")
        lines.flush()
        os.fsync(lines.fileno())


class Trial(Protocol):
    """A way to run a job: mostly a `MeasuredTrial`."""

    @property
    def label(self) -> str:
        """How it is called in a line about its run."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that decides on its figures, in plain JSON: trials with the same one share their runs."""

    def start(self, log: Path, /) -> Start:
        """Return how to start a run, whose log folder is `log`."""

    def read(self, log: Path, /) -> Mapping[str, Any] | None:
        """Return the figures of a run whose exit code was 0, in plain JSON; None if it did not come to its end.

        An exception, such as an OptionError, is passed on, and the run is not recorded.
        """


P = TypeVar("P")
Disturb = Callable[["subprocess.Popen[bytes]"], Mapping[str, Any]]
"""Takes the process of a run's launcher, and waits for the run's end, which it may bring about."""
T = TypeVar("T", bound=Trial)


def in_rounds(plan: Sequence[P], rounds: int) -> Iterator[tuple[int, P]]:
    """Yield (round, trial): each trial once in each round, forwards in one and backwards in the next.

    So each has nearly the same mean position in time, and a drift of the machine favours none.
    """
    for number in range(1, rounds + 1):
        for trial in plan if number % 2 else reversed(plan):
            yield number, trial


class TrialRunner:
    """Runs trials one after the other; a run that came to its end in this folder is not repeated.

    Args:
        folder: of the tool, which it has locked.
        limit_s: after which a run is killed, in seconds.
        limit_option: the tool's option for it.
        budget_s: seconds from now on after which no run is left running (`--budget-s`); None: no limit.
        resume: continue from the runs in the folder; False: remove them.
        are_figures: whether these, from a file, can be the figures of a run that is done.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_s: float = math.inf,
        limit_option: str = "--timeout-s",
        budget_s: float | None = None,
        resume: bool = True,
        are_figures: Callable[[Mapping[str, Any]], bool] = bool,
    ) -> None:
        self.folder = folder
        self._limit_s, self._limit_option = limit_s, limit_option
        self._deadline = math.inf if budget_s is None else time.monotonic() + budget_s
        if not resume:
            (folder / RUNS).unlink(missing_ok=True)
            remove_inner(folder / "failed")
        self._go = time.time()
        self.warnings: list[str] = []
        """what this command has warned of"""
        self.last = {(run.key, run.round): run for run in read_runs(folder, are_figures)}
        """the last run of each trial and round, by the trial's key"""

    def warn(self, text: str) -> None:
        """Print a warning once, and record it with the runs to come."""
        if text not in self.warnings:
            self.warnings.append(text)
            print(f"warning: {text}", file=sys.stderr, flush=True)

    @property
    def left_s(self) -> float:
        """Seconds that are left of the budget."""
        return self._deadline - time.monotonic()

    def is_done(self, identity: Mapping[str, Any], round_: int) -> bool:
        """Return whether a run of the trial with this identity came to its end, now or before."""
        run = self.last.get((key_of(identity), round_))
        return run is not None and run.state == "done"

    def has_failed(self, trial: Trial) -> bool:
        """Return whether a run of the trial failed by itself, now or before, and so would fail again."""
        key = key_of(trial.identity)
        return any(run.key == key and run.state == "failed" for run in self.last.values())

    def to_do(self, trials: Sequence[T], rounds: int, *, retry_failed: bool = True) -> list[tuple[int, T]]:
        """Return (round, trial) of the runs that are not done yet, in the order of `in_rounds`."""
        left = [trial for trial in trials if retry_failed or not self.has_failed(trial)]
        return [(n, trial) for n, trial in in_rounds(left, rounds) if not self.is_done(trial.identity, n)]

    def run_all(
        self, plan: Sequence[tuple[int, T]], *, describe: Callable[[RunRecord], str]
    ) -> Iterator[tuple[T, RunRecord]]:
        """Run (round, trial) after (round, trial), print a line about each, and yield it with its record.

        A trial that has failed is not run in later rounds.
        """
        given_up: set[str] = set()
        for count, (number, trial) in enumerate(plan, 1):
            key = key_of(trial.identity)
            if key in given_up:
                continue
            run = self.run(trial, number)
            if run.state != "done":
                given_up.add(key)
            said = describe(run) if run.state == "done" else f"{run.state}: {run.note}"
            left = self._time_left(
                [key for _, later in plan[count:] if (key := key_of(later.identity)) not in given_up]
            )
            print(f"{count}/{len(plan)}  round {number}, {trial.label}: {said}{left}", flush=True)
            yield trial, run

    def run(
        self,
        trial: Trial,
        round_: int = 1,
        *,
        keep: Path | None = None,
        place: Path | None = None,
        disturb: Disturb | None = None,
    ) -> RunRecord:
        """Run a trial as a user would start it, end all its processes, record it, and return the record.

        A run that is done in the folder is taken from there.

        Args:
            round_: counted from 1.
            keep: where the run's log folder is moved, however the run ends.
            place: a folder inside the tool's, where the run finds what earlier ones have saved; None: it has a
                working folder of its own.
            disturb: returns the figures of a run that it has killed; none of one that has ended by itself.
        """
        if self.is_done(trial.identity, round_):
            return self.last[key_of(trial.identity), round_]
        clear(self.folder)
        place = make_inner(place or running(self.folder))
        limit, option = self._limit_s, self._limit_option
        if self.left_s < limit:
            limit, option = max(round(self.left_s, 1), 1.0), "--budget-s"
        began_at, began, log = time.time(), time.monotonic(), place / "log"
        shutil.rmtree(log, ignore_errors=True)  # of an earlier run in this place
        for name in ("output", "error.json"):
            (place / name).unlink(missing_ok=True)
        try:
            code, killed = self._run_in(place, trial, limit, disturb)
            seconds = round(time.monotonic() - began, 2)
            figures = trial.read(log) if code == 0 and not killed else None
        finally:
            if keep is not None and log.exists():
                remove_inner(keep)
                mark_inner(log, like=self.folder)
                log.rename(keep)
        state: Literal["done", "failed", "killed"] = "done"
        note = ""
        if killed:
            state = "killed"
        elif code is None:
            state, note = "killed", f"had not ended after {limit:g} s ({option})"
        elif code < 0:
            state, note = "killed", f"killed by signal {-code}"
        elif figures is None:
            state, note = "failed", why_it_failed(place, code)
        run = RunRecord(
            trial.identity,
            round_,
            state,
            seconds,
            note,
            killed or figures or {},
            output="" if killed or state == "done" else self._keep_output(place),
            began_at=began_at,
            go=self._go,
            warnings=tuple(self.warnings),
            read=digests_of_read(read_by(place)),
        )
        append_run(self.folder, run)
        self.last[run.key, round_] = run
        clear(self.folder)
        return run

    def _run_in(
        self, place: Path, trial: Trial, limit_s: float, disturb: Disturb | None
    ) -> tuple[int | None, Mapping[str, Any]]:
        """Run a trial in a folder; return its exit code, None past the limit, and the figures of a killed run."""
        start, output = in_own_folder(trial.start(place / "log"), place), place / "output"
        warn = partial(self._warn_of_outside, place)
        if disturb is None:
            return run_to_end(start, self.folder, output, limit_s=limit_s, meanwhile=warn), {}
        with launched(start, self.folder, output) as process:
            killed, code = disturb(process), process.poll()
        warn()
        return code, killed

    def _warn_of_outside(self, place: Path) -> None:
        """Warn of what the present run writes outside of its place, once for each path."""
        for path in written_outside(place):
            self.warn(describe_outside(path))

    def _keep_output(self, place: Path) -> str:
        """Copy what the present run has printed to the folder of failed runs; return the file's relative path."""
        records = self.folder / RUNS
        number = len(records.read_bytes().splitlines()) if records.exists() else 0
        kept = Path("failed", f"{number + 1}.txt")
        make_inner((self.folder / kept).parent)
        shutil.copy(place / "output", self.folder / kept)
        return str(kept)

    def _time_left(self, keys: Sequence[str]) -> str:
        """Return `, about 3 min left` for runs to come, by the keys of their trials, from how long others took."""
        runs = self.last.values()
        # As long as the median of a trial's own runs, or else of all.
        took = {
            key: [run.seconds for run in runs if run.key == key] or [run.seconds for run in runs] for key in keys
        }
        left = sum(median(took[key]) for key in keys)
        if not keys:
            return ""
        return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
