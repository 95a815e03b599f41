"""The optimizer's state sharded over a replica group: each rank updates and then broadcasts some parameters.

    gradients   a b c d     averaged, on all replicas
    rank 0      a b         updates these, and has only their optimizer state
    rank 1          c d
    parameters  a b c d     broadcast by the rank that has updated them

ZeRO stage 1 (Rajbhandari et al., 2020), by whole parameters, so that any optimizer works unchanged and gives the
same bits as if each rank updated all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_trainer.backends import Backend
from hvd_trainer.utils.tensors import parameters_of

BUCKET_BYTES = 4 * 2**20
"""Size of the parameters that are sent together. Each bucket is a copy, and engines keep the last ones alive."""
MAX_BUCKETS_IN_FLIGHT = 16
"""How many buckets, which are copies, are sent before the first is waited for."""


def assign_owners(sizes: Sequence[int], owners: int) -> list[int]:
    """Assign each parameter to an owner: the largest first, always to the one with the least so far.

    Returns:
        The owner of each, from 0 on.
    """
    load, owner = [0] * owners, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owner[number] = load.index(min(load))
        load[owner[number]] += sizes[number]
    return owner


def make_buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters by type and device into buckets; one of `BUCKET_BYTES` or more has a bucket to itself."""
    buckets: list[list[Tensor]] = []
    for kind in dict.fromkeys((p.dtype, p.device) for p in parameters):
        room = 0
        for parameter in (p for p in parameters if (p.dtype, p.device) == kind):
            size = parameter.numel() * parameter.element_size()
            if size > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append(parameter)
            room -= size
    return buckets


class ShardedOptimizer:
    """Let an optimizer update only this rank's parameters, and receive the others after each step."""

    def __init__(self, backend: Backend, optimizer: Optimizer) -> None:
        self._backend = backend
        parameters = [p for p in parameters_of(optimizer) if not p.is_meta]
        owners = assign_owners([p.numel() for p in parameters], len(backend.replica_group))
        self._by_owner: list[list[Tensor]] = [[] for _ in backend.replica_group]
        for parameter, owner in zip(parameters, owners, strict=True):
            self._by_owner[owner].append(parameter)
        self._mine = {id(p) for p in self._by_owner[backend.replica_group.index(backend.world.rank)]}
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def has_all_of(self, optimizer: Optimizer) -> bool:
        """Whether each parameter that the optimizer updates has an owner."""
        owned = {id(parameter) for parameters in self._by_owner for parameter in parameters}
        return all(parameter.is_meta or id(parameter) in owned for parameter in parameters_of(optimizer))

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter."""
        return id(parameter) in self._mine

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        for parameter in parameters_of(optimizer):
            if not self.owns(parameter):
                parameter.grad = None  # optimizers skip it then

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        owned = zip(self._backend.replica_group, self._by_owner, strict=True)
        waiting = [(bucket, rank) for rank, parameters in owned for bucket in make_buckets(parameters)]
        with self._backend.activity.waiting():
            for first in range(0, len(waiting), MAX_BUCKETS_IN_FLIGHT):
                self._send(waiting[first : first + MAX_BUCKETS_IN_FLIGHT])

    def _send(self, sent: Sequence[tuple[Sequence[Tensor], int]]) -> None:
        """Broadcast buckets, each from the rank that has updated it."""
        me = self._backend.world.rank
        pieces = [(_in_one_piece(parameters, sends=rank == me), rank) for parameters, rank in sent]
        self._backend.collectives.broadcast_to_replicas(pieces)
        for (parameters, rank), (piece, _) in zip(sent, pieces, strict=True):
            if rank != me and piece.data_ptr() != parameters[0].data_ptr():
                for parameter, part in zip(parameters, piece.split([p.numel() for p in parameters]), strict=True):
                    parameter.copy_(part.view_as(parameter))

    def close(self) -> None:
        """Let the optimizer update all its parameters again."""
        for hook in self._hooks:
            hook.remove()


def _in_one_piece(parameters: Sequence[Tensor], *, sends: bool) -> Tensor:
    """Return parameters of one type as a flat tensor, or room to receive them; a contiguous one as it is."""
    if len(parameters) == 1 and parameters[0].is_contiguous():
        return parameters[0].detach()
    if not sends:
        return parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))
    return torch.cat([parameter.reshape(-1) for parameter in parameters])
