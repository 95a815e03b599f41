"""Find tensors that differ, among the ranks of one run and between two runs, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """set-up, settings, samples, order, skipped, learning rate, loss, gradients, gradient norm, parameters,
    optimizer, buffers, evaluation, or steps"""
    sides: tuple[str, str]
    values: tuple[Any, Any]
    """for a tensor, its elements that are farthest apart"""
    name: str = ""
    """name of the first that differs"""
    absolute: float = 0.0
    relative: float = 0.0
    count: int = 1
    """how many differ"""
    total: int = 1
    """how many were compared"""
    run: str = ""
    """the run whose ranks differ among each other; empty where two runs do"""


class TensorPair(NamedTuple):
    """A tensor on two ranks, of one run or of two."""

    name: str
    one: int
    other: int


def among_ranks(trace: Trace, when: Moment, kind: str, limit: float = 0.0) -> Iterator[Finding]:
    """Yield a finding if there are tensors that are not the same on all ranks of a run that have them whole.

    Args:
        kind: gradients, parameters, optimizer or buffers.
        limit: the largest allowed relative difference; 0: every bit counts.
    """
    places, holders = [], _holders(trace, when, kind)
    for rank, its in enumerate(trace.ranks):
        for name in _unsliced(trace, its[when].checksums(kind)):
            places.append(TensorPair(name, holders[name], rank))
    yield from _KindComparison(trace, trace, when, kind).find(places, limit)


def between_runs(one: Trace, other: Trace, when: Moment, kind: str, limit: float = 0.0) -> Iterator[Finding]:
    """Yield a finding if tensors differ between two runs.

    They are compared rank by rank; between unequal numbers of ranks only whole tensors are.
    """
    if one.size != other.size:
        left, right = (_holders(trace, when, kind) for trace in (one, other))
        names = dict.fromkeys([*left, *right])
        places = [TensorPair(name, left.get(name, 0), right.get(name, 0)) for name in names]
    else:
        places = [place for rank in range(one.size) for place in _same_rank(one, other, when, kind, rank)]
    yield from _KindComparison(one, other, when, kind).find(places, limit)


def largest_difference(one: Trace, other: Trace, when: Moment, kind: str = "parameters") -> float:
    """Return the largest relative difference of a tensor on rank 0 of two runs; 0 means the same bits."""
    sides = _KindComparison(one, other, when, kind)
    places = _same_rank(one, other, when, kind, 0)
    return max((sides.gap(place).relative for place in places if not sides.same(place)), default=0.0)


def _same_rank(one: Trace, other: Trace, when: Moment, kind: str, rank: int) -> list[TensorPair]:
    names = dict.fromkeys(name for its in (one, other) for name in its.ranks[rank][when].checksums(kind))
    return [TensorPair(name, rank, rank) for name in names]


def _unsliced(trace: Trace, names: Iterable[str]) -> Iterator[str]:
    """Yield the names of tensors that are not split over ranks."""
    sliced = set(trace.start["sliced"])
    return (name for name in names if name not in sliced and name.rpartition("/")[0] not in sliced)


def _holders(trace: Trace, when: Moment, kind: str) -> dict[str, int]:
    """Return the first rank that has each tensor whole, by name."""
    found: dict[str, int] = {}
    for rank, its in enumerate(trace.ranks):
        for name in _unsliced(trace, its[when].checksums(kind)):
            found.setdefault(name, rank)
    return found


class _KindComparison:
    """The tensors of one kind at one moment, on all ranks of two runs, or twice of one run."""

    def __init__(self, one: Trace, other: Trace, when: Moment, kind: str) -> None:
        self._left, self._right = ([_Rank(its[when]) for its in trace.ranks] for trace in (one, other))
        self._names, self._when, self._kind = (one.name, other.name), when, kind
        self._run = one.name if one is other else ""

    def checksums(self, place: TensorPair) -> tuple[str | None, str | None]:
        left, right = self._left[place.one].moment, self._right[place.other].moment
        return left.checksums(self._kind).get(place.name), right.checksums(self._kind).get(place.name)

    def same(self, place: TensorPair) -> bool:
        left, right = self.checksums(place)
        return left == right

    def gap(self, place: TensorPair) -> Distance:
        left, right, name = self._left[place.one], self._right[place.other], f"{self._kind}/{place.name}"
        return distance_between(left.values.get(name), right.values.get(name), left.min_norm.get(name, 0.0))

    def find(self, places: Sequence[TensorPair], limit: float) -> Iterator[Finding]:
        """Yield a finding about the first tensor that differs by more than the limit, and the number of them."""
        differing: dict[str, tuple[TensorPair, Distance]] = {}
        seen = set()
        for place in places:
            # The same two contents were compared on other ranks already.
            known = (place.name, *self.checksums(place))
            if place.name in differing or self.same(place) or known in seen:
                continue
            seen.add(known)
            if limit == 0 and differing:
                differing[place.name] = next(iter(differing.values()))  # only the first one's distance is reported
            elif (its := self.gap(place)).relative > limit or limit == 0:
                differing[place.name] = place, its
        for place, its in [*differing.values()][:1]:
            yield Finding(
                self._when,
                self._kind,
                self._sides(place),
                (its.left, its.right),
                name=place.name,
                absolute=its.absolute,
                relative=its.relative,
                count=len(differing),
                total=len({place.name for place in places}),
                run=self._run,
            )

    def _sides(self, place: TensorPair) -> tuple[str, str]:
        if self._run:
            return f"rank {place.one}", f"rank {place.other}"
        one, other = (name + (f", rank {n}" if n else "") for name, n in zip(self._names, place[1:], strict=True))
        return one, other


class _Rank:
    """The state of one rank at one moment, read on first use."""

    def __init__(self, moment: Snapshot) -> None:
        self.moment = moment

    @cached_property
    def values(self) -> Mapping[str, Tensor]:
        return self.moment.values()

    @cached_property
    def min_norm(self) -> Mapping[str, float]:
        return min_norms(self.values)


class Distance(NamedTuple):
    """The distance of two tensors."""

    absolute: float
    """the largest difference of an element"""
    relative: float
    """the norm of the difference divided by that of the larger tensor"""
    left: Any
    right: Any
    """the elements that are farthest apart, or a description of a tensor without a counterpart"""


def distance_between(one: Tensor | None, other: Tensor | None, min_norm: float = 0.0) -> Distance:
    """Return the distance of two flat tensors.

    Args:
        one, other: the tensors; None where a side does not have it.
        min_norm: the least norm by which the difference is divided.
    """
    if one is None or other is None or len(one) != len(other):
        return Distance(math.inf, math.inf, _describe_tensor(one), _describe_tensor(other))
    left, right = one.double(), other.double()
    distance = (left - right).abs()
    distance[(left == right) | (left.isnan() & right.isnan())] = 0.0
    distance = distance.nan_to_num(nan=math.inf, posinf=math.inf)
    if not len(distance) or not float(distance.max()):
        return Distance(0.0, 0.0, 0.0, 0.0)
    place = int(distance.argmax())
    size = max(float(left.norm()), float(right.norm()), min_norm)
    relative = float(distance.norm()) / size if math.isfinite(size) else math.inf
    return Distance(float(distance[place]), relative, float(left[place]), float(right[place]))


def _describe_tensor(tensor: Tensor | None) -> Any:
    if tensor is None:
        return NONE
    return (
        float(tensor)
        if len(tensor) == 1
        else f"{len(tensor):,} elements, norm {float(tensor.double().norm()):.4g}"
    )


def min_norms(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return for each tensor the least norm that it is measured by, from the norm of all tensors of its kind."""
    squares: dict[str, float] = {}
    for name, tensor in values.items():
        squares[_kind(name)] = squares.get(_kind(name), 0.0) + float(tensor.double().square().sum())
    return {name: MIN_NORM_FRACTION * math.sqrt(squares[_kind(name)]) for name in values}


def _kind(name: str) -> str:
    """Return the kind of a tensor: `gradients` of `gradients/fc1.weight`, `optimizer/exp_avg` of
    `optimizer/fc1.weight/exp_avg`.
    """
    kind, _, rest = name.partition("/")
    return f"{kind}/{rest.rpartition('/')[2]}" if kind == "optimizer" else kind


def relative_difference(left: float, right: float) -> float:
    """Return the relative difference of two numbers; infinite if one is, or is NaN, and the other is not."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    size = max(abs(left), abs(right))
    return abs(left - right) / size if math.isfinite(size) else math.inf
