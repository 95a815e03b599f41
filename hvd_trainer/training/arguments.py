"""What `fit` and `evaluate` are given, and what kind of object each argument takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hvd_trainer.data.data_loader import unsupported


def argument_mistakes(
    model: Any,
    loss: Any,
    data: Mapping[str, Any],
    *,
    metrics: Any,
    collate: Callable[[list[Any]], Any] | None,
) -> Iterator[str]:
    """Yield a message for each argument of `fit`, or of `evaluate`, that is of another kind than it takes.

    Args:
        data: by the names of the arguments.
    """
    if not isinstance(model, nn.Module):
        yield f"model= takes an nn.Module, and not {_kind(model)}"
    elif lazy := next((name for name, one in model.named_parameters() if is_lazy(one)), None):
        yield f"model= has {lazy}, whose shape its first call sets: call the model on a batch first, on all ranks"
    if isinstance(loss, type):
        yield f"loss= is the class {loss.__name__}: make one, {loss.__name__}()"
    elif not callable(loss):
        yield f"loss= takes a function of outputs and targets, and not {_kind(loss)}"
    if metrics is not None and not isinstance(metrics, Mapping):
        yield f'metrics= takes functions by their names, {{"accuracy": accuracy}}, and not {_kind(metrics)}'
    for name, value in data.items():
        parts = value if isinstance(value, list | tuple) else ()
        if parts and collate is None and all(isinstance(part, Tensor | np.ndarray) for part in parts):
            yield f"{name}= is {_kind(value)} of {len(parts)} arrays: say TensorData(inputs, targets), of tensors"
        if isinstance(value, Tensor | np.ndarray):
            yield f"{name}= is {_kind(value)} without targets: say TensorData(inputs, targets)"
        if isinstance(value, DataLoader):
            yield from unsupported(value)
            if collate is not None:
                yield "collate= is for data sets, and a DataLoader has its own: write DataLoader(..., collate_fn=)"


def training_mistakes(model: Any, optimizer: Any, callbacks: Any) -> Iterator[str]:
    """Yield a message for each argument of `fit` that it cannot train with."""
    if isinstance(model, DistributedDataParallel):
        yield "model= is wrapped in DistributedDataParallel, and the engine does that: give the module in it"
    if not isinstance(optimizer, Optimizer):
        yield f"optimizer= takes one of torch.optim, and not {_kind(optimizer)}"
    elif hasattr(optimizer, "skip_synchronize"):
        yield "optimizer= is an hvd.DistributedOptimizer, and the engine averages gradients: give the one in it"
    elif any(group.get("lr") is None for group in optimizer.param_groups):
        yield f"optimizer= has no learning rate to scale, warm up and log: give {type(optimizer).__name__} lr="
    if not isinstance(callbacks, Iterable):
        yield f"callbacks= takes a list, and not {_kind(callbacks)}"
    for callback in callbacks if isinstance(callbacks, Sequence) else ():
        if isinstance(callback, type):
            yield f"callbacks= has the class {callback.__name__}: make one, {callback.__name__}()"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
