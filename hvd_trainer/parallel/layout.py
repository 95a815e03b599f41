"""Which part of the model and which share of the data a rank has; the rest of the trainer does not ask.

WholeModelLayout  each rank has all blocks, and its own share of each batch
PipelineLayout    the ranks of a stage group share a copy of the model, a stage each, and a share of the batch

With either, copies of the model may share out the updates (`sharded_optimizer.py`), or all that they have, in
slices (`fsdp.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hvd_trainer.backends import Backend
from hvd_trainer.backends.model_sync import synchronize
from hvd_trainer.config.options import ParallelOptions, TrainOptions
from hvd_trainer.data import Batch, DataShard, Loader
from hvd_trainer.errors import OptionError
from hvd_trainer.optim.step import StepParts, TrainStep
from hvd_trainer.parallel.partition import block_names
from hvd_trainer.parallel.sharded_optimizer import ShardedOptimizer
from hvd_trainer.parallel.stage_module import StageModule
from hvd_trainer.utils.tensors import parameters_of

if TYPE_CHECKING:
    from hvd_trainer.parallel.fsdp import FSDPShards

K = TypeVar("K")
V = TypeVar("V")


class Layout(ABC):
    """What all ways to lay out a job have in common.

    Args:
        backend: the engine.
        options: of the layout.
        train: of the training.
        exchange: whether copies of the model average their gradients.

    Attributes:
        share: of each batch, for this rank.
        seeds_itself: whether each step seeds its own random numbers.
        is_whole: whether the model is in one place, as it was given.
    """

    shard: DataShard
    is_whole: bool
    seeds_itself: bool

    def __init__(
        self, backend: Backend, options: ParallelOptions, train: TrainOptions, *, exchange: bool = True
    ) -> None:
        self._backend, self._options, self._train = backend, options, train
        self._exchange = exchange and train.reproducible is None
        self._updates: ShardedOptimizer | None = None
        self._everyone: dist.ProcessGroup | None = None
        self._slices: FSDPShards | None = None
        if backend.session.driver is not None and (options.stages > 1 or options.shard != "none"):
            raise OptionError(
                "--stages and --shard need the same ranks to the end, and horovodrun's elastic mode changes them. "
                "Start without --host-discovery-script, or leave them out"
            )
        if options.shard == "optimizer" and backend.world.size > 1:
            self._everyone = backend.group_of([range(backend.world.size)])
        if options.shard == "full" and len(backend.replica_group) > 1:
            # Tensors in slices are half a second of imports that only this needs.
            from hvd_trainer.parallel.fsdp import FSDPShards

            self._slices = FSDPShards(backend, train.precision)
        self.is_whole = options.stages == 1 and self._slices is None

    @abstractmethod
    def check_batch(self, batch_size: int) -> None:
        """Takes note of the samples of a batch.

        Raises:
            OptionError: they are fewer than the chunks.
        """

    def compile(self, model: nn.Module) -> None:
        """Compile a model in place, if that is asked for."""
        if self._train.compile:
            self._backend.compile(model, self._train.compile_mode, exchange=self._exchange)

    @abstractmethod
    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Callable[[], Any]
    ) -> tuple[nn.Module, Optimizer]:
        """The module to train with and the optimizer, alike on all ranks.

        Args:
            inputs: gives those of one batch, for measurements; a collective.
        """

    def _share_updates(self, optimizer: Optimizer) -> None:
        """Lets each replica update a share of the parameters, if that is wanted."""
        if self._everyone is not None:
            self._updates = ShardedOptimizer(self._backend, optimizer)
            drop_other_state(optimizer, self.owns)

    def local(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Of what an optimizer knows of all parameters, by their numbers, what this rank needs. A collective."""
        mine = {number for number, parameter in enumerate(parameters_of(optimizer)) if self.owns(parameter)}
        kept = {number: its for number, its in state.items() if number in mine}
        return kept if self._slices is None else self._slices.of_optimizer(optimizer, kept)

    def local_model(self, model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same for the state of the model, by name. A collective."""
        kept = {name: state[name] for name, ours in model.state_dict().items() if not ours.is_meta}
        return kept if self._slices is None else self._slices.of_model(model, kept)

    def evaluation(self, loader: Loader) -> Iterator[Batch | None]:
        """This rank's batches of a test set; None: it has none left, and others still need it. A collective."""
        return loader.evaluation() if self._slices is None else self._slices.evaluation(loader)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter."""
        return not parameter.is_meta and (self._updates is None or self._updates.owns(parameter))

    @abstractmethod
    def make_step(self, parts: StepParts) -> TrainStep:
        """What the loop calls."""

    def merged(self, owned: Mapping[K, V]) -> dict[K, V] | None:
        """What the stages of the first replica have together, on rank 0; None elsewhere. A collective."""
        whole = owned if self._slices is None else self._slices.completed(owned)
        return None if whole is None else self._of_all_stages(whole)

    @abstractmethod
    def _of_all_stages(self, owned: Mapping[K, V]) -> dict[K, V] | None:
        """The same from whole tensors."""

    def merged_updates(self, owned: Mapping[K, V]) -> dict[K, V] | None:
        """The same for what the optimizer knows of the parameters, which replicas may have shared out."""
        return self.merged(owned) if self._everyone is None else self._gathered(owned, self._everyone)

    def _gathered(self, owned: Mapping[K, V], group: dist.ProcessGroup) -> dict[K, V] | None:
        """What the ranks of a group have, on rank 0 of all; None on the others."""
        # Through the host: a GPU's tensor would come out on the same GPU of the rank that receives it.
        mine = tree_map_only(Tensor, Tensor.cpu, dict(owned))
        first = self._backend.world.is_first
        everyone: list[Any] | None = [None] * dist.get_world_size(group) if first else None
        with self._backend.activity.waiting():
            dist.gather_object(mine, everyone, dst=0, group=group)
        return None if everyone is None else {key: value for its in everyone for key, value in its.items()}

    @property
    def busy_s(self) -> float | None:
        """Seconds in which this rank has computed since the epoch began; None unless it is a stage on a CPU."""
        return None

    def figures(self, seconds: float) -> dict[str, float]:
        """What an epoch's record has besides. A collective.

        Args:
            seconds: that the epoch took.
        """
        return {}

    def lines(self) -> dict[str, str]:
        """What the banner says of it."""
        if self._slices is not None:
            return {"shard": "each copy has a slice of all parameters, gradients and optimizer state (FSDP2)"}
        if self._updates is None:
            return {}
        return {"shard": "each copy of the model updates some parameters, and has the optimizer's state of these"}

    def close(self) -> None:
        """Drops what holds connections."""
        self._everyone = self._slices = None
        if self._updates is not None:
            self._updates.close()


class WholeModelLayout(Layout):
    """Each rank has the whole model."""

    def __init__(
        self, backend: Backend, options: ParallelOptions, train: TrainOptions, *, exchange: bool = True
    ) -> None:
        super().__init__(backend, options, train, exchange=exchange)
        self.shard = DataShard(backend.world.rank, backend.world.size)
        self.seeds_itself = train.reproducible is not None

    def check_batch(self, batch_size: int) -> None:
        """Nothing is cut."""

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Callable[[], Any]
    ) -> tuple[nn.Module, Optimizer]:
        to_train = self._blocks_of(model)
        if self._slices is not None:
            self._slices.check(model)
            synchronize(self._backend, to_train, optimizer)
            blocks = []
            if isinstance(model, nn.Sequential):
                block_names(model, "--shard full")  # a parameter of two blocks would become two
                blocks = list(model.children())
            self._slices.cut([to_train], blocks, optimizer)
            self._backend.set_parameter_names(model)
            return to_train, optimizer
        if self._everyone is not None:
            # Of an optimizer that was shared out before, each rank knows the state of its own share.
            before = optimizer.state_dict()
            state = self.merged_updates(before["state"])
            if state is not None:
                optimizer.load_state_dict({**before, "state": state})
        prepared = self._backend.prepare(to_train, optimizer, exchange=self._exchange)
        self._share_updates(optimizer)
        return prepared

    def _blocks_of(self, model: nn.Module) -> nn.Module:
        """The module to train with: the model, or its blocks, whose activations are computed anew in backward."""
        if self._options.activation_checkpointing == "none":
            return model
        block_names(model, "--activation-checkpointing blocks")
        blocks = list(enumerate(model.children()))
        return StageModule(blocks, device=self._backend.device, precision=self._train.precision, recompute=True)

    def make_step(self, parts: StepParts) -> TrainStep:
        if self._slices is None:
            return TrainStep(parts)
        from hvd_trainer.parallel.fsdp import FSDPStep

        return FSDPStep(replace(parts, bare=parts.model))

    def _of_all_stages(self, owned: Mapping[K, V]) -> dict[K, V] | None:
        return dict(owned)


def drop_other_state(optimizer: Optimizer, owns: Callable[[Tensor], bool]) -> None:
    """Forgets what the optimizer knows of parameters that others update."""
    mine = {id(p) for p in parameters_of(optimizer) if owns(p)}
    for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in mine]:
        del optimizer.state[parameter]
