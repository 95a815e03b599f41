"""`python -m hvd_trainer show LOG_DIR...`: a page of one or several runs, by what they keep in their log folders.

It is drawn from metrics.jsonl, config.yaml, and the times of checkpoints and failure reports; nothing is started.
"""

from __future__ import annotations

import json
import os
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import msgspec
import yaml
from tyro.conf import Positional, arg

from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.chart import Style, draw_lines
from hvd_trainer.measure.formats import check_installed, number
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.report import Picture, Report, Table, Verdict
from hvd_trainer.measure.tool_folder import locked_folder
from hvd_trainer.observe.run_folder import CONFIG, METRICS
from hvd_trainer.utils.files import open_regular
from hvd_trainer.utils.text import COMMAND, plural

BEST: Mapping[str, Callable[[Iterable[float]], float]] = {"val_accuracy": max, "val_loss": min, "train_loss": min}
"""Figures by which runs are compared, the first that all of them have, and which is the best."""
MAX_TOGETHER = 3
"""Runs whose training and validation figures are drawn in one chart."""
FAILURES, VALIDATION = "failures", "validation"
KINDS = {"train": "training", "val": VALIDATION}
"""Words for the prefixes of figures."""
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables that say that there is a browser to open."""


@dataclass(frozen=True)
class Options:
    """Show one or several runs as a page: losses and metrics, speed, learning rate, memory, saves and restarts."""

    log_dirs: Annotated[Positional[tuple[Path, ...]], arg(metavar="LOG_DIR...", help_behavior_hint="")]
    """log folders of runs"""
    out: Path = Path("runs/show")
    """folder for show.html, .md and .json"""


class Line(msgspec.Struct):
    """The keys that every line of metrics.jsonl has, beside its figures; times are seconds since 1970."""

    event: str
    step: int
    time: float
    started_at: float


@dataclass(frozen=True)
class Run:
    """What a run has kept."""

    name: str
    folder: Path
    records: Sequence[Mapping[str, Any]]
    """of metrics.jsonl; at least one"""
    options: Mapping[str, Any]
    saves: Sequence[float]
    failures: Sequence[float]
    """times of checkpoints and of failure reports"""

    @classmethod
    def read(cls, folder: Path, name: str) -> Run:
        """Return the run in a log folder, by its name for people.

        Raises:
            OptionError: there is none.
        """
        records: list[Any] = []
        options: dict[str, Any] = {}
        with suppress(OSError), open_regular(folder / METRICS) as lines:
            for line in lines:
                with suppress(ValueError, RecursionError, msgspec.ValidationError):
                    record = json.loads(line)  # which takes NaN, too
                    msgspec.convert(record, Line)
                    records.append(record)
        if not records:
            raise OptionError(f"{folder} has no {METRICS} with a step or an epoch: name a run's --log-dir")
        with suppress(OSError, ValueError, yaml.YAMLError, msgspec.ValidationError):
            options = msgspec.convert(yaml.safe_load((folder / CONFIG).read_text()), dict[str, Any])
        return cls(name, folder, records, options, *(_times(folder / kept) for kept in ("checkpoints", FAILURES)))

    @cached_property
    def last(self) -> Mapping[str, Any]:
        """All figures, the newest of each."""
        return {name: value for record in self.records for name, value in record.items()}

    @property
    def starts(self) -> list[float]:
        """The times of the start and of each restart."""
        return sorted({record["started_at"] for record in self.records})

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return a figure by steps: of the steps that have it, or else of evaluations and epochs."""
        for events in (("step",), ("evaluation", "epoch")):
            rows = [row for row in self.records if row["event"] in events]
            if pairs := [(row["step"], row[name]) for row in rows if isinstance(row.get(name), float)]:
                return pairs
        return []

    def progress(self) -> list[tuple[float, float]]:
        """Return steps by minutes since the start."""
        return [((row["time"] - self.starts[0]) / 60, row["step"]) for row in self.records]

    def marks(self) -> Iterator[tuple[float, str]]:
        """Yield what happened, by minutes since the start: restarts, saves that are still kept, and failures."""
        for text, times in (("failure", self.failures), ("restart", self.starts[1:]), ("save", self.saves)):
            yield from (((moment - self.starts[0]) / 60, text) for moment in times)


def _times(folder: Path) -> list[float]:
    return sorted(path.stat().st_mtime for path in folder.iterdir()) if folder.is_dir() else []


def verdict(run: Run) -> Verdict:
    """Say what came of a run."""
    kinds = [
        name for name in run.last if name.startswith(("val_", "train_")) and isinstance(run.last[name], float)
    ]
    has_ended = run.records[-1]["event"] == "end"
    steps = f"{plural(run.last['step'], 'step')}{'' if has_ended else ' so far'}"
    figures = [f"{name.replace('_', ' ')} {run.last[name]:.4g}" for name in sorted(kinds)]
    text = f"{run.name}: {', '.join([steps, *figures])}."
    failed = (
        [f"It failed {plural(len(run.failures), 'time')}: see {run.folder / FAILURES}."] if run.failures else []
    )
    if not has_ended:
        return Verdict(text, "failed" if failed else "unsure", failed, badge="FAILED" if failed else "NOT ENDED")
    shown = next((name for name in ("val_accuracy", "val_loss", "train_loss") if name in kinds), "step")
    return Verdict(text, "sure", failed, badge=f"{shown.replace('_', ' ')} {run.last[shown]:.4g}".upper())


def compare(runs: Sequence[Run]) -> Iterator[Verdict]:
    """Say which of several runs has the best figure that all have: of validation, where there is one."""
    name = next((n for n in BEST if all(isinstance(run.last.get(n), float) for run in runs)), None)
    if len(runs) == 1 or name is None:
        return
    ranked = sorted(runs, key=lambda run: run.last[name], reverse=BEST[name] is max)
    best, *others = ranked
    figures = ", ".join(f"{run.last[name]:.4g} of {run.name}" for run in others)
    kind = f"{'highest' if BEST[name] is max else 'lowest'} {name.replace('_', ' ')}"
    failed = [run.name for run in runs if run.failures]
    more = [f"Failed: {', '.join(failed)}."] if failed else []
    same = all(run.last[name] == best.last[name] for run in runs)
    text = f"All {len(runs)} have the same {name.replace('_', ' ')}, {best.last[name]:.4g}."
    if same:
        kind = f"the same {name.replace('_', ' ')}"
    else:
        text = f"{best.name} has the {kind}, {best.last[name]:.4g}, beside {figures}."
    yield Verdict(text, "failed" if failed else "sure", more, badge=f"{kind} {best.last[name]:.4g}".upper())


def pictures(runs: Sequence[Run]) -> Iterator[Picture]:
    """Yield a chart for each figure, and steps by time."""
    names = list(dict.fromkeys(name for run in runs for record in run.records for name in record))
    figures = [name for name in names if name.startswith(("train_", "val_"))]
    charts: dict[str, list[str]] = {}
    for name in figures:
        title = name.partition("_")[2] if len(runs) <= MAX_TOGETHER else name.replace("_", " ")
        charts.setdefault(title, []).append(name)
    charts |= {"samples per second": ["samples_per_s"], "learning rate": ["lr"]}
    for title, shown in charts.items():
        lines, styles = {}, {}
        for colour, run in enumerate(runs):
            for name in shown:
                kind = KINDS.get(name.partition("_")[0], "")
                line = ", ".join([kind] * (len(shown) > 1) + [run.name] * (len(runs) > 1))
                lines[line] = run.curve(name)
                styles[line] = Style(colour, "--" if kind == VALIDATION else "-")
        text = "By optimizer steps." + (" Solid: training; dashed: validation." if len(shown) > 1 else "")
        yield from draw_lines(title, text, lines, styles=styles, across="step")
    # The rare ones first, which are named where several are near each other.
    marks = sorted((mark for run in runs for mark in run.marks()), key=lambda mark: mark[1] == "save")
    text = "Dotted: restarts, failures, and the saves that are still kept."
    lines = {run.name: run.progress() for run in runs}
    yield from draw_lines("steps by time", text, lines, across="minutes", up="step", marks=marks)


def tables(runs: Sequence[Run]) -> Iterator[Table]:
    """Yield the last figures of each run, and the options that differ."""
    figures = (name for run in runs for name, value in run.last.items() if _is_figure(value))
    names = [name for name in dict.fromkeys(figures) if name not in ("time", "started_at")]
    shown = [[run.last.get(name) for run in runs] for name in names]
    rows = [
        (name, *(number(n) if _is_figure(n) else "-" for n in row)) for name, row in zip(names, shown, strict=True)
    ]
    yield Table("Last figures", ("", *(run.name for run in runs)), rows)
    options = dict.fromkeys(name for run in runs for name in run.options)
    cells = [(name, *(str(run.options.get(name, "-")) for run in runs)) for name in options]
    differ = [row for row in cells if len({*row[1:]}) > 1]
    if differ:
        yield Table("Options that differ", ("", *(run.name for run in runs)), differ, range(len(runs) + 1), True)


def _is_figure(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def main(argv: Sequence[str]) -> int:
    """Write the page, open it where there is a browser, and return the exit code.

    Raises:
        OptionError: a folder has no run.
    """
    ran, options = Ran.now(f"{COMMAND} show", argv), read_words(Options, argv, program=f"{COMMAND} show")
    check_installed()
    if not options.log_dirs:
        raise OptionError(f"show draws runs by their log folders, and none is named. Type: {COMMAND} show LOG_DIR")
    folders = [str(folder) for folder in options.log_dirs]
    above = os.path.commonpath([os.path.abspath(folder) for folder in folders])
    names = [os.path.relpath(folder, above) for folder in folders] if len({*folders}) > 1 else folders
    runs = [Run.read(folder, name) for folder, name in zip(options.log_dirs, names, strict=True)]
    report = Report(
        ran=ran,
        verdicts=[*compare(runs), *map(verdict, runs)],
        pictures=[*pictures(runs)],
        tables=[*tables(runs)],
        data={"runs": {run.name: dict(run.last) for run in runs}},
    )
    report.show()
    with locked_folder(options.out, "show") as folder:
        report.write(folder, "show")
        if any(os.environ.get(name) for name in DISPLAYS):
            webbrowser.open((folder / "show.html").resolve().as_uri())
    return 0
