"""Find NaN and Inf in losses and gradients, alike on all ranks, without waiting for the device in each step.

A non-finite loss makes the gradients of its rank non-finite, and the exchange spreads that to all ranks: so they
judge a step by the norm of its averaged gradient, which is the same on all, and need no further exchange. Where no
option needs that norm in each step, the weights are checked instead, as seldom as the losses are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hvd_trainer.backends import Backend
from hvd_trainer.errors import NonFiniteError

Policy = Literal["error", "skip"]
NEVER = 2**62
"""Stands for the step of a mistake where there is none."""
MAX_UNREAD_LOSSES = 1000
"""Losses on the device before they are read; all ranks have equally many."""


class NonFiniteGuard:
    """Leaves losses and norms of steps on the device, and reads all of them at the next check.

    Args:
        backend: the engine.
        policy: `error` ends the run at the next check; under `skip` the step itself is left out, and a check
            finds nothing.
        model: its weights are checked where gradients have no norm: a NaN in a gradient stays in the weights.
    """

    def __init__(self, backend: Backend, policy: Policy, model: nn.Module) -> None:
        self._backend = backend
        self.policy = policy
        self._model = model
        self._losses: list[tuple[int, Tensor]] = []
        self._norms: list[tuple[int, Tensor]] = []
        self._last_step = NEVER
        self._one: Tensor | None = None

    def seed(self, loss: Tensor) -> Tensor:
        """Return the gradient that backward starts from: 1; under `skip` NaN if the loss is not finite.

        Then all ranks find in their averaged gradient that one of them had such a loss.
        """
        if self.policy == "skip":
            return loss.detach() * 0 + 1
        one = self._one
        if one is None or (one.shape, one.dtype, one.device) != (loss.shape, loss.dtype, loss.device):
            one = self._one = torch.ones_like(loss.detach())
        return one

    def note(self, step: int, losses: Sequence[Tensor], norm: Tensor | None) -> None:
        """Add a step: its losses on this rank, and the norm of its averaged gradient if there is one.

        Raises:
            NonFiniteError: as `check`, which it calls after `MAX_UNREAD_LOSSES`.
        """
        if self.policy == "error":
            self._losses += [(step, loss) for loss in losses]
            self._norms += [] if norm is None else [(step, norm)]
            self._last_step = step
            if len(self._losses) >= MAX_UNREAD_LOSSES:
                self.check()

    def check(self) -> None:
        """Check all steps since the last check. A collective.

        Raises:
            NonFiniteError: a loss or a gradient was not finite; on all ranks.
        """
        if self._last_step == NEVER:  # always under `skip`
            return
        first_bad = self._first_bad(self._losses), self._first_bad(self._norms), self._first_bad_weights()
        self._losses, self._norms, self._last_step = [], [], NEVER
        if self._backend.collectives.all_reduce_numbers([min(first_bad)], "min") == [NEVER]:
            return
        everyone = self._backend.collectives.all_gather_object(first_bad)
        step = min(map(min, everyone))
        ranks = [str(rank) for rank, (loss, *_) in enumerate(everyone) if loss == step]
        if ranks:
            what = f"The loss of rank {', '.join(ranks)} was not finite in step {step:,}"
        elif any(norm == step for _, norm, _ in everyone):
            what = f"The gradient was not finite in step {step:,}"
        else:
            what = f"The weights were no longer finite after step {step:,}"
        raise NonFiniteError(
            f"{what}: the weights are of no use from there on, and no later checkpoint was made. Resume from the "
            f"newest with a lower --lr or with --max-norm 1, or leave such steps out with --non-finite skip"
        )

    def _first_bad(self, values: list[tuple[int, Tensor]]) -> int:
        """Return the first step whose value is not finite; `NEVER` if all are finite."""
        if not values:
            return NEVER
        figures = self._backend.read(torch.stack([value for _, value in values]).double())
        bad = (step for (step, _), value in zip(values, figures, strict=True) if not math.isfinite(value))
        return next(bad, NEVER)

    def _first_bad_weights(self) -> int:
        """Return the last step if a weight on this rank is not finite; else `NEVER`."""
        tensors = (p.detach() for p in self._model.parameters() if p.requires_grad and not p.is_meta)
        weights = [
            w.to_local() if hasattr(w, "to_local") else w for w in tensors
        ]  # DTensor: a slice, with `--shard full`
        weights = [w for w in weights if w.numel()]
        if not weights:
            return NEVER
        largest = nn.utils.get_total_norm(weights, math.inf)
        return NEVER if math.isfinite(self._backend.read(largest)) else self._last_step
