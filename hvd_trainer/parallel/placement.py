"""Which part of the model and which shard of the data a rank has; only this layer knows.

ModelPlacement    each rank has all blocks, and its own shard of the data
StagePlacement    the ranks of a stage group have a stage of one replica each, and the same shard of the data

With either, a replica group may shard the optimizer's state (`sharded_optimizer.py`), or parameters and gradients,
too (`fsdp.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from hvd_trainer.backends import Backend
from hvd_trainer.backends.model_sync import synchronize
from hvd_trainer.config.options import ParallelOptions, TrainOptions
from hvd_trainer.data import Batch, DataShard, Loader
from hvd_trainer.optim.loss_module import with_loss
from hvd_trainer.optim.step import StepParts, TrainStep
from hvd_trainer.optim.weights import LossFunction
from hvd_trainer.parallel.partition import block_names
from hvd_trainer.parallel.sharded_optimizer import ShardedOptimizer
from hvd_trainer.parallel.stage_module import StageModule
from hvd_trainer.utils.optimizer_state import load_in_place
from hvd_trainer.utils.tensors import parameters_of

if TYPE_CHECKING:
    from hvd_trainer.parallel.fsdp import FSDPShards

K = TypeVar("K")


class ModelPlacement:
    """The distribution of one training over ranks and devices: here a whole replica on each rank.

    Attributes:
        shard: this rank's shard of the data.
        seeds_itself: whether each step seeds its own random numbers.
        is_whole: whether this rank has the whole model unsharded.
        has_copies: whether each rank of a replica group has all of its parameters, and not a slice of each.
        is_sharded: whether ranks have different parts of model or optimizer, and save what they have.
    """

    def __init__(self, backend: Backend, options: ParallelOptions, train: TrainOptions) -> None:
        self._backend, self._options, self._train = backend, options, train
        self._exchange = train.reproducible is None
        self._sharded_optimizer: ShardedOptimizer | None = None
        self._fsdp: FSDPShards | None = None
        self.shard = DataShard(backend.world.rank, backend.world.size)
        self.seeds_itself = options.is_staged or train.reproducible is not None
        self.is_sharded = backend.world.size > 1 and (options.stages > 1 or options.shard != "none")
        if options.shard == "full" and len(backend.replica_group) > 1:
            # Importing DTensor takes half a second, which only this needs.
            from hvd_trainer.parallel.fsdp import FSDPShards

            self._fsdp = FSDPShards(backend, train.precision)
        self.has_copies = self._fsdp is None
        self.is_whole = options.stages == 1 and self.has_copies

    @property
    def cut(self) -> list[int]:
        """The number of blocks in each part of the model; none if it is not cut."""
        return []

    def set_batch_size(self, batch_size: int) -> None:
        """Learn the number of samples per batch."""

    def compile(self, model: nn.Module) -> None:
        """Compile a model in place, if the options ask for it."""
        if self._train.compile != "none":
            self._backend.compile(model, self._train.compile, exchange=self._exchange)

    def prepare(
        self, model: nn.Module, loss: LossFunction, optimizer: Optimizer, inputs: Callable[[], Any]
    ) -> tuple[nn.Module, Optimizer]:
        """Return the module to train with and the optimizer, alike on all ranks.

        Args:
            loss: becomes a part of the module, if it has parameters.
            inputs: returns the inputs of one batch, for measurements; a collective.
        """
        to_train = with_loss(self._blocks_of(model), loss)
        if self._fsdp is not None:
            self._fsdp.check(model)
            synchronize(self._backend.collectives, to_train, optimizer)
            blocks = []
            if isinstance(model, nn.Sequential):
                block_names(model, "--shard full")  # refuses a parameter of two blocks, which would become two
                blocks = list(model.children())
            self._fsdp.shard([to_train], blocks, optimizer)
            self._backend.set_parameter_names(model, optimizer)
            return to_train, optimizer
        if self.is_sharded and (state := self._whole_state(optimizer)) is not None:
            load_in_place(optimizer, state)
        prepared = self._backend.prepare(to_train, optimizer, exchange=self._exchange)
        self._shard_optimizer(optimizer)
        return prepared

    def follow_changes(self, step: TrainStep, model: nn.Module, *, agree: bool = True) -> None:
        """Exchange from now on what the model has and trains after a callback has changed it. A collective then.

        Args:
            agree: as in `Backend.follow_changes`; False between steps, each of which a collective would delay.

        Raises:
            BackendError: it cannot be exchanged: ranks have changed different things, or `--shard full`, or a
                change of the blocks of a model that is called block by block.
        """
        if self._fsdp is not None:
            self._fsdp.refuse_changes(model)
            return
        step.train_model = self._backend.follow_changes(step.train_model, model, step.optimizer, agree=agree)
        if self._sharded_optimizer is not None and not self._sharded_optimizer.has_all_of(step.optimizer):
            state = self._whole_state(step.optimizer)
            self._sharded_optimizer.close()
            synchronize(self._backend.collectives, model, step.optimizer, state)
            self._shard_optimizer(step.optimizer)

    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return an optimizer's state dict of all parameters on rank 0, else None. A collective.

        After an earlier training each rank has only the state of the parameters that it updated.
        """
        before = optimizer.state_dict()
        state = self.gather(before["state"])
        return None if state is None else {**before, "state": state}

    def _blocks_of(self, model: nn.Module) -> nn.Module:
        """Return the module to train with: the model, or its blocks with activation checkpointing."""
        if self._options.activation_checkpointing == "none":
            return model
        block_names(model, "--activation-checkpointing blocks")
        blocks = list(enumerate(model.children()))
        return StageModule(blocks, device=self._backend.device, precision=self._train.precision, recompute=True)

    def _shard_optimizer(self, optimizer: Optimizer) -> None:
        """Let each rank of the replica group update some parameters only, if the options ask for it."""
        if self.is_sharded and self._options.shard == "optimizer":
            self._sharded_optimizer = ShardedOptimizer(self._backend, optimizer)
            drop_other_state(optimizer, self.owns)

    def own_share(self, state: Mapping[K, Any], *, of_optimizer: bool = False) -> dict[K, Any]:
        """Return what this rank saves of model or optimizer: its rows of tensors, and what no other rank saves."""
        group, rank = self._backend.replica_group, self._backend.world.rank
        is_first = rank == min(group) or (of_optimizer and self._sharded_optimizer is not None)
        if self._fsdp is None:
            return dict(state) if is_first else {}

        def rows(value: Any) -> Any:
            return value.to_local() if hasattr(value, "to_local") else value if is_first else None

        share: dict[K, Any] = tree_map(rows, dict(state))
        return share

    def gather(self, owned: Mapping[K, Any]) -> dict[K, Any] | None:
        """Return what all ranks have together in rank 0's host memory, else None. A collective.

        One value at a time is sent, from the first rank that has it, and one tensor is whole on the device.
        """
        collectives, whole = self._backend.collectives, {}
        owners: dict[K, int] = {}
        for rank, keys in enumerate(collectives.all_gather_object(list(owned))):
            for key in keys:
                owners.setdefault(key, rank)
        for key, rank in owners.items():
            value = owned.get(key) if self._fsdp is None else self._fsdp.unshard(owned.get(key))
            value = collectives.broadcast_object(value, rank)
            if self._backend.world.is_first:
                whole[key] = value
        return whole if self._backend.world.is_first else None

    def evaluation(self, loader: Loader) -> Iterator[Batch | None]:
        """Yield this rank's validation batches; None if it has none left but others need it. A collective."""
        return loader.evaluation() if self._fsdp is None else self._fsdp.evaluation(loader)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter."""
        return not parameter.is_meta and (
            self._sharded_optimizer is None or self._sharded_optimizer.owns(parameter)
        )

    def make_step(self, parts: StepParts) -> TrainStep:
        """Return the step that the loop calls."""
        if self._fsdp is None:
            return TrainStep(parts)
        from hvd_trainer.parallel.fsdp import FSDPStep

        return FSDPStep(replace(parts, eval_model=parts.train_model))

    def figures(self, seconds: float) -> dict[str, float]:
        """Return further figures of an epoch's record. A collective."""
        return {}

    def lines(self) -> dict[str, str]:
        """Return its lines of the start-up summary."""
        if self._fsdp is not None:
            return {"shard": "each copy has a slice of all parameters, gradients and optimizer state (FSDP2)"}
        if self._sharded_optimizer is None:
            return {}
        return {"shard": "each copy of the model updates some parameters, and has the optimizer's state of these"}

    def close(self) -> None:
        """Drop what holds connections of the engine."""
        self._fsdp = None
        if self._sharded_optimizer is not None:
            self._sharded_optimizer.close()


def drop_other_state(optimizer: Optimizer, owns: Callable[[Tensor], bool]) -> None:
    """Drop the optimizer's state of parameters that other ranks update."""
    owned = {id(p) for p in parameters_of(optimizer) if owns(p)}
    for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in owned]:
        del optimizer.state[parameter]
