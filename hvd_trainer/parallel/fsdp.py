"""Parameters, gradients and optimizer state sharded over replicas: PyTorch's fully_shard (FSDP2).

    block        0        1        2          a rank has a shard of each parameter
    forward      gather   gather   gather     and the whole of one block at a time, while it is computed
    backward     <------- gather, then reduce-scatter of its gradients

Of a model in stages, the ranks of a replica group shard their stage; within a step its blocks stay gathered,
because each micro-batch needs them. Each parameter is a `DTensor`, whose name and shape are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from hvd_trainer.errors import BackendError, OptionError
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.optim.step import TrainStep
from hvd_trainer.optim.weights import Share
from hvd_trainer.parallel.pipeline import StageStep
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.optimizer_state import load_in_place
from hvd_trainer.utils.tensors import local_rows


class FSDPShards:
    """Shard the parameters of a model, or of a stage, over the replica group."""

    def __init__(self, backend: Backend, precision: str) -> None:
        self._backend = backend
        self._mesh = DeviceMesh.from_group(backend.group_of(backend.replica_groups), backend.device.type)
        self._policy = gathering_policy(backend.device, precision)
        self._trained: dict[Tensor, bool] = {}

    def check(self, model: nn.Module) -> None:
        """Refuse a model that is sharded already, or that has nothing to train.

        Raises:
            OptionError: it is one of these.
        """
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise OptionError(
                "This model was shared out by an earlier training of this process: build model and optimizer for "
                "each, or use --shard optimizer"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise OptionError("The model has no parameter that requires a gradient: there is nothing to train")

    def shard(self, roots: Sequence[nn.Module], blocks: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """Replace parameters and optimizer state by this rank's shards of the first rank's. A collective.

        The model may be on the host, and need not fit on the device: one block at a time is there whole, as in
        training.

        Args:
            roots: the modules that are called in training.
            blocks: the modules that are gathered one at a time; what a root has besides is one more.
        """
        with self._backend.activity.waiting(), torch.no_grad():
            for root in roots:
                self._equalize(list(root.buffers()))
            for module in [*(block for block in blocks if list(block.parameters())), *roots]:
                self._shard_block(module, optimizer)
        load_in_place(optimizer, optimizer.state_dict())  # which moves the other state to its parameter's device
        self._trained = {p: p.requires_grad for root in roots for p in root.parameters()}

    def refuse_changes(self, model: nn.Module) -> None:
        """Refuse a model that trains other parameters than at the start: blocks are gathered as they were.

        Raises:
            BackendError: some are.
        """
        for name, parameter in model.named_parameters():
            if not parameter.is_meta and self._trained.get(parameter) != parameter.requires_grad:
                what = "unfrozen" if parameter.requires_grad else "frozen"
                raise BackendError(
                    f"{name} was {what if parameter in self._trained else 'put in'} after the start, and --shard "
                    "full gathers what was trained then. Do it before the training begins, in a fit of its own "
                    "for each phase; or use --shard optimizer"
                )

    def _shard_block(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Shard one block, leaving no reference to its whole parameters."""
        whole = {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}
        self._equalize(list(whole.values()))
        fully_shard(module, mesh=self._mesh, mp_policy=self._policy)
        shards = dict(module.named_parameters())
        replaced = {id(parameter): shards[name] for name, parameter in whole.items()}
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
        for name, parameter in whole.items():
            if parameter in optimizer.state:
                own_state = optimizer.state.pop(parameter)
                optimizer.state[shards[name]] = {
                    key: _local_shard(value, shards[name]) for key, value in own_state.items()
                }

    def _equalize(self, tensors: Sequence[Tensor]) -> None:
        """Move tensors to the device and give them the values of the replica group's first rank."""
        for tensor in tensors:
            moved = tensor.detach().to(self._backend.device).contiguous()
            # As `Module.to` does: swapping would refuse a tensor that an autograd graph or a weak reference knows.
            if torch._has_compatible_shallow_copy_type(tensor, moved):
                tensor.data = moved
            else:
                kept = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
                torch.utils.swap_tensors(tensor, kept)
        first = self._backend.replica_group[0]
        self._backend.collectives.broadcast_to_replicas([(tensor.data, first) for tensor in tensors])

    def unshard(self, value: Any) -> Any:
        """Return a nested value with whole tensors in host memory. A collective."""
        with self._backend.activity.waiting():
            return tree_map_only(DTensor, lambda part: part.full_tensor().cpu(), value)

    def evaluation(self, loader: Loader) -> Iterator[Batch | None]:
        """Yield this rank's batches, then None until no rank has any left: no rank can gather a block alone."""
        batches = loader.evaluation()
        while True:
            batch = next(batches, None)
            if not any(self._backend.collectives.all_reduce_numbers([batch is not None], "max")):
                return
            yield batch


class FSDPStep(TrainStep):
    """A step whose backward leaves each rank its shard of the averaged gradients."""

    _last_batch: Batch | None = None

    def backward(self, batch: Batch, share: Share, meter: Meter) -> None:
        self._last_batch = batch
        super().backward(batch, share, meter)

    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        norm = super().total_norm(grads)
        # The norm of shards is a shard itself, which its readers do not know.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def evaluate(self, batch: Batch | None, meter: Meter) -> None:
        if batch is None:
            # The other ranks gather each block together with this one; the result is not counted.
            assert self._last_batch is not None
            super().evaluate(self._last_batch, Meter({}, self.backend))
        else:
            super().evaluate(batch, meter)


class FSDPStageStep(FSDPStep, StageStep):
    """An FSDP step in micro-batches, through one stage or several."""

    def norms(self, grads: Sequence[Tensor]) -> Tensor:
        shards = [grad for grad in grads if isinstance(grad, DTensor)]
        squares = super().norms([grad.to_local() for grad in shards]).square()
        with self.backend.activity.waiting():
            dist.all_reduce(squares, group=shards[0].device_mesh.get_group())
        return squares.sqrt()


def gathering_policy(device: torch.device, precision: str) -> MixedPrecisionPolicy:
    """Return the type in which blocks are gathered: bf16 on an accelerator, if training is, for half the bytes.

    Shards, sums of gradients and the update stay fp32, and autocast still chooses each operation's type. But
    parameters that it would use in fp32, those of norms and embeddings, are rounded by this. On the CPU the
    numbers stay those of unsharded replicas.
    """
    if precision != "bf16" or accelerator.is_host(device):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _local_shard(value: Any, like: Any) -> Any:
    """Return this rank's shard of a tensor with the shape of a sharded one, on the device; others unchanged.

    It is cut on the tensor's device, so that the training device never has all of it.
    """
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    rows, first = local_rows(like)
    part = value[first : first + len(rows)].to(like.device, copy=True)
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=shape, stride=stride)
