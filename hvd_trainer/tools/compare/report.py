"""The reports of a comparison: tables in the terminal, comparison.json, .csv, .md and .html, and heat maps."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from hvd_trainer.tools.compare import heat_map
from hvd_trainer.tools.compare.plots import pictures
from hvd_trainer.tools.compare.result import Comparison, TrialResult
from hvd_trainer.tools.compare.variants import NOT_APPLICABLE
from hvd_trainer.tools.runner.formats import console, make_table, milliseconds, more_or_less, number, percent
from hvd_trainer.utils.text import plural

NAME = "comparison"
PAGE = Path(__file__).with_name("page.html.j2")
"""The template of the page: one file, without scripts and without anything from the network."""
MAX_NAMED = 3
"""Trials that are named with a note that many have."""


class Column(NamedTuple):
    """A figure, its names in tables and in comparison.csv, and how it is shown."""

    title: str
    name: str
    figure: Callable[[Comparison, TrialResult], Any]
    show: Callable[[Any], str]


class Table(NamedTuple):
    """Columns with a title."""

    title: str
    columns: Sequence[Column]
    whole: bool = False
    """whether trials without figures have a row, too"""
    needs: frozenset[str] = frozenset()
    """columns without one of which the table is left out"""


def _median(name: str) -> Callable[[Comparison, TrialResult], Any]:
    return lambda _, its: its.median(name)


def _first(name: str) -> Callable[[Comparison, TrialResult], Any]:
    return lambda _, its: its.first(name)


def _part(name: str) -> Callable[[Comparison, TrialResult], Any]:
    return lambda _, its: its.part(name)


def _extreme(which: Callable[..., Any]) -> Callable[[Comparison, TrialResult], Any]:
    return lambda _, its: which(its.by_round("samples_per_s").values(), default=None)


def _per_rank(_: Comparison, its: TrialResult) -> float | None:
    rate = its.median("samples_per_s")
    return None if rate is None else rate / its.trial.ranks


def _steps_per_s(_: Comparison, its: TrialResult) -> float | None:
    """Return the speed of a script whose samples are not seen."""
    step_s = its.median("step_s")
    return None if step_s is None or its.median("samples_per_s") is not None else 1 / step_s


def _state(comparison: Comparison, its: TrialResult) -> str | None:
    return None if all(other.state == "done" for other in comparison.results) else its.state


def _predicted(comparison: Comparison, its: TrialResult) -> float | None:
    prediction = comparison.predictions.get(its.trial.key)
    return None if prediction is None or comparison.deviation(its) is None else prediction.step_s


def _to_first(difference: float) -> str:
    return "same bits" if difference == 0 else f"{difference:+.1e}"


TABLES = (
    Table(
        "Speed",
        (
            Column("samples/s", "samples_per_s", _median("samples_per_s"), number),
            Column("steps/s", "steps_per_s", _steps_per_s, number),
            Column("lowest", "lowest", _extreme(min), number),
            Column("highest", "highest", _extreme(max), number),
            Column("tokens/s", "tokens_per_s", _median("tokens_per_s"), number),
            Column("per rank", "per_rank", _per_rank, number),
            Column("speed-up", "speed_up", Comparison.speed_up, "{:.2f}".format),
            Column("efficiency", "efficiency", Comparison.efficiency, "{:.0%}".format),
            Column("state", "state", _state, str),
        ),
        whole=True,
    ),
    Table(
        "Where a mean step's time goes, ms: exchange and straggler are what other ranks are waited for",
        (
            Column("median step", "step_p50_s", _median("step_p50_s"), milliseconds),
            Column("p95", "step_p95_s", _median("step_p95_s"), milliseconds),
            Column("data", "data_s", _part("data"), milliseconds),
            Column("forward", "forward_s", _part("forward"), milliseconds),
            Column("backward", "backward_s", _part("backward"), milliseconds),
            Column("exchange", "exchange_s", _part("exchange"), milliseconds),
            Column("straggler", "straggler_s", _part("straggler"), milliseconds),
            Column("update", "update_s", _part("step"), milliseconds),
        ),
    ),
    Table(
        "The step beside its prediction by the formula of the pipeline, ms",
        (
            Column("mean step", "step_s", _median("step_s"), milliseconds),
            Column("predicted", "predicted_step_s", _predicted, milliseconds),
            Column("off by", "off", Comparison.deviation, more_or_less),
            Column("bubble", "bubble", _median("bubble"), percent),
            Column("by formula", "bubble_formula", Comparison.bubble_formula, percent),
        ),
        needs=frozenset(("predicted_step_s", "bubble_formula")),
    ),
    Table(
        "What came of it",
        (
            Column("start-up, s", "startup_s", lambda _, its: its.startup_s, "{:.1f}".format),
            Column("peak, MB", "peak_memory_mb", _median("peak_memory_mb"), number),
            Column("before, MB", "base_memory_mb", _median("base_memory_mb"), number),
            Column("train loss", "train_loss", _first("train_loss"), "{:.6f}".format),
            Column("last loss", "last_loss", _first("last_loss"), "{:.6f}".format),
            Column("to the first", "loss_to_first", Comparison.loss_to_first, _to_first),
            Column("test loss", "test_loss", _first("test_loss"), "{:.6f}".format),
            Column("accuracy", "test_accuracy", _first("test_accuracy"), percent),
            Column("weights", "weights", lambda _, its: its.weights, lambda text: text[:12]),
        ),
    ),
)


class Cells(NamedTuple):
    """A table as text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def figures_of(comparison: Comparison, its: TrialResult) -> dict[str, Any]:
    """Return the figures of a trial by the names of their columns; None for those that it has not."""
    columns = [column for table in TABLES for column in table.columns if column.name != "state"]
    return {column.name: column.figure(comparison, its) for column in columns}


def tables(comparison: Comparison) -> list[Cells]:
    """Return all tables; columns in which no trial has a figure are left out, and tables without columns."""
    axes = [axis for axis in comparison.varied if axis.varies]
    figures = [{**figures_of(comparison, its), "state": _state(comparison, its)} for its in comparison.results]
    found = []
    for table in TABLES:
        used = [column for column in table.columns if any(its[column.name] is not None for its in figures)]
        if not used or (table.needs and not table.needs & {column.name for column in used}):
            continue
        rows = []
        for its, values in zip(comparison.results, figures, strict=True):
            cells = ["-" if values[c.name] is None else c.show(values[c.name]) for c in used]
            if table.whole or set(cells) != {"-"}:
                place = (its.trial.values.get(axis.name, NOT_APPLICABLE) for axis in axes)
                rows.append([its.trial.entry.name, str(its.trial.ranks), *place, *cells])
        titles = ["", "ranks", *(axis.label for axis in axes), *(column.title for column in used)]
        found.append(Cells(table.title, titles, rows))
    return found


def heading(comparison: Comparison) -> str:
    """Return the job as it was typed, with the options that are varied."""
    varied = [f"{axis.label} {', '.join(axis.values)}" for axis in comparison.varied]
    return "; ".join([shlex.join(comparison.job), *varied])


def conditions(comparison: Comparison) -> list[str]:
    """Return the conditions under which the figures hold, a sentence each."""
    machine, trials = comparison.machine, [its.trial for its in comparison.results]
    scaling = "Strong scaling: the global batch is" if comparison.strong else "Weak scaling: each rank's batch is"
    batches = {its.trial.ranks: size for its in comparison.results if (size := its.global_batch_size) is not None}
    sizes = ", ".join(f"{size:,} on {plural(ranks, 'rank')}" for ranks, size in sorted(batches.items()))
    warmup_steps = plural(trials[0].conditions["warmup_steps"], "step")
    return [
        f"{scaling} the same."
        if comparison.varied or not sizes
        else f"{scaling} the same (global batch: {sizes}).",
        f"{plural(trials[0].threads, 'CPU thread')} per rank; the first {warmup_steps} of each run do "
        f"not count; medians over the rounds.",
        *comparison.unseen,
        "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
    ]


def troubles(comparison: Comparison) -> list[str]:
    """Return the trials that lack figures, and why; those with the same reason in one line."""
    labels: dict[str, list[str]] = {}
    for its in comparison.results:
        if its.note:
            note = f"impossible: {its.note}" if its.state == "impossible" else its.note
            labels.setdefault(note, []).append(its.trial.label)
    more = {note: f" and {len(its) - MAX_NAMED} more" for note, its in labels.items() if len(its) > MAX_NAMED}
    return [f"{'; '.join(its[:MAX_NAMED])}{more.get(note, '')}: {note}" for note, its in labels.items()]


def show(comparison: Comparison, folder: Path) -> None:
    """Print the tables and the verdicts, and write all files."""
    _print(comparison)
    files = {kind: folder / f"{NAME}.{kind}" for kind in ("json", "csv", "md", "html")}
    files["json"].write_text(json.dumps(as_json(comparison), indent=1) + "\n")
    write_csv(comparison, files["csv"])
    files["md"].write_text(markdown(comparison))
    maps = [
        path
        for quantity in heat_map.QUANTITIES
        for path in heat_map.write(comparison, quantity, heading(comparison), folder)
    ]
    files["html"].write_text(page(comparison))
    print("written: " + ", ".join(map(str, [*files.values(), *maps])), flush=True)


def _print(comparison: Comparison) -> None:
    out = console()
    for cells in tables(comparison):
        out.print(make_table(*cells))
    for text in [
        *comparison.verdicts(),
        *comparison.deviations(),
        *conditions(comparison),
        *troubles(comparison),
    ]:
        out.print(text, markup=False)


def markdown(comparison: Comparison) -> str:
    """Return verdicts and tables as Markdown."""
    parts = [f"# `{heading(comparison)}`", *comparison.verdicts()]
    for title, columns, rows in tables(comparison):
        rule = [":--", *("--:" for _ in columns[1:])]
        lines = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]
        parts += [f"**{title}**", "\n".join(lines)]
    if deviations := comparison.deviations():
        parts.append("\n".join(deviations))
    return "\n\n".join([*parts, *conditions(comparison), *troubles(comparison)]) + "\n"


def page(comparison: Comparison) -> str:
    """Return verdicts, pictures and tables as a page."""
    from jinja2 import Environment

    # What came from the command line or from a failed run is text, and never a part of the page.
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE.read_text())
    rendered = template.render(
        heading=heading(comparison),
        pairs=comparison.pairs,
        tables=tables(comparison),
        pictures=pictures(comparison),
        conditions=conditions(comparison),
        deviations=comparison.deviations(),
        troubles=troubles(comparison),
    )
    return rendered + "\n"


def write_csv(comparison: Comparison, file: Path) -> None:
    """Write a line per trial: its place on each axis, its state, all figures in full, why it has none."""
    rows = []
    for its in comparison.results:
        prediction = comparison.predictions.get(its.trial.key)
        rows.append(
            {
                **{axis.name: its.trial.values.get(axis.name, NOT_APPLICABLE) for axis in comparison.axes},
                "state": its.state,
                "runs": len(its.runs),
                "global_batch_size": its.global_batch_size,
                **figures_of(comparison, its),
                "predicted_from": "" if prediction is None else prediction.base.label,
                "note": its.note,
            }
        )
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return everything: verdicts, medians of each trial, intervals, and each run."""
    return {
        "job": list(comparison.job),
        "varied": {axis.name: list(axis.values) for axis in comparison.varied},
        "scaling": "strong" if comparison.strong else "weak",
        "machine": dict(comparison.machine),
        "verdicts": comparison.verdicts(),
        "trials": [
            {
                **its.trial.identity,
                "values": dict(its.trial.variant.values),
                "state": its.state,
                "note": its.note,
                **figures_of(comparison, its),
            }
            for its in comparison.results
        ],
        "pairs": [
            {
                "ranks": pair.one.trial.ranks,
                "values": dict(pair.one.trial.variant.values),
                "one": pair.one.trial.entry.name,
                "other": pair.other.trial.entry.name,
                **asdict(pair.speed),
            }
            for pair in comparison.pairs
        ],
        "runs": [asdict(run) for its in comparison.results for run in its.runs.values()],
    }
