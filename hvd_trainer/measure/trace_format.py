"""The format of a trace: what one rank computes in a few steps, as checksums and values in the log folder.

    LOG_DIR/trace/rank-0.jsonl      a line for the start, for each step, and for an evaluation that follows a step
    LOG_DIR/trace/rank-0/           the tensors at these moments: start-0, step-1, step-2, ..., evaluation-2

`python -m hvd_trainer parity` compares two such traces. They are for finding mistakes, not for fast training: each
step waits for the device, and all tensors are copied, hashed and written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hvd_trainer.data import Batch
from hvd_trainer.utils.tensors import parameters_of

FOLDER = "trace"
FACTS = "run.json"
"""The file beside it with the facts of the run, and of a job on the Trainer with its options."""
KEPT_BYTES = 2 * 2**30
"""Limit of the values on all ranks together; of a model that is too large for it, every n-th element is kept."""
COPIES = 4
"""Sets of tensors as large as the model, at each moment: parameters, gradients, and Adam's two moments of them."""
SMALL = 4096
"""Tensors of up to so many elements are always kept whole."""
RATES = ("params", "lr", "initial_lr")
"""Entries of a parameter group that are no constant setting: the learning rate is written for each step."""

Tensors = Mapping[str, Tensor]
Models = Sequence[tuple[nn.Module, Callable[[str], str]]]
"""Models that are trained, each with what makes a name of one in it a name in all of them."""


@dataclass(frozen=True)
class ModelParts:
    """The parameters, buffers and modules of all models that are trained, by name."""

    parameters: Tensors
    buffers: Tensors
    modules: Mapping[str, nn.Module]

    @classmethod
    def of(cls, models: Models, optimizer: Optimizer) -> ModelParts:
        """Return those of the models; parameters that are in none are called by their number in the optimizer."""
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        modules: dict[str, nn.Module] = {}
        for model, name_of in models:
            parameters |= {name_of(name): tensor for name, tensor in model.named_parameters()}
            buffers |= {name_of(name): tensor for name, tensor in model.named_buffers()}
            modules |= {name_of(name): module for name, module in model.named_modules()}
        named = set(parameters.values())
        rest = {f"parameter {n}": p for n, p in enumerate(parameters_of(optimizer)) if p not in named}
        return cls(parameters | rest, buffers, modules)

    def describe(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what `parity` must know of a model and its optimizer to find causes."""
        state = [*self.parameters.items(), *self.buffers.items()]
        return {
            "shapes": {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in state},
            "sliced": [name for name, tensor in state if hasattr(tensor, "to_local")],
            "dropout": [name for name, module in self.modules.items() if draws(module)],
            "batch_norm": [n for n, m in self.modules.items() if isinstance(m, nn.modules.batchnorm._BatchNorm)],
            "settings": [
                {key: repr(value) for key, value in group.items() if key not in RATES}
                for group in optimizer.param_groups
            ],
        }

    def state(self, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
        """Return host copies of parameters, optimizer state and buffers, by name."""
        return {
            "parameters": host_copies(self.parameters.items()),
            "optimizer": host_copies(self._optimizer_state(optimizer)),
            "buffers": host_copies(self.buffers.items()),
        }

    def gradients(self) -> dict[str, Tensor]:
        """Return host copies of the gradients, by the names of their parameters."""
        return host_copies((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)

    def _optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's state of each parameter, by names such as `fc1.weight/exp_avg`."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        for parameter in parameters_of(optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float):
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                    yield f"{names[parameter]}/{key}", tensor


def draws(module: nn.Module) -> bool:
    """Return whether a module drops out: a dropout layer, or one with dropout inside, such as attention."""
    own = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(own, float) and own > 0


def stride(tensors: Iterable[Tensor], moments: int) -> int:
    """Return n such that every n-th element of large tensors, of all moments together, fits into KEPT_BYTES.

    Args:
        tensors: the model's parameters and buffers.
    """
    size = sum(_local(t).numel() * t.element_size() for t in tensors if not t.is_meta)
    return max(1, math.ceil(COPIES * size * moments / KEPT_BYTES))


def subsample(tensor: Tensor, stride: int) -> Tensor:
    """Return a flat copy of every `stride`-th element, or of all elements of a small tensor."""
    return tensor.reshape(-1)[:: stride if tensor.numel() > SMALL else 1].clone()


def host_copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy tensors to host memory, by name: whole tensors, or this rank's shards; meta tensors are left out."""
    return {name: _local(t).to("cpu", copy=True).contiguous() for name, t in named if not t.is_meta}


def _local(tensor: Tensor) -> Tensor:
    # Known by what it can: importing the class of sharded tensors takes half a second.
    local = getattr(tensor, "to_local", None)
    tensor = tensor.detach() if local is None else local().detach()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def checksum(tensor: Tensor) -> str:
    """Return the 8-byte BLAKE2b digest of a tensor's bytes, in hex."""
    return blake2b(_bytes(tensor).numpy().data, digest_size=8).hexdigest()


def sample_checksums(batch: Batch) -> list[str]:
    """Return one text per sample: the checksums of its inputs and of its targets, joined by a dash."""
    inputs, targets = map(_of_rows, batch)
    return [f"{one}-{other}" for one, other in zip_longest(inputs, targets, fillvalue="")]


def _of_rows(part: Any) -> list[str]:
    leaves = [_local(leaf).cpu() for leaf in tree_leaves(part) if isinstance(leaf, Tensor) and leaf.dim()]
    rows = [_bytes(leaf).view(len(leaf), -1).numpy() for leaf in leaves if len(leaf) == len(leaves[0])]
    return [
        blake2b(b"".join(row.tobytes() for row in parts_of_sample), digest_size=8).hexdigest()
        for parts_of_sample in zip(*rows, strict=True)
    ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
