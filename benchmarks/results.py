"""From the runs to the table: medians, spread, ratios, JSON and Markdown."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.contestants import Contestant, Job
from benchmarks.run import Measurement
from hvd_trainer.measure.stats import Ratio, ratio


@dataclass
class Series:
    """All rounds of one contestant at one number of ranks; None where a run failed."""

    contestant: Contestant
    ranks: int
    rounds: list[Measurement | None] = field(default_factory=list)

    def good(self) -> list[Measurement]:
        """The runs that gave a figure."""
        return [measurement for measurement in self.rounds if measurement is not None]


@dataclass(frozen=True)
class Row:
    """One line of the table. Ratios are those within each round, with 95 % intervals, not corrected."""

    job: str
    ranks: int
    contestant: str
    images_per_s: float | None
    lowest: float | None
    highest: float | None
    to_baseline: Ratio | None
    to_floor: Ratio | None
    against: dict[str, Ratio | None]
    startup_s: float | None
    peak_mb: float | None
    notes: str


def summarise(series: list[Series]) -> list[Row]:
    """A row for each series, in their order."""
    return [_row(one, series) for one in series]


def _row(one: Series, everything: list[Series]) -> Row:
    rates = [measurement.images_per_s for measurement in one.good()]
    job = one.contestant.job
    return Row(
        job=job.name,
        ranks=one.ranks,
        contestant=one.contestant.name,
        images_per_s=_median(rates),
        lowest=min(rates, default=None),
        highest=max(rates, default=None),
        to_baseline=_ratio(one, _find(everything, job, one.ranks, job.baseline)),
        to_floor=_ratio(one, _find(everything, job, one.ranks, job.floor)),
        against={name: _ratio(one, _find(everything, job, one.ranks, name)) for name in one.contestant.against},
        startup_s=_median(measurement.startup_s for measurement in one.good()),
        peak_mb=_median(measurement.peak_mb for measurement in one.good()),
        notes=_notes(one),
    )


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


def _find(everything: list[Series], job: Job, ranks: int, name: str) -> Series | None:
    return next(
        (
            one
            for one in everything
            if one.contestant.job == job and one.ranks == ranks and one.contestant.name == name
        ),
        None,
    )


def _ratio(one: Series, other: Series | None) -> Ratio | None:
    """The machine's speed drifts over minutes; within a round it cancels out."""
    if other is None:
        return None
    pairs = [
        (left.images_per_s, right.images_per_s)
        for left, right in zip(one.rounds, other.rounds, strict=True)
        if left is not None and right is not None
    ]
    return ratio(*zip(*pairs, strict=True)) if pairs else None


def _notes(one: Series) -> str:
    failed = one.rounds.count(None)
    crashed = [m.exit_code for m in one.good() if m.exit_code != 0]
    notes = []
    if failed:
        notes.append(f"failed in {failed} of {len(one.rounds)} rounds")
    if crashed:
        notes.append(f"exit code not 0 after the work in {len(crashed)} of {len(one.rounds)} rounds")
    return "; ".join(notes)


def markdown(rows: list[Row], machine: dict[str, Any]) -> str:
    """The table, with the machine it was measured on above it."""
    lines = [
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        "",
        "| job | ranks | contestant | samples/s | lowest to highest | to the baseline | to the floor "
        "| to others | start-up, s | peak, MB | notes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{_number(row.lowest, ',.0f')} to {_number(row.highest, ',.0f')}"
        cells = [
            row.job,
            str(row.ranks),
            row.contestant,
            _number(row.images_per_s, ",.0f"),
            spread if row.lowest is not None else "-",
            _shown(row.to_baseline),
            _shown(row.to_floor),
            ", ".join(f"{_shown(one)} {name}" for name, one in row.against.items() if one is not None),
            _number(row.startup_s, ".1f"),
            _number(row.peak_mb, ",.0f"),
            row.notes,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(one: Ratio | None) -> str:
    """`0.86 (0.80 to 0.92)`: a ratio, and its interval where there are rounds enough for one."""
    if one is None:
        return "-"
    return f"{one.value:.2f}" + ("" if one.low is None else f" ({one.low:.2f} to {one.high:.2f})")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def as_json(series: list[Series], rows: list[Row], machine: dict[str, Any]) -> dict[str, Any]:
    """Everything: the machine, the table's rows, and each round of each contestant."""
    return {
        "machine": machine,
        "table": [asdict(row) for row in rows],
        "runs": [
            {
                "job": one.contestant.job.name,
                "contestant": one.contestant.name,
                "ranks": one.ranks,
                "rounds": [None if m is None else asdict(m) for m in one.rounds],
            }
            for one in series
        ],
    }


def describe_machine() -> dict[str, Any]:
    """What the figures depend on; ``load`` is the machine's before the first run."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "horovod": _horovod_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _horovod_version() -> str:
    try:
        return version("horovod")
    except PackageNotFoundError:
        return "not installed"
