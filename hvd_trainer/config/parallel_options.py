"""The options of a model in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hvd_trainer.config.checks import at_least, collect_errors, non_default

if TYPE_CHECKING:
    from hvd_trainer.config.engine_options import EngineOptions
    from hvd_trainer.config.options import TrainOptions

NOT_IN_STAGES = (
    *("sync_batch_norm", "find_unused_parameters", "static_graph", "bucket_views", "powersgd_rank"),
    *("adasum", "num_groups", "autotune"),
)
"""Engine options that need a whole model and whole batches."""


@dataclass(frozen=True)
class ParallelOptions:
    """A model in parts, for one that is too large for a GPU, or for its batch."""

    stages: int = 1
    """processes that share one copy of the model, each with a stage of its blocks; ranks / stages copies train in
    parallel, and --batch-size is per copy"""
    devices_per_rank: int = 1
    """devices of each process, with a part of the model on each"""
    devices: tuple[str, ...] = ()
    """the same by their names, such as cuda:0 cpu, instead of the next free ones"""
    chunks: int | None = None
    """micro-batches that a batch is cut into, so that all stages or devices work at once (1: one after the other);
    None: as many as there are stages or devices"""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """in which order a stage works on its micro-batches"""
    parts_per_stage: int | None = None
    """parts of the model that each stage has; None: 2 for the interleaved schedule, and 1 for the others"""
    balance: str = "time"
    """where the model is cut: by the time that its blocks take, which is measured at the start, by their bytes, or
    by hand: the number of blocks in each part, such as 3,2"""
    activation_checkpointing: Literal["none", "blocks"] = "none"
    """compute the activations inside each block anew in backward instead of keeping them"""
    shard: Literal["none", "optimizer", "full"] = "none"
    """what copies of the model share out among themselves instead of each keeping it: the optimizer's state, or
    (ddp only) parameters and gradients too"""

    @property
    def is_staged(self) -> bool:
        """Whether the model or its batches are cut."""
        return self.stages * self.num_devices > 1 or self.chunks is not None

    @property
    def num_devices(self) -> int:
        return len(self.devices) or self.devices_per_rank

    @property
    def num_chunks(self) -> int:
        return self.stages * self.num_devices if self.chunks is None else self.chunks

    @property
    def parts_of_each(self) -> int:
        return self.parts_per_stage or (2 if self.schedule == "interleaved" else 1)

    def mistakes(self, train: TrainOptions, engine: EngineOptions) -> list[str]:
        """What is out of range, and what does not go together with micro-batches and stages."""
        compiled_apart = self.activation_checkpointing != "none" or self.shard == "full"
        found = [
            *at_least(
                1,
                stages=self.stages,
                devices_per_rank=self.devices_per_rank,
                chunks=self.chunks,
                parts_per_stage=self.parts_per_stage,
            ),
            *(self._shard_mistakes(train, engine) if self.shard == "full" else ()),
            *collect_errors(
                (
                    self.shard == "optimizer" and engine.adasum,
                    "--shard optimizer and --adasum, which makes the updates itself: leave one out",
                ),
                (
                    train.compile and compiled_apart,
                    "--compile goes neither with --activation-checkpointing nor with --shard full: leave it out, "
                    "and compile the blocks yourself, with block.compile()",
                ),
            ),
            *(
                f"{name} is about stages: add --stages, or leave it out"
                for name in non_default(self, ("schedule", "parts_per_stage"))
                if self.stages == 1
            ),
            *collect_errors(
                (
                    self.stages * self.num_devices == 1 and self.balance != ParallelOptions.balance,
                    "--balance cuts a model: add --stages or --devices-per-rank, or leave it out",
                )
            ),
        ]
        return found if found or not self.is_staged else self._staged_mistakes(train, engine)

    def _staged_mistakes(self, train: TrainOptions, engine: EngineOptions) -> list[str]:
        """What does not go together with cut models and batches."""
        how = "--stages" if self.stages > 1 else "--chunks" if self.num_devices == 1 else "--devices-per-rank"
        names, batch_size = len(self.devices), train.batch_size
        return [
            *collect_errors(
                (
                    train.reproducible is not None,
                    f"{how} and --reproducible: micro-batches are summed in another order; leave one out",
                ),
                (
                    train.global_batch_size is None and (self.chunks or 0) > batch_size,
                    f"--chunks {self.chunks} cuts --batch-size {batch_size} into less than one sample",
                ),
                (
                    names > 0 and self.devices_per_rank not in (1, names),
                    f"--devices names {names}, but --devices-per-rank is {self.devices_per_rank}: leave one out",
                ),
                (
                    self.stages > 1 and self.num_devices > 1,
                    "--stages gives a part of the model to each rank, and --devices-per-rank several: leave one "
                    "out",
                ),
                (
                    self.stages > 1 and self.parts_of_each > 1 and self.schedule in ("gpipe", "1f1b"),
                    f"--schedule {self.schedule} has one part per stage: leave out --parts-per-stage, or type "
                    f"--schedule interleaved",
                ),
            ),
            *(f"{name} does not go with {how}: leave one out" for name in non_default(engine, NOT_IN_STAGES)),
            *collect_errors(
                (
                    engine.compression == "powersgd",
                    f"--compression powersgd does not go with {how}: type --compression fp16",
                ),
                (
                    train.compile,
                    f"--compile does not go with {how}: compile the blocks yourself, with block.compile()",
                ),
            ),
        ]

    def _shard_mistakes(self, train: TrainOptions, engine: EngineOptions) -> list[str]:
        """What does not go together with slices of everything."""
        return [
            *collect_errors(
                (
                    engine.backend != "ddp",
                    "--shard full is PyTorch's own: type --backend ddp, or --shard optimizer",
                ),
                (
                    self.num_devices > 1,
                    "--shard full has a rank's slices on one device: leave out --devices-per-rank",
                ),
                (
                    self.schedule == "zero-bubble",
                    "--schedule zero-bubble computes gradients of parameters apart, where --shard full does not "
                    "see them: type --schedule 1f1b or interleaved, or --shard optimizer",
                ),
                (
                    train.reproducible is not None,
                    "--shard full and --reproducible: gradients are summed in slices; leave one out",
                ),
            ),
            *(
                f"{name} does not go with --shard full: leave one out"
                for name in non_default(engine, (*NOT_IN_STAGES, "compression"))
            ),
        ]
