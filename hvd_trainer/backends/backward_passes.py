"""Hooks that count the backward passes of a step which have added to each gradient."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle


@dataclass(slots=True, eq=False)
class WatchedGradient:
    """One parameter's gradient. A step of 10,000 tensors looks up nothing by tensor, which is slow."""

    parameter: Tensor
    num_passes: int = 0
    """how many backward passes of this step have added to it"""


G = TypeVar("G", bound=WatchedGradient)


class BackwardPasses(ABC, Generic[G]):
    """Counts until a gradient is complete, by hooks that live as long as this object.

    Args:
        per_step: after how many passes a gradient is complete.

    Attributes:
        gradients: that are watched, by parameter.
        have_begun: whether there are gradients that no step has used.
    """

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self.gradients: dict[Tensor, G] = {}
        self.have_begun = False
        self._hooks: list[RemovableHandle] = []

    def watch(self, gradient: G) -> None:
        """Count the passes that add to a gradient."""
        # A parameter outlives this object, and may get another: its hook must not keep this one alive.
        me = weakref.ref(self)

        def hook(_: Tensor) -> None:
            passes = me()
            if passes is not None and passes.is_counting:
                passes._count(gradient)

        handle = gradient.parameter.register_post_accumulate_grad_hook(hook)
        weakref.finalize(self, handle.remove)
        self._hooks.append(handle)
        self.gradients[gradient.parameter] = gradient

    def _count(self, gradient: G) -> None:
        if gradient.num_passes >= self.per_step:
            raise self.too_many(gradient)
        gradient.num_passes += 1
        self.have_begun = True
        if gradient.num_passes == self.per_step:
            self.complete(gradient)

    def reset(self) -> None:
        """Start to count for the next step."""
        for gradient in self.gradients.values():
            gradient.num_passes = 0
        self.have_begun = False

    def unhook(self) -> None:
        """Count nothing any more."""
        for hook in self._hooks:
            hook.remove()

    @property
    @abstractmethod
    def is_counting(self) -> bool:
        """Whether the passes under way count."""

    @abstractmethod
    def complete(self, gradient: G) -> None:
        """Act on a gradient that is complete."""

    @abstractmethod
    def too_many(self, gradient: G) -> Exception:
        """Return the error of a pass that adds to a complete gradient, which may be on its way already."""
