"""Buffers of a model: which of them are averaged over ranks.

statistics    of batch norm, and what a module names: each rank's own in training, and their mean over ranks
              before an evaluation and in a checkpoint
all others    masks, tables, counters, memory banks: each rank's own in training; before an evaluation rank 0's,
              as in DDP, and in a checkpoint each rank's, where they differ
"""

from __future__ import annotations

from torch import Tensor, nn

from hvd_trainer.errors import BackendError

STATISTICS = ("running_mean", "running_var")
"""Buffers of batch norm."""
AVERAGED = "averaged_buffers"
"""Attribute of a module with the names of other buffers to average."""


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the statistics of a model by name, without those of other stages.

    A module may have an attribute `averaged_buffers`, with the names of its buffers that are means over samples.

    Raises:
        BackendError: it names there what is no such buffer.
    """
    statistics = {}
    for prefix, module in model.named_modules():
        named = getattr(module, AVERAGED, ())
        for name in named or STATISTICS:
            buffer = module._buffers.get(name)
            if name in named and (buffer is None or not buffer.is_floating_point()):
                raise BackendError(
                    f"{prefix or type(module).__name__} names {name!r} in {AVERAGED}, and has no buffer of "
                    f"floating-point numbers of this name. It has: {', '.join(module._buffers) or 'none'}"
                )
            if buffer is not None and buffer.numel() and not buffer.is_meta:
                statistics[f"{prefix}.{name}" if prefix else name] = buffer
    return statistics


def other_buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return by name the buffers that are no statistics, without those of other stages."""
    statistics = statistics_of(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in statistics}
    return {name: buffer for name, buffer in buffers.items() if buffer.numel() and not buffer.is_meta}
