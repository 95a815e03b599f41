"""Test how `python -m hvd_trainer parity` compares traces: where runs part, the causes, and what it prints."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import RAN
from made_traces import SHAPES, Change, combine, make_line, make_trace, multiply, set_line, set_samples, set_tensor
from torch import Tensor, nn

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.report import Report
from hvd_trainer.measure.trace_format import KEPT_BYTES, draws, sample_checksums, stride, subsample
from hvd_trainer.measure.trials import RunRecord
from hvd_trainer.tools.parity import causes
from hvd_trainer.tools.parity.causes import find_causes, known_causes
from hvd_trainer.tools.parity.comparison import Pair
from hvd_trainer.tools.parity.report import conclude, details, verdict
from hvd_trainer.tools.parity.tensors import NONE, distance_between
from hvd_trainer.tools.parity.tolerance import expected_tolerance
from hvd_trainer.tools.parity.traced_runs import Side, TracedRun, global_batch_options, parse_engines, versions
from hvd_trainer.tools.parity.traces import SCRIPT_OPTIONS, Moment, Trace

DIGITS = ("-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1")
DONE = RunRecord({"engine": "x", "ranks": 2, "words": ["train.py"]}, 1, "done", 1.0)
ALL = ("gradients", "parameters", "optimizer")


def first_epoch_again(rank: int, line: dict[str, Any], values: Any) -> None:
    line["samples"] = make_line(rank, 2, Moment(line["step"] - 2, 1))["samples"]


def reverse_samples(rank: int, line: dict[str, Any], values: Any) -> None:
    line["samples"] = line["samples"][::-1]


def rate_by_rank(rank: int, line: dict[str, Any], values: Any) -> None:
    line["lr"] = [0.1 + rank]


OTHER_DECAY = {"momentum": "0.9", "weight_decay": "0.1"}
OTHER_ACCURACY = {"val_loss": 0.5, "val_accuracy": 0.7}
APART = combine(multiply(1.5, *ALL, only=0), multiply(0.5, *ALL, only=1))
SUMMED = combine(multiply(2, *ALL), set_line(grad_norm=4.0))
CASES: list[tuple[str, Change, str, str]] = [
    # before the first step
    ("start 0", set_tensor("optimizer/a.weight/step", 1.0), "optimizer", "horovod has made a step before"),
    ("start 0", multiply(0.9995, "parameters"), "parameters", "one side has made a step before training"),
    ("start 0", multiply(-1, "parameters"), "parameters", "other random numbers"),
    ("start 0", multiply(1.1, "parameters", only=1), "parameters", "made the ranks of horovod start alike"),
    ("start 0", set_line(settings=[OTHER_DECAY]), "set-up", "weight_decay is 0.1 with horovod, 0.0 with ddp"),
    # samples
    ("step 2", set_samples(lambda rank, n: f"x{n}-y0"), "samples", "all ranks of horovod train on the same"),
    ("step 3", first_epoch_again, "samples", "the same order in each epoch"),
    ("step 1", set_samples(lambda rank, n: f"z{n}{rank}-z{n}"), "samples", "the data come in another order"),
    ("step 2", reverse_samples, "samples", "ddp takes the same ones on other ranks, or in another order"),
    ("step 2", lambda rank, line, values: line["samples"].pop(), "samples", "or a batch size, or the end of"),
    # within a step
    ("step 3", set_line(lr=[0.2]), "learning rate", "horovod multiplies the learning rate by its number"),
    ("step 1", set_line(lr=[0.1 * 2**0.5]), "learning rate", "by the root of its number"),
    ("step 2", set_line(lr=[0.1, 0.07]), "learning rate", "None of the known causes fits."),
    ("step 1", rate_by_rank, "learning rate", "None of the known causes fits."),
    ("step 2", set_line(skipped=True), "skipped", "None of the known causes fits."),
    ("step 1", set_line(losses=[1.1]), "loss", "another loss for the same samples: train()"),
    ("step 1", APART, "gradients", "horovod does not average its gradients"),
    ("step 1", multiply(1.5, "gradients/a.bias", only=1), "gradients", "1 of 3 gradients, such as that of a.bias"),
    ("step 1", SUMMED, "gradients", "the gradients of horovod are larger by its number of ranks"),
    ("step 3", multiply(1.001, "parameters/b", only=1), "parameters", "None of the known causes fits."),
    ("step 2", multiply(1 + 1e-6, "gradients"), "gradients", "sums are taken in another order: rounding"),
    ("step 2", multiply(1.01, "gradients"), "gradients", "None of the known causes fits."),
    # buffers and evaluation
    ("step 2", multiply(2, "buffers", only=1), "buffers", "one side sends them round while it trains"),
    ("evaluation 4", multiply(2, "buffers", only=1), "buffers", "None of the known causes fits."),
    ("evaluation 4", set_line(figures=OTHER_ACCURACY), "evaluation", "None of the known causes fits."),
]


def test_all_that_goes_into_the_first_step_is_told() -> None:
    """A shuffled loader went unsaid beside a momentum, and of two settings the second."""
    settings = set_line(settings=[{"weight_decay": 0.1, "momentum": 0.9}])
    others = set_samples(lambda rank, n: f"z{n}{rank}-z{n}")
    pair = Pair.compare(make_trace("horovod", {"start 0": settings, "step 1": others}), make_trace("ddp"))
    said = "\n".join(details(pair))
    for text in ("weight_decay is 0.1 with horovod", "momentum is 0.9 with horovod", "Also: the samples: "):
        assert text in said
    assert "the data come in another order" in said


def report_on(pairs: Sequence[Pair]) -> Report:
    runs = {trace.name: TracedRun(trace.name, DONE, trace) for pair in pairs for trace in pair.runs}
    return conclude([*runs.values()], pairs, Path("out"), [], RAN)


@pytest.mark.parametrize(("moment", "change", "quantity", "cause"), CASES)
def test_first_difference_and_its_cause(moment: str, change: Change, quantity: str, cause: str) -> None:
    pair = Pair.compare(make_trace("horovod", {moment: change}), make_trace("ddp"))
    when = pair.findings[0].when
    assert (pair.findings[0].quantity, f"{when.name} {when.step}") == (quantity, moment)
    said = "\n".join([verdict(pair).text, *details(pair)])
    assert cause in said
    assert len(find_causes(pair)) == (not cause.startswith("None")), said
    assert "horovod and ddp differ" in said
    assert "{" not in said


@pytest.mark.parametrize(
    ("facts", "options", "name", "cause"),
    [
        ({"optimizer": "Adam"}, {}, "optimizer", "sets itself up by the engine"),
        ({}, {"compression": "fp16"}, "--compression", "make it the same on both sides: --compression"),
    ],
)
def test_set_up_is_compared_first(facts: Any, options: Any, name: str, cause: str) -> None:
    pair = Pair.compare(make_trace("horovod", facts=facts, **options), make_trace("ddp"))
    assert (pair.findings[0].quantity, pair.findings[0].name) == ("set-up", name)
    assert cause in "\n".join(details(pair))


@pytest.mark.parametrize(
    ("changes", "start", "cause"),
    [
        (set_line(losses=[1.1]), {"dropout": ["drop"]}, "dropout (drop) draws other numbers"),
        (
            set_line(losses=[1.1]),
            {"batch_norm": ["n"]},
            "batch norm (n) normalises the batch of each rank by itself",
        ),
        (set_samples(lambda rank, place: f"x{max(1, place)}-y0"), {}, "the data come in another order"),
        (lambda rank, line, values: line["samples"].pop(), {}, "does not divide among the ranks"),
        (combine(multiply(0.5, "gradients"), set_line(grad_norm=1.0)), {}, "gradients of ddp are larger by"),
    ],
)
def test_causes_on_unequal_numbers_of_ranks(changes: Change, start: Any, cause: str) -> None:
    ranks = make_trace("ddp", {"start 0": set_line(**start)})
    single = make_trace("single", {"step 1": changes}, ranks=1)
    assert cause in "\n".join(details(Pair.compare(ranks, single)))


def test_equal_runs_have_no_findings() -> None:
    pair = Pair.compare(make_trace("horovod"), make_trace("ddp"))
    assert pair.same
    assert verdict(pair).text == "horovod and ddp: the same bits through 4 steps"
    assert not verdict(pair).details
    assert pair.gaps == {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}


def test_bits_are_the_same_only_where_all_are() -> None:
    """Elements that were not kept, and gradients within what is allowed, were said to be THE SAME BITS."""
    gpu = {"device": "cuda"}
    one, other = make_trace("horovod", facts=gpu), make_trace("ddp", facts=gpu)
    for snapshots in other.ranks:
        for moment in (Moment(2, 1), Moment(3, 1)):
            snapshots[moment].line["checksums"]["parameters"]["a.weight"] = "of other elements"
    said = verdict(pair := Pair.compare(one, other))
    assert pair.same
    assert (said.badge, said.text.partition(".")[0]) == ("ALIKE", "horovod and ddp: alike through 4 steps")
    assert said.details == ["The first bits that differ, in step 2, are those of the parameters (1 of 3 differ)."]
    (table,) = report_on([pair]).tables
    assert [row[-1] for row in table.rows] == ["same bits", "0.0e+00", "0.0e+00", "same bits"]
    gradients = make_trace("ddp", {"step 4": multiply(1 + 1e-7, "gradients")}, facts=gpu)
    assert verdict(Pair.compare(one, gradients)).badge == "ALIKE"
    assert verdict(Pair.compare(one, make_trace("ddp", facts=gpu))).badge == "THE SAME BITS"


@pytest.mark.parametrize(
    ("samples", "suspect"),
    [
        (
            {f"step {n}": set_samples(lambda rank, place, n=n: f"{n}{place}-y0") for n in (1, 2, 3, 4)},
            "on all ranks",
        ),
        ({"step 3": first_epoch_again}, "in the same order in each epoch"),
    ],
)
def test_equal_runs_with_the_same_mistake_are_warned_of(samples: Any, suspect: str) -> None:
    pair = Pair.compare(make_trace("horovod", samples), make_trace("ddp", samples))
    assert pair.same
    (warning,) = report_on([pair]).warnings
    assert suspect in warning


def test_finding_has_values_and_distance() -> None:
    """Describe the first tensor, its elements that are farthest apart, the distance, and the number of tensors."""
    one, other = (set_tensor("gradients/a.bias", 1.0, 2.0, number) for number in (2.0, 2.5))
    pair = Pair.compare(make_trace("horovod", {"step 2": one}), make_trace("ddp", {"step 2": other}))
    (finding,) = pair.findings
    assert (finding.name, finding.values, finding.count, finding.total) == ("a.bias", (2.0, 2.5), 1, 3)
    assert finding.relative == pytest.approx(0.5 / (1 + 4 + 6.25) ** 0.5)
    assert verdict(pair).text == "horovod and ddp differ in step 2, after 1 step of the same bits."
    assert next(details(pair)) == (
        "First: the gradients (1 of 3 differ). Of a.bias the elements that are farthest apart are 2 on horovod, "
        "2.5 on ddp; the whole tensor's relative difference is 1.5e-01."
    )


def test_finding_names_the_rank_of_each_side() -> None:
    """A stage holds layers of its own: its rank was once said of the other run, too, which has them on rank 0."""

    def drop(rank: int, line: Any, values: Any) -> None:
        if rank == 0:
            del values["parameters/a.bias"]

    staged = make_trace("ddp", {"start 0": drop})
    single = make_trace("single", {"start 0": multiply(2, "parameters/a.bias")}, ranks=1)
    (finding,) = Pair.compare(staged, single, asked=0).findings
    assert (finding.name, finding.sides) == ("a.bias", ("ddp, rank 1", "single"))


def test_slices_of_each_stage_are_known_as_such() -> None:
    """Those of the first stage were, and the ranks of a later stage seemed to differ among each other."""

    def slice_stage(rank: int, line: dict[str, Any], values: dict[str, Tensor]) -> None:
        line["sliced"] = [name for name in SHAPES if name.startswith("b" if rank > 1 else "a")]
        for place in [place for place in values if not place.startswith("buffers")]:
            tensor = values.pop(place)
            if place.split("/")[1] in line["sliced"]:
                values[place] = tensor * (1 + rank)

    changes = {"start 0": slice_stage, "step 1": slice_stage}
    pair = Pair.compare(*(make_trace(name, changes, ranks=4, steps=1) for name in ("horovod", "ddp")))
    assert pair.same, pair.findings


def test_distance_of_parameters_is_that_of_all_stages() -> None:
    """Rank 0 has the first stage only: where a later one differed, the table said "same bits"."""

    def keep_own(rank: int, line: Any, values: Any) -> None:
        for name in [name for name in values if (name.rpartition("/")[2] == "b.weight") != (rank == 1)]:
            del values[name]

    step = combine(multiply(1.5, "parameters/b.weight"), keep_own)
    staged = [make_trace(name, {"step 1": change}) for name, change in (("horovod", keep_own), ("ddp", step))]
    gaps = Pair.compare(*staged, asked=0.5).gaps
    assert gaps[1] == pytest.approx(1 / 3)
    assert gaps[2] == 0


def test_pass_that_only_one_side_makes_is_a_difference() -> None:
    """Passes of one rank were compared as far as both sides had them."""
    pair = Pair.compare(make_trace("horovod", {"step 1": set_line(losses=[1.0, 1.0])}), make_trace("ddp"))
    assert next(details(pair)) == ("First: the loss (2 of 4 differ): rank 0, pass 2 is 1 on horovod, none on ddp.")


def test_ranks_with_unlike_norms_are_as_far_apart_as_said() -> None:
    def norm(rank: int, line: dict[str, Any], values: Any) -> None:
        line["grad_norm"] = 2.0 + 2 * rank

    (finding, *_) = Pair.compare(make_trace("horovod", {"step 1": norm}), make_trace("ddp")).findings
    assert (finding.run, finding.relative) == ("horovod", 0.5)


def test_samples_of_a_step_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's were counted again for each later step, which took minutes of a thousand steps."""
    trace, count, counted = make_trace(steps=20), Trace.samples, list[Moment]()
    monkeypatch.setattr(Trace, "samples", lambda self, when: (counted.append(when), count(self, when))[1])
    assert not trace.repeats
    assert counted == trace.steps


def test_run_that_ends_early() -> None:
    whole = make_trace("horovod")
    ranks = [{when: snapshot for when, snapshot in rank.items() if when.step < 3} for rank in whole.ranks]
    pair = Pair.compare(replace(whole, ranks=ranks), make_trace("ddp"))
    assert pair.findings[0].values == (2, 4)
    assert next(details(pair)) == "First: the number of steps: 2 on horovod, 4 on ddp."


# Rounding.


def test_one_process_may_differ_by_rounding() -> None:
    figures = set_line(losses=[1 + 1e-7], grad_norm=2 + 1e-6)
    change = combine(multiply(1 + 1e-4, *ALL), multiply(1.5, "buffers"), figures)
    rounding = make_trace("single", {"step 1": change}, ranks=1)
    pair = Pair.compare(make_trace("ddp"), rounding)
    assert pair.same, pair.findings
    apart = "alike through 4 steps. Parameters are up to 1.0e-04 apart; allowed are 0.001"
    assert apart in verdict(pair).text
    assert pair.allowed.why == "fp32, on 2 and 1 ranks"
    exact = Pair.compare(make_trace("ddp"), rounding, asked=0)
    assert "sums are taken in another order (fp32, on 2 and 1 ranks)" in find_causes(exact)[0].text


def test_losses_are_averaged_by_the_weights_of_their_batches() -> None:
    def weighed(rank: int, line: dict[str, Any], values: Any) -> None:
        line.update(losses=[1.0, 2.0][rank : rank + 1], weights=[3.0, 1.0][rank : rank + 1])

    two, one = make_trace("ddp", {"step 1": weighed}), {"step 1": set_line(losses=[1.25], weights=[4.0])}
    assert Pair.compare(two, make_trace("single", one, ranks=1)).same


def test_growing_rounding_is_allowed_and_jumps_are_not() -> None:
    def single(*scales: float) -> Trace:
        changes = {
            f"step {step}": combine(multiply(1 + scale, *ALL), set_line(losses=[(1 + scale) / step]))
            for step, scale in enumerate(scales, 2)
        }
        return make_trace("single", changes, ranks=1)

    assert Pair.compare(make_trace("ddp"), single(0.0, 0.02)).same
    grown = Pair.compare(make_trace("ddp"), single(0.01, 0.2))
    assert [finding.quantity for finding in grown.findings] == ["loss", "parameters"]
    assert "rounding, which grows from step to step" in "\n".join(details(grown))
    jump = "\n".join(details(Pair.compare(make_trace("ddp"), single(0.0, 0.2))))
    assert "rounding" not in jump
    assert "Allowed: 0.001 in the first step, 1e-05 for its loss, 0.05 later (fp32, on 2 and 1 ranks)." in jump


@pytest.mark.parametrize(
    ("facts", "options", "ranks", "expected"),
    [
        ({}, {}, 2, (0, 0, 0)),
        ({}, {"precision": "bf16"}, 2, (0, 0, 0)),
        ({}, {"reproducible": 4}, 1, (0, 0, 0)),
        ({}, {}, 1, (1e-5, 1e-3, 0.05)),
        ({}, {"precision": "bf16"}, 1, (1e-2, 0.3, 0.3)),
        ({}, {"precision": "bf16", "compression": "fp16"}, 2, (1e-2, 0.3, 0.3)),
        ({"device": "NVIDIA H100"}, {}, 2, (1e-5, 1e-3, 0.05)),
        ({}, {"compression": "fp16"}, 2, (1e-5, 0.01, 0.05)),
    ],
)
def test_expected_tolerances(facts: Any, options: Any, ranks: int, expected: tuple[float, ...]) -> None:
    traces = [make_trace(ranks=size, facts=facts, **options) for size in (2, ranks)]
    allowed = expected_tolerance(*traces)
    assert (allowed.loss, allowed.tensors, allowed.later) == expected
    assert expected_tolerance(*traces, 0.5).limit("gradients", first=False) == 0.5
    assert allowed.limit("gradients", first=False) == (math.inf if expected[0] else 0)


def script_trace(*kinds: str, ranks: int = 3, change: Change | None = None) -> Trace:
    shapes = {f"{number}.weight": f"{kind} [3, 4]" for number, kind in enumerate(kinds)}
    changes: dict[str, Change] = {"start 0": set_line(shapes=shapes)}
    changes |= {} if change is None else {"step 1": change}
    return replace(make_trace("ddp", changes, ranks=ranks), options=SCRIPT_OPTIONS, is_script=True)


def test_script_may_differ_by_rounding_on_more_than_two_ranks() -> None:
    """Horovod's ring adds up the gradients of three ranks in another order than Gloo does."""
    assert Pair.compare(*[script_trace("float32", ranks=2)] * 2).allowed.exact
    allowed = Pair.compare(*[script_trace("float32")] * 2).allowed
    assert allowed.why.startswith("taken for fp32 without autocast, a script on 3 ranks")


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["float64"], (2e-14, 5e-8, 0.05)),
        (["float32", "int64"], (1e-5, 1e-3, 0.05)),
        (["float16", "float32"], (1e-3, 0.1, 0.3)),
        (["float32", "bfloat16"], (1e-2, 0.3, 0.3)),
    ],
)
def test_parameters_of_a_script_tell_its_precision(kinds: list[str], expected: tuple[float, ...]) -> None:
    traces = [script_trace(*kinds)] * 2
    assert expected_tolerance(*traces)[1:4] == expected


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_bits_of_gradients_tell_that_they_are_compressed(kind: torch.dtype) -> None:
    def compress(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        values["gradients/large"] = torch.randn(100, generator=torch.Generator().manual_seed(1))
        values |= {name: value.to(kind).float() for name, value in values.items() if name.startswith("gradients")}

    def whole_numbers(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        values |= {name: value.round() for name, value in values.items() if name.startswith("gradients")}

    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[kind]
    sent, other = script_trace("float32", ranks=2, change=compress), script_trace("float32", ranks=2)
    assert [trace.compression for trace in (sent, other)] == [name, "none"]
    assert expected_tolerance(sent, sent)[1:4] == (1e-5, 0.01, 0.05)
    assert script_trace("float32", change=whole_numbers).compression == "none"
    finding = Pair.compare(sent, other).findings[0]
    assert (finding.quantity, finding.name) == ("set-up", "the type in which gradients are sent")


def test_clipping_on_one_side_is_seen_by_its_norm() -> None:
    clip = combine(multiply(0.5, *ALL), set_line(grad_norm=1.0))
    steps = {f"step {number}": number for number in (1, 2, 3, 4)}
    one = make_trace("horovod", dict.fromkeys(steps, clip))
    other = make_trace("ddp", {step: set_line(grad_norm=2.0 + number) for step, number in steps.items()})
    (cause,) = find_causes(Pair.compare(one, other))
    assert cause.text.startswith("horovod clips the gradients to a norm of 1, and ddp does not")


def test_distances_of_tensors() -> None:
    nan, tensor = math.nan, torch.tensor
    assert distance_between(tensor([1.0, nan]), tensor([1.0, nan])).relative == 0
    assert distance_between(tensor([1.0, nan]), tensor([1.0, 2.0])).relative == math.inf
    assert distance_between(tensor([math.inf]), tensor([math.inf])).relative == 0
    assert distance_between(tensor([3, 4]), tensor([3, 5]))[1:] == (4, 5)
    assert distance_between(NONE, tensor([1.0]))[1:] == (NONE, 1.0)
    assert distance_between(torch.zeros(0), torch.zeros(0)).relative == 0


def test_what_is_only_rounding_beside_others_is_not_measured_by_its_own_size() -> None:
    traces = [
        make_trace(name, {"step 1": combine(multiply(100, "gradients"), set_tensor("gradients/a.bias", number))})
        for name, number in (("horovod", 1e-6), ("ddp", -1e-6))
    ]
    assert Pair.compare(*traces).findings[0].relative < 1e-5


# What is printed.


def test_table_and_json() -> None:
    change = combine(set_line(losses=[math.nan]), multiply(2, "parameters"))
    traces = [make_trace("horovod", {"step 4": change}), make_trace("ddp")]
    pair = Pair.compare(*traces)
    report = report_on([pair])
    (table,) = report.tables
    assert table.columns == [
        *("step", "loss, horovod", "loss, ddp", "gradient norm, horovod", "gradient norm, ddp"),
        "apart: horovod and ddp",
    ]
    assert table.rows[0] == ["1", "1", "1", "2", "2", "same bits"]
    assert table.rows[3] == ["4", "nan", "0.25", "2", "2", "5.0e-01"]
    assert [verdict.state for verdict in report.verdicts] == ["failed"]
    kept = json.loads(report.json())
    assert not kept["same"]
    assert kept["pairs"][0]["findings"][0]["quantity"] == "loss"
    assert kept["pairs"][0]["losses"]["2"] == [0.5, 0.5]


def test_large_model_is_compared_by_samples_of_its_values() -> None:
    one = make_trace("horovod", {"start 0": set_line(stride=16)})
    pair = Pair.compare(one, make_trace("ddp", {"step 1": multiply(1.5, "gradients")}))
    assert any("every 16th was kept" in text for text in report_on([pair]).notes)


# What is run.


def test_a_new_version_of_a_script_is_run_in_its_place(tmp_path: Path) -> None:
    new = tmp_path / "new.py"
    new.touch()
    old, other = versions("horovod, ddp", ["train.py", "--epochs", "1"], new)
    assert old == ("old", "horovod", ["train.py", "--epochs", "1"])
    assert other == ("new", "ddp", [str(new), "--epochs", "1"])
    trial = other.trial(2, 1, 20, exactly=False)
    assert trial.label == "new, ddp on 2 ranks"
    assert "--exactly-horovod" not in trial.start(tmp_path).command
    for backend, job in (("horovod,ddp", DIGITS), ("horovod", ["train.py"]), ("ddp,single", ["train.py"])):
        with pytest.raises(OptionError, match="--new"):
            versions(backend, job, new)
    with pytest.raises(OptionError, match="name a file"):
        versions("horovod,ddp", ["train.py"], tmp_path / "none.py")


def test_two_versions_may_exchange_by_different_means() -> None:
    one, other = script_trace("float32"), script_trace("float32")
    one = replace(one, facts={**one.facts, "exchanged_by": "hvd.DistributedOptimizer"})
    other = replace(other, facts={**other.facts, "exchanged_by": "DistributedDataParallel"})
    assert not Pair.compare(replace(one, name="horovod"), replace(other, name="ddp")).same
    assert Pair.compare(replace(one, name="old"), replace(other, name="new")).same


def test_single_comes_last_with_the_global_batch() -> None:
    assert parse_engines("single, ddp") == ["ddp", "single"]
    trial = Side("single", "single", DIGITS).trial(4, 1, 20, make_trace(ranks=4, accumulate=2))
    message = Message.read(trial.start(Path("log")).variables)
    assert message == Message(
        log_dir="log", engine="single", max_steps=20, trace_steps=20, options={"accumulate": 8}
    )
    assert global_batch_options(make_trace(ranks=4, sync_batch_norm=True)) == {"batch_size": 16}
    assert global_batch_options(make_trace(ranks=4, reproducible=4)) == {}
    with pytest.raises(OptionError, match="options of the Trainer, on which this job is not built"):
        global_batch_options(script_trace("float32"))


# What ranks keep.


def test_samples_are_identified_by_their_bytes() -> None:
    one = sample_checksums((torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0])))
    other = sample_checksums(({"x": torch.arange(6.0).view(3, 2)}, torch.tensor([0, 1, 1])))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False]
    assert one[0].split("-")[1] == one[2].split("-")[1]
    assert len(set(one)) == 3
    assert len(sample_checksums((torch.zeros(4, 2), None))) == 4


def test_draws_lists_dropout() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.1)
    modules = (nn.Dropout(), nn.Dropout(0.0), attention, nn.GRU(2, 2, 2, dropout=0.2), nn.ReLU())
    assert [draws(module) for module in modules] == [True, False, True, True, False]


def test_subsample_of_large_models() -> None:
    assert stride([torch.zeros(10, 10)], 40) == 1
    assert stride([torch.zeros(2**20, 2**20, device="meta")], 40) == 1  # which another stage has
    assert stride([torch.zeros(2**20)], KEPT_BYTES // 2**22) == 4
    assert len(subsample(torch.zeros(100, 100), 16)) == 625
    assert len(subsample(torch.zeros(50), 16)) == 50


def test_each_known_cause_has_a_function_that_tells_whether_it_fits() -> None:
    assert all(callable(getattr(causes, known.when)) for known in known_causes())
