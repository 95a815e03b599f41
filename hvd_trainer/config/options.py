"""The options of a job as typed dataclasses, from which the command line and the YAML form are derived.

`parse` gives any dataclass a command line: nested dataclasses become groups in `--help`, option names stay flat
(`--batch-size`), and `--config FILE` reads the same names from YAML, which the command line overrides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hvd_trainer.config.checks import at_least, collect_errors, more_than, non_default, refuse
from hvd_trainer.config.engine_options import EngineOptions
from hvd_trainer.config.measure_options import MeasureOptions
from hvd_trainer.config.parallel_options import ParallelOptions
from hvd_trainer.config.stop_condition import StopCondition

Decay = Literal["none", "linear", "cosine"]


EXCHANGE_OPTIONS = (
    *("compression", "powersgd_rank", "static_graph", "bucket_views", "sync_batch_norm"),
    *("adasum", "num_groups", "autotune", "cache_capacity"),
)
"""Engine options about exchanging gradients that the engine does not exchange in reproducible mode."""
NOT_CAPTURED = ("find_unused_parameters", "sync_batch_norm", "adasum", "num_groups")
"""Engine options by which a step is not the same each time, or is Horovod's own."""


@dataclass(frozen=True)
class TrainOptions:
    """Training."""

    epochs: int = 3
    """passes over the training set"""
    max_steps: int | None = None
    """end after so many optimizer steps, also inside an epoch; a later run with more goes on from there"""
    until: str | None = None
    """test_accuracy=0.99: end after the epoch in which a figure is as good, a loss as low or another as high"""
    batch_size: int = 128
    """samples per rank and backward pass; times ranks times --accumulate it is the global batch"""
    global_batch_size: int | None = None
    """samples per step of all ranks together; sets the batch size from the number of ranks"""
    accumulate: int = 1
    """backward passes per step: gradients are added up and exchanged once"""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """multiply the learning rate by (ranks x accumulate), or its square root; the same on both engines"""
    warmup_epochs: float = 0.0
    """raise the learning rate linearly from near 0 over this many epochs"""
    lr_decay: Decay = "none"
    """lower the learning rate over the rest of all epochs down to 0, on a line or half a cosine"""
    max_norm: float | None = None
    """clip the norm of the averaged gradient to this"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """mixed precision of forward and backward; fp16 scales the loss"""
    non_finite: Literal["error", "skip"] = "error"
    """what to do when a loss or gradient is infinite or not a number: end the run at the next line of the log or
    save, before anything is saved, or leave such steps out, as if their data were not there"""
    reproducible: int | None = None
    """cut the global batch into this many virtual ranks (a power of two): the same bits on 1, 2, 4, ... ranks of
    either engine; then --batch-size is per virtual rank"""
    compile: bool = False
    """compile the model with torch.compile"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """its mode: on GPUs, reduce-overhead and max-autotune launch what they have compiled as CUDA graphs"""
    tf32: bool = False
    """on GPUs: multiply float32 matrices in TF32, faster and with 10 bits of mantissa"""
    channels_last: bool = False
    """keep the weights of convolutions channels last, which GPUs compute faster with bf16, fp16 and TF32"""
    cudnn_benchmark: bool = False
    """on GPUs: try cuDNN's ways to compute a convolution, once for each shape, and keep the quickest"""
    capture_step: bool = False
    """on CUDA GPUs: capture the step as a graph after its first 11 times, and launch it at once from then on; for
    batches of one shape, with an optimizer made with fused=True (the jobs' own are)"""
    seed: int = 0
    """seed of weights, data order and dropout"""
    workers: int | None = None
    """loader processes per rank; None: by CPUs, and none at all for data in memory"""
    prefetch: int | None = None
    """batches that each loader process has ready; None: 2, as in PyTorch"""


@dataclass(frozen=True)
class LogOptions:
    """What is printed and kept."""

    log_dir: str | None = None
    """folder for metrics.jsonl, TensorBoard events, config.yaml, checkpoints and the final weights"""
    log_every: int = 50
    """steps between two lines in metrics.jsonl"""
    quiet: bool = False
    """print errors only"""
    verbose: bool = False
    """print more of what is decided at the start"""


@dataclass(frozen=True)
class SaveOptions:
    """Checkpoints, in the log folder."""

    resume: str = "none"
    """go on from a checkpoint: auto (newest valid one in the log folder), a path, or none"""
    resume_partial: tuple[Literal["optimizer", "scheduler", "scaler", "random", "data"], ...] = ()
    """what may be missing in it or different from it, and then starts anew"""
    save_every_epochs: int | None = 1
    """save after each n-th epoch, and the last"""
    save_every_steps: int | None = None
    """save after each n-th step"""
    save_every_s: float | None = 600.0
    """save when the last save is so many seconds ago"""
    commit_every_steps: int = 50
    """under horovodrun's elastic mode: remember the state after each n-th step, for the ranks that go on when
    others fail"""
    requeue: bool = False
    """in a Slurm job: when a signal stops it, put it back into the queue, from where it goes on by itself"""
    keep: int = 2
    """how many of the newest checkpoints stay"""
    keep_best: str | None = "test_loss"
    """the figure by which the best one stays too: the lowest of a loss, the highest of others"""


@dataclass(frozen=True)
class TrainerOptions:
    """All that a `Trainer` can be told. Derive from it to add the options of a job."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    log: LogOptions = field(default_factory=LogOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    measure: MeasureOptions = field(default_factory=MeasureOptions)

    def check(self) -> None:
        """Refuses values that cannot be: all mistakes at once.

        Raises:
            OptionError: an option is out of its range, or two contradict each other.
        """
        refuse(self.mistakes())

    def mistakes(self) -> list[str]:
        """What is wrong, one text per mistake; a job with options of its own adds to it."""
        train, log, save = self.train, self.log, self.save
        return [
            *at_least(
                1,
                epochs=train.epochs,
                max_steps=train.max_steps,
                batch_size=train.batch_size,
                global_batch_size=train.global_batch_size,
                accumulate=train.accumulate,
                log_every=log.log_every,
                save_every_epochs=save.save_every_epochs,
                save_every_steps=save.save_every_steps,
                commit_every_steps=save.commit_every_steps,
                keep=save.keep,
                prefetch=train.prefetch,
                trace_steps=self.measure.trace_steps,
            ),
            *at_least(0, warmup_epochs=train.warmup_epochs, workers=train.workers, seed=train.seed),
            *more_than(0, max_norm=train.max_norm, save_every_s=save.save_every_s),
            *StopCondition.mistakes(train.until),
            *self._reproducible_mistakes(),
            *self._capture_mistakes(),
            *self.parallel.mistakes(train, self.engine),
            *self.measure.mistakes(self),
            *collect_errors(
                (
                    self.engine.backend == "data-parallel" and self._is_unlike_data_parallel,
                    "--backend data-parallel goes with whole models that are trained as they are: leave out "
                    "--reproducible, --shard, --chunks, --devices-per-rank and --leave-out exchange",
                ),
                (log.quiet and log.verbose, "--quiet and --verbose contradict each other"),
                (
                    train.non_finite == "skip" and self.engine.compression == "powersgd",
                    "--non-finite skip and --compression powersgd: what is not finite stays in its memory",
                ),
                (
                    # PyTorch's issue 169545: a replayed graph writes over the gradients of the pass before it.
                    train.compile_mode != "default" and (train.accumulate > 1 or train.reproducible is not None),
                    f"--compile-mode {train.compile_mode} is for steps of one backward pass: leave it out, or "
                    f"leave out {'--reproducible' if train.reproducible else '--accumulate'}",
                ),
                (
                    train.compile_mode != "default" and not train.compile,
                    f"--compile-mode {train.compile_mode} says how to compile: add --compile",
                ),
                (
                    train.channels_last and self.parallel.shard == "full",
                    "--channels-last does not go with --shard full, which cuts tensors in their usual order",
                ),
                (
                    save.requeue and log.log_dir is None,
                    "--requeue needs a log folder to go on from: add --log-dir DIR",
                ),
                (
                    save.resume == "auto" and log.log_dir is None,
                    "--resume auto looks in the log folder: add --log-dir DIR",
                ),
            ),
        ]

    @property
    def _is_unlike_data_parallel(self) -> bool:
        parallel = self.parallel
        in_parts = parallel.is_staged or parallel.shard != "none"
        return in_parts or self.train.reproducible is not None or "exchange" in self.measure.leave_out

    def _reproducible_mistakes(self) -> list[str]:
        ranks = self.train.reproducible
        if ranks is None:
            return []
        return [
            *collect_errors(
                (
                    ranks < 1 or ranks.bit_count() != 1,
                    f"--reproducible must be a power of two, not {ranks}",
                ),
                (
                    self.train.cudnn_benchmark,
                    "--cudnn-benchmark computes in whatever way is quickest at the moment: leave it out, or "
                    "leave out --reproducible",
                ),
            ),
            *(
                f"--reproducible sums gradients itself: leave out {name}"
                for name in non_default(self.engine, EXCHANGE_OPTIONS)
            ),
        ]

    def _capture_mistakes(self) -> list[str]:
        """Return a message for each option that a CUDA graph of the step cannot contain."""
        train, engine = self.train, self.engine
        if not train.capture_step:
            return []
        others = {
            "--accumulate": train.accumulate > 1,
            "--reproducible": train.reproducible is not None,
            "--precision fp16": train.precision == "fp16",
            "--non-finite skip": train.non_finite == "skip",
            f"--compile-mode {train.compile_mode}": train.compile_mode != "default",
            "--stages, --chunks and --devices-per-rank": self.parallel.is_staged,
            f"--shard {self.parallel.shard}": self.parallel.shard != "none",
            "--activation-checkpointing": self.parallel.activation_checkpointing != "none",
            "--trace-steps": self.measure.trace_steps is not None,
            "--backend data-parallel": engine.backend == "data-parallel",
            "--transport gloo": engine.transport == "gloo",
            "--compression powersgd": engine.compression == "powersgd",
            **dict.fromkeys(non_default(engine, NOT_CAPTURED), True),
        }
        return [
            f"--capture-step launches one and the same step again and again: leave it out, or leave out {name}"
            for name, is_there in others.items()
            if is_there
        ]
