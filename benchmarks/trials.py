"""Contestants as trials: each is started as a user would start it, with a recorder in front of its script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from hvd_trainer.measure.formats import milliseconds, number
from hvd_trainer.measure.machine import Ran, as_text, conditions
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.report import Report, Table, Verdict
from hvd_trainer.measure.results import TrialResult
from hvd_trainer.measure.stats import METHOD, Ratio, ratio
from hvd_trainer.utils.text import plural

Result = TrialResult["BenchmarkTrial"]


@dataclass(frozen=True, kw_only=True)
class BenchmarkTrial(MeasuredTrial):
    """A contestant on a number of ranks, with one CPU thread each."""

    contestant: Contestant

    @classmethod
    def of(
        cls, contestant: Contestant, ranks: int, data_dir: Path, machine: dict[str, Any] | None = None
    ) -> BenchmarkTrial:
        words = [word.replace("{data}", str(data_dir)) for word in contestant.arguments.split()]
        job = contestant.job
        return cls(
            contestant=contestant,
            job=words,
            engine=contestant.engine,
            ranks=ranks,
            threads=1,
            warmup_steps=job.warmup,
            native=True,
            label=f"{job.name}, {contestant.name} x {ranks}",
            conditions={"job": job.name, "contestant": contestant.name, **conditions(machine or {})},
        )

    def read(self, log: Path) -> dict[str, Any] | None:
        """The figures of a run; None if a rank did not take exactly the steps of the job."""
        figures, job = super().read(log), self.contestant.job
        if figures is None or figures["work"]["steps"] != job.steps(self.ranks):
            return None
        figures.pop("samples_per_s", None)  # of what comes out of its loader, if it has one
        if job.max_steps is None:
            seconds = figures["step_s"] * (figures["work"]["steps"] - self.warmup_steps)
            figures["samples_per_s"] = self.ranks * job.timed_samples(self.ranks) / seconds
        return figures


def conclude(
    results: Sequence[Result], machine: dict[str, Any], warnings: Sequence[str], rounds: int, ran: Ran
) -> Report:
    """Return a table for each job, with a row for each contestant and number of ranks."""
    jobs = dict.fromkeys(result.trial.contestant.job for result in results)
    failed = [result for result in results if len(result.runs) < rounds]
    return Report(
        ran=ran,
        verdicts=[Verdict(f"{its.trial.label}: {its.note}", "failed", badge="FAILED") for its in failed]
        or [Verdict(f"{plural(len(results), 'trial')} measured in {plural(rounds, 'round')}.")],
        warnings=warnings,
        tables=[
            Table(
                f"{job.name}: medians of {plural(rounds, 'round')}, and ratios of speeds",
                ("", "ranks", "samples/s", "lowest", "highest", "step, ms", "to the baseline", "to the floor")
                + ("to others", "start-up, s", "peak, MB"),
                [_row(its, results) for its in results if its.trial.contestant.job == job],
                words=(0, 8),
            ).compact()
            for job in jobs
        ],
        notes=[
            f"{METHOD}, not corrected for the number of rows. Pairs are rounds that one command ran in turn.",
            f"One CPU thread per rank. Machine: {as_text(machine)}.",
        ],
        data={
            "machine": machine,
            "runs": [
                {"round": number, "seconds": run.seconds, **its.trial.identity, **its.rounds[number]}
                for its in results
                for number, run in its.runs.items()
            ],
        },
    )


def _row(result: Result, results: Sequence[Result]) -> list[str]:
    contestant, ranks = result.trial.contestant, result.trial.ranks
    rates = result.by_round("samples_per_s").values()
    by_name = {
        its.trial.contestant.name: ratio_of(result, its)
        for its in results
        if (its.trial.contestant.job, its.trial.ranks) == (contestant.job, ranks)
    }
    others = [(by_name[name], name) for name in contestant.against if by_name.get(name) is not None]
    return [
        contestant.name,
        str(ranks),
        _cell(result.median("samples_per_s")),
        _cell(min(rates, default=None)),
        _cell(max(rates, default=None)),
        _cell(result.median(contestant.job.figure), milliseconds),
        _cell(by_name.get(contestant.job.baseline), _shown),
        _cell(by_name.get(contestant.job.floor), _shown),
        ", ".join(f"{_cell(of, _shown)} {name}" for of, name in others),
        _cell(result.median("startup_s"), "{:.1f}".format),
        _cell(result.median("peak_memory_mb")),
    ]


def _cell(value: Any, show: Callable[[Any], str] = number) -> str:
    return "-" if value is None else show(value)


def ratio_of(one: Result, other: Result) -> Ratio | None:
    """The speed of one as a multiple of the other's; None if they have not run in turn."""
    pairs = other.in_turn(one, one.trial.contestant.job.figure)
    return ratio(*zip(*pairs, strict=True)) if pairs else None


def _shown(one: Ratio) -> str:
    """`0.86 (0.80 to 0.92)`: a ratio, and its interval where there are rounds enough for one."""
    return f"{one.value:.2f}" + ("" if one.low is None else f" ({one.low:.2f} to {one.high:.2f})")
