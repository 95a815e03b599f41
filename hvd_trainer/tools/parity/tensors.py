"""Which tensors differ: between the ranks of one run, which should have the same, and between two runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from hvd_trainer.tools.parity.distance import Distance, distance_between, least_norms
from hvd_trainer.tools.parity.traces import Moment, Trace, When


@dataclass(frozen=True)
class Unlike:
    """Tensors that differ; of the first one, how."""

    name: str
    ranks: tuple[int, int]
    gap: Distance
    count: int
    """how many differ"""
    total: int
    """of how many"""


class Place(NamedTuple):
    """A tensor on two ranks, be they of one run or of two."""

    name: str
    one: int
    other: int


def among_ranks(trace: Trace, when: When, kind: str, limit: float = 0.0) -> Unlike | None:
    """Tensors of one name that are not the same on all ranks that have them whole.

    Args:
        kind: gradients, parameters, optimizer or buffers.
        limit: of the relative difference; 0: each bit counts.
    """
    places, holders = [], _holders(trace, when, kind)
    for rank, its in enumerate(trace.ranks):
        for name in _whole(trace, its[when].checksums(kind)):
            places.append(Place(name, holders[name], rank))
    return _Sides(trace, trace, when, kind).unlike(places, limit)


def between(one: Trace, other: Trace, when: When, kind: str, limit: float = 0.0) -> Unlike | None:
    """Tensors that two runs do not have alike: on each rank; of unequal numbers of ranks, those that are whole."""
    sides = _Sides(one, other, when, kind)
    if one.size != other.size:
        left, right = (_holders(trace, when, kind) for trace in (one, other))
        places = [Place(name, left.get(name, 0), right.get(name, 0)) for name in dict.fromkeys([*left, *right])]
        return sides.unlike(places, limit)
    pairs = enumerate(zip(one.ranks, other.ranks, strict=True))
    return sides.unlike(
        [
            Place(name, rank, rank)
            for rank, pair in pairs
            for name in dict.fromkeys(name for its in pair for name in its[when].checksums(kind))
        ],
        limit,
    )


def largest(one: Trace, other: Trace, when: When, kind: str = "parameters") -> float:
    """The largest relative difference of a tensor between two runs, as rank 0 has them; 0: the same bits."""
    sides = _Sides(one, other, when, kind)
    names = dict.fromkeys(name for its in (one, other) for name in its.ranks[0][when].checksums(kind))
    places = [Place(name, 0, 0) for name in names if not sides.same(Place(name, 0, 0))]
    return max((sides.gap(place).relative for place in places), default=0.0)


def _whole(trace: Trace, names: Iterable[str]) -> Iterator[str]:
    """Those that are no slices of what several ranks share."""
    sliced = set(trace.start["sliced"])
    return (name for name in names if name not in sliced and name.rpartition("/")[0] not in sliced)


def _holders(trace: Trace, when: When, kind: str) -> dict[str, int]:
    """The first rank that has each tensor whole."""
    found: dict[str, int] = {}
    for rank, its in enumerate(trace.ranks):
        for name in _whole(trace, its[when].checksums(kind)):
            found.setdefault(name, rank)
    return found


class _Sides:
    """Tensors of one kind at one moment, on all ranks of two runs, or of one and the same."""

    def __init__(self, one: Trace, other: Trace, when: When, kind: str) -> None:
        self._left, self._right = ([_Rank(its[when]) for its in trace.ranks] for trace in (one, other))
        self._kind = kind

    def checksums(self, place: Place) -> tuple[str | None, str | None]:
        left, right = self._left[place.one].moment, self._right[place.other].moment
        return left.checksums(self._kind).get(place.name), right.checksums(self._kind).get(place.name)

    def same(self, place: Place) -> bool:
        left, right = self.checksums(place)
        return left == right

    def gap(self, place: Place) -> Distance:
        left, right, name = self._left[place.one], self._right[place.other], f"{self._kind}/{place.name}"
        return distance_between(left.values.get(name), right.values.get(name), left.least.get(name, 0.0))

    def unlike(self, places: Sequence[Place], limit: float) -> Unlike | None:
        differing: dict[str, tuple[Place, Distance]] = {}
        seen = set()
        for place in places:
            # Ranks that have the same need not be looked at again.
            known = (place.name, *self.checksums(place))
            if place.name in differing or self.same(place) or known in seen:
                continue
            seen.add(known)
            if limit == 0 and differing:
                differing[place.name] = next(iter(differing.values()))  # only the first one's is told
            elif (its := self.gap(place)).relative > limit or limit == 0:
                differing[place.name] = place, its
        if not differing:
            return None
        place, its = next(iter(differing.values()))
        total = len({place.name for place in places})
        return Unlike(place.name, (place.one, place.other), its, len(differing), total)


class _Rank:
    """What one rank has at one moment, read when it is needed."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment

    @cached_property
    def values(self) -> Mapping[str, Tensor]:
        return self.moment.values()

    @cached_property
    def least(self) -> Mapping[str, float]:
        return least_norms(self.values)
