"""How a projection is shown: tables and sentences for people, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite, log2
from typing import Any, NamedTuple

from hvd_trainer.tools.estimate.fit import LEVEL
from hvd_trainer.tools.estimate.held_out import Errors, Guess
from hvd_trainer.tools.estimate.projection import Basis, Row, elsewhere
from hvd_trainer.tools.estimate.workload import Job
from hvd_trainer.tools.runner.formats import console, number
from hvd_trainer.utils.text import plural

CANNOT_KNOW = "cannot know"
TEXTS = ("", "most is lost to", "beside it, published")
"""Columns that are no numbers."""


class Trial(NamedTuple):
    """Guesses about points that the model was not fitted to, and what they were guessed from."""

    title: str
    guesses: Sequence[Guess]
    """whose errors are of one kind"""
    is_shown: bool = False
    """one by one"""


class Report(NamedTuple):
    """All that is said."""

    job: Job
    conditions: Sequence[str]
    bases: Sequence[Basis]
    rows: Sequence[Row]
    trials: Sequence[Trial]
    measured: str
    """what the measured points are of"""


def show(report: Report) -> None:
    """Prints all of it."""
    out = console()
    for text in (report.job.described(), *report.conditions):
        out.print(text, markup=False)
    _print_table(
        f"Efficiency: the speed of a rank, as a part of that of one alone ({LEVEL:.0%} intervals)",
        *_projection(report),
    )
    for text in sentences(report):
        out.print(text, markup=False)
    shown = [guess for trial in report.trials if trial.is_shown for guess in trial.guesses]
    if shown:
        _print_table(
            "Held out: what the model says of published speeds that it was not fitted to", *_trials(shown)
        )
    for text in (*map(_judged, report.trials), f"Measured: {report.measured}."):
        out.print(text, markup=False)


def sentences(report: Report) -> list[str]:
    """What was asked for, engine by engine, and what the interval is made of."""
    found = []
    for basis in report.bases:
        asked = [row for row in report.rows if row.engine == basis.engine][-1]
        found.append(verdict(asked))
        if asked.is_known:
            found.append(_made_of(basis, asked))
    return found


def verdict(row: Row) -> str:
    """In a sentence or two."""
    where = f"{row.engine} on {plural(row.setup.ranks, 'rank')}"
    formula = f"{row.step.efficiency:.0%}"
    if not row.is_known:
        return (
            f"{where}: {CANNOT_KNOW}: {'; '.join(row.reasons)}. (The formula alone gives {formula}, and nothing "
            f"says whether that is so.)"
        )
    limit = "" if row.limited_by is None else f" Most is lost to {row.limited_by} of a step."
    return f"{where}: {formula}, {row.low:.0%} to {row.high:.0%}.{limit}"


def _made_of(basis: Basis, row: Row) -> str:
    beyond = basis.scope.doublings(row.setup)
    further = f" (of which {beyond:.3g} are beyond {basis.scope.source}, and count twice)" if beyond else ""
    return (
        f"  Its interval: how well the points tell the costs, and {basis.unexplained:.1%} of a step for each of "
        f"{log2(row.setup.ranks):.3g} doublings{further}, by which the formula is off where it has seen nothing."
    )


def _projection(report: Report) -> tuple[list[str], list[list[str]]]:
    has_rate = report.job.batch_size is not None
    titles = ["", "hosts", "ranks", "efficiency", "interval", "linear", *(["samples/s"] if has_rate else [])]
    return [*titles, "most is lost to", "beside it, published"], [_cells(row, report.job) for row in report.rows]


def _cells(row: Row, job: Job) -> list[str]:
    known = row.is_known
    cells = [row.engine, str(row.setup.hosts), str(row.setup.ranks)]
    cells += [f"{row.step.efficiency:.1%}" if known else CANNOT_KNOW]
    cells += [f"{row.low:.0%} to {row.high:.0%}" if known and row.setup.ranks > 1 else "-", "100%"]
    if job.batch_size is not None:
        cells.append(number(samples_per_s(row, job)) if known else "-")
    return [*cells, (row.limited_by or "-") if known else "-", "; ".join(row.published) or "-"]


def samples_per_s(row: Row, job: Job) -> float:
    """Of all ranks, by the formula; the job's batch is known."""
    assert job.batch_size is not None
    return row.setup.ranks * row.setup.passes * job.batch_size / row.step.total_s


def _trials(guesses: Sequence[Guess]) -> tuple[list[str], list[list[str]]]:
    titles = ["", "published", "model", "interval", "off by", "linear off by", "linear from 1 host"]
    rows = [
        [
            guess.point.label,
            f"{guess.point.efficiency:.1%}",
            f"{guess.efficiency:.1%}",
            f"{guess.low:.0%} to {guess.high:.0%}",
            f"{guess.error:+.1%}",
            f"{guess.linear_error:+.1%}",
            "-" if guess.from_host_error is None else f"{guess.from_host_error:+.1%}",
        ]
        for guess in guesses
    ]
    return titles, rows


def _judged(trial: Trial) -> str:
    its = Errors.of(trial.guesses)
    host = "" if its.from_host_median is None else f" (from one host on by {its.from_host_median:.1%})"
    worse = "" if its.is_better else " The model is WORSE than the linear guess there."
    return (
        f"{trial.title} ({plural(its.number, 'point')}): off by {its.median:.1%} at the median, "
        f"{its.largest:.1%} at most; the linear guess by {its.linear_median:.1%} and {its.linear_largest:.1%}"
        f"{host}. "
        f"{its.inside} of {its.number} within the fit's own interval.{worse}"
    )


def _print_table(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in titles:
        table.add_column(name, justify="left" if name in TEXTS else "right")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def as_json(report: Report) -> str:
    """One document; its keys stay. A link without a limit is null."""
    return json.dumps(
        {
            "job": asdict(report.job),
            "conditions": list(report.conditions),
            "measured": report.measured,
            "level": LEVEL,
            "rows": [_row_as_json(row, report.job) for row in report.rows],
            "costs": {basis.engine: basis.fitted.costs._asdict() for basis in report.bases},
            "unexplained": {basis.engine: basis.unexplained for basis in report.bases},
            "elsewhere": elsewhere(),
            "held_out": [
                {
                    "title": trial.title,
                    **asdict(Errors.of(trial.guesses)),
                    "points": [_guess_as_json(guess) for guess in trial.guesses],
                }
                for trial in report.trials
            ],
        },
        indent=1,
    )


def _row_as_json(row: Row, job: Job) -> dict[str, Any]:
    known = row.is_known
    return {
        "engine": row.engine,
        "hosts": row.setup.hosts,
        "ranks": row.setup.ranks,
        "link_gbit": _finite(row.setup.link_gbit),
        "efficiency": row.step.efficiency if known else None,
        "low": row.low if known else None,
        "high": row.high if known else None,
        "linear": 1.0,
        "cannot_know": list(row.reasons),
        "formula": row.step._asdict(),
        "samples_per_s": samples_per_s(row, job) if known and job.batch_size is not None else None,
        "published": list(row.published),
    }


def _guess_as_json(guess: Guess) -> Mapping[str, Any]:
    return {
        "point": guess.point.label,
        "efficiency": guess.point.efficiency,
        "model": guess.efficiency,
        "low": guess.low,
        "high": guess.high,
        "error": guess.error,
        "linear_error": guess.linear_error,
        "linear_from_host_error": guess.from_host_error,
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
