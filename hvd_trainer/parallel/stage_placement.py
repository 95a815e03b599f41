"""Models in stages and batches in micro-batches: what a rank keeps of the model, and its groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hvd_trainer.backends import Backend
from hvd_trainer.backends.model_sync import synchronize
from hvd_trainer.config.options import ParallelOptions, TrainOptions
from hvd_trainer.data import DataShard
from hvd_trainer.errors import OptionError
from hvd_trainer.optim.step import StepParts, TrainStep
from hvd_trainer.optim.weights import LossFunction
from hvd_trainer.parallel.block_timing import time_blocks
from hvd_trainer.parallel.device_pipeline import DevicePipeline
from hvd_trainer.parallel.grid import make_grid
from hvd_trainer.parallel.microbatch import slice_samples
from hvd_trainer.parallel.partition import MB, Partition, block_names, make_partitions
from hvd_trainer.parallel.pipeline import Runner, SingleStage, StagePipeline, StageStep
from hvd_trainer.parallel.placement import ModelPlacement, drop_other_state
from hvd_trainer.parallel.schedule import bubble
from hvd_trainer.parallel.stage_module import StageModule
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.optimizer_state import load_in_place

_BLOCK_TIMES_S: WeakKeyDictionary[nn.Module, list[float]] = WeakKeyDictionary()
"""Measured time of each block of a model, in seconds."""


class StagePlacement(ModelPlacement):
    """Train a replica in stages on several ranks, or on one rank in micro-batches."""

    def __init__(self, backend: Backend, options: ParallelOptions, train: TrainOptions) -> None:
        super().__init__(backend, options, train)
        self.grid = make_grid([peer.node for peer in backend.session.peers], options.stages)
        self.place = self.grid.place(backend.world.rank)
        self.shard = DataShard(self.place.replica, self.grid.num_replicas)
        self._chunk_size = 0
        self.parts: list[Partition] = []
        self._mine: dict[int, StageModule] = {}
        self._num_parts = (
            options.devices_per_rank if options.stages == 1 else options.stages * options.parts_of_each
        )
        self._group: dist.ProcessGroup | None = None
        self._pipeline: Runner | None = None
        if options.stages > 1:
            self._group = backend.group_of(self.grid.stage_groups)

    @property
    def cut(self) -> list[int]:
        return [len(part.names) for part in self.parts]

    def set_batch_size(self, batch_size: int) -> None:
        self._chunk_size = -(-batch_size // self._options.num_chunks)

    def prepare(
        self, model: nn.Module, loss: LossFunction, optimizer: Optimizer, inputs: Callable[[], Any]
    ) -> tuple[nn.Module, Optimizer]:
        # Blocks of other stages keep names and shapes, but no tensors.
        options, backend = self._options, self._backend
        why = f"--stages {options.stages}" if options.stages > 1 else f"--chunks {options.num_chunks}"
        if options.devices_per_rank > 1:
            why = f"--devices-per-rank {options.devices_per_rank}"
        names = block_names(model, why)
        timed = options.balance == "time" and self._num_parts > 1
        times = self._block_times(model, inputs) if timed else None
        self.parts = make_partitions(model, names, self._num_parts, options.balance, why, times)
        refuse_batch_norm(model, options.num_chunks)
        refuse_in_place(model, self.parts)
        if self._fsdp is not None:
            self._fsdp.check(model)
        synchronize(backend.collectives, model, optimizer, self._whole_state(optimizer))
        own = range(self.place.stage, len(self.parts), options.stages)
        refuse_missing_blocks(model, [self.parts[number] for number in own])
        for number, part in enumerate(self.parts):
            if number not in own:
                drop_tensors(model, part, optimizer)
        self._mine = {number: self._blocks(model, number) for number in own}
        drop_other_state(optimizer, self.owns)
        load_in_place(optimizer, optimizer.state_dict())  # moves it to the parameters' devices
        stage = nn.ModuleList(self._mine.values())
        if self._fsdp is None:
            backend.prepare_stage(stage, passes=options.num_chunks, exchange=self._exchange)
        else:
            blocks = [block for part in self._mine.values() for block in part.blocks]
            self._fsdp.shard(list(stage), blocks, optimizer)
        backend.set_parameter_names(model, optimizer)
        self._shard_optimizer(optimizer)
        self._refuse_frozen_stage()
        return model, optimizer

    def follow_changes(self, step: TrainStep, model: nn.Module, *, agree: bool = True) -> None:
        super().follow_changes(step, model, agree=agree)
        self._refuse_frozen_stage()

    def _refuse_frozen_stage(self) -> None:
        """Refuse a first stage whose output needs no gradient, for which PyTorch's pipelining has no backward.

        Raises:
            OptionError: all its parameters are frozen; on its ranks.
        """
        first = self._mine.get(0)
        if self._group is not None and first is not None and not any(p.requires_grad for p in first.parameters()):
            raise OptionError(
                f"All parameters of the first stage ({', '.join(self.parts[0].names)}) are frozen, and a pipeline "
                f"cannot train so: give it more blocks with --balance, or freeze fewer"
            )

    def _block_times(self, model: nn.Module, inputs: Callable[[], Any]) -> list[float]:
        """Return the seconds that each block takes for one micro-batch, measured by rank 0. A collective.

        Measured once per model: after its partition by these times, a rank has no longer all of its blocks.
        """
        backend = self._backend
        if model not in _BLOCK_TIMES_S:
            batch, times = inputs(), []
            if backend.world.is_first:
                chunk = slice_samples(batch, 0, self._chunk_size)
                times = time_blocks(list(model.children()), chunk, backend.device, self._train.precision)
            _BLOCK_TIMES_S[model] = backend.collectives.broadcast_object(times)
        return _BLOCK_TIMES_S[model]

    def _device(self, number: int) -> torch.device:
        """Return the device of a partition."""
        return self._backend.session.devices[number if self._options.stages == 1 else 0]

    def _blocks(self, model: nn.Module, number: int) -> StageModule:
        """Return one partition as a module on its device; to be sharded, it stays where it is."""
        blocks, device = list(model.children()), self._device(number)
        if self._fsdp is None:
            for i in self.parts[number].blocks:
                blocks[i].to(device)
        return StageModule(
            [(i, blocks[i]) for i in self.parts[number].blocks],
            device=device,
            precision=self._train.precision,
            recompute=self._options.activation_checkpointing == "blocks",
            sends=self._group is not None and number + 1 < len(self.parts),
        )

    def make_step(self, parts: StepParts) -> TrainStep:
        options = self._options
        self._pipeline = self._runner()
        kind: type[StageStep] = StageStep
        if self._fsdp is not None:
            from hvd_trainer.parallel.fsdp import FSDPStageStep

            kind = FSDPStageStep
        return kind(
            parts,
            runner=self._pipeline,
            chunks=options.num_chunks,
            chunk_size=self._chunk_size,
            seed=self._train.seed,
            replica=self.place.replica,
        )

    def _runner(self) -> Runner:
        options = self._options
        if self._group is not None:
            return StagePipeline(
                self._mine, len(self.parts), options.num_chunks, options.schedule, self._group, self._backend
            )
        if options.devices_per_rank > 1:
            return DevicePipeline(list(self._mine.values()), self._backend.session.devices)
        return SingleStage(self._mine[0])

    def figures(self, seconds: float) -> dict[str, float]:
        """Return the fraction of their time in which stages waited, sent or received. A collective."""
        # On a GPU the clock would only show how long Python takes to queue the work.
        if not isinstance(self._pipeline, StagePipeline) or not accelerator.is_host(self._backend.device):
            return {}
        busy, whole = self._backend.collectives.all_reduce(torch.tensor([self._pipeline.busy_s, seconds])).tolist()
        self._pipeline.busy_s = 0.0
        return {"bubble": 1 - busy / whole}

    def lines(self) -> dict[str, str]:
        options, grid = self._options, self.grid
        chunks, stages = options.num_chunks, options.stages
        idle = bubble(options.schedule, stages, chunks, options.parts_of_each)
        if stages == 1:
            idle = bubble("gpipe", options.devices_per_rank, chunks)
        copies = f"{grid.num_replicas} {'copy' if grid.num_replicas == 1 else 'copies'}"
        cut_up = f"{chunks} {'chunk' if chunks == 1 else 'chunks'} of {self._chunk_size}"
        lines = super().lines() | {"stages": f"{stages} x {copies} of the model, batches in {cut_up}"}
        if len(self.parts) == 1:
            return lines
        how = options.schedule if stages > 1 else f"{options.devices_per_rank} devices each"
        lines["stages"] += f", {how}: {idle:.1%} of a step is waiting, if all parts take equally long"
        for number, part in enumerate(self.parts):
            names = part.names[0] if len(part.names) == 1 else f"{part.names[0]} to {part.names[-1]}"
            took = "" if part.seconds is None else f", {part.seconds * 1000:.2f} ms per chunk"
            size = f"{part.parameters:,} parameters, {part.bytes / MB:,.2f} MB"
            place = f"stage {number % stages}" if stages > 1 else str(self._device(number))
            lines[f"part {number}"] = f"{place}: {names}, {size}{took}"
        return lines

    def close(self) -> None:
        super().close()
        self._group = self._pipeline = None


def make_placement(backend: Backend, options: ParallelOptions, train: TrainOptions) -> ModelPlacement:
    """Return how this job's ranks share model and data; arguments and errors as of `ModelPlacement`."""
    return (StagePlacement if options.is_staged else ModelPlacement)(backend, options, train)


def refuse_batch_norm(model: nn.Module, chunks: int) -> None:
    """Refuse batch norm over micro-batches, whose statistics would take the place of the batch's.

    Raises:
        OptionError: the model has batch norm, and there are several micro-batches.
    """
    for name, module in model.named_modules():
        if chunks > 1 and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise OptionError(
                f"{name} is batch norm, which would take the statistics of each of the {chunks} chunks for those "
                f"of the batch. Type --chunks 1 --schedule gpipe, or use one that looks at one sample at a time, "
                f"such as LayerNorm or GroupNorm"
            )


def refuse_in_place(model: nn.Module, parts: Sequence[Partition]) -> None:
    """Refuse partitions that begin by overwriting their input, which backward needs.

    Raises:
        OptionError: one does.
    """
    blocks = list(model.named_children())
    for part in parts[1:]:
        name, block = blocks[part.first]
        opening = next(module for module in block.modules() if not list(module.children()))
        if getattr(opening, "inplace", False):
            raise OptionError(
                f"The part from {name} on begins with {opening}, which overwrites what it receives. Make it "
                f"inplace=False, or cut elsewhere with --balance"
            )


def refuse_missing_blocks(model: nn.Module, parts: Sequence[Partition]) -> None:
    """Refuse partitions whose tensors an earlier training has dropped on this rank.

    Raises:
        OptionError: there is one.
    """
    blocks = list(model.children())
    if any(p.is_meta for part in parts for number in part.blocks for p in blocks[number].parameters()):
        raise OptionError(
            "An earlier training of this process has cut this model elsewhere, and this rank no longer has all of "
            "its part: train with the same --stages, --balance and --schedule, or build model and optimizer again"
        )


def drop_tensors(model: nn.Module, part: Partition, optimizer: Optimizer) -> None:
    """Drop the tensors of a partition's blocks, but not their numbers in the optimizer."""
    blocks = list(model.children())
    replaced: dict[int, nn.Parameter] = {}
    for number in part.blocks:
        before = dict(blocks[number].named_parameters())
        blocks[number].to("meta")
        for name, parameter in blocks[number].named_parameters():
            parameter.requires_grad = False
            replaced[id(before[name])] = parameter
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
