"""Find tensors that differ, among the ranks of one run and between two runs, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

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
    """The distance of two tensors."""

    relative: float
    """the norm of the difference divided by that of the larger tensor"""
    left: Any
    right: Any
    """the elements that are farthest apart, or a description of a tensor without a counterpart"""


TensorPair = tuple[str, int, int]
"""The name of a tensor, and two ranks, of one run or of two."""


def among_ranks(trace: Trace, when: Moment, kind: str, limit: float = 0.0) -> Iterator[Finding]:
    """Yield a finding if there are tensors that are not the same on all ranks of a run that have them whole.

    Args:
        kind: gradients, parameters, optimizer or buffers.
        limit: the largest allowed relative difference; 0: every bit counts.
    """
    first = _first_holders(trace, when, kind)
    ranks = range(trace.size)
    pairs = [(name, first[name], rank) for rank in ranks for name in _whole(trace, when, kind, rank)]
    yield from _compare(trace, trace, when, kind, pairs, limit)


def between_runs(one: Trace, other: Trace, when: Moment, kind: str, limit: float = 0.0) -> Iterator[Finding]:
    """Yield a finding if tensors differ between two runs.

    They are compared rank by rank; between unequal numbers of ranks only whole tensors are.
    """
    if one.size == other.size:
        sides = enumerate(zip(one.ranks, other.ranks, strict=True))
        sums = [(rank, left[when].checksums(kind), right[when].checksums(kind)) for rank, (left, right) in sides]
        pairs = [(name, rank, rank) for rank, left, right in sums for name in {**left, **right}]
    else:
        left, right = (_first_holders(trace, when, kind) for trace in (one, other))
        pairs = [(name, left.get(name, 0), right.get(name, 0)) for name in {**left, **right}]
    yield from _compare(one, other, when, kind, pairs, limit)


def largest_difference(one: Trace, other: Trace, when: Moment) -> float:
    """Return the largest relative difference of a parameter on rank 0 of two runs; 0 means the same bits."""
    left, right = one.ranks[0][when], other.ranks[0][when]
    sums = left.checksums("parameters"), right.checksums("parameters")
    names = [name for name in {**sums[0], **sums[1]} if sums[0].get(name) != sums[1].get(name)]
    return max((_distance(left, right, "parameters", name).relative for name in names), default=0.0)


def _whole(trace: Trace, when: Moment, kind: str, rank: int) -> Iterator[str]:
    """Yield the names of tensors of a rank that are not split over ranks."""
    sliced = set(trace.start["sliced"])
    for name in trace.ranks[rank][when].checksums(kind):
        if not {name, name.rpartition("/")[0]} & sliced:  # `fc1.weight`, or its `fc1.weight/exp_avg`
            yield name


def _first_holders(trace: Trace, when: Moment, kind: str) -> dict[str, int]:
    """Return the first rank that has each tensor whole, by name."""
    holders: dict[str, int] = {}
    for rank in range(trace.size):
        for name in _whole(trace, when, kind, rank):
            holders.setdefault(name, rank)
    return holders


def _compare(
    one: Trace, other: Trace, when: Moment, kind: str, pairs: Sequence[TensorPair], limit: float
) -> Iterator[Finding]:
    """Yield a finding about the first tensor that differs by more than the limit, and the number of them."""
    findings, seen = dict[str, Finding](), set[tuple[str, str | None, str | None]]()
    for name, rank, other_rank in pairs:
        left, right = one.ranks[rank][when], other.ranks[other_rank][when]
        contents = name, left.checksums(kind).get(name), right.checksums(kind).get(name)
        # The same two contents may have been compared on other ranks already.
        if contents[1] == contents[2] or name in findings or contents in seen:
            continue
        seen.add(contents)
        apart = _distance(left, right, kind, name)
        if limit == 0 or apart.relative > limit:
            sides, values = _sides(one, other, rank, other_rank), (apart.left, apart.right)
            findings[name] = Finding(when, kind, sides, values, name, apart.relative)
    for first in [*findings.values()][:1]:
        total, run = len({name for name, _, _ in pairs}), one.name if one is other else ""
        yield replace(first, count=len(findings), total=total, run=run)


def _sides(one: Trace, other: Trace, rank: int, other_rank: int) -> tuple[str, str]:
    if one is other:
        return f"rank {rank}", f"rank {other_rank}"
    left, right = (f", rank {number}" if number else "" for number in (rank, other_rank))
    return one.name + left, other.name + right


def _distance(left: Snapshot, right: Snapshot, kind: str, name: str) -> Distance:
    place = f"{kind}/{name}"
    min_norm = MIN_NORM_FRACTION * norm_of_kind(left, kind_of(place))
    return distance_between(left.values().get(place), right.values().get(place), min_norm)


def distance_between(one: Tensor | None, other: Tensor | None, min_norm: float = 0.0) -> Distance:
    """Return the distance of two flat tensors.

    Args:
        one, other: the tensors; None where a side does not have it.
        min_norm: the least norm by which the difference is divided.
    """
    if one is None or other is None or len(one) != len(other):
        return Distance(math.inf, _describe_tensor(one), _describe_tensor(other))
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


def _describe_tensor(tensor: Tensor | None) -> Any:
    if tensor is None:
        return NONE
    if len(tensor) == 1:
        return float(tensor)
    return f"{len(tensor):,} elements, norm {float(tensor.double().norm()):.4g}"


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
