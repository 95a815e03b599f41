"""What averages gradients over ranks between backward and the update."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn
from torch.optim import Optimizer

from hvd_trainer.backends.buckets import Bucket, GradientBuckets


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


class BucketReducer(Reducer):
    """Exchange gradients in `GradientBuckets`; a subclass says how one bucket is sent and received.

    Args:
        module: whose gradients are averaged.
        num_ranks: how many ranks have the module.
        limit_bytes: a bucket is closed when it has reached this size.
        reorder: as for `GradientBuckets`.
        passes: backward passes of a step.
    """

    def __init__(
        self, module: nn.Module, *, num_ranks: int, limit_bytes: int, reorder: bool, passes: int = 1
    ) -> None:
        self.buckets = GradientBuckets(
            [p for p in module.parameters() if p.requires_grad],
            limit_bytes,
            num_ranks,
            self._send,
            reorder=reorder,
            passes=passes,
        )

    def set_enabled(self, enabled: bool) -> None:
        self.buckets.enabled = enabled

    @abstractmethod
    def _send(self, bucket: Bucket) -> None:
        """Start the exchange of a bucket, which is full."""

    @abstractmethod
    def _receive(self) -> None:
        """Wait until every bucket holds the sum over ranks."""

    def _on_new_layout(self) -> None:
        """Follow the buckets, which have been laid out anew."""

    def finish(self) -> None:
        self.buckets.send_rest()
        self._receive()
        if self.buckets.reset():
            self._on_new_layout()

    def close(self) -> None:
        self.buckets.remove()
