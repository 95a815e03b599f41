"""The optimizer's state shared out among replicas: each updates some parameters, and gives them to the others.

    gradients   a b c d     averaged, on all replicas
    rank 0      a b         updates these, and has the optimizer's state of them alone
    rank 1          c d
    parameters  a b c d     sent round by the rank that has updated them

The first stage of ZeRO (Rajbhandari et al., 2020). By whole parameters, so that any optimizer does it unchanged,
and gives the same bits as if each rank updated all of them.
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
"""Of parameters that are sent together: a copy of them is made, and the engines hold on to the last ones."""
UNDER_WAY = 16
"""Buckets that are sent before the first is waited for: so many copies there are at once."""


def share_out(sizes: Sequence[int], owners: int) -> list[int]:
    """Gives each parameter to an owner: the largest first, always to the one that has least so far.

    Returns:
        The owner of each, from 0 on.
    """
    load, owner = [0] * owners, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owner[number] = load.index(min(load))
        load[owner[number]] += sizes[number]
    return owner


def buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """In the order given, of one type and device each; a parameter of `BUCKET_BYTES` or more has one to itself."""
    found: list[list[Tensor]] = []
    for kind in dict.fromkeys((p.dtype, p.device) for p in parameters):
        room = 0
        for parameter in (p for p in parameters if (p.dtype, p.device) == kind):
            size = parameter.numel() * parameter.element_size()
            if size > room:
                found.append([])
                room = BUCKET_BYTES
            found[-1].append(parameter)
            room -= size
    return found


class ShardedOptimizer:
    """Has an optimizer update only this rank's share of the parameters, and completes the others' after each step.

    Args:
        backend: the engine; the parameters are shared out among its column.
        optimizer: keeps its class and its groups, and loses the state of parameters that others update.
    """

    def __init__(self, backend: Backend, optimizer: Optimizer) -> None:
        self._backend = backend
        parameters = [p for p in parameters_of(optimizer) if not p.is_meta]
        owners = share_out([p.numel() for p in parameters], len(backend.replica_group))
        self._by_owner: list[list[Tensor]] = [[] for _ in backend.replica_group]
        for parameter, owner in zip(parameters, owners, strict=True):
            self._by_owner[owner].append(parameter)
        self._mine = {id(p) for p in self._by_owner[backend.replica_group.index(backend.world.rank)]}
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter."""
        return id(parameter) in self._mine

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        for parameter in parameters_of(optimizer):
            if not self.owns(parameter):
                parameter.grad = None  # which optimizers leave alone

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        owned = zip(self._backend.replica_group, self._by_owner, strict=True)
        waiting = [(bucket, rank) for rank, parameters in owned for bucket in buckets(parameters)]
        with self._backend.activity.waiting():
            for first in range(0, len(waiting), UNDER_WAY):
                self._send(waiting[first : first + UNDER_WAY])

    def _send(self, sent: Sequence[tuple[Sequence[Tensor], int]]) -> None:
        """Send buckets, each in one piece from the rank that has updated it."""
        pieces = [(_in_one_piece(parameters), rank) for parameters, rank in sent]
        self._backend.broadcast_to_replicas(pieces)
        for (parameters, rank), (piece, _) in zip(sent, pieces, strict=True):
            if rank != self._backend.world.rank and piece.data_ptr() != parameters[0].data_ptr():
                for parameter, part in zip(parameters, piece.split([p.numel() for p in parameters]), strict=True):
                    parameter.copy_(part.view_as(parameter))

    def close(self) -> None:
        """The optimizer updates all that it has again."""
        for hook in self._hooks:
            hook.remove()


def _in_one_piece(parameters: Sequence[Tensor]) -> Tensor:
    """Return a copy of parameters of one type as a flat tensor; of a contiguous one alone, itself."""
    if len(parameters) == 1 and parameters[0].is_contiguous():
        return parameters[0].detach()
    return torch.cat([parameter.reshape(-1) for parameter in parameters])
