"""Which operations all ranks have asked for: the same state on all members of a process set.

Every member feeds its `Matcher` with the same requests in the same order, as they came in the rounds of the
controller. So all members get the same list of responses, without a coordinator. Pure: no threads, no network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_trainer.hvd.common.request import REDUCE_OPS, Kind, Request, Signature, title_of
from hvd_trainer.utils.text import ranks_text

NOT_WITH_JOIN = (Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER, Kind.ADD_SET, Kind.REMOVE_SET)


@dataclass
class Response:
    """An operation that members of the set ask for; once all have, it is carried out, or is a mistake."""

    key: tuple[str, int]
    signatures: list[Signature | None]
    """of each member; None for one that has not asked yet, or has joined"""
    payloads: list[bytes]
    """the members' tensors, of those that came with the requests"""
    device_indices: list[int]
    """of the members' tensors; -1 on a CPU"""
    num_posted: int = 0
    error: str | None = None
    request: Request | None = None
    """this rank's own, once all have asked; None if it has joined"""

    @classmethod
    def empty(cls, key: tuple[str, int], size: int) -> Response:
        """Return one that none of `size` members has asked for yet."""
        return cls(key, [None] * size, [b""] * size, [-1] * size)

    @property
    def signature(self) -> Signature:
        """Signature of the first member that asked for the operation; members that have joined have none."""
        return next(signature for signature in self.signatures if signature is not None)

    @property
    def is_inline(self) -> bool:
        """Whether all members' tensors came with the requests."""
        return all(self.payloads)


class Matcher:
    """Collects requests of all members of a process set.

    Args:
        ranks: global ranks of the members.

    Attributes:
        joined: indices of members that have called `join`, each with whether it has a device for its zeros.
        pending: what some members have asked for, by name and number.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.joined: dict[int, bool] = {}
        self.pending: dict[tuple[str, int], Response] = {}
        self._responses: list[Response] = []

    def add(
        self, member: int, signature: Signature, number: int, payload: bytes = b"", device_index: int = -1
    ) -> None:
        """Note that a member asks for an operation.

        Args:
            payload: its tensor, if that came with the request.
            device_index: of its tensors' device.
        """
        key = signature.name, number
        entry = self.pending.get(key)
        if entry is None:
            entry = self.pending[key] = Response.empty(key, len(self.ranks))
        entry.signatures[member], entry.payloads[member] = signature, payload
        entry.device_indices[member] = device_index
        entry.num_posted += 1
        self._respond_if_complete(entry)

    def join(self, member: int, *, has_device: bool = True) -> None:
        """Note that a member has joined: it takes part in whatever the others ask for.

        Args:
            has_device: whether it can make zeros on an accelerator.
        """
        if member in self.joined:
            return
        self.joined[member] = has_device
        for entry in list(self.pending.values()):
            self._respond_if_complete(entry)

    def _respond_if_complete(self, entry: Response) -> None:
        if entry.num_posted < len(self.ranks) and (not self.joined or self._missing(entry)):
            return
        del self.pending[entry.key]
        if entry.signatures.count(entry.signatures[0]) < len(entry.signatures):
            entry.error = self._mistake(entry.key, entry.signatures)
        self._responses.append(entry)

    def _missing(self, entry: Response) -> list[int]:
        """Return the members that neither have asked for an operation yet nor have joined."""
        return [m for m, signature in enumerate(entry.signatures) if signature is None and m not in self.joined]

    def take_responses(self) -> list[Response]:
        """Return the operations that have become complete, in the order in which they did."""
        responses, self._responses = self._responses, []
        return responses

    def conflicts(self) -> list[list[Response]]:
        """Return different operations under one name, each member having asked for one of them."""
        by_name: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for key in self.pending:
            by_name.setdefault((key[0].partition(".")[2], key[1]), []).append(key)
        same_name = [[self.pending[key] for key in keys] for keys in by_name.values() if len(keys) > 1]
        return [entries for entries in same_name if all(len(asked) == 1 for asked in _asked_by_member(entries))]

    def refuse(self, entries: Sequence[Response]) -> None:
        """Respond with an error to different operations under one name."""
        error = self._mistake(entries[0].key, [signature for (signature,) in _asked_by_member(entries)])
        for entry in entries:
            del self.pending[entry.key]
            entry.error = error
        self._responses += entries

    def _mistake(self, key: tuple[str, int], signatures: Sequence[Signature | None]) -> str | None:
        """Return what ranks disagree in, with who asked for what; None if they agree."""
        asked = {
            self.ranks[member]: signature for member, signature in enumerate(signatures) if signature is not None
        }
        first = next(iter(asked.values()))
        if len(asked) < len(signatures) and first.kind in NOT_WITH_JOIN:
            joined = [self.ranks[member] for member in sorted(self.joined)]
            return (
                f"{first.kind.capitalize()} is not supported with Join: {title_of(key)} was asked for by "
                f"{ranks_text([*asked])}, while {ranks_text(joined)} had joined."
            )
        hosts = [
            self.ranks[member]
            for member, signature in enumerate(signatures)
            if signature is None and not self.joined.get(member, True)
        ]
        if hosts and first.device not in ("", "cpu"):
            return (
                f"{title_of(key)} is on {first.device}, asked for by {ranks_text([*asked])}, while "
                f"{ranks_text(hosts)} had joined without a device for zeros. Type hvd.join(hvd.local_rank()), or "
                f"the number of the GPU that the rank uses"
            )
        for what, value in _ASPECTS:
            values = {rank: value(signature) for rank, signature in asked.items()}
            if len(set(values.values())) > 1:
                return f"Mismatched {what} in {title_of(key)}: {_who_asked(values)}."
        return None


def _asked_by_member(entries: Sequence[Response]) -> list[list[Signature]]:
    """Return which of some operations each member has asked for."""
    by_member = zip(*(entry.signatures for entry in entries), strict=True)
    return [[signature for signature in signatures if signature is not None] for signatures in by_member]


def _who_asked(values: dict[int, Any]) -> str:
    """Return such as `rank 0 has float32, ranks 1, 2 have int64`."""
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return "; ".join(
        f"{ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}" for value, ranks in groups.items()
    )


def _comparable_shapes(signature: Signature) -> str:
    """Return the shapes as far as ranks must agree on them: gathered rows may differ in number."""
    shapes = signature.shapes
    if signature.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        return ", ".join(f"({', '.join(['any', *map(str, shape[1:])])})" for shape in shapes)
    return ", ".join(f"({', '.join(map(str, shape))})" for shape in shapes)


_ASPECTS: Sequence[tuple[str, Callable[[Signature], Any]]] = (
    ("operations", lambda s: s.kind),
    ("numbers of tensors", lambda s: len(s.shapes)),
    ("data types", lambda s: ", ".join(s.dtypes)),
    ("devices", lambda s: s.device),
    ("reduction operations", lambda s: REDUCE_OPS[s.op] if s.op >= 0 else "none"),
    ("prescale factors", lambda s: s.prescale),
    ("postscale factors", lambda s: s.postscale),
    ("tensor shapes", _comparable_shapes),
    ("root ranks", lambda s: s.root),
    ("process sets", lambda s: s.splits if s.kind != Kind.ALLTOALL else ()),
)
