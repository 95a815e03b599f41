"""A comparison to read: tables in the terminal, comparison.json, comparison.md and the page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from hvd_trainer.tools.compare.page import write_page
from hvd_trainer.tools.compare.result import Comparison, Measured
from hvd_trainer.tools.runner.formats import console, milliseconds, number, percent
from hvd_trainer.utils.text import plural

NAME = "comparison"


class Column(NamedTuple):
    """A figure, and how it is shown."""

    title: str
    figure: Callable[[Comparison, Measured], Any]
    show: Callable[[Any], str]


def _of(name: str) -> Callable[[Comparison, Measured], Any]:
    return lambda _, its: its.median(name)


def _part(name: str) -> Callable[[Comparison, Measured], Any]:
    return lambda _, its: its.part(name)


def _rates(its: Measured) -> list[float]:
    return list(its.by_round("samples_per_s").values())


def _per_rank(_: Comparison, its: Measured) -> float | None:
    rate = its.median("samples_per_s")
    return None if rate is None else rate / its.point.ranks


SPEED = (
    Column("samples/s", _of("samples_per_s"), number),
    Column("lowest", lambda _, its: min(_rates(its), default=None), number),
    Column("highest", lambda _, its: max(_rates(its), default=None), number),
    Column("per rank", _per_rank, number),
    Column("speed-up", Comparison.speed_up, "{:.2f}".format),
    Column("efficiency", Comparison.efficiency, "{:.0%}".format),
)
STEP = (
    Column("step, ms", _of("step_p50_s"), milliseconds),
    Column("p95", _of("step_p95_s"), milliseconds),
    Column("data", _part("data"), milliseconds),
    Column("forward", _part("forward"), milliseconds),
    Column("backward", _part("backward"), milliseconds),
    Column("exchange", _part("exchange"), milliseconds),
    Column("straggler", _part("straggler"), milliseconds),
    Column("update", _part("step"), milliseconds),
)
RESULT = (
    Column("start-up, s", lambda _, its: its.startup_s, "{:.1f}".format),
    Column("peak, MB", _of("peak_memory_mb"), number),
    Column("train loss", _of("train_loss"), "{:.6f}".format),
    Column("test loss", _of("test_loss"), "{:.6f}".format),
    Column("accuracy", _of("test_accuracy"), percent),
    Column("weights", lambda _, its: its.weights, lambda text: text[:12]),
)
TABLES = (
    ("Speed", SPEED),
    ("Where a step's time goes, ms: exchange and straggler are what other ranks are waited for", STEP),
    ("What came of it", RESULT),
)


def cells(comparison: Comparison, columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Titles, and one row per point; columns in which nobody has a figure are left out."""
    figures = [[column.figure(comparison, its) for its in comparison.measured] for column in columns]
    used = [n for n, values in enumerate(figures) if any(value is not None for value in values)]
    rows = []
    for place, its in enumerate(comparison.measured):
        shown = ["-" if (v := figures[n][place]) is None else columns[n].show(v) for n in used]
        rows.append([its.point.contestant.name, str(its.point.ranks), *shown])
    return ["", "ranks", *(columns[n].title for n in used)], rows


def heading(comparison: Comparison) -> str:
    """The job, as it was typed."""
    return shlex.join(comparison.job)


def conditions(comparison: Comparison) -> list[str]:
    """What the figures hold for, a sentence each."""
    machine, points = comparison.machine, [its.point for its in comparison.measured]
    batches = {
        its.point.ranks: run.figures["work"]["global_batch_size"]
        for its in comparison.measured
        for run in its.runs.values()
        if "global_batch_size" in run.figures["work"]
    }
    scaling = (
        "Strong scaling: the global batch is the same" if comparison.strong else "Weak scaling: each rank's batch"
    )
    if not comparison.strong:
        scaling += " is the same"
    sizes = ", ".join(f"{size:,} on {plural(ranks, 'rank')}" for ranks, size in sorted(batches.items()))
    return [
        f"{scaling} (global batch: {sizes}).",
        f"{plural(points[0].threads, 'CPU thread')} per rank; the first "
        f"{plural(points[0].setting['warmup_steps'], 'step')} of each run do not count; medians over the rounds.",
        "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
    ]


def troubles(comparison: Comparison) -> list[str]:
    """What has no figures, and why."""
    return [f"{its.point.label}: {its.note}" for its in comparison.measured if its.note]


def show(comparison: Comparison, folder: Path) -> None:
    """Prints the tables and what they say, and writes all files."""
    _print(comparison)
    files = [folder / f"{NAME}.{kind}" for kind in ("json", "md", "html")]
    files[0].write_text(json.dumps(as_json(comparison), indent=1) + "\n")
    files[1].write_text(markdown(comparison))
    tables = [(title, *cells(comparison, columns)) for title, columns in TABLES]
    write_page(
        comparison,
        files[2],
        heading=heading(comparison),
        tables=tables,
        conditions=conditions(comparison),
        troubles=troubles(comparison),
    )
    print("written: " + ", ".join(map(str, files)), flush=True)


def _print(comparison: Comparison) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = console()
    for title, columns in TABLES:
        titles, rows = cells(comparison, columns)
        table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
        for number_, name in enumerate(titles):
            table.add_column(name, justify="left" if number_ == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        out.print(table)
    for text in [*comparison.verdicts(), *conditions(comparison), *troubles(comparison)]:
        out.print(text, markup=False)


def markdown(comparison: Comparison) -> str:
    """Verdicts and tables."""
    parts = [f"# `{heading(comparison)}`", *comparison.verdicts()]
    for title, columns in TABLES:
        titles, rows = cells(comparison, columns)
        rule = [":--", *("--:" for _ in titles[1:])]
        lines = [f"| {' | '.join(cells_)} |" for cells_ in (titles, rule, *rows)]
        parts += [f"**{title}**", "\n".join(lines)]
    return "\n\n".join([*parts, *conditions(comparison), *troubles(comparison)]) + "\n"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything: verdicts, medians by point, intervals, and each run."""
    return {
        "job": list(comparison.job),
        "scaling": "strong" if comparison.strong else "weak",
        "machine": dict(comparison.machine),
        "verdicts": comparison.verdicts(),
        "points": [
            {
                **its.point.identity,
                "note": its.note,
                **{column.title: column.figure(comparison, its) for _, columns in TABLES for column in columns},
            }
            for its in comparison.measured
        ],
        "pairs": [
            {
                "ranks": pair.one.point.ranks,
                "one": pair.one.point.contestant.name,
                "other": pair.other.point.contestant.name,
                **asdict(pair.speed),
            }
            for pair in comparison.pairs
        ],
        "runs": [asdict(run) for its in comparison.measured for run in its.runs.values()],
    }
