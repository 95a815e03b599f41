"""Read published.json, speeds on several GPUs with their sources; nothing in it was measured by us.

A figure that the formula needs and a source lacks is assumed, and marked so in the source's notes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from hvd_trainer.tools.estimate.model import Setup
from hvd_trainer.tools.estimate.points import Point, count_pieces

FILE = Path(__file__).with_name("published.json")


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
        parts = [(hosts, gpus, speed / (hosts * gpus) / self.alone) for hosts, gpus, speed in self.speeds]
        return [
            Point(
                self.engine,
                self._setup(hosts, per_host),
                self.compute_s / efficiency,
                self.name,
                f"{self.name}, {hosts * per_host} GPUs",
            )
            for hosts, per_host, efficiency in (*parts, *self.efficiencies)
        ]

    def _setup(self, hosts: int, per_host: int) -> Setup:
        return Setup(
            hosts,
            per_host,
            self.link_gbit,
            self.compute_s,
            self.parameters * 4,
            count_pieces(self.gradient_mb, piece_mb=self.piece_mb),
            trees=self.trees,
        )


@cache
def published_series() -> Sequence[Series]:
    """Return all published tables."""
    return [
        Series(source=table["source"], link_gbit=table["link_gbit"], **series)
        for table in json.loads(FILE.read_text())
        for series in table["series"]
    ]


def published_points(engine: str) -> list[Point]:
    """Return all published points of an engine."""
    return [point for series in published_series() if series.engine == engine for point in series.points]
