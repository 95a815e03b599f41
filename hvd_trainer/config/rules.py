"""The one place where options are refused, all mistakes at once: by their values, by each other, by the launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from hvd_trainer.config.checks import default_of, find_wrong_values, flag, refuse
from hvd_trainer.config.launch_rules import Launch, launch_mistakes
from hvd_trainer.config.options import MeasureOptions, ParallelOptions, TrainerOptions
from hvd_trainer.config.parser import with_defaults


@dataclass(frozen=True)
class Conflict:
    """Options that do not go together.

    Args:
        when: tells whether they are set so.
        text: what to say of it, for `str.format`, with the groups by their names: `{train.batch_size}`.
    """

    when: Callable[[TrainerOptions], bool]
    text: str

    def message(self, options: TrainerOptions) -> str:
        """Return the text with the values of these options."""
        return self.text.format_map(vars(options))


def check(options: TrainerOptions, launch: Launch | None = None) -> None:
    """Check all options at once.

    Args:
        launch: the job that they are for; None: not known.

    Raises:
        OptionError: values are out of their ranges, options contradict each other or do not go with the launch, or
            the job finds mistakes.
    """
    refuse(find_mistakes(options, launch))


def find_mistakes(options: TrainerOptions, launch: Launch | None = None) -> list[str]:
    """Return one message per mistake."""
    wrong = find_wrong_values(options)
    # What is wrong by itself has its message, and is looked at no further.
    rest = with_defaults(options, wrong)
    conflicts = (conflict for table in CONFLICTS.values() for conflict in table)
    return [
        *wrong.values(),
        *(conflict.message(rest) for conflict in conflicts if conflict.when(rest)),
        *rest.mistakes(),
        *(() if launch is None else launch_mistakes(rest, launch)),
    ]


def _saves_nowhere(name: str, options: TrainerOptions) -> bool:
    """Return whether an option asks for checkpoints, other than by default, where nothing is kept."""
    usual = getattr(default_of(type(options), "save"), name, None)
    return options.log.log_dir is None and getattr(options.save, name) not in (usual, None)


POWERS_OF_TWO = [2**power for power in range(64)]
IN_ROUNDS = ("interleaved", "zero-bubble")
"""Schedules that work on a round of chunks after the other."""
ALONE = ("single", "data-parallel")
"""Engines of one process."""
GRAPHS = ("reduce-overhead", "max-autotune")
"""Values of `--compile` by which steps are launched as CUDA graphs."""

CONFLICTS: Mapping[str, tuple[Conflict, ...]] = {
    "The log folder": (
        Conflict(
            lambda o: o.measure.profile_steps is not None and o.log.log_dir is None,
            "--profile-steps writes to the log folder: add --log-dir DIR",
        ),
        Conflict(
            lambda o: o.measure.profile_skip != MeasureOptions.profile_skip and o.measure.profile_steps is None,
            "--profile-skip counts the steps before a profile: add --profile-steps N",
        ),
        Conflict(
            lambda o: o.save.requeue and o.log.log_dir is None,
            "--requeue needs a log folder to resume from: add --log-dir DIR",
        ),
        Conflict(
            lambda o: o.save.resume == "auto" and o.log.log_dir is None,
            "--resume auto looks in the log folder: add --log-dir DIR",
        ),
        *(
            Conflict(partial(_saves_nowhere, name), f"{flag(name)} is about checkpoints: add --log-dir DIR")
            for name in ("save_every_epochs", "save_every_steps", "save_every_s", "keep", "keep_best")
        ),
    ),
    "Reproducible sums (`--reproducible`)": (
        Conflict(
            lambda o: o.train.reproducible not in (None, *POWERS_OF_TWO),
            "--reproducible must be a power of two, not {train.reproducible}",
        ),
        Conflict(
            lambda o: o.train.reproducible is not None and o.engine.compression != "none",
            "--reproducible sums gradients itself: leave out --compression",
        ),
        Conflict(
            lambda o: o.train.reproducible is not None and o.engine.sync_batch_norm,
            "--reproducible sums gradients itself: leave out --sync-batch-norm",
        ),
    ),
    "Compilation (`--compile`)": (
        # PyTorch's issue 169545: a replayed graph writes over the gradients of the pass before it.
        Conflict(
            lambda o: o.train.compile in GRAPHS and o.train.reproducible is not None,
            "--compile {train.compile} is for steps of one backward pass: type --compile default, or leave out "
            "--reproducible",
        ),
        Conflict(
            lambda o: o.train.compile in GRAPHS and o.train.accumulate > 1,
            "--compile {train.compile} is for steps of one backward pass: type --compile default, or leave out "
            "--accumulate",
        ),
        Conflict(
            lambda o: is_compiled(o) and (o.parallel.activation_checkpointing != "none" or is_fully_sharded(o)),
            "--compile goes neither with --activation-checkpointing nor with --shard full: leave it out, and "
            "compile the blocks yourself, with block.compile()",
        ),
        Conflict(
            lambda o: is_compiled(o) and o.parallel.is_staged,
            "--compile does not go with {parallel.cut_by}: compile the blocks yourself, with block.compile()",
        ),
    ),
    "A model or batches in parts (`--stages`, `--chunks`, `--devices-per-rank`)": (
        Conflict(
            lambda o: o.parallel.schedule != ParallelOptions.schedule and o.parallel.stages == 1,
            "--schedule is about stages: add --stages, or leave it out",
        ),
        Conflict(
            lambda o: o.parallel.schedule == "1f1b" and o.parallel.num_chunks < o.parallel.stages,
            "--schedule 1f1b keeps {parallel.stages} stages busy only with as many chunks, and here are "
            "{parallel.num_chunks}. Type --chunks {parallel.stages}, or --schedule gpipe, which takes any number",
        ),
        Conflict(
            lambda o: o.parallel.schedule in IN_ROUNDS and bool(o.parallel.num_chunks % o.parallel.num_rounds),
            "--schedule {parallel.schedule} works in rounds of equally many chunks, about as many as the "
            "{parallel.stages} stages, and --chunks {parallel.num_chunks} does not divide. Type a multiple of "
            "{parallel.stages}",
        ),
        Conflict(
            lambda o: o.parallel.balance != "time" and o.parallel.stages * o.parallel.devices_per_rank == 1,
            "--balance cuts a model: add --stages or --devices-per-rank, or leave it out",
        ),
        Conflict(
            lambda o: o.parallel.is_staged and o.train.reproducible is not None,
            "{parallel.cut_by} and --reproducible: micro-batches are summed in another order; leave one out",
        ),
        Conflict(
            lambda o: o.parallel.stages > 1 and o.parallel.devices_per_rank > 1,
            "--stages gives a part of the model to each rank, and --devices-per-rank several: leave one out",
        ),
        Conflict(
            lambda o: o.parallel.is_staged and o.engine.sync_batch_norm,
            "--sync-batch-norm does not go with {parallel.cut_by}: leave one out",
        ),
        Conflict(
            lambda o: o.parallel.is_staged and o.engine.find_unused_parameters,
            "--find-unused-parameters does not go with {parallel.cut_by}: leave one out",
        ),
        Conflict(
            lambda o: o.parallel.is_staged and o.engine.compression == "powersgd",
            "--compression powersgd does not go with {parallel.cut_by}: type --compression fp16",
        ),
    ),
    "Sharded state (`--shard`)": (
        Conflict(
            lambda o: is_fully_sharded(o) and o.engine.backend != "ddp",
            "--shard full is PyTorch's own: type --backend ddp, or --shard optimizer",
        ),
        Conflict(
            lambda o: is_fully_sharded(o) and o.parallel.devices_per_rank > 1,
            "--shard full has a rank's slices on one device: leave out --devices-per-rank",
        ),
        Conflict(
            lambda o: is_fully_sharded(o) and o.parallel.schedule == "zero-bubble",
            "--schedule zero-bubble computes gradients of parameters apart, where --shard full does not see them: "
            "type --schedule 1f1b or interleaved, or --shard optimizer",
        ),
        Conflict(
            lambda o: is_fully_sharded(o) and o.train.reproducible is not None,
            "--shard full and --reproducible: gradients are summed in slices; leave one out",
        ),
        Conflict(
            lambda o: is_fully_sharded(o) and o.train.channels_last,
            "--channels-last does not go with --shard full, which cuts tensors in their usual order",
        ),
        Conflict(
            lambda o: is_fully_sharded(o) and o.engine.sync_batch_norm,
            "--sync-batch-norm does not go with --shard full: leave one out",
        ),
        Conflict(
            lambda o: is_fully_sharded(o) and o.engine.find_unused_parameters,
            "--find-unused-parameters does not go with --shard full: leave one out",
        ),
        Conflict(
            lambda o: is_fully_sharded(o) and o.engine.compression != "none",
            "--compression does not go with --shard full: leave one out",
        ),
    ),
    "Engines and gradients": (
        Conflict(
            lambda o: o.engine.backend == "horovod" and o.engine.transport not in ("auto", "mpi"),
            "--transport {engine.transport} with --backend horovod: only DDP has it; leave it out, or type "
            "--backend ddp",
        ),
        Conflict(
            lambda o: o.engine.backend == "horovod" and o.engine.compression == "powersgd",
            "--compression powersgd with --backend horovod: only DDP has it; leave it out, or type --backend ddp",
        ),
        Conflict(
            lambda o: o.engine.backend == "ddp" and o.engine.transport == "mpi",
            "--transport mpi with --backend ddp: only Horovod has it; leave it out, or type --backend horovod",
        ),
        Conflict(
            lambda o: o.engine.backend in ALONE and o.engine.transport != "auto",
            "--transport {engine.transport} with --backend {engine.backend}: one process has nothing to exchange; "
            "leave it out",
        ),
        Conflict(
            lambda o: o.engine.backend in ALONE and o.engine.compression != "none",
            "--compression {engine.compression} with --backend {engine.backend}: one process has nothing to "
            "exchange; leave it out",
        ),
        Conflict(
            lambda o: o.engine.backend == "data-parallel" and o.engine.sync_batch_norm,
            "--sync-batch-norm with --backend data-parallel: DataParallel does it in its own way; leave it out, "
            "or type --backend ddp",
        ),
        Conflict(
            lambda o: o.engine.backend == "data-parallel" and o.engine.find_unused_parameters,
            "--find-unused-parameters with --backend data-parallel: DataParallel does it in its own way; leave it "
            "out, or type --backend ddp",
        ),
        Conflict(
            lambda o: (
                o.engine.backend == "data-parallel"
                and (o.parallel.is_staged or o.parallel.shard != "none" or o.train.reproducible is not None)
            ),
            "--backend data-parallel goes with whole models that are trained as they are: leave out "
            "--reproducible, --shard, --chunks and --devices-per-rank",
        ),
        Conflict(
            lambda o: o.train.non_finite == "skip" and o.engine.compression == "powersgd",
            "--non-finite skip and --compression powersgd: what is not finite stays in its memory",
        ),
    ),
}


def is_compiled(options: TrainerOptions) -> bool:
    """Return whether torch.compile compiles the model."""
    return options.train.compile != "none"


def is_fully_sharded(options: TrainerOptions) -> bool:
    """Return whether parameters are in slices, too."""
    return options.parallel.shard == "full"
