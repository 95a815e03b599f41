"""Print an estimate as tables and sentences for people, or as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite, log2
from typing import Any, NamedTuple

from hvd_trainer.tools.estimate.fit import INTERVAL_LEVEL
from hvd_trainer.tools.estimate.held_out import Errors, Guess
from hvd_trainer.tools.estimate.projection import Basis, Row, new_cluster_factor
from hvd_trainer.tools.estimate.workload import Job
from hvd_trainer.tools.runner.formats import console, make_table, number
from hvd_trainer.utils.text import plural

CANNOT_KNOW = "cannot know"
TEXT_COLUMNS = ("", "most is lost to", "beside it, published")
"""Columns of texts, which are aligned at the left."""


class Trial(NamedTuple):
    """The guesses about points that the model was not fitted to."""

    title: str
    guesses: Sequence[Guess]
    """guesses whose errors are summarized together"""
    is_shown: bool = False
    """whether the guesses are printed one by one"""


class Report(NamedTuple):
    """The content of an estimate."""

    job: Job
    conditions: Sequence[str]
    bases: Sequence[Basis]
    rows: Sequence[Row]
    trials: Sequence[Trial]
    measured: str
    """description of the measured points"""


def print_report(report: Report) -> None:
    """Print the estimate for people."""
    out = console()
    for text in (report.job.describe(), *report.conditions):
        out.print(text, markup=False)
    _print_table(
        f"Efficiency: the speed of a rank, as a part of that of one alone ({INTERVAL_LEVEL:.0%} intervals)",
        *_projection_table(report),
    )
    for text in sentences(report):
        out.print(text, markup=False)
    shown = [guess for trial in report.trials if trial.is_shown for guess in trial.guesses]
    if shown:
        _print_table(
            "Held out: what the model says of published speeds that it was not fitted to", *_trial_table(shown)
        )
    for text in (*map(_judge_trial, report.trials), f"Measured: {report.measured}."):
        out.print(text, markup=False)


def sentences(report: Report) -> list[str]:
    """Return the verdict of each engine, and how its interval is made."""
    found = []
    for basis in report.bases:
        asked = [row for row in report.rows if row.engine == basis.engine][-1]
        found.append(verdict(asked))
        if asked.is_known:
            found.append(_explain_interval(basis, asked))
    return found


def verdict(row: Row) -> str:
    """Return the verdict about a row in one or two sentences."""
    where = f"{row.engine} on {plural(row.setup.ranks, 'rank')}"
    formula = f"{row.step.efficiency:.0%}"
    if not row.is_known:
        return (
            f"{where}: {CANNOT_KNOW}: {'; '.join(row.reasons)}. (The formula alone gives {formula}, and nothing "
            f"says whether that is so.)"
        )
    limit = "" if row.limited_by is None else f" Most is lost to {row.limited_by} of a step."
    return f"{where}: {formula}, {row.low:.0%} to {row.high:.0%}.{limit}"


def _explain_interval(basis: Basis, row: Row) -> str:
    beyond = basis.scope.doublings(row.setup)
    further = f" (of which {beyond:.3g} are beyond {basis.scope.source}, and count twice)" if beyond else ""
    off = f"{basis.unexplained_error:.1%} of a step"
    return (
        f"  Its interval: how well the points tell the costs, and {off} for each of "
        f"{log2(row.setup.ranks):.3g} doublings{further}, by which the formula is off where it has seen nothing."
    )


def _projection_table(report: Report) -> tuple[list[str], list[list[str]]]:
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
    """Return the samples per second of all ranks by the formula; the job's batch size must be known."""
    assert job.batch_size is not None
    return row.setup.ranks * row.setup.passes * job.batch_size / row.step.total_s


def _trial_table(guesses: Sequence[Guess]) -> tuple[list[str], list[list[str]]]:
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


def _judge_trial(trial: Trial) -> str:
    its = Errors.summarize(trial.guesses)
    host = "" if its.from_host_median is None else f" (from one host on by {its.from_host_median:.1%})"
    worse = "" if its.is_better else " The model is WORSE than the linear guess there."
    return (
        f"{trial.title} ({plural(its.number, 'point')}): off by {its.median:.1%} at the median, "
        f"{its.largest:.1%} at most; the linear guess by {its.linear_median:.1%} and {its.linear_largest:.1%}"
        f"{host}. "
        f"{its.inside} of {its.number} within the fit's own interval.{worse}"
    )


def _print_table(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    words = [place for place, name in enumerate(titles) if name in TEXT_COLUMNS]
    console().print(make_table(title, titles, rows, words=words))


def as_json(report: Report) -> str:
    """Format the estimate as one JSON document, whose keys are a public format; a link without a limit is null."""
    return json.dumps(
        {
            "job": asdict(report.job),
            "conditions": list(report.conditions),
            "measured": report.measured,
            "level": INTERVAL_LEVEL,
            "rows": [_row_as_json(row, report.job) for row in report.rows],
            "costs": {basis.engine: basis.fitted.costs._asdict() for basis in report.bases},
            "unexplained": {basis.engine: basis.unexplained_error for basis in report.bases},
            "elsewhere": new_cluster_factor(),
            "held_out": [
                {
                    "title": trial.title,
                    **asdict(Errors.summarize(trial.guesses)),
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
