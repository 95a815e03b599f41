"""Measured time of each block of a model."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_trainer.optim.step import mixed_precision
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.rng import isolated_rng

NUM_WARM_UP, NUM_ROUNDS = 2, 7
MAX_BLOCK_S = 1.0
"""Time limit for one block, after its first measured round: slow blocks vary less."""


def time_blocks(
    blocks: Sequence[nn.Module], inputs: Any, device: torch.device, precision: str = "fp32"
) -> list[float]:
    """Return the median time of forward and backward of each block for one micro-batch, in seconds.

    One block at a time is copied to the device, so that the model need not fit there.
    """
    value, times = inputs, []
    with isolated_rng(device), torch.enable_grad():
        for block in blocks:
            module = copy.deepcopy(block).to(device).train()
            taken: list[float] = []
            start = _now(device)
            for number in range(NUM_WARM_UP + NUM_ROUNDS):
                began = _now(device)
                if taken and began - start > MAX_BLOCK_S:
                    break
                with mixed_precision(device, precision):
                    outputs = module(value)
                roots = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
                if number >= NUM_WARM_UP:
                    taken.append(_now(device) - began)
            times.append(median(taken))
            value = tree_map_only(Tensor, _as_input, outputs)
    return times


def _as_input(tensor: Tensor) -> Tensor:
    """Return a tensor as an input of the next block: a leaf that requires a gradient if the output did."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _now(device: torch.device) -> float:
    accelerator.synchronize(device)
    return time.perf_counter()
