"""Read the points that the model is fitted to: timed steps, each with its set-up.

Our own points come from a file in the format of `benchmarks/slow_link.py`, such as `measured.json` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.estimate.model import Setup
from hvd_trainer.tools.runner.formats import number

FORMAT = 1
SHIPPED_FILE = Path(__file__).with_name("measured.json")
SENT_FRACTION = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
"""The bytes sent, divided by a gradient's. PowerSGD's depend on the tensors' shapes: its points are left out."""
PIECE_MB = 25.0
"""The default size of the pieces in which our engines send gradients."""


@dataclass(frozen=True)
class Point:
    """A set-up on an engine, and the time of its steps."""

    engine: str
    setup: Setup
    step_s: float
    series: str
    """points that were measured together and share errors have the same series"""
    label: str

    @property
    def efficiency(self) -> float:
        return self.setup.compute_s / self.step_s


@dataclass(frozen=True)
class Measured:
    """The points of a file."""

    machine: str
    device: str
    points: Sequence[Point]
    left_out: int
    """number of points that the formula does not cover, or that were not timed without exchange"""
    batch_size: int
    """per rank, in most points"""
    gradient_mb: float
    """size of fp32 gradients, in most points"""

    def describe(self) -> str:
        """Describe the points in one line."""
        left_out = f", {self.left_out} left out (PowerSGD, or not timed alone)" if self.left_out else ""
        return f"{len(self.points)} points{left_out}, on {self.machine}"

    def points_of(self, engine: str) -> list[Point]:
        return [point for point in self.points if point.engine == engine]


def count_pieces(gradient_mb: float, num_tensors: int | None = None, piece_mb: float = PIECE_MB) -> int:
    """Count the pieces in which gradients travel; a piece is no smaller than a tensor."""
    pieces = max(1, ceil(gradient_mb / piece_mb))
    return pieces if num_tensors is None else min(pieces, max(1, num_tensors))


def read_points(file: Path) -> Measured:
    """Read all points of a file.

    Raises:
        OptionError: it cannot be read, is something else, or has no point with two ranks.
    """
    wanted = "type one that `python -m benchmarks.slow_link --output DIR` has written"
    try:
        content = json.loads(file.read_text())
        if "runs" in content:
            raise OptionError(
                f"--fit {file} is a comparison, measured on one host, where nothing shows what a link costs. Type "
                f"--from {file}: it takes the step times of the job, or script, from there"
            )
        if content["format"] != FORMAT:
            raise OptionError(f"--fit {file} has format {content['format']}, and {FORMAT} is known here: {wanted}")
        entries = [entry for entry in content["points"] if entry["hosts"] * entry["ranks_per_host"] > 1]
        covered = [e for e in entries if e["compression"] in SENT_FRACTION and e["compute_ms"] is not None]
        points = [_point(entry) for entry in covered]
        if not points:
            raise OptionError(f"--fit {file} has no point with two ranks or more: {wanted}")
        return Measured(
            content["machine"],
            content.get("device", "cpu"),
            points,
            len(entries) - len(points),
            _most_frequent([entry["batch_size"] for entry in entries]),
            _most_frequent([entry["gradient_mb"] for entry in entries]),
        )
    except OSError as error:
        raise OptionError(f"--fit {file} cannot be read ({error.strerror}): {wanted}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"--fit {file} is no file of points ({error!r}): {wanted}") from None


def check_positive(**values: float | None) -> None:
    """Refuse values that no measurement gives and that would be divided by.

    Raises:
        ValueError: a value is not above 0, or endless.
    """
    for name, value in values.items():
        if value is not None and not 0 < value < inf:
            raise ValueError(f"{name} is {value}")


def _point(entry: Mapping[str, Any]) -> Point:
    names = ("hosts", "ranks_per_host", "link_mbit", "compute_ms", "gradient_mb", "num_tensors", "accumulation")
    check_positive(
        **{name: entry[name] for name in names}, step_ms=min(entry["step_ms"]), delay_ms=1 + entry["delay_ms"]
    )
    setup = Setup(
        hosts=entry["hosts"],
        ranks_per_host=entry["ranks_per_host"],
        link_gbit=inf if entry["link_mbit"] is None else entry["link_mbit"] / 1000,
        compute_s=entry["compute_ms"] / 1000,
        sent_bytes=entry["gradient_mb"] * 2**20 * SENT_FRACTION[entry["compression"]],
        pieces=count_pieces(entry["gradient_mb"], entry["num_tensors"]),
        passes=entry["accumulation"],
        delay_s=entry["delay_ms"] / 1000,
    )
    link = "no limit" if entry["link_mbit"] is None else f"{entry['link_mbit']:g} Mbit/s"
    words = [f"{setup.hosts} x {setup.ranks_per_host} ranks", link]
    words += [f"{entry['delay_ms']:g} ms"] if entry["delay_ms"] else []
    words += [entry["compression"]] if entry["compression"] != "none" else []
    words += [f"{setup.passes} passes"] if setup.passes > 1 else []
    series = ", ".join(words)
    label = f"{series}, {number(entry['gradient_mb'])} MB"
    return Point(entry["backend"], setup, median(entry["step_ms"]) / 1000, series, label)


def _most_frequent(values: Sequence[Any]) -> Any:
    return max(values, key=values.count)
