"""Compiled models whose gradients are exchanged while backward still runs.

torch.compile makes one backward function of a whole model, whose gradients are all ready at once, at its end.
Inside DDP's forward PyTorch therefore splits the graph where DDP's buckets end (`DDPOptimizer`), and compiles each
piece:

    forward     [ conv1 conv2 ]   [ fc1 fc2 ]
    backward    [ conv1 conv2 ] <-- [ fc1 fc2 ]     the exchange of fc2 and fc1 runs beside backward of the conv

Here another engine gets the same pieces, and thereby the same bits as DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compile_in_buckets(model: nn.Module, mode: str, limit_bytes: int) -> None:
    """Compile a model in place, in pieces of about one bucket of gradients each.

    Args:
        mode: as in `torch.compile`.
    """
    # Importing these takes a second, which only compiled models should cost.
    import torch._inductor
    from torch._dynamo.backends.distributed import DDPOptimizer

    options = torch._inductor.list_mode_options(mode)

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return torch._inductor.compile(graph, inputs, options)

    def compile_in_parts(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if not torch.is_grad_enabled():  # evaluation, which has no backward
            return compile_graph(graph, inputs)
        first = min(limit_bytes, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
        return DDPOptimizer(limit_bytes, compile_graph, first).compile_fn(graph, inputs)

    model.compile(backend=compile_in_parts)
