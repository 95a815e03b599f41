"""What averages gradients over ranks between backward and the update."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch.optim import Optimizer


class Reducer(ABC):
    """Average the gradients of one model, or of one stage, over the ranks that have it."""

    @abstractmethod
    def set_enabled(self, enabled: bool) -> None:
        """Choose whether the next backward passes lead to an exchange; without one, gradients add up locally."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every gradient is the mean over ranks."""

    def update(self, optimizer: Optimizer) -> None:
        """Step the user's optimizer."""
        optimizer.step()

    @abstractmethod
    def close(self) -> None:
        """Stop taking part in backward."""
