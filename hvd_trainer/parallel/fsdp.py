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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hvd_trainer.backends import Backend
from hvd_trainer.data import Batch, Loader
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.optim.step import TrainStep
from hvd_trainer.parallel.pipeline import StageStep
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import parameters_of


class FSDPShards:
    """Hold the slices that this rank has of a model's parameters, or of a stage's.

    Args:
        backend: the engine.
        precision: fp32, bf16 or fp16.
    """

    def __init__(self, backend: Backend, precision: str) -> None:
        self._backend = backend
        self._mesh = DeviceMesh.from_group(backend.group_of(backend.replica_groups), backend.device.type)
        self._policy = gathering_policy(backend.device, precision)
        self.is_first = backend.replica_group[0] == backend.world.rank

    def check(self, model: nn.Module) -> None:
        """Refuse a model that is in slices already, or that has nothing to train.

        Raises:
            OptionError: it is one of these.
        """
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise OptionError(
                "This model was shared out by an earlier training of this process: build model and optimizer anew "
                "for each, or use --shard optimizer"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise OptionError("The model has no parameter that requires a gradient: there is nothing to train")

    def cut(self, roots: Sequence[nn.Module], blocks: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """Leave this rank its slices of the first rank's parameters, also in the optimizer. A collective.

        The model may be on the host, and need not fit on the device: one block at a time is there whole, as in
        training.

        Args:
            roots: what is called in training.
            blocks: what is gathered at once; what roots have besides is one more block each.
            optimizer: knows the same of the parameters on all ranks.
        """
        with self._backend.activity.waiting(), torch.no_grad():
            for root in roots:
                self._equalize(list(root.buffers()))
            for module in [*(block for block in blocks if list(block.parameters())), *roots]:
                self._cut(module, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # what was not cut follows its parameter to the device

    def _cut(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Cut one block; when this returns, nothing holds its whole parameters any more."""
        whole = {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}
        self._equalize(list(whole.values()))
        fully_shard(module, mesh=self._mesh, mp_policy=self._policy)
        slices = dict(module.named_parameters())
        replaced = {id(parameter): slices[name] for name, parameter in whole.items()}
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
        for name, parameter in whole.items():
            if parameter in optimizer.state:
                its = optimizer.state.pop(parameter)
                optimizer.state[slices[name]] = {key: _sliced(value, slices[name]) for key, value in its.items()}

    def _equalize(self, tensors: Sequence[Tensor]) -> None:
        """Move tensors to the device and give them the values of the column's first rank."""
        for tensor in tensors:
            tensor.data = tensor.data.to(self._backend.device).contiguous()
        self._backend.broadcast_to_replicas([(tensor.data, self._backend.replica_group[0]) for tensor in tensors])

    def completed(self, owned: Mapping[Any, Any]) -> dict[Any, Any] | None:
        """Return whole tensors in host memory, on the column's first rank; None on the others. A collective.

        One tensor at a time is whole on the device.
        """

        def complete(part: DTensor) -> Tensor:
            whole = part.full_tensor()
            return whole.cpu() if self.is_first else torch.empty(0)

        with self._backend.activity.waiting():
            done: dict[Any, Any] = tree_map_only(DTensor, complete, dict(owned))
        return done if self.is_first else None

    def of_optimizer(self, optimizer: Optimizer, state: Mapping[int, Any]) -> dict[int, Any]:
        """Return this rank's slices of what an optimizer knows of parameters, by their numbers.

        Args:
            state: of whole tensors on the host, the same on all ranks.
        """
        parameters = list(parameters_of(optimizer))
        return {
            number: {key: _sliced(value, parameters[number]) for key, value in its.items()}
            for number, its in state.items()
        }

    def of_model(self, model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same of the state of a model, by name."""
        return {name: _sliced(state[name], ours) for name, ours in model.state_dict().items() if name in state}

    def evaluation(self, loader: Loader) -> Iterator[Batch | None]:
        """Every rank computes as often as the one with most batches: none can gather a block alone."""
        batches = loader.evaluation()
        while True:
            batch = next(batches, None)
            if not any(self._backend.all_reduce_numbers([batch is not None], "max")):
                return
            yield batch


class FSDPStep(TrainStep):
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


class FSDPStageStep(FSDPStep, StageStep):
    """The same in micro-batches, through one stage or several."""

    def norms(self, grads: Sequence[Tensor]) -> Tensor:
        slices = [grad for grad in grads if isinstance(grad, DTensor)]
        squares = super().norms([grad.to_local() for grad in slices]).square()
        with self.backend.activity.waiting():
            dist.all_reduce(squares, group=slices[0].device_mesh.get_group())
        return squares.sqrt()


def gathering_policy(device: torch.device, precision: str) -> MixedPrecisionPolicy:
    """Return in which type blocks are gathered for the computation: half the bytes in bf16, on an accelerator.

    Slices, the sums of gradients and the update stay fp32, and autocast goes on choosing what each operation is
    computed in. But parameters that it would use in fp32, those of norms and embeddings, are rounded by this. On
    the CPU the numbers stay those of whole copies.
    """
    if precision != "bf16" or accelerator.is_host(device):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _sliced(value: Any, like: Any) -> Any:
    """Return this rank's slice of a tensor that has the shape of a sharded one, on the device; others as they are.

    Cut where the value is, so that the device never has all of it.
    """
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    mesh = like.device_mesh
    length = -(-len(value) // mesh.size())
    start = mesh.get_local_rank() * length
    mine = value[start : start + length].to(like.device, copy=True)
    return DTensor.from_local(mine, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
