"""Losses and gradients that are not finite: seen by all ranks alike, and without waiting for the device per step.

A loss that is not finite makes the gradients of its rank so, and the exchange brings that to all ranks: so they
judge a step by the norm of its averaged gradient, which they have in common, and need no exchange to agree.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hvd_trainer.backends import Backend
from hvd_trainer.errors import NonFiniteError

Policy = Literal["error", "skip"]
NEVER = 2**62
MOST = 1000
"""Losses that are kept at most; all ranks have as many."""


class NonFiniteGuard:
    """Keeps the figures of the steps since the last check on the device, and reads them all at once.

    Args:
        backend: the engine.
        policy: `error` ends the run at the next check; `skip` leaves such steps out, which the step does by
            itself, so that a check has nothing to find.
    """

    def __init__(self, backend: Backend, policy: Policy) -> None:
        self._backend, self.policy = backend, policy
        self._losses: list[tuple[int, Tensor]] = []
        self._norms: list[tuple[int, Tensor]] = []

    def seed(self, loss: Tensor) -> Tensor:
        """What backward starts from: 1, or NaN if the loss is not finite."""
        return loss.detach() * 0 + 1

    def note(self, step: int, losses: list[Tensor], norm: Tensor | None) -> None:
        """Remembers a step: its losses on this rank, and the norm of its averaged gradient if there is one.

        Raises:
            NonFiniteError: as `check`, which it calls when there is much to remember.
        """
        if self.policy == "error":
            self._losses += [(step, loss.detach()) for loss in losses]
            self._norms += [] if norm is None else [(step, norm.detach())]
            if len(self._losses) >= MOST:
                self.check()

    def check(self) -> None:
        """Looks at all steps since the last check. A collective.

        Raises:
            NonFiniteError: one had a loss or a gradient that was not finite; on all ranks.
        """
        if self.policy == "skip":
            return
        loss, norm = _first_bad(self._losses), _first_bad(self._norms)
        self._losses, self._norms = [], []
        if int(self._backend.all_reduce(torch.tensor(min(loss, norm)), "min")) == NEVER:
            return
        firsts = self._backend.all_gather_object((loss, norm))
        step = min(min(pair) for pair in firsts)
        ranks = [str(rank) for rank, (loss, _) in enumerate(firsts) if loss == step]
        what = f"The loss of rank {', '.join(ranks)}" if ranks else "The gradient"
        raise NonFiniteError(
            f"{what} was not finite in step {step:,}: the weights are of no use from there on, and no later "
            f"checkpoint was made. Go on from the newest with a lower --lr or with --max-norm 1, or leave such "
            f"steps out with --non-finite skip"
        )


def _first_bad(values: list[tuple[int, Tensor]]) -> int:
    """The first step whose value is not finite; `NEVER` if all are."""
    if not values:
        return NEVER
    figures = torch.stack([value.double() for _, value in values]).tolist()
    bad = (step for (step, _), value in zip(values, figures, strict=True) if not math.isfinite(value))
    return next(bad, NEVER)
