"""Test `python -m hvd_trainer parity`: the trace of a run, where two runs part, and the causes it names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import QUICKEST, SUPPORT, launch, requires
from made_traces import Edit, make_line, make_trace
from torch import Tensor, nn

from hvd_trainer import TrainerOptions
from hvd_trainer.config.options import MeasureOptions
from hvd_trainer.config.rules import check
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.checksums import KEPT_BYTES, sample_checksums, stride, subsample
from hvd_trainer.observe.trace_writer import draws
from hvd_trainer.tools.parity import cli
from hvd_trainer.tools.parity.pair import Pair, compare_all
from hvd_trainer.tools.parity.report import as_json, conclusions, select_steps, table
from hvd_trainer.tools.parity.tensors import NONE, distance_between, min_norms
from hvd_trainer.tools.parity.tolerance import expected_tolerance
from hvd_trainer.tools.parity.traced_runs import (
    Plan,
    TracedRun,
    check_traced_job,
    global_batch_options,
    parse_engines,
)
from hvd_trainer.tools.parity.traces import EVENTS, SCRIPT_OPTIONS, Moment, Trace, read_trace
from hvd_trainer.tools.runner.command import read_job
from hvd_trainer.tools.runner.runs import RunRecord

DIGITS = ("-m", "hvd_trainer.mnist", "--dataset", "digits")
FAULTY = str(SUPPORT / "parity_job.py")


def edit_at(moment: str, change: Callable[[int, dict[str, Any], dict[str, Tensor]], None]) -> Edit:
    """Restrict an edit to one moment."""

    def edit(rank: int, its: str, line: dict[str, Any], values: dict[str, Tensor]) -> None:
        if its == moment:
            change(rank, line, values)

    return edit


def set_line(**changes: Any) -> Callable[[int, dict[str, Any], dict[str, Tensor]], None]:
    return lambda rank, line, values: line.update(changes)


def multiply(factor: float, *names: str, only: int | None = None) -> Callable[[int, Any, dict[str, Tensor]], None]:
    """Multiply the tensors whose names begin so, on all ranks or on one."""

    def change(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        if only in (None, rank):
            for name in values:
                if name.startswith(names):
                    values[name] = values[name] * factor

    return change


def combine(
    *changes: Callable[[int, Any, dict[str, Tensor]], None],
) -> Callable[[int, Any, dict[str, Tensor]], None]:
    def change(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        for its in changes:
            its(rank, line, values)

    return change


def set_state(key: str, value: float) -> Callable[[int, Any, dict[str, Tensor]], None]:
    return lambda rank, line, values: values.update({f"optimizer/a.weight/{key}": torch.tensor([value])})


def replace_samples(value_of: Callable[[int, int], str]) -> Callable[[int, dict[str, Any], Any], None]:
    """Replace the samples, given the rank and the place in its batch."""
    return lambda rank, line, values: line.update(
        samples=[value_of(rank, place) for place in range(len(line["samples"]))]
    )


def repeat_first_epoch(rank: int, line: dict[str, Any], values: Any) -> None:
    """Take the samples of the first epoch."""
    line["samples"] = make_line(rank, 2, Moment(line["step"] - 2, 1), 4)["samples"]


def reverse_samples(rank: int, line: dict[str, Any], values: Any) -> None:
    line["samples"] = line["samples"][::-1]


ALL = ("gradients", "parameters", "optimizer")
CASES = {
    # before the first step
    "step of zero gradients": (
        edit_at("start 0", set_state("exp_avg", 0.0)),
        *("optimizer", 0, "horovod has made a step before training"),
    ),
    "weights moved": (
        edit_at("start 0", multiply(0.9995, "parameters")),
        *("parameters", 0, "one side has made a step before training"),
    ),
    "weights of their own": (
        edit_at("start 0", multiply(-1, "parameters")),
        "parameters",
        0,
        "other random numbers",
    ),
    "ranks start apart": (
        edit_at("start 0", multiply(1.1, "parameters", only=1)),
        *("parameters", 0, "nothing has made the ranks of horovod start alike"),
    ),
    "weight decay": (
        edit_at("start 0", set_line(settings=[{"momentum": "0.9", "weight_decay": "0.1"}])),
        *("settings", 0, "weight_decay is 0.1 and 0.0"),
    ),
    # samples
    "all ranks the same": (
        edit_at("step 2", replace_samples(lambda rank, place: f"x{place}-y0")),
        *("samples", 2, "all ranks of horovod train on the same samples"),
    ),
    "each epoch the same": (edit_at("step 3", repeat_first_epoch), "samples", 3, "the same order in each epoch"),
    "transforms": (
        edit_at("step 1", replace_samples(lambda rank, place: f"z{place}{rank}-y{(2 * place + rank) % 4}")),
        *("samples", 1, "transformed"),
    ),
    "other data": (
        edit_at("step 1", replace_samples(lambda rank, place: f"z{place}{rank}-z{place}")),
        *("samples", 1, "the data come in another order"),
    ),
    "order within": (edit_at("step 2", reverse_samples), "order", 2, "on other ranks or in another order"),
    # within a step
    "rate by ranks": (
        edit_at("step 3", set_line(lr=[0.2])),
        "learning rate",
        3,
        "horovod multiplies the learning rate by its",
    ),
    "rate by the root": (
        edit_at("step 1", set_line(lr=[0.1 * 2**0.5])),
        "learning rate",
        1,
        "by the root of its number",
    ),
    "rate of another schedule": (
        edit_at("step 2", set_line(lr=[0.07])),
        "learning rate",
        2,
        "depends on the engine",
    ),
    "rate by rank": (
        edit_at("step 1", lambda rank, line, values: line.update(lr=[0.1 + rank])),
        *("learning rate", 1, "depends on the engine, the launcher or the rank"),
    ),
    "skipped": (edit_at("step 2", set_line(skipped=True)), "skipped", 2, "one side leaves this step out"),
    "loss summed": (
        edit_at("step 1", set_line(losses=[4.0])),
        "loss",
        1,
        "the loss of horovod is the sum over its batch",
    ),
    "loss by a branch": (
        edit_at("step 1", set_line(losses=[1.1])),
        "loss",
        1,
        "another loss for the same samples: train()",
    ),
    "not averaged": (
        edit_at("step 1", combine(multiply(1.5, *ALL, only=0), multiply(0.5, *ALL, only=1))),
        *("gradients", 1, "horovod does not average its gradients"),
    ),
    "one not averaged": (
        edit_at("step 1", multiply(1.5, "gradients/a.bias", only=1)),
        *("gradients", 1, "does not average the gradients of some parameters, such as a.bias"),
    ),
    "summed over ranks": (
        edit_at("step 1", combine(multiply(2, *ALL), set_line(grad_norm=4.0))),
        *("gradients", 1, "horovod adds up the gradients of 2 ranks, and ddp takes their mean"),
    ),
    "one rank moves": (
        edit_at("step 3", multiply(1.001, "parameters/b", only=1)),
        *("parameters", 3, "the same gradients, and other weights after the update"),
    ),
    "rounded": (edit_at("step 2", multiply(1 + 1e-6, "gradients")), "gradients", 2, "as small as rounding"),
    # buffers, evaluation, end
    "buffers while training": (
        edit_at("step 2", multiply(2, "buffers", only=1)),
        *("buffers", 2, "one side sends them round while it trains"),
    ),
    "buffers not averaged": (
        edit_at("evaluation 4", multiply(2, "buffers", only=1)),
        *("buffers", 4, "horovod does not average the statistics of batch norm"),
    ),
    "test figures": (
        edit_at("evaluation 4", set_line(figures={"test_loss": 0.6, "test_accuracy": 0.75})),
        *("evaluation", 4, "other test data"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_first_difference_and_its_cause(case: str) -> None:
    edit, quantity, step, cause = CASES[case]
    pair = Pair.compare(make_trace("horovod", edit), make_trace("ddp"))
    assert (pair.findings[0].quantity, pair.findings[0].when.step) == (quantity, step)
    said = "\n".join([pair.verdict(), *pair.details()])
    assert cause in said
    assert len(pair.causes) == 1, said
    assert "horovod and ddp differ" in said
    assert "{" not in said


def test_equal_runs_have_no_findings() -> None:
    pair = Pair.compare(make_trace("horovod"), make_trace("ddp"))
    assert pair.same
    assert pair.verdict() == "horovod and ddp: the same bits through 4 steps"
    assert not list(pair.details())
    assert pair.gaps == {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}


def test_finding_has_values_and_distance() -> None:
    """Describe the first tensor, its elements that are farthest apart, the distance, and the number of tensors."""

    def change(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        values["gradients/a.bias"] = torch.tensor([1.0, 2.0, 2.0])

    def base(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        values["gradients/a.bias"] = torch.tensor([1.0, 2.0, 2.5])

    pair = Pair.compare(
        make_trace("horovod", edit_at("step 2", change)), make_trace("ddp", edit_at("step 2", base))
    )
    (found,) = pair.findings
    assert (found.name, found.values, found.absolute, found.count, found.total) == (
        "a.bias",
        (2.0, 2.5),
        0.5,
        1,
        3,
    )
    assert found.relative == pytest.approx(0.5 / (1 + 4 + 6.25) ** 0.5)
    assert pair.verdict() == "horovod and ddp differ in step 2, after 1 step of the same bits"
    assert next(pair.details()) == (
        "First: the gradients (1 of 3 differ). Of a.bias the elements that are farthest apart are 2 on horovod, "
        "2.5 on ddp; the whole tensor's relative difference is 1.5e-01."
    )


def test_finding_names_the_rank_of_each_side() -> None:
    """A stage holds layers of its own: its rank was once said of the other run, too, which has them on rank 0."""

    def drop(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        if rank == 0:
            del values["parameters/a.bias"]

    staged = make_trace("ddp", edit_at("start 0", drop))
    single = make_trace("single", edit_at("start 0", multiply(2, "parameters/a.bias")), ranks=1)
    (found,) = Pair.compare(staged, single, asked=0).findings
    assert (found.name, found.sides) == ("a.bias", ("ddp, rank 1", "single"))


def test_finding_without_known_cause() -> None:
    pair = Pair.compare(make_trace("horovod", edit_at("step 2", multiply(1.01, "gradients"))), make_trace("ddp"))
    assert list(pair.details())[-1] == "None of the known causes fits."


@pytest.mark.parametrize(
    ("facts", "options", "name", "cause"),
    [
        ({"train_samples": 32}, {}, "samples per epoch", "such as a part that it has cut out by itself"),
        ({"optimizer": "Adam"}, {}, "optimizer", "sets itself up by the engine"),
        ({}, {"compression": "fp16"}, "--compression", "make it the same on both sides: --compression"),
    ],
)
def test_set_up_is_compared_first(facts: Any, options: Any, name: str, cause: str) -> None:
    pair = Pair.compare(make_trace("horovod", facts=facts, **options), make_trace("ddp"))
    assert (pair.findings[0].quantity, pair.findings[0].name) == ("set-up", name)
    assert cause in "\n".join(pair.details())


def test_run_that_ends_early() -> None:
    def drop(trace: Trace) -> Trace:
        ranks = [{when: its for when, its in rank.items() if when.step < 3} for rank in trace.ranks]
        return Trace(trace.name, trace.facts, trace.options, ranks)

    pair = Pair.compare(drop(make_trace("horovod")), make_trace("ddp"))
    assert pair.findings[0].values == (2, 4)
    assert "one side has made fewer" in "\n".join(pair.details())


# One process, and other differences of rounding.


def noise(scale: float, *names: str) -> Callable[[int, Any, dict[str, Tensor]], None]:
    def change(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        for name in values:
            if name.startswith(names):
                values[name] = values[name] * (1 + scale)

    return change


def test_one_process_may_differ_by_rounding() -> None:
    change = combine(noise(1e-4, *ALL), noise(0.5, "buffers"))
    rounding = make_trace(
        "single", edit_at("step 1", combine(change, set_line(losses=[1 + 1e-7], grad_norm=2 + 1e-6))), ranks=1
    )
    pair = Pair.compare(make_trace("ddp"), rounding)
    assert pair.same, pair.findings
    assert (
        "alike through 4 steps. Parameters are up to 1.0e-04 apart (step 1); allowed are 0.001" in pair.verdict()
    )
    assert pair.allowed.why == "fp32, on 2 and 1 ranks"
    exact = Pair.compare(make_trace("ddp"), rounding, asked=0)
    assert "sums are taken in another order (another number of ranks)" in exact.causes[0].text


@pytest.mark.parametrize(
    ("changes", "start", "cause"),
    [
        (set_line(losses=[1.1]), {"dropout": ["drop"]}, "dropout (drop) draws other numbers"),
        (
            set_line(losses=[1.1]),
            {"batch_norm": ["n"]},
            "batch norm (n) normalises the batch of each rank by itself",
        ),
        (replace_samples(lambda rank, place: f"x{max(1, place)}-y0"), {}, "the data come in another order"),
        (lambda rank, line, values: line["samples"].pop(), {}, "do not divide among the ranks"),
        (combine(multiply(0.5, "gradients"), set_line(grad_norm=1.0)), {}, "ddp adds up the gradients of 2 ranks"),
        (set_line(lr=[0.05]), {}, "--lr-scaling counts ranks and passes"),
    ],
)
def test_causes_on_unequal_numbers_of_ranks(changes: Any, start: Any, cause: str) -> None:
    ranks = make_trace("ddp", edit_at("start 0", set_line(**start)), lr_scaling="linear")
    single = make_trace("single", edit_at("step 1", changes), ranks=1, lr_scaling="linear")
    said = "\n".join(Pair.compare(ranks, single).details())
    assert cause in said


def test_growing_rounding_is_allowed_and_jumps_are_not() -> None:
    def single(scale: float) -> Trace:
        return make_trace(
            "single", edit_at("step 3", combine(noise(scale, *ALL), set_line(losses=[(1 + scale) / 3]))), ranks=1
        )

    assert Pair.compare(make_trace("ddp"), single(0.02)).same
    jump = Pair.compare(make_trace("ddp"), single(0.5))
    assert [finding.quantity for finding in jump.findings] == ["loss", "parameters"]
    assert "rounding that has grown" in "\n".join(jump.details())


def test_adam_amplifies_rounding() -> None:
    change = edit_at("step 1", multiply(1.5, "parameters/a.bias"))
    single = make_trace("single", change, ranks=1, facts={"optimizer": "AdamW"})
    pair = Pair.compare(make_trace("ddp", facts={"optimizer": "AdamW"}), single)
    assert "AdamW divides a gradient by its size" in "\n".join(pair.details())


@pytest.mark.parametrize(
    ("facts", "options", "ranks", "expected"),
    [
        ({}, {}, 2, (0, 0, 0)),
        ({}, {"precision": "bf16"}, 2, (0, 0, 0)),
        ({}, {"reproducible": 4}, 1, (0, 0, 0)),
        ({}, {}, 1, (1e-5, 1e-3, 0.05)),
        ({}, {"precision": "bf16"}, 1, (1e-2, 0.3, 0.3)),
        ({"device": "NVIDIA H100"}, {}, 2, (1e-5, 1e-3, 0.05)),
        ({}, {"compression": "fp16"}, 2, (1e-5, 0.01, 0.05)),
    ],
)
def test_expected_tolerances(facts: Any, options: Any, ranks: int, expected: tuple[float, ...]) -> None:
    allowed = expected_tolerance(
        make_trace(facts=facts, **options), make_trace(ranks=ranks, facts=facts, **options)
    )
    assert (allowed.loss, allowed.tensors, allowed.later) == expected
    assert expected_tolerance(make_trace(), make_trace(), 0.5).limit("gradients", first=False) == 0.5
    if expected[0]:
        assert allowed.limit("gradients", first=False) == math.inf


def test_script_may_differ_by_rounding_on_more_than_two_ranks() -> None:
    """Horovod's ring adds up the gradients of three ranks in another order than Gloo does."""
    two, three = (replace(make_trace(ranks=ranks), options=SCRIPT_OPTIONS) for ranks in (2, 3))
    assert expected_tolerance(two, two).exact
    assert expected_tolerance(three, three).why.startswith("a script on 3 ranks")


def test_equal_runs_are_compared_once_with_the_others() -> None:
    pairs = compare_all([make_trace("horovod"), make_trace("ddp"), make_trace("single", ranks=1)])
    assert [pair.name for pair in pairs] == ["horovod and ddp", "horovod and single"]


def test_distances_of_tensors() -> None:
    nan = math.nan
    assert distance_between(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])).relative == 0
    assert distance_between(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])).relative == math.inf
    assert distance_between(torch.tensor([math.inf]), torch.tensor([math.inf])).relative == 0
    assert distance_between(torch.tensor([3, 4]), torch.tensor([3, 5])).absolute == 1
    assert distance_between(None, torch.tensor([1.0]))[2:] == (NONE, 1.0)
    assert distance_between(torch.zeros(0), torch.zeros(0)).relative == 0
    # What is nothing but rounding beside the others does not count by its own size.
    values = {"gradients/a": torch.tensor([100.0]), "gradients/b": torch.tensor([1e-6])}
    min_norm = min_norms(values)["gradients/b"]
    assert distance_between(values["gradients/b"], -values["gradients/b"], min_norm).relative == pytest.approx(
        2e-6
    )


# What is said.


def test_table_and_json() -> None:
    traces = [
        make_trace("horovod", edit_at("step 4", combine(set_line(losses=[math.nan]), multiply(2, "parameters")))),
        make_trace("ddp"),
    ]
    run = RunRecord({"engine": "x", "ranks": 2}, 1, "done", 1.0)
    runs = [TracedRun(trace.name, run, trace) for trace in traces]
    pairs = compare_all(traces)
    lines = table(traces, pairs)
    assert lines[0].split() == ["loss", "gradient", "norm", "parameters", "apart"]
    assert lines[1].split() == ["step", "horovod", "ddp", "horovod", "ddp", "horovod,", "ddp"]
    assert lines[2].split() == ["1", "1", "1", "2", "2", "same", "bits"]
    assert lines[5].split() == ["4", "nan", "0.25", "2", "2", "5.0e-01"]
    kept = json.loads(json.dumps(as_json(runs, pairs)))
    assert not kept["same"]
    assert kept["pairs"][0]["findings"][0]["quantity"] == "loss"
    assert kept["steps"][1]["loss"] == {"horovod": 0.5, "ddp": 0.5}


def test_select_steps_around_differences() -> None:
    pair = Pair.compare(
        make_trace("horovod", edit_at("step 60", set_line(lr=[0.2])), steps=100), make_trace("ddp", steps=100)
    )
    whens = [Moment(step, 1) for step in range(1, 101)]
    assert [when.step for when in select_steps(whens, [pair])] == [*range(1, 9), *range(57, 64), *range(97, 101)]
    assert len(select_steps(whens[:24], [pair])) == 24


def test_large_model_is_compared_by_samples_of_its_values(tmp_path: Path) -> None:
    traces = [
        make_trace("horovod", edit_at("start 0", set_line(stride=16))),
        make_trace("ddp", edit_at("step 1", multiply(1.5, "gradients"))),
    ]
    run = RunRecord({}, 1, "done", 1.0)
    lines = conclusions([TracedRun(t.name, run, t) for t in traces], compare_all(traces), tmp_path)
    assert any("every 16th was kept" in line for line in lines)


# What is run.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name the job behind --"),
        ([*DIGITS, "--trace_steps=3", "--resume", "auto"], "Leave --trace_steps=3 and --resume out of the job"),
        ([*DIGITS, "--backend", "ddp"], "Leave --backend out of the job"),
    ],
)
def test_invalid_jobs_are_refused(words: Sequence[str], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_traced_job(read_job(words), 20)
    assert message in str(caught.value)


def test_max_steps_of_the_job_limits_steps() -> None:
    assert check_traced_job([*DIGITS, "--max-steps", "5"], 20) == 5
    assert check_traced_job([*DIGITS, "--max_steps=7"], 20) == 7
    assert check_traced_job([*DIGITS, "--max-steps", "500"], 20) == 20


@pytest.mark.parametrize("engines", ["ddp", "ddp,ddp", "ddp,mpi", ""])
def test_invalid_engines_are_refused(engines: str) -> None:
    with pytest.raises(OptionError, match=f"--engines {engines}"):
        parse_engines(engines, DIGITS)


def test_single_comes_last_with_the_global_batch() -> None:
    assert parse_engines("single, ddp", DIGITS) == ["ddp", "single"]
    plan = Plan((*DIGITS, "--accumulate", "2"), 20, 4, 1, 60.0)
    like = make_trace(ranks=4, accumulate=2)
    words = plan.start("single", Path("log"), like).command
    assert words[1 : 1 + len(DIGITS)] == list(DIGITS)
    assert words[-2:] == ["--accumulate", "8"]
    place = words.index("--max-steps")
    assert words[place : place + 4] == ["--max-steps", "20", "--trace-steps", "20"]
    assert "--save-every-epochs" in words
    assert global_batch_options(make_trace(ranks=4, sync_batch_norm=True)) == ["--batch-size", "16"]
    assert global_batch_options(make_trace(ranks=4, reproducible=4)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--np", "0", "--steps", "0", "--timeout-s", "0"], "--np must .*; --steps must .*; --timeout-s"),
        (["--tolerance", "-1"], "--tolerance must be 0 or more"),
        (["--engines", "ddp"], "name two or three"),
    ],
)
def test_mistakes_are_reported_before_a_run(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        cli.main(["--out", str(tmp_path / "out"), *arguments, "--", *DIGITS])
    assert not (tmp_path / "out").exists()


# What ranks keep.


def test_trace_needs_log_folder_and_steps() -> None:
    options = TrainerOptions(measure=MeasureOptions(trace_steps=0))
    with pytest.raises(
        OptionError, match="--trace-steps must be 1 or more, not 0; --trace-steps writes to the log"
    ):
        check(options)


def test_samples_are_identified_by_their_bytes() -> None:
    one = sample_checksums((torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0])))
    other = sample_checksums(({"x": torch.arange(6.0).view(3, 2)}, torch.tensor([0, 1, 1])))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False]
    assert one[0].split("-")[1] == one[2].split("-")[1]
    assert len(set(one)) == 3
    assert len(sample_checksums((torch.zeros(4, 2), None))) == 4


def test_draws_lists_dropout() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.1)
    assert [
        draws(m) for m in (nn.Dropout(), nn.Dropout(0.0), attention, nn.GRU(2, 2, 2, dropout=0.2), nn.ReLU())
    ] == [
        *(True, False, True, True, False),
    ]


def test_subsample_of_large_models() -> None:
    assert stride([torch.zeros(10, 10)], 40) == 1
    assert stride([torch.zeros(2**20, 2**20, device="meta")], 40) == 1  # which another stage has
    assert stride([torch.zeros(2**20)], KEPT_BYTES // 2**22) == 4
    assert len(subsample(torch.zeros(100, 100), 16)) == 625
    assert len(subsample(torch.zeros(50), 16)) == 50


@cache
def trace_run(folder: Path, engine: str, ranks: int, *words: str, job: tuple[str, ...] = (FAULTY,)) -> Trace:
    """Run 7 steps, one epoch of five and two of the next, and read the trace."""
    log = folder / "-".join([engine, str(ranks), *(word.strip("-") for word in words)]).replace("/", "-")
    options = ("--max-steps", "7", "--trace-steps", "7", "--save-every-epochs", "None")
    launch(QUICKEST, ranks, [*job, "--backend", engine, "--log-dir", str(log), *options, *words])
    found = read_trace(engine, log)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


BASE = ("--batch-size", "32", "--batch-norm")
FAULTS = {
    "scaled rate": ("learning rate", 1, "horovod multiplies the learning rate by its number of ranks"),
    "fake step": ("parameters", 0, "horovod has made a step before training"),
    "wrong shard": ("samples", 1, "all ranks of horovod train on the same samples"),
    "buffers": ("buffers", 5, "horovod does not average the statistics of batch norm"),
    "sent buffers": ("buffers", 2, "one side sends them round while it trains (as DDP does"),
    "no average": ("gradients", 1, "horovod does not average its gradients"),
    "sum": ("gradients", 1, "horovod adds up the gradients of 2 ranks, and ddp takes their mean"),
    "other start": ("parameters", 0, "the weights were drawn from other random numbers"),
    "one rank": ("parameters", 3, "the ranks of horovod have the same gradients, and other weights"),
}


@requires("horovod")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_mistake_is_found(folder: Path, fault: str) -> None:
    """Find in a real job on real engines where a planted mistake begins, and what it is."""
    quantity, step, cause = FAULTS[fault]
    words = (*BASE, "--fault", fault, *(("--on", "ddp") if fault == "sent buffers" else ()))
    pair = Pair.compare(*(trace_run(folder, engine, 2, *words) for engine in ("horovod", "ddp")))
    assert (pair.findings[0].quantity, pair.findings[0].when.step) == (quantity, step)
    assert cause in "\n".join(pair.details())
    assert len(pair.causes) == 1


@requires("horovod")
@pytest.mark.parametrize("options", [BASE, (*BASE, "--accumulate", "2", "--max-norm", "0.1"), ("--stages", "2")])
def test_engines_have_the_same_bits(folder: Path, options: tuple[str, ...]) -> None:
    pair = Pair.compare(trace_run(folder, "horovod", 2, *options), trace_run(folder, "ddp", 2, *options))
    assert pair.verdict().startswith("horovod and ddp: the same bits through ")
    kinds = pair.one.ranks[0][Moment(1, 1)].line["checksums"]
    assert set(kinds) == {"gradients", "parameters", "optimizer", "buffers"}
    assert all(kinds[kind] for kind in ("gradients", "parameters", "optimizer"))


def test_one_process_is_within_1e_5(folder: Path) -> None:
    """Train the whole global batch in one process; with virtual ranks it has the same bits, batch norm or not."""
    ranks = trace_run(folder, "ddp", 2, "--batch-size", "32")
    single = trace_run(folder, "single", 1, "--batch-size", "32", *global_batch_options(ranks))
    pair = Pair.compare(ranks, single)
    assert pair.same
    assert Pair.compare(ranks, single, asked=1e-5).same
    assert max(pair.gaps.values()) < 1e-6
    words = (*BASE, "--reproducible", "2")
    both_ways = trace_run(folder, "ddp", 2, *words), trace_run(folder, "single", 1, *words)
    assert Pair.compare(*both_ways).verdict() == "ddp and single: the same bits through 7 steps"
    plain = trace_run(folder, "ddp", 2, *BASE), trace_run(folder, "single", 1, *BASE, "--accumulate", "2")
    assert "with --reproducible 2 in the job" in "\n".join(Pair.compare(*plain).details())


def test_tracing_changes_no_bits(tmp_path: Path, folder: Path) -> None:
    trace = trace_run(folder, "ddp", 2, *BASE)
    log = next(folder.glob("ddp-2-batch-size-32-batch-norm"))
    launch(
        *(QUICKEST, 2, [FAULTY, "--backend", "ddp", "--log-dir", str(tmp_path), "--max-steps", "7", *BASE]),
    )
    assert (log / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert not (tmp_path / "trace").exists()
    assert [EVENTS[when.event] for when in trace.moments].count("evaluation") == 2
    assert [len(trace.lines(when)[0]["samples"]) for when in trace.steps] == [32, 32, 32, 32, 24, 32, 32]
    epoch = sum(
        (trace.samples(when) for when in trace.steps[:5]),
        start=trace.samples(trace.steps[0]) - trace.samples(trace.steps[0]),
    )
    assert len(epoch) == sum(epoch.values()) == 304
    start = trace.start
    assert start["batch_norm"] == ["1"]
    assert start["shapes"]["0.weight"] == "float32 [16, 8]"
    assert "optimizer" not in start["checksums"] or not start["checksums"]["optimizer"]


# From the command to the exit code.


def command(out: Path, *options: str, job: Sequence[str]) -> list[str]:
    return ["-m", "hvd_trainer", "parity", "--out", str(out), *options, "--", *job]


@pytest.mark.long
@requires("horovod")
def test_parity_of_digits_on_both_engines(tmp_path: Path) -> None:
    said = launch("python", 1, command(tmp_path, "--steps", "7", job=DIGITS)).stdout
    assert "horovod and ddp: the same bits through 7 steps" in said
    kept = json.loads((tmp_path / "parity.json").read_text())
    assert kept["same"]
    assert [run["state"] for run in kept["runs"]] == ["done", "done"]
    assert len(kept["steps"]) == 7
    assert not list(tmp_path.rglob("checkpoints"))


@pytest.mark.long
@requires("horovod")
def test_planted_mistake_sets_exit_code(tmp_path: Path) -> None:
    """Find a mistake of DDP, with one process compared, too."""
    job = (FAULTY, "--batch-size", "32", "--fault", "scaled rate", "--on", "ddp")
    options = ("--engines", "horovod,ddp,single", "--steps", "3")
    result = launch("python", 1, command(tmp_path, *options, job=job), check=False)
    assert result.returncode == 1
    assert "First: the learning rate: 0.05 on horovod, 0.1 on ddp." in result.stdout
    assert "ddp multiplies the learning rate by its number of ranks" in result.stdout
    assert "horovod and single: alike through 3 steps" in result.stdout


@pytest.mark.long
@requires("horovod")
def test_failed_run_is_named(tmp_path: Path) -> None:
    job = (FAULTY, "--fault", "crash")
    result = launch("python", 1, command(tmp_path, "--steps", "2", job=job), check=False)
    assert result.returncode == 2
    assert "horovod failed: RuntimeError: a mistake in the job; its output is in" in result.stdout
    assert "ddp on 2 ranks: 2 steps" in result.stdout
    result = launch(
        "python", 1, command(tmp_path, "--steps", "2", "--engines", "ddp,single", job=["-c"]), check=False
    )
    assert result.returncode == 2
