"""Find ranks that are no longer copies of one model, before anything is saved.

Each rank computes a digest of its parameters and of the optimizer's state on its device. One small all-reduce, at
each epoch's end and before each save, tells whether they are equal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import Backend
from hvd_trainer.errors import ReplicasDifferError
from hvd_trainer.utils.digest import digest

logger = logging.getLogger(__name__)
MAX_ROUNDING = 64
"""Difference, in units of the type's precision, up to which unlike processors explain it."""


class ReplicaGuard:
    """Compares what each rank of a replica group has a copy of.

    Args:
        model: all that is trained.
        optimizer: whose state each rank has; None: the ranks have parts of it.
    """

    def __init__(self, backend: Backend, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._backend, self._model, self._optimizer = backend, model, optimizer
        self._has_warned = False

    def check(self) -> None:
        """Compare the ranks. A collective.

        Where the last bits differ, as they do if processors of different kinds compute an update, all take those
        of the replica group's first rank.

        Raises:
            ReplicasDifferError: they differ by more; on all ranks.
        """
        backend = self._backend
        if len(backend.replica_group) == 1:
            return
        copies = self._copies()
        are_equal = backend.are_equal(digest(list(copies.values())).to(backend.device))
        differ = not all(backend.read(are_equal))
        if len(backend.replica_groups) > 1:
            [differ] = map(bool, backend.collectives.all_reduce_numbers([differ], "max"))
        if differ:
            self._act_on(copies)

    def _copies(self) -> dict[str, Tensor]:
        """Return by name what each rank has a copy of."""
        copies: dict[str, Tensor] = {
            name: p.detach() for name, p in self._model.named_parameters() if not p.is_meta
        }
        if self._optimizer is not None:
            names: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
            copies |= dict(_state_of(self._optimizer, names))
        return copies

    def _act_on(self, copies: Mapping[str, Tensor]) -> None:
        """Take over the first rank's last bits, or raise the error that names the first difference."""
        backend = self._backend
        differing = backend.differing(copies)
        beyond = [
            name
            for name, is_everywhere in differing.items()
            if not is_everywhere or self._distance(copies[name]) > MAX_ROUNDING
        ]
        everyone = backend.collectives.all_gather_object(beyond)
        if not any(everyone):
            self._take_over(copies, list(differing))
            return
        first = next(names[0] for names in everyone if names)
        ranks = [rank for rank, names in enumerate(everyone) if first in names]
        reference = next(group[0] for group in backend.replica_groups if ranks[0] in group)
        others = ", ".join(str(rank) for rank in ranks if rank != reference)
        raise ReplicasDifferError(
            f"The ranks no longer train one model: {first} on rank {others} differs from rank {reference}. "
            f"{self._cause(first)} Nothing was saved since the last comparison: when that is corrected, resume "
            "with --resume auto"
        )

    def _distance(self, own: Tensor) -> float:
        """Return how far a tensor is from the first rank's, in units of its type's precision. A collective."""
        reference = self._first_ranks(own)
        if not own.is_floating_point():
            return math.inf if bool((reference != own.to(reference.device)).any()) else 0.0
        off = (own.to(reference.device, torch.float64) - reference.double()).abs().max()
        if not off:
            return 0.0
        units = float(off / reference.double().abs().max()) / torch.finfo(own.dtype).eps
        return units if math.isfinite(units) else math.inf

    def _first_ranks(self, own: Tensor) -> Tensor:
        """Return what the replica group's first rank has for a tensor, on the training device. A collective."""
        received = own.detach().to(self._backend.device, copy=True).contiguous()
        with self._backend.activity.waiting():
            self._backend.collectives.broadcast_to_replicas([(received, self._backend.replica_group[0])])
        return received

    def _take_over(self, copies: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Take the first rank's last bits, and say so once."""
        for name in names:
            copies[name].copy_(self._first_ranks(copies[name]))
        if self._backend.world.is_first and not self._has_warned:
            logger.warning(
                "warning: last bits of %d tensors, %s first, are not the same on all ranks, as on processors of "
                "different kinds: those of the first rank are taken, now and from here on",
                len(names),
                names[0],
            )
        self._has_warned = True

    def _cause(self, name: str) -> str:
        """Return the likely cause of a difference, as a sentence."""
        parameter = dict(self._model.named_parameters()).get(name)
        if parameter is None:
            return "That is the optimizer's: a callback has changed it on some ranks only?"
        if reason := self._backend.why_not_exchanged(parameter):
            return f"Its gradient is not exchanged: {reason}."
        return (
            "Its gradient is exchanged, so something else has changed it on some ranks: a callback, random "
            "numbers, or an update that not all ranks have made?"
        )


def _state_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's state by name: its tensors, and its numbers as tensors."""
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if isinstance(value, int | float | Tensor)}
        for key, value in settings.items():
            yield f"{key} of the optimizer's group {number}", torch.as_tensor(value)
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, int | float | Tensor):
                    yield f"{key} of {names.get(parameter, '?')}", torch.as_tensor(value)
