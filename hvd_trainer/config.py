"""The options of a job as typed dataclasses, from which the command line and the YAML form are derived.

`parse` gives any dataclass a command line: nested dataclasses become groups in `--help`, option names stay flat
(`--batch-size`), and `--config FILE` reads the same names from YAML, which the command line overrides.
"""

from __future__ import annotations

import inspect
import io
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import yaml

from hvd_trainer.backends import EngineOptions
from hvd_trainer.errors import OptionError
from hvd_trainer.option_checks import at_least, flag, more_than
from hvd_trainer.parallel_options import ParallelOptions
from hvd_trainer.profile_options import profile_mistakes

T = TypeVar("T")


EXCHANGE_OPTIONS = (
    *("compression", "powersgd_rank", "static_graph", "sync_batch_norm"),
    *("adasum", "num_groups", "autotune"),
)
"""Engine options about exchanging gradients that the engine does not exchange in reproducible mode."""


@dataclass(frozen=True)
class TrainOptions:
    """Training."""

    epochs: int = 3
    """passes over the training set"""
    max_steps: int | None = None
    """end after so many optimizer steps, also inside an epoch; a later run with more goes on from there"""
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
    seed: int = 0
    """seed of weights, data order and dropout"""
    workers: int | None = None
    """loader processes per rank; None: by CPUs, and none at all for data in memory"""


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
class MeasureOptions:
    """What a step's time goes to, and what it computes."""

    record_steps: bool = False
    """keep in the log folder, for each rank, how long each part of each step took"""
    profile: str | None = None
    """steps=10: what all ranks do in so many steps, as one trace for ui.perfetto.dev in the log folder, and as a
    table; with commas also skip=5 (how many steps before), memory, stacks, shapes"""
    trace_steps: int | None = None
    """keep in the log folder, for each rank, what its first so many steps compute, as `parity` compares it"""
    leave_out: tuple[Literal["exchange", "data"], ...] = ()
    """train without it, to see what it costs: the exchange of gradients; fetching data (the first batch comes
    again and again). What is trained so is of no use, and not saved"""


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
        mistakes = self.mistakes()
        if mistakes:
            raise OptionError("; ".join(mistakes))

    def mistakes(self) -> list[str]:
        """What is wrong, one text per mistake; a job with options of its own adds to it."""
        train, log, save = self.train, self.log, self.save
        found = [
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
                trace_steps=self.measure.trace_steps,
            ),
            *at_least(0, warmup_epochs=train.warmup_epochs, workers=train.workers, seed=train.seed),
            *more_than(0, max_norm=train.max_norm, save_every_s=save.save_every_s),
        ]
        if train.reproducible is not None and (train.reproducible < 1 or train.reproducible.bit_count() != 1):
            found.append(f"--reproducible must be a power of two, not {train.reproducible}")
        if train.reproducible is not None:
            found += [
                f"--reproducible sums gradients itself: leave out {flag(name)}"
                for name in EXCHANGE_OPTIONS
                if getattr(self.engine, name) != getattr(EngineOptions(), name)
            ]
        found += self.parallel.mistakes(train, self.engine)
        if self.measure.record_steps and log.log_dir is None:
            found.append("--record-steps writes to the log folder: add --log-dir DIR")
        if self.measure.profile is not None:
            found += profile_mistakes(self.measure.profile)
            if log.log_dir is None:
                found.append("--profile writes to the log folder: add --log-dir DIR")
        if self.measure.trace_steps is not None and log.log_dir is None:
            found.append("--trace-steps writes to the log folder: add --log-dir DIR")
        if self.measure.leave_out:
            what = f"--leave-out {' '.join(self.measure.leave_out)}"
            if save.resume != "none":
                found.append(f"{what} trains nothing of use: leave out --resume {save.resume}")
            if self.parallel.shard == "full" and "exchange" in self.measure.leave_out:
                found.append(f"--shard full cannot compute without exchanging parameters: leave out {what}")
            if train.reproducible is not None and "exchange" in self.measure.leave_out:
                found.append(f"--reproducible sums gradients itself, so {what} has nothing to leave out")
        if log.quiet and log.verbose:
            found.append("--quiet and --verbose contradict each other")
        if train.non_finite == "skip" and self.engine.compression == "powersgd":
            found.append("--non-finite skip and --compression powersgd: what is not finite stays in its memory")
        if save.requeue and log.log_dir is None:
            found.append("--requeue needs a log folder to go on from: add --log-dir DIR")
        if save.resume == "auto" and log.log_dir is None:
            found.append("--resume auto looks in the log folder: add --log-dir DIR")
        return found


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic that makes a run comparable with another: who takes how many samples per step."""

    size: int
    """ranks, or virtual ranks, that share a global batch"""
    batch_size: int
    accumulate: int
    per_rank: int = 1
    """virtual ranks of each rank"""

    @classmethod
    def of(cls, options: TrainOptions, replicas: int) -> BatchPlan:
        """Derives the batch per rank, or per copy of the model where several ranks share one.

        Raises:
            OptionError: the global batch does not divide among the ranks, or the virtual ranks do not.
        """
        size = options.reproducible or replicas
        if size % replicas:
            possible = ", ".join(str(2**power) for power in range(size.bit_length()))
            raise OptionError(
                f"--reproducible {size} runs on {possible} ranks, each with as many virtual ranks, and not on "
                f"{replicas}."
            )
        wanted, parts = options.global_batch_size, size * options.accumulate
        if wanted is None:
            return cls(size, options.batch_size, options.accumulate, size // replicas)
        kind = "virtual rank" if options.reproducible else "rank"
        among = f"{size} {kind if size == 1 else kind + 's'} x --accumulate {options.accumulate}"
        batch_size, rest = divmod(wanted, parts)
        if rest or batch_size == 0:
            near = max(1, round(wanted / parts)) * parts
            raise OptionError(
                f"--global-batch-size {wanted} does not divide among {among}. "
                f"The nearest that does: --global-batch-size {near}"
            )
        if options.batch_size not in (batch_size, TrainOptions.batch_size):
            raise OptionError(
                f"--batch-size {options.batch_size} and --global-batch-size {wanted} contradict each other: with "
                f"{among} the batch size is {batch_size}. Leave one out."
            )
        return cls(size, batch_size, options.accumulate, size // replicas)

    @property
    def passes(self) -> int:
        """Backward passes of one rank in a step."""
        return self.accumulate * self.per_rank

    @property
    def global_batch_size(self) -> int:
        return self.size * self.batch_size * self.accumulate

    def lr_factor(self, scaling: str) -> float:
        """What the learning rate is multiplied by: one rule for both engines."""
        parts = self.size * self.accumulate
        return {"none": 1.0, "linear": float(parts), "sqrt": math.sqrt(parts)}[scaling]


def parse(kind: type[T], args: Sequence[str] | None = None, *, outputs: bool = True) -> T:
    """Fills a dataclass from the command line and, with `--config FILE`, from YAML.

    Args:
        kind: a dataclass; all fields need defaults. Fields that are dataclasses become groups.
        args: the command line without the program's name; `sys.argv[1:]` if None.
        outputs: print help and errors (rank 0 alone does, or each message would come once per rank).

    Raises:
        OptionError: the YAML file is missing or names an option that there is not.
        SystemExit: the command line is wrong (code 2) or asked for help (code 0).
    """
    args = list(sys.argv[1:] if args is None else args)
    config, args = _take_config(args)
    if config is not None:
        args = _arguments_from_yaml(Path(config), kind) + args
    # tyro's own switch, console_outputs, does not reach its messages about values.
    unheard = io.StringIO()
    with (
        nullcontext() if outputs else redirect_stderr(unheard),
        nullcontext() if outputs else redirect_stdout(unheard),
    ):
        return _read(kind, args)


def _read(kind: type[T], args: list[str]) -> T:
    import tyro

    return tyro.cli(
        kind,
        prog=_program(),
        description=f"{inspect.getdoc(kind)}\n\n--config FILE takes options from YAML (epochs: 3); the command "
        f"line wins. Every run with --log-dir writes such a file, config.yaml.",
        args=args,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _program() -> str:
    """What the user typed to start this job."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec is not None else f"python {sys.argv[0]}"


def flatten(options: Any) -> dict[str, Any]:
    """All options by their flat names, as YAML and the command line write them."""
    flat: dict[str, Any] = {}
    for name, value in asdict(options).items():
        flat |= value if is_dataclass(getattr(options, name)) else {name: value}
    return flat


def _take_config(args: list[str]) -> tuple[str | None, list[str]]:
    config, rest = None, []
    remaining = iter(args)
    for argument in remaining:
        if argument == "--config":
            config = next(remaining, None)
            if config is None:
                raise OptionError("--config needs a file: --config config.yaml")
        elif argument.startswith("--config="):
            config = argument.partition("=")[2]
        else:
            rest.append(argument)
    return config, rest


def _arguments_from_yaml(path: Path, kind: type[Any]) -> list[str]:
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise OptionError(f"--config {path} should hold lines such as `epochs: 3`.")
    known = set(_option_names(kind))
    arguments = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(sorted(known))}."
            raise OptionError(f"--config {path}: there is no option {key!r}.{hint}")
        arguments += _as_arguments(flag(name), value)
    return arguments


def _as_arguments(flag: str, value: Any) -> list[str]:
    """A YAML value as it would be typed. With `=`, so that a value may begin with a dash."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def _option_names(kind: type[Any]) -> Iterator[str]:
    hints = get_type_hints(kind)
    for entry in fields(kind):
        if is_dataclass(hints[entry.name]):
            yield from _option_names(hints[entry.name])
        else:
            yield entry.name
