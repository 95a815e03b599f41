"""The optimizers that the jobs offer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

OptimizerName = Literal["adam", "adamw", "sgd"]


def make_optimizer(
    model: nn.Module, name: OptimizerName, *, lr: float, momentum: float, weight_decay: float
) -> Optimizer:
    """An optimizer over all parameters.

    Args:
        momentum: for sgd only.
        weight_decay: decay of the weights (adamw: decoupled).
    """
    weights = model.parameters()
    if name == "sgd":
        return torch.optim.SGD(weights, lr, momentum=momentum, weight_decay=weight_decay)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(weights, lr, weight_decay=weight_decay)
