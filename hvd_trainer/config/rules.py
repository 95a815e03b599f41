"""Which options do not go together, as a table, and the check of all options at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

from hvd_trainer.config.checks import flag, range_errors, refuse, switch
from hvd_trainer.config.options import TrainerOptions

Condition = Callable[[TrainerOptions], bool]


@dataclass(frozen=True)
class Conflict:
    """Options that do not go together.

    Args:
        when: tells whether they are set so.
        message: for `str.format`, with the groups by their names: `{train.batch_size}`.
        option: what stands for `{option}` in the message.
    """

    when: Condition
    message: str
    option: str = ""

    def text(self, options: TrainerOptions) -> str:
        """Return the message for these options."""
        groups = {group.name: getattr(options, group.name) for group in fields(TrainerOptions)}
        return self.message.replace("{option}", self.option).format_map(groups)


def check(options: TrainerOptions) -> None:
    """Check all options at once.

    Raises:
        OptionError: values are out of their ranges, options contradict each other, or the job finds mistakes.
    """
    refuse(find_mistakes(options))


def find_mistakes(options: TrainerOptions) -> list[str]:
    """Return one message per mistake."""
    conflicts = (conflict for table in CONFLICTS.values() for conflict in table)
    return [
        *range_errors(options),
        *(conflict.text(options) for conflict in conflicts if conflict.when(options)),
        *options.mistakes(),
    ]


def _if_set(group: str, names: Iterable[str]) -> dict[str, Condition]:
    """Return for each of a group's options, by how it is typed, whether it differs from its default."""

    def is_set(name: str) -> Condition:
        return lambda o: bool(getattr(getattr(o, group), name) != getattr(defaults, name))

    defaults = getattr(TrainerOptions(), group)
    return {
        switch(name, on=False) if getattr(defaults, name) is True else flag(name): is_set(name) for name in names
    }


def _each(always: Condition, message: str, others: Mapping[str, Condition]) -> Iterable[Conflict]:
    """Return the conflicts of one setting with each of several options.

    Args:
        message: with `{option}` for the other option.
    """

    def both(other: Condition) -> Condition:
        return lambda o: always(o) and other(o)

    return [Conflict(both(other), message, option) for option, other in others.items()]


def _is_reproducible(o: TrainerOptions) -> bool:
    return o.train.reproducible is not None


def _is_fully_sharded(o: TrainerOptions) -> bool:
    return o.parallel.shard == "full"


def _leaves_out_exchange(o: TrainerOptions) -> bool:
    return "exchange" in o.measure.leave_out


def _has_mode(o: TrainerOptions) -> bool:
    return o.train.compile_mode != "default"


POWERS_OF_TWO = [2**power for power in range(64)]
NOT_IN_STAGES = (
    *("sync_batch_norm", "find_unused_parameters", "static_graph", "bucket_views", "powersgd_rank"),
    *("adasum", "num_groups", "autotune"),
)
"""Engine options that need a whole model and whole batches."""

CONFLICTS: Mapping[str, tuple[Conflict, ...]] = {
    "The log folder": (
        Conflict(lambda o: o.log.quiet and o.log.verbose, "--quiet and --verbose contradict each other"),
        *_each(
            lambda o: o.log.log_dir is None,
            "{option} writes to the log folder: add --log-dir DIR",
            _if_set("measure", ("record_steps", "sample_stacks", "profile", "trace_steps")),
        ),
        Conflict(
            lambda o: o.save.requeue and o.log.log_dir is None,
            "--requeue needs a log folder to go on from: add --log-dir DIR",
        ),
        Conflict(
            lambda o: o.save.resume == "auto" and o.log.log_dir is None,
            "--resume auto looks in the log folder: add --log-dir DIR",
        ),
    ),
    "Reproducible sums (`--reproducible`)": (
        Conflict(
            lambda o: _is_reproducible(o) and o.train.reproducible not in POWERS_OF_TWO,
            "--reproducible must be a power of two, not {train.reproducible}",
        ),
        Conflict(
            lambda o: _is_reproducible(o) and o.train.cudnn_benchmark,
            "--cudnn-benchmark computes in whatever way is quickest at the moment: leave it out, or leave out "
            "--reproducible",
        ),
        *_each(
            _is_reproducible,
            "--reproducible sums gradients itself: leave out {option}",
            _if_set(
                "engine",
                (
                    *("compression", "powersgd_rank", "static_graph", "bucket_views", "sync_batch_norm"),
                    *("adasum", "num_groups", "autotune", "cache_capacity"),
                ),
            ),
        ),
    ),
    "Compilation (`--compile`)": (
        Conflict(
            lambda o: _has_mode(o) and not o.train.compile,
            "--compile-mode {train.compile_mode} says how to compile: add --compile",
        ),
        # PyTorch's issue 169545: a replayed graph writes over the gradients of the pass before it.
        Conflict(
            lambda o: _has_mode(o) and _is_reproducible(o),
            "--compile-mode {train.compile_mode} is for steps of one backward pass: leave it out, or leave out "
            "--reproducible",
        ),
        Conflict(
            lambda o: _has_mode(o) and o.train.accumulate > 1,
            "--compile-mode {train.compile_mode} is for steps of one backward pass: leave it out, or leave out "
            "--accumulate",
        ),
        Conflict(
            lambda o: o.train.compile and (o.parallel.activation_checkpointing != "none" or _is_fully_sharded(o)),
            "--compile goes neither with --activation-checkpointing nor with --shard full: leave it out, and "
            "compile the blocks yourself, with block.compile()",
        ),
        Conflict(
            lambda o: o.train.compile and o.parallel.is_staged,
            "--compile does not go with {parallel.cut_by}: compile the blocks yourself, with block.compile()",
        ),
    ),
    "A step captured as a CUDA graph (`--capture-step`)": (
        *_each(
            lambda o: o.train.capture_step,
            "--capture-step launches one and the same step again and again: leave it out, or leave out {option}",
            {
                "--accumulate": lambda o: o.train.accumulate > 1,
                "--reproducible": _is_reproducible,
                "--precision fp16": lambda o: o.train.precision == "fp16",
                "--non-finite skip": lambda o: o.train.non_finite == "skip",
                "--compile-mode {train.compile_mode}": _has_mode,
                "--stages, --chunks and --devices-per-rank": lambda o: o.parallel.is_staged,
                "--shard {parallel.shard}": lambda o: o.parallel.shard != "none",
                "--activation-checkpointing": lambda o: o.parallel.activation_checkpointing != "none",
                "--trace-steps": lambda o: o.measure.trace_steps is not None,
                "--backend data-parallel": lambda o: o.engine.backend == "data-parallel",
                "--transport gloo": lambda o: o.engine.transport == "gloo",
                "--compression powersgd": lambda o: o.engine.compression == "powersgd",
                # By these a step is not the same each time, or is Horovod's own.
                **_if_set("engine", ("find_unused_parameters", "sync_batch_norm", "adasum", "num_groups")),
            },
        ),
    ),
    "A model or batches in parts (`--stages`, `--chunks`, `--devices-per-rank`)": (
        *_each(
            lambda o: o.parallel.stages == 1,
            "{option} is about stages: add --stages, or leave it out",
            _if_set("parallel", ("schedule", "parts_per_stage")),
        ),
        *_each(
            lambda o: o.parallel.stages * o.parallel.num_devices == 1,
            "{option} cuts a model: add --stages or --devices-per-rank, or leave it out",
            _if_set("parallel", ("balance",)),
        ),
        Conflict(
            lambda o: o.parallel.is_staged and _is_reproducible(o),
            "{parallel.cut_by} and --reproducible: micro-batches are summed in another order; leave one out",
        ),
        Conflict(
            lambda o: o.train.global_batch_size is None and (o.parallel.chunks or 0) > max(o.train.batch_size, 0),
            "--chunks {parallel.chunks} cuts --batch-size {train.batch_size} into less than one sample",
        ),
        Conflict(
            lambda o: bool(o.parallel.devices) and o.parallel.devices_per_rank not in (1, o.parallel.num_devices),
            "--devices names {parallel.num_devices}, but --devices-per-rank is {parallel.devices_per_rank}: leave "
            "one out",
        ),
        Conflict(
            lambda o: o.parallel.stages > 1 and o.parallel.num_devices > 1,
            "--stages gives a part of the model to each rank, and --devices-per-rank several: leave one out",
        ),
        Conflict(
            lambda o: (
                o.parallel.stages > 1 and o.parallel.parts_of_each > 1 and o.parallel.schedule in ("gpipe", "1f1b")
            ),
            "--schedule {parallel.schedule} has one part per stage: leave out --parts-per-stage, or type "
            "--schedule interleaved",
        ),
        *_each(
            lambda o: o.parallel.is_staged,
            "{option} does not go with {parallel.cut_by}: leave one out",
            _if_set("engine", NOT_IN_STAGES),
        ),
        Conflict(
            lambda o: o.parallel.is_staged and o.engine.compression == "powersgd",
            "--compression powersgd does not go with {parallel.cut_by}: type --compression fp16",
        ),
    ),
    "Sharded state (`--shard`)": (
        Conflict(
            lambda o: o.parallel.shard == "optimizer" and o.engine.adasum,
            "--shard optimizer and --adasum, which makes the updates itself: leave one out",
        ),
        Conflict(
            lambda o: _is_fully_sharded(o) and o.engine.backend != "ddp",
            "--shard full is PyTorch's own: type --backend ddp, or --shard optimizer",
        ),
        Conflict(
            lambda o: _is_fully_sharded(o) and o.parallel.num_devices > 1,
            "--shard full has a rank's slices on one device: leave out --devices-per-rank",
        ),
        Conflict(
            lambda o: _is_fully_sharded(o) and o.parallel.schedule == "zero-bubble",
            "--schedule zero-bubble computes gradients of parameters apart, where --shard full does not see them: "
            "type --schedule 1f1b or interleaved, or --shard optimizer",
        ),
        Conflict(
            lambda o: _is_fully_sharded(o) and _is_reproducible(o),
            "--shard full and --reproducible: gradients are summed in slices; leave one out",
        ),
        Conflict(
            lambda o: _is_fully_sharded(o) and o.train.channels_last,
            "--channels-last does not go with --shard full, which cuts tensors in their usual order",
        ),
        *_each(
            _is_fully_sharded,
            "{option} does not go with --shard full: leave one out",
            _if_set("engine", (*NOT_IN_STAGES, "compression")),
        ),
    ),
    "Measuring without a part of the step (`--leave-out`)": (
        Conflict(
            lambda o: bool(o.measure.leave_out) and o.save.resume != "none",
            "--leave-out trains nothing of use: leave out --resume {save.resume}",
        ),
        Conflict(
            lambda o: _leaves_out_exchange(o) and _is_fully_sharded(o),
            "--shard full cannot compute without exchanging parameters: leave out --leave-out exchange",
        ),
        Conflict(
            lambda o: _leaves_out_exchange(o) and _is_reproducible(o),
            "--reproducible sums gradients itself, so --leave-out exchange has nothing to leave out",
        ),
    ),
    "Other engines and gradients": (
        Conflict(
            lambda o: (
                o.engine.backend == "data-parallel"
                and (
                    o.parallel.is_staged
                    or o.parallel.shard != "none"
                    or _is_reproducible(o)
                    or _leaves_out_exchange(o)
                )
            ),
            "--backend data-parallel goes with whole models that are trained as they are: leave out "
            "--reproducible, --shard, --chunks, --devices-per-rank and --leave-out exchange",
        ),
        Conflict(
            lambda o: o.train.non_finite == "skip" and o.engine.compression == "powersgd",
            "--non-finite skip and --compression powersgd: what is not finite stays in its memory",
        ),
        Conflict(
            lambda o: (
                o.engine.adasum
                and (o.train.max_norm is not None or o.train.precision == "fp16" or o.train.non_finite == "skip")
            ),
            "--adasum combines whole updates, not gradients: it goes neither with --max-norm nor with --precision "
            "fp16 nor with --non-finite skip. Leave one out",
        ),
    ),
}
