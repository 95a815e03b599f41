"""Buffers of a model: which of them are averaged over ranks.

statistics    of batch norm, and what a module names: each rank's own in training, and their mean over ranks
              before an evaluation and in a checkpoint
all others    masks, tables, counters, memory banks: each rank's own in training; before an evaluation rank 0's,
              as in DDP, and in a checkpoint each rank's, where they differ
"""

from __future__ import annotations

from torch import Tensor, nn

STATISTICS = ("running_mean", "running_var")
"""Of batch norm in all its classes."""


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the statistics of a model by name, without those of other stages.

    A module may have an attribute `averaged_buffers`, with the names of its buffers that are means over samples.
    """
    statistics = {}
    for prefix, module in model.named_modules():
        for name in getattr(module, "averaged_buffers", STATISTICS):
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_floating_point() and buffer.numel() and not buffer.is_meta:
                statistics[f"{prefix}.{name}" if prefix else name] = buffer
    return statistics


def other_buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return by name the buffers that are no statistics, without those of other stages."""
    statistics = statistics_of(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in statistics}
    return {name: buffer for name, buffer in buffers.items() if buffer.numel() and not buffer.is_meta}
