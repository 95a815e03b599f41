"""Read the points that the model is fitted to: timed steps, each with its set-up.

measured.json     steps that were timed here, in the format of `benchmarks/slow_link.py`
published.json    speeds on several GPUs with their sources; nothing in it was measured by us

A figure that the formula needs and a published source lacks is assumed, and marked so in the source's notes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.formats import number
from hvd_trainer.tools.estimate.model import Setup

FORMAT = 1
SHIPPED_FILE = Path(__file__).with_name("measured.json")
PUBLISHED_FILE = Path(__file__).with_name("published.json")
SENT_FRACTION = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
"""The bytes sent, divided by a gradient's. PowerSGD's depend on the tensors' shapes: its points are left out."""
PIECE_MB = 25.0
"""The default size of the pieces in which our engines send gradients."""

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


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


def count_pieces(gradient_mb: float, num_tensors: int | None = None, piece_mb: float = PIECE_MB) -> int:
    """Count the pieces in which gradients travel; a piece is no smaller than a tensor."""
    pieces = max(1, ceil(gradient_mb / piece_mb))
    return pieces if num_tensors is None else min(pieces, num_tensors)


class Entry(Struct):
    """An entry of a file of points."""

    backend: str
    hosts: Count
    ranks_per_host: Count
    link_mbit: Positive | None
    """speed of each host's link; None: no limit was set"""
    delay_ms: Annotated[float, Meta(ge=0)]
    compression: str
    accumulation: Count
    batch_size: int
    gradient_mb: Positive
    num_tensors: Count
    step_ms: Annotated[list[Positive], Meta(min_length=1)]
    compute_ms: Positive | None
    """time of a step without exchange; None: not measured"""

    @property
    def is_covered(self) -> bool:
        """Whether the formula covers it."""
        return self.compression in SENT_FRACTION and self.compute_ms is not None

    def point(self) -> Point:
        """Return it as a point of the model."""
        assert self.compute_ms is not None
        setup = Setup(
            hosts=self.hosts,
            ranks_per_host=self.ranks_per_host,
            link_gbit=inf if self.link_mbit is None else self.link_mbit / 1000,
            compute_s=self.compute_ms / 1000,
            sent_bytes=self.gradient_mb * 2**20 * SENT_FRACTION[self.compression],
            pieces=count_pieces(self.gradient_mb, self.num_tensors),
            passes=self.accumulation,
            delay_s=self.delay_ms / 1000,
        )
        words = [
            f"{self.hosts} x {self.ranks_per_host} ranks",
            "no limit" if self.link_mbit is None else f"{self.link_mbit:g} Mbit/s",
            f"{self.delay_ms:g} ms" if self.delay_ms else "",
            self.compression if self.compression != "none" else "",
            f"{self.accumulation} passes" if self.accumulation > 1 else "",
        ]
        series = ", ".join(filter(None, words))
        label = f"{series}, {number(self.gradient_mb)} MB"
        return Point(self.backend, setup, median(self.step_ms) / 1000, series, label)


class Measured(Struct):
    """A file of points; those of one rank, or that the formula does not cover, are left out."""

    machine: str
    entries: list[Entry] = msgspec.field(name="points")
    device: Literal["gpu", "cpu"] = "cpu"

    def __post_init__(self) -> None:
        self.entries = [entry for entry in self.entries if entry.hosts * entry.ranks_per_host > 1]

    @property
    def points(self) -> list[Point]:
        return [entry.point() for entry in self.entries if entry.is_covered]

    def points_of(self, engine: str) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.engine == engine)

    def describe(self) -> str:
        """Describe the points in one line."""
        left_out = len(self.entries) - len(self.points)
        why = f", {left_out} left out (PowerSGD, or not timed alone)" if left_out else ""
        return f"{len(self.points)} points{why}, on {self.machine}"


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
        its = msgspec.convert(content, Measured)
    except OSError as error:
        raise OptionError(f"--fit {file} cannot be read ({error.strerror}): {wanted}") from None
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise OptionError(f"--fit {file} is no file of points ({error!r}): {wanted}") from None
    if not its.points:
        raise OptionError(f"--fit {file} has no point with two ranks or more: {wanted}")
    return its


@dataclass(frozen=True, kw_only=True)
class Series:
    """A published table: the same training on several numbers of GPUs."""

    source: str
    link_gbit: float
    code: str
    """whose code was run"""
    engine: Literal["horovod", "ddp"]
    network: str
    parameters: int
    """as torchvision's models have them, Inception V3 without its auxiliary classifier; BERT with its heads"""
    batch_size: int
    """per GPU"""
    alone: float
    """samples per second of one GPU"""
    speeds: Sequence[tuple[int, int, float]] = ()
    """samples per second of so many hosts with so many GPUs each"""
    efficiencies: Sequence[tuple[int, int, float]] = ()
    """where a source has these instead: a GPU's speed, divided by that of one alone"""
    piece_mb: float
    """by default 25 in DDP, 64 in Horovod (its fusion buffer); 1e6 where all gradients are sent at once"""
    trees: bool = True

    @property
    def name(self) -> str:
        return f"{self.code}, {self.network}"

    @property
    def gradient_mb(self) -> float:
        return self.parameters * 4 / 2**20

    @property
    def compute_s(self) -> float:
        return self.batch_size / self.alone

    @cached_property
    def points(self) -> list[Point]:
        """The points of the table, those with the fewest GPUs first."""
        pieces = count_pieces(self.gradient_mb, piece_mb=self.piece_mb)
        sent_bytes = self.parameters * 4
        found = [(hosts, gpus, speed / (hosts * gpus) / self.alone) for hosts, gpus, speed in self.speeds]
        return [
            Point(
                self.engine,
                Setup(hosts, gpus, self.link_gbit, self.compute_s, sent_bytes, pieces, trees=self.trees),
                self.compute_s / efficiency,
                self.name,
                f"{self.name}, {hosts * gpus} GPUs",
            )
            for hosts, gpus, efficiency in (*found, *self.efficiencies)
        ]


@cache
def published_series() -> Sequence[Series]:
    """Return all published tables."""
    return [
        Series(source=table["source"], link_gbit=table["link_gbit"], **series)
        for table in json.loads(PUBLISHED_FILE.read_text())
        for series in table["series"]
    ]


def published_points(engine: str) -> tuple[Point, ...]:
    """Return all published points of an engine."""
    return tuple(point for series in published_series() if series.engine == engine for point in series.points)
