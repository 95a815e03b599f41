"""All options of a `Trainer`, as typed dataclasses: the command line, YAML and docs/options.md are made from them.

A nested dataclass is a group, option names are flat (`--batch-size`), and the text below a field explains it. What
two options say of each other stands in rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from hvd_trainer.config.checks import COMMON, Count, NonNegative, NonNegativeInt, ParsedBy, Positive
from hvd_trainer.config.figures import BestFigure, StopCondition

Decay = Literal["none", "linear", "cosine"]


@dataclass(frozen=True)
class EngineOptions:
    """How the engine exchanges gradients. One name for one thing on both engines.

    Horovod's own settings are its environment variables, such as HOROVOD_CYCLE_TIME, HOROVOD_CACHE_CAPACITY and
    HOROVOD_AUTOTUNE. A program gives DistributedDataParallel its own by `Trainer(options, ddp_kwargs={...})`.
    """

    backend: Annotated[Literal["auto", "horovod", "ddp", "single", "data-parallel"], COMMON] = "auto"
    """the engine that exchanges gradients: Horovod, native PyTorch DDP, or none in one process; auto: Horovod
    under horovodrun, if it is installed, else DDP; to compare with, also torch.nn.DataParallel: one process with
    all GPUs, where --batch-size is per GPU"""
    device: Annotated[Literal["auto", "cpu", "cuda", "xpu"], COMMON] = "auto"
    """where to train: cuda is NVIDIA's and AMD's GPUs, xpu Intel's; auto takes a GPU per rank if there are any"""
    timeout_s: Positive = 60.0
    """once it trains: abort, with the stacks of all ranks, when a rank makes no progress for this many seconds"""
    startup_timeout_s: Positive = 300.0
    """the same for the start, saving and callbacks; and how long a single exchange may take"""
    network_interface: str | None = None
    """the network card that joins the nodes, such as eth1: for the ranks' meeting, Gloo and NCCL; None: the one
    on the route to rank 0's node"""
    compression: Annotated[Literal["none", "fp16", "bf16", "powersgd"], COMMON] = "none"
    """format of the gradients on the wire (powersgd: ddp only)"""
    threads: Count | None = None
    """CPU threads of each rank; None: as OMP_NUM_THREADS or `torch.set_num_threads` says, else its share of the
    cores (another number adds in another order, so that last bits differ)"""
    bucket_mb: Positive = 25.0
    """gradients are exchanged in buckets of this size, in MB, while backward runs"""
    sync_batch_norm: bool = False
    """batch norm over the global batch instead of each rank's own"""
    find_unused_parameters: bool = False
    """allow steps in which some parameters get no gradient; they then stay as they are"""
    transport: Literal["auto", "gloo", "nccl", "xccl", "mpi"] = "auto"
    """the library that moves the bytes: auto is nccl on GPUs (Intel's: xccl) and gloo on CPUs; gloo, nccl and xccl
    are ddp only; mpi is horovod only, and quicker than gloo on CPUs (needs mpirun and a Horovod built with MPI)"""


@dataclass(frozen=True)
class TrainOptions:
    """Training."""

    epochs: Annotated[Count, COMMON] = 3
    """passes over the training set"""
    max_steps: Annotated[Count | None, COMMON] = None
    """end after so many optimizer steps, also inside an epoch; a later run with more continues from there"""
    until: Annotated[str | None, ParsedBy(StopCondition.parse)] = None
    """'val_accuracy>=0.99' or 'val_loss<=0.05', in quotes: end after the epoch, or the evaluation in it, in which
    a figure is as high, or as low"""
    evaluate_every_steps: Annotated[Count | None, COMMON] = None
    """evaluate after each n-th step of an epoch, too, and not only at its end"""
    batch_size: Annotated[Count, COMMON] = 128
    """samples per rank and backward pass; times ranks times --accumulate it is the global batch"""
    global_batch_size: Annotated[Count | None, COMMON] = None
    """samples per step of all ranks together; sets the batch size from the number of ranks"""
    accumulate: Annotated[Count, COMMON] = 1
    """backward passes per step: gradients are added up and exchanged once"""
    lr_scaling: Annotated[Literal["none", "linear", "sqrt"], COMMON] = "none"
    """multiply the learning rate by (ranks x accumulate), or its square root; the same on both engines"""
    warmup_epochs: Annotated[NonNegative, COMMON] = 0.0
    """raise the learning rate linearly from near 0 over this many epochs"""
    lr_decay: Decay = "none"
    """lower the learning rate over the rest of all epochs down to 0, on a line or half a cosine"""
    max_norm: Annotated[Positive | None, COMMON] = None
    """clip the norm of the averaged gradient to this"""
    precision: Annotated[Literal["fp32", "bf16", "fp16"], COMMON] = "fp32"
    """mixed precision of forward and backward; fp16 scales the loss"""
    non_finite: Literal["error", "skip"] = "error"
    """what to do when a loss or gradient is infinite or not a number: end the run at the next line of the log or
    save, before anything is saved, or leave such steps out, as if their data were not there"""
    reproducible: int | None = None
    """cut the global batch into this many virtual ranks (a power of two): the same bits on 1, 2, 4, ... ranks of
    either engine; then --batch-size is per virtual rank"""
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"
    """compile the model with torch.compile, in this mode: on GPUs, reduce-overhead and max-autotune launch what
    they have compiled as CUDA graphs"""
    tf32: bool = False
    """on GPUs: multiply float32 matrices in TF32, faster and with 10 bits of mantissa"""
    channels_last: bool = False
    """keep the weights of convolutions channels last, which GPUs compute faster with bf16, fp16 and TF32"""
    seed: Annotated[NonNegativeInt, COMMON] = 0
    """seed of weights, data order and dropout"""
    workers: NonNegativeInt | None = None
    """loader processes per rank; None: by CPUs, and none at all for data in memory"""
    prefetch: Count | None = None
    """batches that each loader process has ready; None: 2, as in PyTorch"""


@dataclass(frozen=True)
class LogOptions:
    """What is printed and kept."""

    log_dir: Annotated[str | None, COMMON] = None
    """folder for metrics.jsonl, TensorBoard events, config.yaml, checkpoints and the final weights"""
    log_every: Count = 50
    """steps between two lines in metrics.jsonl"""
    quiet: Annotated[bool, COMMON] = False
    """print errors only"""


@dataclass(frozen=True)
class SaveOptions:
    """Checkpoints, in the log folder."""

    resume: Annotated[str, COMMON] = "none"
    """resume from a checkpoint: auto (newest valid one in the log folder), a path, or none"""
    resume_partial: tuple[
        Literal["optimizer", "scheduler", "scaler", "loss", "frozen", "random", "data", "callbacks"], ...
    ] = ()
    """what to begin again with, instead of what the checkpoint has, or lacks (frozen: which parameters are
    trained)"""
    save_every_epochs: Count | None = 1
    """save after each n-th epoch, and the last"""
    save_every_steps: Count | None = None
    """save after each n-th step"""
    save_every_s: Positive | None = 600.0
    """save when the last save is this many seconds old"""
    commit_every_steps: Count = 50
    """under horovodrun's elastic mode: remember the state after each n-th step, for the ranks that
    continue when others fail"""
    requeue: bool = False
    """in a Slurm job: when a signal stops it, put it back into the queue, from where it resumes by itself"""
    keep: Count = 2
    """how many of the newest checkpoints stay"""
    keep_best: Annotated[str | None, ParsedBy(BestFigure.parse)] = "min:val_loss"
    """the one with the lowest or the highest figure stays too, where records have it: min:val_loss,
    max:val_accuracy"""


@dataclass(frozen=True)
class ParallelOptions:
    """A model in parts, for one that is too large for a GPU, or for its batch."""

    stages: Annotated[Count, COMMON] = 1
    """processes that share one copy of the model, each with a stage of its blocks; ranks / stages copies train in
    parallel, and --batch-size is per copy"""
    devices_per_rank: Count = 1
    """devices of each process, with a part of the model on each"""
    chunks: Count | None = None
    """micro-batches that a batch is cut into, so that all stages or devices work at once (1: one after the other);
    None: as many as there are stages or devices"""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """in which order a stage works on its micro-batches; with interleaved it has two parts of the model"""
    balance: str = "time"
    """where the model is cut: by the time that its blocks take, which is measured at the start, by their bytes, or
    by hand: the number of blocks in each part, such as 3,2"""
    activation_checkpointing: Literal["none", "blocks"] = "none"
    """compute the activations inside each block again in backward instead of keeping them"""
    shard: Annotated[Literal["none", "optimizer", "full"], COMMON] = "none"
    """what copies of the model share out among themselves instead of each keeping it: the optimizer's state, or
    (ddp only) parameters and gradients too"""

    @property
    def is_staged(self) -> bool:
        """Return whether the model or its batches are cut."""
        return self.stages * self.devices_per_rank > 1 or self.chunks is not None

    @property
    def cut_by(self) -> str:
        """Return the option that cuts the model or its batches, as it is typed."""
        return (
            "--stages" if self.stages > 1 else "--chunks" if self.devices_per_rank == 1 else "--devices-per-rank"
        )

    @property
    def num_chunks(self) -> int:
        """Return the number of micro-batches of a batch."""
        return self.stages * self.devices_per_rank if self.chunks is None else self.chunks

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds in which a schedule of rounds works on all micro-batches."""
        return max(1, self.num_chunks // self.stages)

    @property
    def parts_of_each(self) -> int:
        """Return the number of parts of the model that each stage has."""
        return 2 if self.schedule == "interleaved" else 1


@dataclass(frozen=True)
class MeasureOptions:
    """What a step's time goes to."""

    profile_steps: Annotated[Count | None, COMMON] = None
    """what all ranks do in so many steps, by PyTorch's profiler: a trace of each for ui.perfetto.dev in the log
    folder, and a table of who waited for whom"""
    profile_skip: NonNegativeInt = 5
    """how many steps come before these, in which caches fill; in one more the profiler sets itself up"""


@dataclass(frozen=True)
class TrainerOptions:
    """All options of a `Trainer`. Derive from it to add the options of a job."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    log: LogOptions = field(default_factory=LogOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    measure: MeasureOptions = field(default_factory=MeasureOptions)

    def mistakes(self) -> list[str]:
        """Return one message per mistake in a job's own options that no range on a field can say; override it."""
        return []
