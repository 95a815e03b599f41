"""The reports of a comparison: tables in the terminal, comparison.json, .csv, .md and .html, and heat maps."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from hvd_trainer.measure.formats import (
    console,
    make_table,
    milliseconds,
    more_or_less,
    number,
    percent,
    render_page,
    to_json,
)
from hvd_trainer.tools.compare import heat_map
from hvd_trainer.tools.compare.plots import Picture, pictures
from hvd_trainer.tools.compare.result import Comparison
from hvd_trainer.tools.compare.variants import NOT_APPLICABLE
from hvd_trainer.utils.text import plural

NAME = "comparison"
PAGE = Path(__file__).with_name("page.html.j2")
"""The template of the page: one file, without scripts and without anything from the network."""
MAX_NAMED = 3
"""Trials that are named with a note that many have."""


class Table(NamedTuple):
    """A title, titles of columns, and cells as text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


SPEED = "Speed"
PREDICTED = "The step beside its prediction by the formula of the pipeline, ms"
TABLES: dict[str, Sequence[tuple[str, str, Callable[[Any], str]]]] = {
    SPEED: (
        ("samples/s", "samples_per_s", number),
        ("steps/s", "steps_per_s", number),
        ("lowest", "lowest", number),
        ("highest", "highest", number),
        ("tokens/s", "tokens_per_s", number),
        ("per rank", "per_rank", number),
        ("speed-up", "speed_up", "{:.2f}".format),
        ("efficiency", "efficiency", "{:.0%}".format),
        ("state", "state", str),
    ),
    "Where a mean step's time goes, ms: exchange and straggler are what other ranks are waited for": (
        ("median step", "step_p50_s", milliseconds),
        ("p95", "step_p95_s", milliseconds),
        ("data", "data_s", milliseconds),
        ("forward", "forward_s", milliseconds),
        ("backward", "backward_s", milliseconds),
        ("exchange", "exchange_s", milliseconds),
        ("straggler", "straggler_s", milliseconds),
        ("update", "update_s", milliseconds),
    ),
    PREDICTED: (
        ("mean step", "step_s", milliseconds),
        ("predicted", "predicted_step_s", milliseconds),
        ("off by", "off", more_or_less),
        ("bubble", "bubble", percent),
        ("by formula", "bubble_formula", percent),
    ),
    "What came of it": (
        ("start-up, s", "startup_s", "{:.1f}".format),
        ("peak, MB", "peak_memory_mb", number),
        ("before, MB", "base_memory_mb", number),
        ("train loss", "train_loss", "{:.6f}".format),
        ("last loss", "last_loss", "{:.6f}".format),
        ("to the first", "loss_to_first", lambda off: "same bits" if off == 0 else f"{off:+.1e}"),
        ("test loss", "test_loss", "{:.6f}".format),
        ("accuracy", "test_accuracy", percent),
        ("weights", "weights", lambda text: text[:12]),
    ),
}
"""By their titles: columns of a title, a figure of `Comparison.figures`, and how it is shown."""


def tables(comparison: Comparison) -> list[Table]:
    """Return all tables; columns in which no trial has a figure are left out, and tables without columns."""
    axes = [axis for axis in comparison.varied if axis.varies]
    figures = [dict(comparison.figures[its.trial.key]) for its in comparison.results]
    all_done = all(its.state == "done" for its in comparison.results)
    for its, values in zip(comparison.results, figures, strict=True):
        values["state"] = None if all_done else its.state
    found = []
    for title, columns in TABLES.items():
        used = [column for column in columns if any(values[column[1]] is not None for values in figures)]
        names = [name for _, name, _ in used]
        if not used or (title == PREDICTED and not {"predicted_step_s", "bubble_formula"} & {*names}):
            continue
        rows = []
        for its, values in zip(comparison.results, figures, strict=True):
            cells = ["-" if values[name] is None else show(values[name]) for _, name, show in used]
            if title == SPEED or set(cells) != {"-"}:
                place = (its.trial.values.get(axis.name, NOT_APPLICABLE) for axis in axes)
                rows.append([its.trial.entry.name, str(its.trial.ranks), *place, *cells])
        titles = ["", "ranks", *(axis.label for axis in axes), *(column[0] for column in used)]
        found.append(Table(title, titles, rows))
    return found


def heading(comparison: Comparison) -> str:
    """Return the job as it was typed, with the options that are varied."""
    varied = [f"{axis.label} {', '.join(axis.values)}" for axis in comparison.varied]
    return "; ".join([shlex.join(comparison.job), *varied])


def conditions(comparison: Comparison) -> list[str]:
    """Return the conditions under which the figures hold, a sentence each."""
    trial = comparison.results[0].trial
    scaling = "Strong scaling: the global batch is" if comparison.strong else "Weak scaling: each rank's batch is"
    batches = {its.trial.ranks: size for its in comparison.results if (size := its.global_batch_size) is not None}
    sizes = ", ".join(f"{size:,} on {plural(ranks, 'rank')}" for ranks, size in sorted(batches.items()))
    known = "" if comparison.varied or not sizes else f" (global batch: {sizes})"
    return [
        f"{scaling} the same{known}.",
        f"{plural(trial.threads, 'CPU thread')} per rank; the first "
        f"{plural(trial.warmup_steps, 'step')} of each run do not count; medians over the rounds.",
        *comparison.unseen,
        "Machine: " + ", ".join(f"{name} {value}" for name, value in comparison.machine.items()) + ".",
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
    out = console()
    for table in tables(comparison):
        out.print(make_table(*table))
    notes = [*comparison.deviations(), *conditions(comparison), *troubles(comparison)]
    for text in [*comparison.verdicts(), *notes]:
        out.print(text, markup=False)
    files = {kind: folder / f"{NAME}.{kind}" for kind in ("json", "csv", "md", "html")}
    files["json"].write_text(to_json(as_json(comparison)))
    with files["csv"].open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows_of(comparison)[0]))
        writer.writeheader()
        writer.writerows(rows_of(comparison))
    files["md"].write_text(markdown(comparison))
    written, drawn = list(files.values()), []
    for quantity in heat_map.QUANTITIES:
        maps, svg = heat_map.write(comparison, quantity, heading(comparison), folder)
        written += maps
        if svg:
            drawn.append(Picture(f"Heat map: {quantity.title}", "By options; the best one is in bold.", svg))
    files["html"].write_text(page(comparison, [*drawn, *pictures(comparison)]))
    print("written: " + ", ".join(map(str, written)), flush=True)


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


def page(comparison: Comparison, drawn: Sequence[Picture]) -> str:
    """Return verdicts, pictures and tables as a page."""
    return render_page(
        PAGE,
        heading=heading(comparison),
        pairs=comparison.pairs,
        tables=tables(comparison),
        pictures=drawn,
        conditions=conditions(comparison),
        deviations=comparison.deviations(),
        troubles=troubles(comparison),
    )


def rows_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Return for each trial its place on each axis, its state, all figures in full, and why it has none."""
    rows = []
    for its in comparison.results:
        prediction = comparison.predictions.get(its.trial.key)
        rows.append(
            {
                **{axis.name: its.trial.values.get(axis.name, NOT_APPLICABLE) for axis in comparison.axes},
                "state": its.state,
                "runs": len(its.runs),
                "global_batch_size": its.global_batch_size,
                **comparison.figures[its.trial.key],
                "predicted_from": "" if prediction is None else prediction.base.label,
                "note": its.note,
            }
        )
    return rows


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return everything: verdicts, medians of each trial, intervals, and each run."""
    rows = zip(comparison.results, rows_of(comparison), strict=True)
    trials = [{**row, **its.trial.identity, "values": dict(its.trial.variant.values)} for its, row in rows]
    pairs = [
        {
            "ranks": pair.one.trial.ranks,
            "values": dict(pair.one.trial.variant.values),
            "one": pair.one.trial.entry.name,
            "other": pair.other.trial.entry.name,
            **asdict(pair.speed),
        }
        for pair in comparison.pairs
    ]
    return {
        "job": list(comparison.job),
        "varied": {axis.name: list(axis.values) for axis in comparison.varied},
        "scaling": "strong" if comparison.strong else "weak",
        "machine": dict(comparison.machine),
        "verdicts": comparison.verdicts(),
        "trials": trials,
        "pairs": pairs,
        "runs": [asdict(run) for its in comparison.results for run in its.runs.values()],
    }
