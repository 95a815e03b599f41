"""Which options do not go together, as a table, and the check of all options at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


_DEFAULTS = TrainerOptions()
_PLACES = {
    (switch(option.name, on=False) if option.default is True else flag(option.name)): (group.name, option.name)
    for group in fields(TrainerOptions)
    for option in fields(getattr(_DEFAULTS, group.name))
}
"""The group and the field of each option, by how it is typed to change its default."""
CUT, SEVERAL_DEVICES = "{parallel.cut_by}", "--devices-per-rank or --devices"
SEVERAL_WAYS: Mapping[str, Condition] = {
    CUT: lambda o: o.parallel.is_staged,
    "--stages, --chunks and --devices-per-rank": lambda o: o.parallel.is_staged,
    SEVERAL_DEVICES: lambda o: o.parallel.num_devices > 1,
}
"""Options that can be typed in several ways, with all of them."""


def is_set(typed: str) -> Condition:
    """Return a test for an option as it is typed.

    `--precision fp16` is set if it has this value, or this among its values; `--precision`, and
    `--precision {train.precision}` of a message, if it differs from its default.
    """
    if typed in SEVERAL_WAYS:
        return SEVERAL_WAYS[typed]
    option, _, value = typed.partition(" ")
    group, name = _PLACES[option]
    default = getattr(getattr(_DEFAULTS, group), name)

    def test(options: TrainerOptions) -> bool:
        found = getattr(getattr(options, group), name)
        if not value or value.startswith("{"):
            return bool(found != default)
        return value in found if isinstance(found, tuple) else value == found

    return test


def given(*all_of: str, any_of: Sequence[str] = (), without: str = "") -> Condition:
    """Return a test for options as they are typed: all of some, any of others, and not the last."""
    tests, others = [is_set(option) for option in all_of], [is_set(option) for option in any_of]
    excluded = [is_set(without)] if without else []
    return lambda o: (
        all(test(o) for test in tests)
        and (not others or any(test(o) for test in others))
        and not any(test(o) for test in excluded)
    )


def _each(always: Condition, message: str, others: Iterable[str]) -> Iterable[Conflict]:
    """Return the conflicts of one setting with each of several options, `{option}` in the message."""

    def both(other: Condition) -> Condition:
        return lambda o: always(o) and other(o)

    return [Conflict(both(is_set(option)), message, option) for option in others]


POWERS_OF_TWO = [2**power for power in range(64)]
NOT_IN_STAGES = (
    *("--sync-batch-norm", "--find-unused-parameters", "--static-graph", "--no-bucket-views", "--powersgd-rank"),
    *("--adasum", "--num-groups", "--autotune"),
)
"""Engine options that need a whole model and whole batches."""

CONFLICTS: Mapping[str, tuple[Conflict, ...]] = {
    "The log folder": (
        Conflict(given("--quiet", "--verbose"), "--quiet and --verbose contradict each other"),
        Conflict(
            given("--profile-steps", without="--log-dir"),
            "--profile-steps writes to the log folder: add --log-dir DIR",
        ),
        Conflict(
            given("--profile-skip", without="--profile-steps"),
            "--profile-skip counts the steps before a profile: add --profile-steps N",
        ),
        Conflict(
            given("--requeue", without="--log-dir"),
            "--requeue needs a log folder to go on from: add --log-dir DIR",
        ),
        Conflict(
            given("--resume auto", without="--log-dir"), "--resume auto looks in the log folder: add --log-dir DIR"
        ),
    ),
    "Reproducible sums (`--reproducible`)": (
        Conflict(
            lambda o: o.train.reproducible not in (None, *POWERS_OF_TWO),
            "--reproducible must be a power of two, not {train.reproducible}",
        ),
        Conflict(
            given("--reproducible", "--cudnn-benchmark"),
            "--cudnn-benchmark computes in whatever way is quickest at the moment: leave it out, or leave out "
            "--reproducible",
        ),
        *_each(
            given("--reproducible"),
            "--reproducible sums gradients itself: leave out {option}",
            (
                *("--compression", "--powersgd-rank", "--static-graph", "--no-bucket-views", "--sync-batch-norm"),
                *("--adasum", "--num-groups", "--autotune", "--cache-capacity"),
            ),
        ),
    ),
    "Compilation (`--compile`)": (
        Conflict(
            given("--compile-mode", without="--compile"),
            "--compile-mode {train.compile_mode} says how to compile: add --compile",
        ),
        # PyTorch's issue 169545: a replayed graph writes over the gradients of the pass before it.
        *(
            Conflict(
                given("--compile-mode", option),
                "--compile-mode {train.compile_mode} is for steps of one backward pass: leave it out, or leave "
                f"out {option}",
            )
            for option in ("--reproducible", "--accumulate")
        ),
        Conflict(
            given("--compile", any_of=("--activation-checkpointing", "--shard full")),
            "--compile goes neither with --activation-checkpointing nor with --shard full: leave it out, and "
            "compile the blocks yourself, with block.compile()",
        ),
        Conflict(
            given("--compile", CUT),
            "--compile does not go with {parallel.cut_by}: compile the blocks yourself, with block.compile()",
        ),
    ),
    "A model or batches in parts (`--stages`, `--chunks`, `--devices-per-rank`)": (
        *_each(
            given(without="--stages"),
            "{option} is about stages: add --stages, or leave it out",
            ("--schedule", "--parts-per-stage"),
        ),
        Conflict(
            lambda o: o.parallel.balance != "time" and o.parallel.stages * o.parallel.num_devices == 1,
            "--balance cuts a model: add --stages or --devices-per-rank, or leave it out",
        ),
        Conflict(
            given(CUT, "--reproducible"),
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
            given("--stages", SEVERAL_DEVICES),
            "--stages gives a part of the model to each rank, and --devices-per-rank several: leave one out",
        ),
        Conflict(
            lambda o: (
                o.parallel.stages > 1 and o.parallel.parts_of_each > 1 and o.parallel.schedule in ("gpipe", "1f1b")
            ),
            "--schedule {parallel.schedule} has one part per stage: leave out --parts-per-stage, or type "
            "--schedule interleaved",
        ),
        *_each(given(CUT), "{option} does not go with {parallel.cut_by}: leave one out", NOT_IN_STAGES),
        Conflict(
            given(CUT, "--compression powersgd"),
            "--compression powersgd does not go with {parallel.cut_by}: type --compression fp16",
        ),
    ),
    "Sharded state (`--shard`)": (
        Conflict(
            given("--shard optimizer", "--adasum"),
            "--shard optimizer and --adasum, which makes the updates itself: leave one out",
        ),
        Conflict(
            given("--shard full", without="--backend ddp"),
            "--shard full is PyTorch's own: type --backend ddp, or --shard optimizer",
        ),
        Conflict(
            given("--shard full", SEVERAL_DEVICES),
            "--shard full has a rank's slices on one device: leave out --devices-per-rank",
        ),
        Conflict(
            given("--shard full", "--schedule zero-bubble"),
            "--schedule zero-bubble computes gradients of parameters apart, where --shard full does not see them: "
            "type --schedule 1f1b or interleaved, or --shard optimizer",
        ),
        Conflict(
            given("--shard full", "--reproducible"),
            "--shard full and --reproducible: gradients are summed in slices; leave one out",
        ),
        Conflict(
            given("--shard full", "--channels-last"),
            "--channels-last does not go with --shard full, which cuts tensors in their usual order",
        ),
        *_each(
            given("--shard full"),
            "{option} does not go with --shard full: leave one out",
            (*NOT_IN_STAGES, "--compression"),
        ),
    ),
    "Other engines and gradients": (
        Conflict(
            given("--backend data-parallel", any_of=(CUT, "--shard", "--reproducible")),
            "--backend data-parallel goes with whole models that are trained as they are: leave out "
            "--reproducible, --shard, --chunks and --devices-per-rank",
        ),
        Conflict(
            given("--non-finite skip", "--compression powersgd"),
            "--non-finite skip and --compression powersgd: what is not finite stays in its memory",
        ),
        Conflict(
            given("--adasum", any_of=("--max-norm", "--precision fp16", "--non-finite skip")),
            "--adasum combines whole updates, not gradients: it goes neither with --max-norm nor with --precision "
            "fp16 nor with --non-finite skip. Leave one out",
        ),
    ),
}
