"""The grid of stages and replicas: which ranks share one copy of the model, and which have the same stage.

    6 ranks, 2 stages           stage 0   stage 1
                   replica 0    rank 0    rank 1     a row is a stage group: activations go right, gradients left
                   replica 1    rank 2    rank 3
                   replica 2    rank 4    rank 5     a column is a replica group: it averages its gradients

Pure arithmetic, before any engine has started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """A rank's position in the grid."""

    replica: int
    stage: int


@dataclass(frozen=True)
class Grid:
    """The ranks by replica and stage."""

    stage_groups: tuple[tuple[int, ...], ...]
    """per replica the ranks of its stages: `stage_groups[replica][stage]`"""

    @property
    def num_replicas(self) -> int:
        """How many copies of the model there are."""
        return len(self.stage_groups)

    @property
    def replica_groups(self) -> list[list[int]]:
        """Per stage the ranks that have it, one of each replica."""
        return [list(group) for group in zip(*self.stage_groups, strict=True)]

    def place(self, rank: int) -> Place:
        """Return a rank's replica and stage."""
        groups = enumerate(self.stage_groups)
        return next(Place(replica, group.index(rank)) for replica, group in groups if rank in group)


def make_grid(nodes: Sequence[str], stages: int) -> Grid:
    """Lay the grid out so that the stages of a replica are on one node, wherever they fit. They divide the ranks.

    Stages send each other activations in every micro-batch, replicas exchange gradients once per step. So stage
    groups take the ranks of one node first, and only the remaining ranks form groups across nodes.

    Returns:
        The grid; rank 0 is stage 0 of replica 0.
    """
    groups: list[tuple[int, ...]] = []
    left: list[int] = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, other in enumerate(nodes) if other == node]
        whole = len(ranks) // stages * stages
        groups += [tuple(ranks[start : start + stages]) for start in range(0, whole, stages)]
        left += ranks[whole:]
    groups += [tuple(left[start : start + stages]) for start in range(0, len(left), stages)]
    return Grid(tuple(sorted(groups)))
