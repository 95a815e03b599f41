"""Access to the tensors of models and optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield all parameters that the optimizer updates, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]
