"""From the runs of `slow_link.py` to its table, and to points from which a model of costs is fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.slow_link_cases import FAST, Case, Link, Plan, is_offered
from hvd_trainer.jobs.models import mlp
from hvd_trainer.tools.runner.records import RunRecord
from hvd_trainer.utils.text import plural

FORMAT = 1
Figures = Mapping[str, Any]


class Measured:
    """The runs that gave figures, by what was run.

    Args:
        runs: in the order in which they ended.
        rounds: how many count.
        steps: that counted where nothing was exchanged.
    """

    def __init__(self, runs: Iterable[RunRecord], rounds: int, steps: int) -> None:
        self._steps = steps
        self._rounds: dict[Case, dict[int, Figures]] = {}
        for run in runs:
            ours = run.identity.keys() == set(Case._fields)
            if ours and run.state == "done" and run.round <= rounds:
                self._rounds.setdefault(Case(**run.identity), {})[run.round] = run.figures

    def of(self, case: Case, name: str) -> list[float]:
        """One figure, a value for each round that has it."""
        rounds = self._rounds.get(case, {})
        return [rounds[number][name] for number in sorted(rounds)]

    def compute_ms(self, case: Case) -> float | None:
        """A step of it with nothing exchanged, by as many ranks at once."""
        alone = self.of(case.alone(self._steps), "step_ms")
        return median(alone) if alone else None


@cache
def gradients(width: int) -> tuple[float, int]:
    """Of the job's model: MB (of 2^20 bytes, fp32), and how many tensors."""
    sizes = [parameter.numel() for parameter in mlp(width).parameters()]
    return 4 * sum(sizes) / 2**20, len(sizes)


def as_points(measured: Measured, cases: Sequence[Case], machine: str) -> dict[str, Any]:
    """All that was exchanged, a point for each; the format is told in README.md beside this file."""
    points = []
    for case in cases:
        step_ms = measured.of(case, "step_ms")
        if not case.exchange or not step_ms:
            continue
        losses = measured.of(case.to_the_end, "test_loss")
        gradient_mb, num_tensors = gradients(case.width)
        points.append(
            {
                "backend": case.backend,
                "hosts": case.hosts,
                "ranks_per_host": case.ranks_per_host,
                "link_mbit": case.mbit,
                "delay_ms": case.delay_ms,
                "compression": case.compression,
                "accumulation": case.accumulation,
                "batch_size": case.batch_size * case.accumulation,
                "gradient_mb": gradient_mb,
                "num_tensors": num_tensors,
                "step_ms": step_ms,
                "compute_ms": measured.compute_ms(case),
                "loss": fmean(losses) if losses else None,
                "samples": int(measured.of(case.to_the_end, "samples")[0]) if losses else 0,
            }
        )
    return {"format": FORMAT, "machine": machine, "points": points}


def markdown(measured: Measured, plan: Plan, cases: Sequence[Case], machine: str) -> str:
    """The table, the further points below it, and above them what they were measured on."""
    gradient_mb, num_tensors = gradients(plan.width)
    epoch = f"{plan.samples:,} images of MNIST" if plan.images == "mnist" else "the embedded digits"
    lines = [
        machine,
        "",
        f"{plural(plan.ranks_per_host, 'rank')} per host, {plan.batch_size} images per rank and pass, an epoch of "
        f"{epoch}, gradients of {gradient_mb:.2f} MB in {num_tensors} tensors.",
        *_table(measured, plan),
    ]
    in_table = set(plan.table_cases())
    further = [case for case in cases if case.exchange and case not in in_table]
    if further:
        lines += _further(measured, further)
    return "\n".join(lines) + "\n"


def _table(measured: Measured, plan: Plan) -> list[str]:
    links = (FAST, *plan.links)
    head = [
        *("hosts", "engine", "passes", "compression", "step without exchange, ms"),
        *(f"{link}: step, ms" for link in links),
        *(f"{link}: epoch, s" for link in links),
        *("train loss", "test loss"),
    ]
    lines = ["", _line(head), _line(["---"] * len(head))]
    for row in plan.rows():
        cells = [str(row.hosts), row.backend, str(row.accumulation), row.compression]
        if is_offered(row.backend, row.compression):
            steps = measured.of(row, "steps")
            step_ms = [measured.of(_over(row, link, plan), "step_ms") for link in links]
            cells += [
                _number(measured.compute_ms(row)),
                *map(_range, step_ms),
                *(_number(steps[0] * median(its) / 1000 if steps and its else None) for its in step_ms),
                *(_spread(measured.of(row, name)) for name in ("train_loss", "test_loss")),
            ]
        else:
            cells += ["not on this engine", *[""] * (len(head) - len(cells) - 1)]
        lines.append(_line(cells))
    return lines


def _over(row: Case, link: Link, plan: Plan) -> Case:
    return row if link == FAST else row.on(link, plan.steps)


def _further(measured: Measured, cases: Sequence[Case]) -> list[str]:
    head = ["hosts", "engine", "gradients, MB", "link", "step without exchange, ms", "step, ms"]
    lines = ["", _line(head), _line(["---"] * len(head))]
    for case in cases:
        gradient_mb = f"{gradients(case.width)[0]:.2f}"
        times = [_number(measured.compute_ms(case)), _range(measured.of(case, "step_ms"))]
        lines.append(_line([str(case.hosts), case.backend, gradient_mb, str(case.link), *times]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _range(values: Sequence[float]) -> str:
    """The median over the rounds, and the lowest and highest."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else "-"


def _spread(values: Sequence[float]) -> str:
    """The mean over the seeds, and their standard deviation."""
    if len(values) < 2:
        return f"{values[0]:.4f}" if values else "-"
    return f"{fmean(values):.4f} ± {stdev(values):.4f}"
