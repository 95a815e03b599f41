"""Find tensors that differ, among the ranks of one run and between two runs, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_trainer.tools.parity.traces import Moment, Snapshot, Trace

NONE = "none"
"""Stands for a value that one side does not have."""
MIN_NORM_FRACTION = 0.01
"""A difference is divided by at least this fraction of the norm of all tensors of its kind: some gradients are
nothing but rounding, such as that of a bias in front of batch norm, and differ by as much as their own norm."""


@dataclass(frozen=True)
class Finding:
    """A quantity that differs."""

    when: Moment
    quantity: str
    """such as the kind of a tensor, or what else `comparison.py` compares"""
    sides: tuple[str, str]
    values: tuple[Any, Any]
    """for a tensor, its elements that are farthest apart"""
    name: str = ""
    """name of the first that differs"""
    relative: float = 0.0
    count: int = 1
    """how many differ"""
    total: int = 1
    """how many were compared"""
    run: str = ""
    """the run whose ranks differ among each other; empty where two runs do"""


class Distance(NamedTuple):
    """The distance of two values."""

    relative: float
    """the norm of the difference divided by that of the larger tensor"""
    left: Any
    right: Any
    """of tensors the elements that are farthest apart, or a description of one without a counterpart"""


TensorPair = tuple[str, int, int]
"""The name of a tensor, and two ranks, of one run or of two."""


def find_unlike_tensors(
    one: Trace, other: Trace, when: Moment, kind: str, limit: float = 0.0
) -> Iterator[Finding]:
    """Yield a finding for each tensor that differs between two runs, or among the ranks of one.

    Ranks of one run are compared where they have a tensor whole. Two runs are compared rank by rank; between
    unequal numbers of ranks only whole tensors are.

    Args:
        other: the same as `one`, to compare its ranks.
        kind: gradients, parameters, optimizer or buffers.
        limit: the largest allowed relative difference; 0: every bit counts.
    """
    pairs, run = _pairs(one, other, when, kind), one.name if one is other else ""
    total = len({name for name, _, _ in pairs})
    done, seen = set[str](), set[tuple[str, str | None, str | None]]()
    for name, rank, other_rank in pairs:
        left, right = one.ranks[rank][when], other.ranks[other_rank][when]
        contents = name, left.checksums(kind).get(name), right.checksums(kind).get(name)
        # The same two contents may have been compared on other ranks already.
        if contents[1] == contents[2] or name in done or contents in seen:
            continue
        seen.add(contents)
        apart = _distance(left, right, kind, name)
        if limit == 0 or apart.relative > limit:
            done.add(name)
            sides, values = _sides(one, other, rank, other_rank), (apart.left, apart.right)
            yield Finding(when, kind, sides, values, name, apart.relative, total=total, run=run)


def _pairs(one: Trace, other: Trace, when: Moment, kind: str) -> list[TensorPair]:
    if one.size == other.size and one is not other:
        sides = enumerate(zip(one.ranks, other.ranks, strict=True))
        sums = [(rank, left[when].checksums(kind), right[when].checksums(kind)) for rank, (left, right) in sides]
        return [(name, rank, rank) for rank, left, right in sums for name in {**left, **right}]
    first, others = (_first_holders(trace, when, kind) for trace in (one, other))
    if one is not other:
        return [(name, first.get(name, 0), others.get(name, 0)) for name in {**first, **others}]
    return [(name, first[name], rank) for rank in range(one.size) for name in _whole(one, when, kind, rank)]


def _whole(trace: Trace, when: Moment, kind: str, rank: int) -> Iterator[str]:
    """Yield the names of tensors of a rank that are not split over ranks."""
    snapshots = trace.ranks[rank]
    sliced = set(snapshots[min(snapshots)].line["sliced"])  # a stage has tensors of its own
    for name in snapshots[when].checksums(kind):
        if not {name, name.rpartition("/")[0]} & sliced:  # `fc1.weight`, or its `fc1.weight/exp_avg`
            yield name


def _first_holders(trace: Trace, when: Moment, kind: str) -> dict[str, int]:
    """Return the first rank that has each tensor whole, by name."""
    holders: dict[str, int] = {}
    for rank in range(trace.size):
        for name in _whole(trace, when, kind, rank):
            holders.setdefault(name, rank)
    return holders


def _sides(one: Trace, other: Trace, rank: int, other_rank: int) -> tuple[str, str]:
    if one is other:
        return f"rank {rank}", f"rank {other_rank}"
    left, right = (f", rank {number}" if number else "" for number in (rank, other_rank))
    return one.name + left, other.name + right


def _distance(left: Snapshot, right: Snapshot, kind: str, name: str) -> Distance:
    place = f"{kind}/{name}"
    min_norm = MIN_NORM_FRACTION * norm_of_kind(left, kind_of(place))
    return distance_between(left.values().get(place, NONE), right.values().get(place, NONE), min_norm)


def distance_between(one: Any, other: Any, min_norm: float = 0.0) -> Distance:
    """Return the distance of two flat tensors, or of two floats; what else differs is infinitely far apart.

    Args:
        one, other: the values; `NONE` where a side has none.
        min_norm: the least norm by which the difference is divided.
    """
    if isinstance(one, float) and isinstance(other, float):
        one, other = (torch.tensor([side], dtype=torch.float64) for side in (one, other))
    are_tensors = isinstance(one, Tensor), isinstance(other, Tensor)
    if not all(are_tensors) or len(one) != len(other):
        is_same = not any(are_tensors) and one == other
        return Distance(0.0 if is_same else math.inf, _describe(one), _describe(other))
    left, right = one.double(), other.double()
    distance = (left - right).abs()
    distance[(left == right) | (left.isnan() & right.isnan())] = 0.0
    distance = distance.nan_to_num(nan=math.inf, posinf=math.inf)
    if not len(distance) or not float(distance.max()):
        return Distance(0.0, 0.0, 0.0)
    place = int(distance.argmax())
    size = max(float(left.norm()), float(right.norm()), min_norm)
    relative = float(distance.norm()) / size if math.isfinite(size) else math.inf
    return Distance(relative, float(left[place]), float(right[place]))


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor) or len(value) == 1:
        return float(value) if isinstance(value, Tensor) else value
    return f"{len(value):,} elements, norm {float(value.double().norm()):.4g}"


@lru_cache(maxsize=64)
def norm_of_kind(snapshot: Snapshot, kind: str) -> float:
    """Return the norm of all tensors of one kind on a rank."""
    squares = [float(t.double().square().sum()) for n, t in snapshot.values().items() if kind_of(n) == kind]
    return math.sqrt(sum(squares))


def kind_of(place: str) -> str:
    """Return the kind of a tensor: `gradients` of `gradients/fc1.weight`, `optimizer/exp_avg` of
    `optimizer/fc1.weight/exp_avg`.
    """
    kind, _, rest = place.partition("/")
    return f"{kind}/{rest.rpartition('/')[2]}" if kind == "optimizer" else kind
