"""The format of a trace: what one rank computes in a few steps, as checksums and values in the log folder.

    LOG_DIR/trace/rank-0.jsonl      a line for the start, for each step, and for an evaluation that follows a step
    LOG_DIR/trace/rank-0/           the tensors at these moments: start-0, step-1, step-2, ..., evaluation-2

`python -m hvd_trainer parity` compares two such traces. They are for finding mistakes, not for fast training: each
step waits for the device, and all tensors are copied, hashed and written.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hvd_trainer.data import Batch
from hvd_trainer.utils.files import atomic_write
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


@dataclass(frozen=True)
class ModelParts:
    """The parameters, buffers and modules of a model, by name."""

    parameters: Tensors
    buffers: Tensors
    modules: Mapping[str, nn.Module]

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        return cls(dict(model.named_parameters()), dict(model.named_buffers()), dict(model.named_modules()))

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
        for number, parameter in enumerate(parameters_of(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float):
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                    yield f"{names.get(parameter, f'parameter {number}')}/{key}", tensor


class TraceWriter:
    """Writes the trace of one rank.

    Args:
        log: the log folder, on this rank's node.
        rank, size: of this process, and of all.
        steps: that are traced.
    """

    def __init__(self, log: Path, rank: int, size: int, steps: int) -> None:
        self._log, self._folder = log, log / FOLDER / f"rank-{rank}"
        self._rank, self._size, self._steps = rank, size, steps
        self._stride = 1

    def begin(
        self,
        step: int,
        parts: ModelParts,
        optimizer: Optimizer,
        state: Mapping[str, Tensors],
        facts: Mapping[str, Any],
        group: Sequence[int] | None = None,
    ) -> None:
        """Begin a trace, over an earlier one.

        Args:
            step: steps done before.
            parts: of the model.
            optimizer: that updates it.
            state: of both before the first step.
            facts: of what is traced.
            group: the ranks with the same part of the model; None: all.

        Raises:
            OSError: the folder cannot be written to.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._folder.with_suffix(".jsonl").write_text("")
        self._stride = stride(
            [*parts.parameters.values(), *parts.buffers.values()], (self._steps + 1) * self._size
        )
        group = range(self._size) if group is None else group
        place = {
            "rank": self._rank,
            "size": self._size,
            "copy": group.index(self._rank),  # of the model
            "copies": len(group),
            "stride": self._stride,
        }
        self.write("start", step, {**place, **parts.describe(optimizer)}, **state)
        if self._rank == 0:
            (self._log / FACTS).write_text(json.dumps(facts, indent=1, default=str) + "\n")

    def write(self, event: str, step: int, figures: Mapping[str, Any], **kinds: Tensors) -> None:
        """Write a moment: its figures as a line, with the checksums of its tensors, and a file of their values."""
        # Imported here, since most runs trace nothing and the import takes time.
        from safetensors.torch import save_file

        checksums = {kind: {name: checksum(t) for name, t in tensors.items()} for kind, tensors in kinds.items()}
        values = {
            f"{kind}/{name}": subsample(tensor, self._stride)
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        }
        with atomic_write(self._folder / f"{event}-{step}.safetensors") as temporary:
            save_file(values, temporary)
        # Closed after each line, so that a run that fails leaves whole lines.
        with self._folder.with_suffix(".jsonl").open("a") as lines:
            lines.write(json.dumps({"event": event, "step": step, **figures, "checksums": checksums}) + "\n")


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
