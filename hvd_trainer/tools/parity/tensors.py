"""Find tensors that differ: among the ranks of one run, and between two runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from hvd_trainer.tools.parity.case import Finding
from hvd_trainer.tools.parity.distance import Distance, distance_between, min_norms
from hvd_trainer.tools.parity.traces import Moment, Snapshot, Trace


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
