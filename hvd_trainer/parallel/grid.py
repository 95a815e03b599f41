"""The grid of stages and replicas: which ranks share one copy of the model, and which have the same part of it.

    6 ranks, 2 stages           stage 0   stage 1
                   replica 0    rank 0    rank 1     a row passes activations on, and gradients back
                   replica 1    rank 2    rank 3
                   replica 2    rank 4    rank 5     a column averages its gradients

Pure arithmetic: nothing here has started yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvd_trainer.errors import OptionError


class Place(NamedTuple):
    """Where a rank stands in the grid."""

    replica: int
    stage: int


@dataclass(frozen=True)
class Grid:
    """The ranks by replica and stage: `rows[replica][stage]`."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.rows[0])

    @property
    def replicas(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[list[int]]:
        """Per stage, the ranks that have it."""
        return [list(column) for column in zip(*self.rows, strict=True)]

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        return next(Place(replica, row.index(rank)) for replica, row in enumerate(self.rows) if rank in row)


def check_stages(stages: int, size: int) -> None:
    """Refuses stages that do not divide the ranks.

    Raises:
        OptionError: they do not.
    """
    if size % stages:
        divisors = [str(count) for count in range(1, size + 1) if size % count == 0]
        raise OptionError(
            f"--stages {stages} does not divide the {size} {'rank' if size == 1 else 'ranks'}: each copy of the "
            f"model takes one rank per stage. Start {max(1, round(size / stages)) * stages} ranks, or give one of "
            f"these: --stages {', '.join(divisors)}"
        )


def make_grid(nodes: Sequence[str], stages: int) -> Grid:
    """Lays the grid out so that the stages of a replica are on one node, wherever they fit.

    Stages send each other activations in every micro-batch, replicas exchange gradients once per step; so rows
    take the ranks of one node first, and only what is left of the nodes is put together across them.

    Args:
        nodes: the node of each rank, in rank order.
        stages: processes that share one copy of the model.

    Returns:
        The grid; rank 0 is stage 0 of replica 0.

    Raises:
        OptionError: the stages do not divide the ranks.
    """
    check_stages(stages, len(nodes))
    rows: list[tuple[int, ...]] = []
    left: list[int] = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, its in enumerate(nodes) if its == node]
        whole = len(ranks) // stages * stages
        rows += [tuple(ranks[start : start + stages]) for start in range(0, whole, stages)]
        left += ranks[whole:]
    rows += [tuple(left[start : start + stages]) for start in range(0, len(left), stages)]
    return Grid(tuple(sorted(rows)))
