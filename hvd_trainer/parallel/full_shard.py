"""Parameters, gradients and optimizer state shared out among copies of a model: PyTorch's fully_shard (FSDP2).

    block        0        1        2          a rank has a slice of each parameter
    forward      gather   gather   gather     and the whole of one block at a time, while it is computed
    backward     <------- gather, and the sum of its gradients is sent back in slices

Of a model in stages, the copies of a stage do so among themselves; within a step its blocks stay gathered, as they
are needed for each chunk. Each parameter is a `DTensor`; its name and shape stay those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hvd_trainer.backends import Backend
from hvd_trainer.backends.same_model import parameters_of
from hvd_trainer.data import Batch, Loader
from hvd_trainer.errors import OptionError
from hvd_trainer.metrics import Meter
from hvd_trainer.parallel.pipeline import StageStep
from hvd_trainer.train_step import TrainStep


class Slices:
    """What the ranks of a column have of a model, or of a stage: a slice of each parameter."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._mesh = DeviceMesh.from_group(backend.group_of(backend.columns), backend.device.type)
        self.is_first = backend.column[0] == backend.world.rank

    def check(self, model: nn.Module) -> None:
        """Raises:
        OptionError: the model is in slices already.
        """
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise OptionError(
                "This model was shared out by an earlier training of this process: build model and optimizer anew "
                "for each, or use --shard optimizer"
            )

    def cut(
        self, model: nn.Module, roots: Sequence[nn.Module], blocks: Sequence[nn.Module], optimizer: Optimizer
    ) -> None:
        """Leaves this rank its slices of the parameters, also in the optimizer and in what that knows.

        Args:
            model: the whole one, by whose names the parameters are known.
            roots: what is called in training.
            blocks: what is gathered at once; what roots have besides is one more block each.
        """
        before = dict(model.named_parameters())
        for module in [*(block for block in blocks if list(block.parameters())), *roots]:
            fully_shard(module, mesh=self._mesh)
        after = dict(model.named_parameters())
        sliced = {id(old): after[name] for name, old in before.items()}
        for group in optimizer.param_groups:
            group["params"] = [sliced[id(parameter)] for parameter in group["params"]]
        for name, old in before.items():
            if old in optimizer.state:
                its = optimizer.state.pop(old)
                optimizer.state[after[name]] = {key: _sliced(value, after[name]) for key, value in its.items()}

    def completed(self, owned: Mapping[Any, Any]) -> dict[Any, Any] | None:
        """Whole tensors in host memory, from all ranks' slices; on the first of the column. A collective."""

        def complete(part: DTensor) -> Tensor:
            whole = part.full_tensor()
            return whole.cpu() if self.is_first else torch.empty(0)

        with self._backend.activity.waiting():
            done: dict[Any, Any] = tree_map_only(DTensor, complete, dict(owned))
        return done if self.is_first else None

    def of_optimizer(self, optimizer: Optimizer, state: Mapping[int, Any]) -> dict[int, Any]:
        """Of what an optimizer knows of parameters, by their numbers, this rank's slices. A collective."""
        parameters = list(parameters_of(optimizer))
        with self._backend.activity.waiting():
            return {
                number: {key: _sliced(value, parameters[number]) for key, value in its.items()}
                for number, its in sorted(state.items())
            }

    def of_model(self, model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same of the state of a model, by name. A collective."""
        with self._backend.activity.waiting():
            return {name: _sliced(state[name], ours) for name, ours in model.state_dict().items() if name in state}

    def evaluation(self, loader: Loader) -> Iterator[Batch | None]:
        """Every rank computes as often as the one with most batches: none can gather a block alone."""
        batches = loader.evaluation()
        while True:
            batch = next(batches, None)
            if not int(self._backend.all_reduce(torch.tensor(int(batch is not None)), "max")):
                return
            yield batch


class SlicedStep(TrainStep):
    """A step whose gradients come averaged out of backward, each rank's slice of them."""

    def backward(self, batch: Batch, weight: float, meter: Meter) -> None:
        self._some_batch = batch
        super().backward(batch, weight, meter)

    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        norm = super().total_norm(grads)
        # Of slices it is a slice itself, which nothing that only reads it understands.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def evaluate(self, batch: Batch | None, meter: Meter) -> None:
        if batch is None:
            # For the others, who gather each block with this rank; nobody counts it.
            super().evaluate(self._some_batch, Meter({}, self.backend))
        else:
            super().evaluate(batch, meter)


class SlicedStageStep(SlicedStep, StageStep):
    """The same in micro-batches, through one stage or several."""

    def norms(self, grads: Sequence[Tensor]) -> Tensor:
        slices = [grad for grad in grads if isinstance(grad, DTensor)]
        squares = super().norms([grad.to_local() for grad in slices]).square()
        with self.backend.activity.waiting():
            dist.all_reduce(squares, group=slices[0].device_mesh.get_group())
        return squares.sqrt()


def _sliced(value: Any, like: Any) -> Any:
    """This rank's slice of a tensor that has the shape of a sharded one; others as they are. A collective."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value
