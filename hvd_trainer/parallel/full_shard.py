"""Parameters, gradients and optimizer state shared out among ranks: PyTorch's fully_shard (FSDP2).

    block        0        1        2          a rank has a slice of each parameter
    forward      gather   gather   gather     and the whole of one block at a time, while it is computed
    backward     <------- gather, and the sum of its gradients is sent back in slices

Each parameter is a `DTensor`; its name and shape stay those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hvd_trainer.backends.same_model import parameters_of
from hvd_trainer.data import Batch, Loader
from hvd_trainer.errors import OptionError
from hvd_trainer.metrics import Meter
from hvd_trainer.parallel.layout import Whole
from hvd_trainer.train_step import StepParts, TrainStep


class FullyShared(Whole):
    """All ranks share one copy of the model's state, and compute it whole."""

    is_whole = False

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Callable[[], Any]
    ) -> tuple[nn.Module, Optimizer]:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise OptionError(
                "This model was shared out by an earlier training of this process: build model and optimizer anew "
                "for each, or use --shard optimizer"
            )
        backend = self._backend
        to_train = self._blocks_of(model)
        backend.prepare(to_train, optimizer, exchange=False)
        mesh = DeviceMesh(backend.device.type, list(range(backend.world.size)))
        units = list(model.children()) if isinstance(model, nn.Sequential) else []
        _shard(model, [*(unit for unit in units if list(unit.parameters())), to_train], mesh, optimizer)
        return to_train, optimizer

    def make_step(self, parts: StepParts) -> TrainStep:
        return FullyShardedStep(replace(parts, bare=parts.model))

    def merged(self, owned: Mapping[Any, Any]) -> dict[Any, Any] | None:
        first = self._backend.world.is_first
        with self._backend.activity.waiting():
            whole = _completed(owned, keep=first)
        return whole if first else None

    def local(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[Any, Any]:
        parameters = list(parameters_of(optimizer))
        with self._backend.activity.waiting():
            return {
                number: {key: _sliced(value, parameters[number]) for key, value in its.items()}
                for number, its in sorted(state.items())
            }

    def local_model(self, model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        with self._backend.activity.waiting():
            return {name: _sliced(state[name], ours) for name, ours in model.state_dict().items()}

    def evaluation(self, loader: Loader) -> Iterator[Batch | None]:
        """Every rank computes as often as the one with most batches: none can gather a block alone."""
        batches = loader.evaluation()
        while True:
            batch = next(batches, None)
            if not int(self._backend.all_reduce(torch.tensor(int(batch is not None)), "max")):
                return
            yield batch

    def lines(self) -> dict[str, str]:
        return {"shard": "each rank has a slice of all parameters, gradients and optimizer state (FSDP2)"}


class FullyShardedStep(TrainStep):
    """A step whose gradients come averaged out of backward, each rank's slice of them."""

    def backward(self, batch: Batch, weight: float, meter: Meter) -> None:
        self._some_inputs = batch[0]
        super().backward(batch, weight, meter)

    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        norm = super().total_norm(grads)
        # Of slices it is a slice itself, which nothing that only reads it understands.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def evaluate(self, batch: Batch | None, meter: Meter) -> None:
        if batch is None:
            self.model(self._some_inputs)  # for the others, who gather each block with this rank
        else:
            super().evaluate(batch, meter)


def _shard(model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, optimizer: Optimizer) -> None:
    """Leaves this rank its slices of the model's parameters, also in the optimizer and in what that knows."""
    before = dict(model.named_parameters())
    for unit in units:
        fully_shard(unit, mesh=mesh)
    after = dict(model.named_parameters())
    sliced = {id(old): after[name] for name, old in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [sliced[id(parameter)] for parameter in group["params"]]
    for name, old in before.items():
        if old in optimizer.state:
            its = optimizer.state.pop(old)
            optimizer.state[after[name]] = {key: _sliced(value, after[name]) for key, value in its.items()}


def _sliced(value: Any, like: Any) -> Any:
    """This rank's slice of a tensor that has the shape of a sharded one; others as they are. A collective."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


def _completed(values: Mapping[Any, Any], *, keep: bool) -> dict[Any, Any]:
    """Whole tensors in host memory, from all ranks' slices; on ranks that do not keep them, empty ones."""

    def complete(part: DTensor) -> Tensor:
        whole = part.full_tensor()
        return whole.cpu() if keep else torch.empty(0)

    done: dict[Any, Any] = tree_map_only(DTensor, complete, dict(values))
    return done
