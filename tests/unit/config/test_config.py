"""Options: their names, YAML, conflicts, and one message from many ranks."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from msgspec import Meta

from hvd_trainer import Trainer
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.checks import flag
from hvd_trainer.config.figures import StopCondition
from hvd_trainer.config.launch_rules import Launch
from hvd_trainer.config.options import EngineOptions, TrainerOptions, TrainOptions
from hvd_trainer.config.parser import flatten, parse, with_values
from hvd_trainer.config.rules import CONFLICTS, check, find_mistakes
from hvd_trainer.errors import OptionError
from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.trainer import obey

OTHERS = ("--lr-decay", "--until", "--compile", "--workers", "--bucket-mb", "--keep-best")


def help_of(kind: type, option: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, set[str]]:
    """Return what an option for help prints, and which options it explains."""
    with pytest.raises(SystemExit) as leaving:
        parse(kind, [option])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    return text, set(re.findall(r"^\W*(--[a-z][\w-]*)(?=[ ,])", text, re.MULTILINE))


def test_help_lists_common_options_and_help_all_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """In sections, one for each group."""
    text, common = help_of(MnistOptions, "--help", capsys)
    assert common >= {"--backend", "--epochs", "--data-dir", "--log-dir", "--lr-scaling", "--quiet"}
    assert not common & set(OTHERS)
    assert 20 <= len(common) <= 25
    assert "--help-all lists all options" in text
    whole, every = help_of(MnistOptions, "--help-all", capsys)
    assert every - {"--config"} == {flag(name) for name in flatten(MnistOptions())}
    for printed in (text, whole):
        sections = re.findall(r"(\w+) options \W", printed)
        assert " ".join(sections) == "data network optimizer engine train log save parallel measure"
        assert "--config FILE" in printed


def test_help_begins_with_a_docstring_that_somebody_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    """A class without one was introduced by its signature, which `dataclass` puts in its place."""

    @dataclass(frozen=True)
    class Options(TrainerOptions):
        hidden: int = 64

    text, _ = help_of(Options, "--help", capsys)
    assert "Options(" not in text
    assert "--help-all lists all options" in text


@pytest.mark.parametrize(("job", "option"), [("mnist", "--help"), ("imdb", "--epochs=many")])
def test_help_and_mistyped_options_import_no_torch(job: str, option: str) -> None:
    """Help and errors took as long as the import of PyTorch: seconds."""
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"hvd_trainer.{job}", option], capture_output=True, text=True
    )
    assert shown.returncode == (0 if option == "--help" else 2)
    imported = re.findall(r"\| +(\w+)$", shown.stderr, re.MULTILINE)
    assert "tyro" in imported
    assert "torch" not in imported


def test_command_line_overrides_yaml(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("epochs: 7\nlr: 1e-4\nbatch-size: 32\nquiet: true\nmax_norm: null\ndata_dir: -odd\n")
    options = parse(MnistOptions, ["--config", str(file), "--epochs", "2", "--no-quiet"])
    assert (options.train.epochs, options.train.batch_size, options.optimizer.lr) == (2, 32, 1e-4)
    assert (options.log.quiet, options.train.max_norm, options.data.data_dir) == (False, None, "-odd")


def test_config_yaml_of_a_run_parses_back(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    words = ["--lr", "1e-3", "--max-norm=2", "--compile=max-autotune", "--seed", "3", "--log-dir", "a b"]
    options = parse(MnistOptions, words)
    assert (options.optimizer.lr, options.train.max_norm, options.train.compile) == (1e-3, 2.0, "max-autotune")
    assert (options.log.log_dir, options.train.global_batch_size) == ("a b", None)
    file.write_text(yaml.safe_dump(flatten(options)))
    assert parse(MnistOptions, [f"--config={file}"]) == options


class Color(Enum):
    RED, BLUE = 1, 2


@dataclass(frozen=True)
class Own:
    """A user's own group of options."""

    widths: tuple[int, ...] = (8, 4)
    """layers"""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """of something"""


@dataclass(frozen=True)
class OwnOptions(TrainerOptions):
    """The options of a user's own job."""

    own: Own = field(default_factory=Own)


def test_options_of_a_users_own_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, common = help_of(OwnOptions, "--help", capsys)
    assert "--widths" in common
    assert "--bucket-mb" not in common
    assert text.index("own options") < text.index("engine options")
    assert "--bucket-mb" in help_of(OwnOptions, "--help-all", capsys)[1]
    file = tmp_path / "own.yaml"
    file.write_text("widths: [5, 6, 7]\n")
    assert parse(OwnOptions, ["--config", str(file), "--epochs", "1"]).own.widths == (5, 6, 7)
    assert parse(OwnOptions, ["--widths", "2", "3"]).own.widths == (2, 3)


@pytest.mark.parametrize("value", ["0.0", "1.0", "nan"])
def test_ranges_of_a_users_own_options_are_checked(value: str) -> None:
    options = parse(OwnOptions, ["--share", value, "--epochs", "0"])
    assert find_mistakes(options) == [
        "--epochs must be a whole number, 1 or more, not 0",
        f"--share must be a number, more than 0, less than 1, not {value}",
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--epoks", "3"], "Unrecognized options: --epoks"),
        (["--epochs", "many"], "error: --epochs takes a whole number, and not 'many'. Type: "),
        (["--max-steps", "1.5"], "error: --max-steps takes a whole number, and not '1.5'. Type: "),
        (["--lr", "much"], "error: --lr takes a number, and not 'much'. Type: "),
        (["--backend", "mpi"], "--backend takes auto, horovod, ddp, single or data-parallel, and not 'mpi'"),
    ],
)
def test_wrong_command_line_exits_with_2(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse(MnistOptions, args)
    assert leaving.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    with pytest.raises(SystemExit):
        parse(MnistOptions, args, outputs=False)
    assert capsys.readouterr() == ("", ""), "other ranks stay silent"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epoch: 3", "there is no option 'epoch'. Did you mean epochs?"),
        ("zzz: 3", "There are: accumulate, "),
        ("- 3", "should hold lines such as `epochs: 3`"),
        ("a: [", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_wrong_yaml_file_is_named(content: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError) as caught:
        parse(MnistOptions, ["--config", str(file)])
    assert str(file) in str(caught.value)
    assert words in str(caught.value)
    with pytest.raises(OptionError, match="--config needs a file"):
        parse(MnistOptions, ["--config"])


def test_check_reports_all_mistakes_at_once() -> None:
    args = "--epochs 0 --chunks 0 --max-steps 0 --log-every 0 --accumulate 0 --max-norm 0 --warmup-epochs nan"
    args += " --lr 0 --momentum -1 --timeout-s 0 --bucket-mb 0 --until soon --profile-steps 0 --keep-best val_loss"
    with pytest.raises(OptionError) as caught:
        check(parse(MnistOptions, [*args.split(), "--resume", "auto"]))
    for words in (
        "--epochs must be a whole number, 1 or more, not 0",
        "--chunks must be a whole number, 1 or more, or None, not 0",
        "--max-steps must be a whole number, 1 or more, or None, not 0",
        "--log-every must be a whole number, 1 or more, not 0",
        "--accumulate must be a whole number, 1 or more, not 0",
        "--max-norm must be a number, more than 0, or None, not 0.0",
        "--warmup-epochs must be a number, 0 or more, not nan",
        "--lr must be a number, more than 0",
        "--momentum must be a number, 0 or more",
        "add --log-dir DIR",
        "--timeout-s must be a number, more than 0, not 0.0",
        "--bucket-mb must be a number, more than 0, not 0.0",
        "--until soon is no figure with >= or <= and a number",
        "--keep-best val_loss does not say which way is better",
        "--profile-steps must be a whole number, 1 or more, or None, not 0",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--schedule gpipe", "--schedule is about stages: add --stages"),
        ("--balance bytes", "--balance cuts a model: add --stages or --devices-per-rank"),
        ("--stages 2 --devices-per-rank 2", "leave one out"),
        ("--stages 2 --reproducible 4", "--stages and --reproducible: micro-batches are summed in another order"),
        ("--chunks 2 --sync-batch-norm", "--sync-batch-norm does not go with --chunks"),
        ("--stages 2 --compression powersgd", "powersgd does not go with --stages: type --compression fp16"),
        ("--devices-per-rank 2 --compile default", "--compile does not go with --devices-per-rank"),
        ("--shard full --backend horovod", "--shard full is PyTorch's own: type --backend ddp"),
        ("--shard full --backend ddp --devices-per-rank 2", "on one device: leave out --devices-per-rank"),
        ("--shard full --backend ddp --stages 2 --schedule zero-bubble", "type --schedule 1f1b or interleaved"),
        ("--shard full --backend ddp --compression fp16", "--compression does not go with --shard full"),
        ("--compile default --activation-checkpointing blocks", "compile the blocks yourself, with block.com"),
        ("--channels-last --shard full", "--channels-last does not go with --shard full"),
        ("--reproducible 3", "--reproducible must be a power of two, not 3"),
        *(
            (f"--reproducible 4 {option}", f"sums gradients itself: leave out {option.split()[0]}")
            for option in ("--compression fp16", "--sync-batch-norm")
        ),
        ("--profile-steps 1", "--profile-steps writes to the log folder: add --log-dir DIR"),
        ("--profile-skip 1", "--profile-skip counts the steps before a profile: add --profile-steps N"),
        ("--requeue", "--requeue needs a log folder"),
        ("--stages 4 --chunks 2", "here are 2. Type --chunks 4, or --schedule gpipe"),
        ("--stages 4 --schedule interleaved --chunks 9", "--chunks 9 does not divide. Type a multiple of 4"),
        *(
            (f"--{option} {value}", f"--{option} is about checkpoints: add --log-dir DIR")
            for option, value in (
                ("save-every-steps", 9),
                ("save-every-s", 1),
                ("keep", 5),
                ("keep-best", "max:f1"),
            )
        ),
        ("--dataset mnist --repeat 2", "--repeat is for the digits, not for --dataset mnist: leave one out"),
        ("--momentum 0.8", "--momentum 0.8 is for --optimizer sgd, not adam: leave one out"),
        ("--compile reduce-overhead --accumulate 2", "type --compile default, or leave out --accumulate"),
        ("--compile max-autotune --reproducible 2", "type --compile default, or leave out --reproducible"),
        ("--until 0.99", "type --until 'val_accuracy>=0.99' or --until 'val_loss<=0.05', in quotes"),
        ("--until val_accuracy>=99%", "type --until 'val_accuracy>=0.99'"),
        ("--until val_mae=0.05", "type --until 'val_mae>=0.05' or --until 'val_mae<=0.05', in quotes"),
        ("--until val_loss<0.1", "type --until 'val_loss>=0.1' or --until 'val_loss<=0.1', in quotes"),
        ("--keep-best val_mae", "type --keep-best min:val_mae or --keep-best max:val_mae"),
        ("--keep-best best:val_mae", "type --keep-best min:val_loss or --keep-best max:val_loss"),
    ],
)
def test_conflicting_options_are_refused(args: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        check(parse(MnistOptions, args.split()))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reached", "missed"),
    [("val_mae<=0.5", (0.5, 0.1), (0.51, math.nan)), ("val_loss>=0.5", (0.5, 0.9), (0.49, math.nan))],
)
def test_until_is_reached_at_its_value(text: str, reached: Sequence[float], missed: Sequence[float]) -> None:
    condition = StopCondition.parse(text)
    for found in reached:
        assert condition.is_reached({condition.figure: found})
    for found in missed:
        assert not condition.is_reached({condition.figure: found})
    assert not condition.is_reached({})


def test_a_tool_that_wants_steps_overrides_until(tmp_path: Path) -> None:
    """With --until typed or in YAML, a measured job ended after its first good epoch and made too few steps."""
    (tmp_path / "job.yaml").write_text("until: val_loss<=9\n")
    options = parse(MnistOptions, ["--config", str(tmp_path / "job.yaml"), "--until", "val_loss<=10"])
    train = obey(Message(log_dir="", max_steps=7, endless=True), options).train
    assert (train.until, train.max_steps) == (None, 7)


def test_messages_of_conflicts_name_options_that_exist() -> None:
    """A message that names an option that there is not would fail only where it is needed."""
    for conflict in itertools.chain.from_iterable(CONFLICTS.values()):
        text = conflict.message(MnistOptions())
        assert "{" not in text
        named = {name.removeprefix("--no-").removeprefix("--") for name in re.findall(r"--[a-z][\w-]*", text)}
        assert {name.replace("-", "_") for name in named} <= flatten(MnistOptions()).keys()
        assert not conflict.when(TrainerOptions())


def plan(size: int, **options: int) -> BatchPlan:
    return BatchPlan.of(TrainOptions(**options), size)


def test_batch_plan_divides_the_global_batch() -> None:
    assert plan(4).global_batch_size == 512
    assert plan(4, global_batch_size=64, accumulate=2).batch_size == 8
    assert plan(4, global_batch_size=64, batch_size=16).batch_size == 16
    assert plan(3, accumulate=2).lr_factor("linear") == 6
    with pytest.raises(
        OptionError, match="does not divide among 3 ranks x --accumulate 1. .*--global-batch-size 99"
    ):
        plan(3, global_batch_size=100)
    with pytest.raises(OptionError, match="--global-batch-size 4$"):
        plan(4, global_batch_size=1)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("non_finite", "warn", "--non-finite must be one of error, skip, not 'warn'"),
        ("epochs", "3", "--epochs must be a whole number, 1 or more, not '3'"),
        ("epochs", True, "--epochs must be a whole number, 1 or more, not True"),
        ("epochs", None, "--epochs must be a whole number, 1 or more, not None"),
        ("max_norm", math.nan, "--max-norm must be a number, more than 0, or None, not nan"),
        ("tf32", 1, "--tf32 must be True or False, not 1"),
        ("log_dir", Path("log"), "--log-dir must be a text, or None, not PosixPath('log')"),
        ("resume_partial", ("weights",), "scaler, loss, frozen, random, data, callbacks, not ('weights',)"),
        ("resume_partial", "data", "any number of: optimizer, scheduler, scaler, loss, frozen, random, data, c"),
        ("train", EngineOptions(), "--train must be TrainOptions, not EngineOptions("),
    ],
)
def test_options_made_in_code_are_checked_as_typed_ones_are(name: str, value: Any, said: str) -> None:
    """Another library's choices, and texts for numbers, passed: `non_finite="warn"` trained to NaN."""
    options = MnistOptions()
    options = replace(options, train=value) if name == "train" else with_values(options, {name: value})
    (message,) = find_mistakes(options)
    assert said in message
    with pytest.raises(OptionError, match=re.escape(said)):
        Trainer(options)


def test_a_value_of_another_type_hides_no_other_mistake() -> None:
    """A text for a number cannot be compared with one."""
    wrong = {"chunks": "8", "accumulate": "2", "reproducible": "4", "schedule": "gpipe", "profile_skip": 7}
    said = "; ".join(find_mistakes(with_values(MnistOptions(), wrong), Launch(2)))
    for words in ("--chunks must", "--accumulate must", "--reproducible must", "--schedule is", "--profile-skip"):
        assert words in said


@dataclass(frozen=True)
class StrangeOptions(TrainerOptions):
    """Options of types that a user's own job may have."""

    color: Color = Color.RED
    place: int | Path = 3
    call: Callable[[int], int] = abs


def test_options_of_a_users_own_types_pass() -> None:
    assert find_mistakes(StrangeOptions()) == []
    assert find_mistakes(StrangeOptions(color=Color.BLUE, place=Path("x"))) == []
    assert "--color must be Color, not 7" in find_mistakes(StrangeOptions(color=7))  # type: ignore[arg-type]


@dataclass(frozen=True)
class SmallBatches(TrainerOptions):
    """A job with a batch size of its own."""

    train: TrainOptions = field(default_factory=lambda: TrainOptions(batch_size=64))


@pytest.mark.parametrize(
    ("typed", "launch", "words"),
    [
        ("--global-batch-size 512", Launch(2), ""),
        ("--global-batch-size 64 --batch-size 32", Launch(2), ""),
        ("--global-batch-size 64 --batch-size 16", Launch(2), "2 ranks x --accumulate 1 the batch size is 32"),
        ("--global-batch-size 100", Launch(3), "The nearest that does: --global-batch-size 99"),
        ("--reproducible 4", Launch(3), "--reproducible 4 runs on 1, 2, 4 ranks"),
        ("--chunks 65", Launch(1), "cuts a batch of 64 into less than one sample. Type --chunks 64"),
        ("--stages 4", Launch(6), "Start 8 ranks, or give one of these: --stages 1, 2, 3, 6"),
        ("--stages 2", Launch(2, is_elastic=True), "elastic mode changes them. Start without"),
        ("--requeue --log-dir x", Launch(1), "--requeue is for jobs in a Slurm queue"),
        ("--requeue --log-dir x", Launch(1, is_queued=True), ""),
    ],
)
def test_options_that_do_not_go_with_the_launch_are_refused(typed: str, launch: Launch, words: str) -> None:
    """A job's own batch size made --global-batch-size impossible: "leave one out" of what nobody had typed."""
    mistakes = find_mistakes(parse(SmallBatches, typed.split()), launch)
    assert words in "; ".join(mistakes)
    assert bool(mistakes) == bool(words)


def test_all_mistakes_are_told_before_ranks_meet() -> None:
    typed = "--epochs 0 --chunks 300 --requeue --momentum 1 --transport mpi"
    with pytest.raises(OptionError) as caught:
        Trainer(parse(MnistOptions, typed.split()))
    for said in ("--epochs must", "--chunks 300 cuts", "add --log-dir", "--optimizer sgd", "only Horovod has it"):
        assert said in str(caught.value)
