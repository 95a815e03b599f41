"""Print an estimate as tables and sentences for people, or as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite, log2
from typing import Any, NamedTuple

from hvd_trainer.measure.formats import console, make_table, number
from hvd_trainer.tools.estimate.fit import INTERVAL_LEVEL
from hvd_trainer.tools.estimate.held_out import Errors, Guess, Trial
from hvd_trainer.tools.estimate.job import Job
from hvd_trainer.tools.estimate.projection import Basis, Row, new_cluster_factor
from hvd_trainer.utils.text import plural

CANNOT_KNOW = "cannot know"
TEXT_COLUMNS = ("", "most is lost to", "beside it, published")
"""Columns of texts, which are aligned at the left."""


class Report(NamedTuple):
    """The content of an estimate."""

    job: Job
    conditions: Sequence[str]
    bases: Sequence[Basis]
    rows: Sequence[Row]
    trials: Sequence[Trial]
    measured: str
    """description of the measured points"""

    @property
    def asked(self) -> list[Row]:
        """The row of each engine on as many hosts as were requested."""
        return list({row.engine: row for row in self.rows}.values())


def print_report(report: Report) -> None:
    """Print the estimate for people."""
    out = console()
    for text in (report.job.describe(), *report.conditions):
        out.print(text, markup=False)
    title = f"Efficiency: the speed of a rank, as a part of that of one alone ({INTERVAL_LEVEL:.0%} intervals)"
    _print_table(title, [_cells(row, report.job) for row in report.rows])
    for basis, row in zip(report.bases, report.asked, strict=True):
        out.print(verdict(row), markup=False)
        if row.is_known:
            out.print(_explain_interval(basis, row), markup=False)
    shown = [_guess_cells(guess) for trial in report.trials if trial.is_published for guess in trial.guesses]
    if shown:
        _print_table("Held out: what the model says of published speeds that it was not fitted to", shown)
    for text in (*map(_judge_trial, report.trials), f"Measured: {report.measured}."):
        out.print(text, markup=False)


def _print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    titles = list(rows[0])
    words = [place for place, name in enumerate(titles) if name in TEXT_COLUMNS]
    console().print(make_table(title, titles, [list(row.values()) for row in rows], words=words))


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
    return (
        f"  Its interval: how well the points tell the costs, and {basis.unexplained_error:.1%} of a step per "
        f"doubling of the ranks, {log2(row.setup.ranks):.3g} here{further}, by which the formula is off where it "
        f"has seen nothing."
    )


def _cells(row: Row, job: Job) -> dict[str, str]:
    known, rate = row.is_known, samples_per_s(row, job)
    return {
        "": row.engine,
        "hosts": str(row.setup.hosts),
        "ranks": str(row.setup.ranks),
        "efficiency": f"{row.step.efficiency:.1%}" if known else CANNOT_KNOW,
        "interval": f"{row.low:.0%} to {row.high:.0%}" if known and row.setup.ranks > 1 else "-",
        "linear": "100%",
        **({"samples/s": "-" if rate is None else number(rate)} if job.batch_size is not None else {}),
        "most is lost to": (row.limited_by or "-") if known else "-",
        "beside it, published": "; ".join(row.published) or "-",
    }


def samples_per_s(row: Row, job: Job) -> float | None:
    """Return the samples per second of all ranks by the formula; None if that cannot be known."""
    if job.batch_size is None or not row.is_known:
        return None
    return row.setup.ranks * row.setup.passes * job.batch_size / row.step.total_s


def _guess_cells(guess: Guess) -> dict[str, str]:
    return {
        "": guess.point.label,
        "published": f"{guess.point.efficiency:.1%}",
        "model": f"{guess.efficiency:.1%}",
        "interval": f"{guess.low:.0%} to {guess.high:.0%}",
        "off by": f"{guess.error:+.1%}",
        "linear off by": f"{guess.linear_error:+.1%}",
        "linear from 1 host": "-" if guess.from_host_error is None else f"{guess.from_host_error:+.1%}",
    }


def _judge_trial(trial: Trial) -> str:
    its = Errors.summarize(trial.guesses)
    host = "" if its.from_host_median is None else f" (from one host on by {its.from_host_median:.1%})"
    worse = "" if its.is_better else " The model is WORSE than the linear guess there."
    return (
        f"{trial.title} ({plural(its.number, 'point')}): off by {its.median:.1%} at the median, "
        f"{its.largest:.1%} at most; the linear guess by {its.linear_median:.1%} and {its.linear_largest:.1%}"
        f"{host}. {its.inside} of {its.number} within the fit's own interval.{worse}"
    )


def as_json(report: Report) -> str:
    """Format the estimate as one JSON document, whose keys are a public format; a link without a limit is null."""
    document = {
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
                **Errors.summarize(trial.guesses)._asdict(),
                "points": [_guess_as_json(guess) for guess in trial.guesses],
            }
            for trial in report.trials
        ],
    }
    return json.dumps(document, indent=1)


def _row_as_json(row: Row, job: Job) -> dict[str, Any]:
    efficiency, low, high = (row.step.efficiency, row.low, row.high) if row.is_known else (None, None, None)
    return {
        "engine": row.engine,
        "hosts": row.setup.hosts,
        "ranks": row.setup.ranks,
        "link_gbit": row.setup.link_gbit if isfinite(row.setup.link_gbit) else None,
        "efficiency": efficiency,
        "low": low,
        "high": high,
        "linear": 1.0,
        "cannot_know": list(row.reasons),
        "formula": row.step._asdict(),
        "samples_per_s": samples_per_s(row, job),
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
