"""Test `python -m hvd_trainer estimate`: the formula, fits to planted costs, and answers that cannot be known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_trainer import cli
from hvd_trainer.errors import OptionError
from hvd_trainer.tools.compare import report as compare_report
from hvd_trainer.tools.compare.result import Comparison
from hvd_trainer.tools.compare.trials import Entry, make_trials
from hvd_trainer.tools.compare.variants import Axis, make_variants
from hvd_trainer.tools.estimate.cli import Options, estimate
from hvd_trainer.tools.estimate.fit import PRIORS, fit, interval
from hvd_trainer.tools.estimate.held_out import (
    Errors,
    Guess,
    guess_extremes,
    guess_groups,
    guess_large,
    guess_tables,
)
from hvd_trainer.tools.estimate.model import (
    BACKWARD_FRACTION,
    INNER_LATENCY_FRACTION,
    Costs,
    Setup,
    expected_maximum,
    predict_exchange,
    predict_step,
)
from hvd_trainer.tools.estimate.points import (
    SHIPPED_FILE,
    Point,
    count_pieces,
    published_points,
    published_series,
    read_points,
)
from hvd_trainer.tools.estimate.projection import Scope, new_cluster_factor, published_near
from hvd_trainer.tools.runner.records import RunRecord

NOTHING = Costs(0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
"""No cost but the link's own."""
COSTS = Costs(1e-3, 1e-4, 1.2, 1e-9, 0.8, 1.0, 0.03)
SETUP = Setup(4, 2, 10.0, 0.1, 1e8, 4)
EXAMPLE = "--hosts 64 --gpus-per-host 8 --link-gbit 100"


# The formula.


def test_one_rank_and_a_perfect_link_lose_nothing() -> None:
    assert predict_step(replace(SETUP, hosts=1, ranks_per_host=1), COSTS).efficiency == 1
    assert predict_step(replace(SETUP, link_gbit=inf), NOTHING).efficiency == 1


def test_ring_equals_hand_computation() -> None:
    """Compute 4 hosts with 8 ranks: 14 messages one after the other, 6 of them over the link; 14/8 of the
    bytes.
    """
    latency, bandwidth = predict_exchange(replace(SETUP, delay_s=0.001), COSTS)
    assert latency == pytest.approx((4 + 1) * (6 * 1.1e-3 + 8 * INNER_LATENCY_FRACTION * 1e-4))
    assert bandwidth == pytest.approx(14 / 8 * 1e8 * (1e-9 + 1.2 * 8 / 10e9))


def test_tree_is_taken_where_it_is_faster() -> None:
    few, many = replace(SETUP, sent_bytes=4e5, trees=True), replace(SETUP, hosts=2, trees=True)
    assert predict_exchange(few, COSTS)[0] == pytest.approx(5 * 2 * (2 * 1e-4 + INNER_LATENCY_FRACTION * 1e-4))
    assert predict_exchange(many, COSTS) == predict_exchange(replace(many, trees=False), COSTS)


def test_overlap_is_bounded_by_backward_and_pieces() -> None:
    quick = replace(SETUP, link_gbit=100.0, sent_bytes=1e7)
    all_hidden = COSTS._replace(overlap=1.0)
    its = predict_step(quick, all_hidden)
    assert its.latency_s + its.bandwidth_s == pytest.approx(sum(predict_exchange(quick, COSTS)) / 4)
    slow = replace(SETUP, link_gbit=1.0)
    its = predict_step(slow, all_hidden)
    assert its.latency_s + its.bandwidth_s == pytest.approx(
        sum(predict_exchange(slow, COSTS)) - BACKWARD_FRACTION * 0.1
    )
    last_pass = predict_step(replace(slow, passes=4), all_hidden)
    assert last_pass.bandwidth_s > its.bandwidth_s


def test_efficiency_falls_with_ranks_and_rises_with_the_link() -> None:
    for trees in (False, True):
        by_hosts = [
            predict_step(replace(SETUP, hosts=hosts, trees=trees), COSTS).efficiency for hosts in range(1, 200)
        ]
        assert by_hosts == sorted(by_hosts, reverse=True)
    by_link = [
        predict_step(replace(SETUP, link_gbit=gbit), COSTS).efficiency for gbit in (0.1, 1.0, 10.0, 100.0, inf)
    ]
    assert by_link == sorted(by_link)


def test_expected_maximum() -> None:
    """Stay below the asymptote sqrt(2 ln n)."""
    assert expected_maximum(1) == pytest.approx(0.0)
    drawn = np.random.default_rng(0).normal(size=(20_000, 8)).max(axis=1).mean()
    assert expected_maximum(8) == pytest.approx(drawn, rel=0.02)
    assert [expected_maximum(n) / sqrt(2 * log(n)) for n in (8, 10**3, 10**6)] == pytest.approx(
        [0.70, 0.87, 0.92], abs=0.01
    )


# Fitting.


def make_points(noise: float, costs: Costs = COSTS) -> tuple[Point, ...]:
    """Make steps of Gloo on 2 to 4 hosts over four links, by the formula with some noise."""
    generator = np.random.default_rng(3)
    points = []
    for hosts in (2, 3, 4):
        for link, delay_s in ((inf, 0.0), (1.0, 1e-3), (0.2, 5e-3), (0.1, 0.0)):
            for sent in (1e6, 5e6):
                setup = Setup(hosts, 1, link, 0.03, sent, 1, delay_s=delay_s)
                seconds = predict_step(setup, costs).total_s * float(np.exp(generator.normal(0, noise)))
                label = f"{hosts} hosts, {link} Gbit/s, {sent:.0f} bytes"
                points.append(Point("ddp", setup, seconds, label, label))
    return tuple(points)


def test_fit_finds_planted_costs() -> None:
    wanted = Costs(2e-3, 5e-4, 1.4, 4e-9, 0.5, 2.0, 0.05)
    found = fit(make_points(0.02, wanted), "cpu")
    for name in ("latency_s", "link_factor", "byte_s", "rounds"):
        assert getattr(found.costs, name) == pytest.approx(getattr(wanted, name), rel=0.35), name
    assert found.costs.link_factor == pytest.approx(1.4, rel=0.05)
    assert found.noise < 0.03
    assert all(cost >= 0 for cost in found.costs)


def test_undetermined_costs_keep_their_prior() -> None:
    """Keep the overlap's prior where there is one piece: nothing can be hidden, so no point has it."""
    overlap = Costs._fields.index("overlap")
    assert fit(make_points(0.02), "cpu").covariance[overlap, overlap] == pytest.approx(1.0, rel=0.05)
    link = Costs._fields.index("link_factor")
    assert fit(make_points(0.02), "cpu").covariance[link, link] < 0.05
    assert fit((), "gpu").costs.link_factor == pytest.approx(PRIORS["gpu"]["link_factor"].typical)


def test_interval_widens_with_uncertainty() -> None:
    fitted = fit(make_points(0.02), "cpu")
    setup = replace(SETUP, hosts=2)
    narrow, wide = interval(setup, fitted, 0.01), interval(setup, fitted, 0.1)
    assert wide[0] < narrow[0] < predict_step(setup, fitted.costs).efficiency < narrow[1] < wide[1] <= 1
    known = fitted.with_known("spread", 0.2, 0.25)
    assert known.costs.spread == 0.2
    assert {round(costs.overlap, 9) for costs in known.draws} != {round(known.costs.overlap, 9)}


def test_held_out_errors_equal_noise() -> None:
    errors = Errors.summarize(guess_groups(make_points(0.03), "cpu"))
    assert errors.number == 24
    assert errors.median < 0.04
    assert errors.is_better
    assert errors.inside >= 18
    edges = guess_extremes(make_points(0.0), "cpu")
    assert set(edges) == {"the most hosts", "the slowest link"}
    assert all(Errors.summarize(guesses).largest < 0.15 for guesses in edges.values())


def test_errors_are_relative_to_speed() -> None:
    point = make_points(0.0)[0]
    guess = Guess(point, 0.9 * point.efficiency, 0.0, 1.0, from_host=point.efficiency)
    assert guess.error == pytest.approx(-0.1)
    assert guess.linear_error == pytest.approx(1 / point.efficiency - 1)
    assert guess.from_host_error == 0


# Published tables.


def test_published_figures_equal_sources() -> None:
    """Compare with the speed-ups that DLPerf prints beside its tables, and Horovod's three percentages."""
    printed = {
        ("pytorch/examples", 32): 30.00,
        ("TensorFlow 1", 32): 26.25,
        ("MXNet", 32): 26.74,
        ("MXNet", 16): 14.59,
        ("NVIDIA", 32): 29.72,
        ("NVIDIA AMP", 32): 28.09,
        ("NVIDIA, batch 32", 32): 24.13,
        ("NVIDIA, batch 48", 16): 12.99,
    }
    found = {(s.code, p.setup.ranks): p.efficiency * p.setup.ranks for s in published_series() for p in s.points}
    for name, speed_up in printed.items():
        assert found[name] == pytest.approx(speed_up, abs=0.006), name
    assert [p.efficiency for p in published_points("horovod") if p.setup.ranks == 512] == pytest.approx(
        [0.9, 0.9, 0.68]
    )


def test_model_and_linear_guess_on_published_tables() -> None:
    """Beat the linear guess on DLPerf's 16 and 32 GPUs, and report that it is better on two of Horovod's three."""
    for engine, within in (("ddp", 0.03), ("horovod", 0.08)):
        errors = Errors.summarize(guess_tables(engine))
        assert errors.median < within
        assert errors.is_better
        harder = [abs(guess.from_host_error or 0) for guess in guess_tables(engine)]
        assert errors.median < sorted(harder)[len(harder) // 2]
    assert not Errors.summarize(guess_large("horovod")).is_better
    assert guess_large("ddp") == []
    assert new_cluster_factor() > 1


def test_published_near() -> None:
    setup = Setup(4, 8, 100.0, 0.36, 1.02e8, 4, trees=True)
    assert published_near("ddp", setup) == ["94% pytorch/examples", "93% NVIDIA", "88% NVIDIA AMP"]
    assert published_near("ddp", replace(setup, sent_bytes=1e10)) == []
    assert published_near("horovod", replace(setup, hosts=64))[0] == "90% Horovod, Inception V3 at 25 Gbit/s"


# Points.


def make_entry(**changed: Any) -> dict[str, Any]:
    return {
        "backend": "ddp",
        "hosts": 2,
        "ranks_per_host": 1,
        "link_mbit": 100.0,
        "delay_ms": 5.0,
        "compression": "none",
        "accumulation": 1,
        "batch_size": 64,
        "gradient_mb": 4.0,
        "num_tensors": 6,
        "step_ms": [400.0, 420.0, 410.0],
        "compute_ms": 30.0,
        "loss": 1.0,
        "samples": 640,
    } | changed


def write_points(file: Path, *entries: Any, **others: Any) -> str:
    file.write_text(json.dumps({"format": 1, "machine": "a test", "points": list(entries)} | others))
    return str(file)


def test_read_points(tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    write_points(
        *(file, make_entry(), make_entry(link_mbit=None, delay_ms=0.0, compression="bf16", accumulation=4)),
        *(make_entry(compression="powersgd"), make_entry(compute_ms=None), make_entry(hosts=1)),
    )
    its = read_points(file)
    one, other = its.points
    assert one.setup == Setup(2, 1, 0.1, 0.03, 4 * 2**20, 1, delay_s=0.005)
    assert (one.step_s, one.label) == (0.41, "2 x 1 ranks, 100 Mbit/s, 5 ms, 4 MB")
    assert other.setup == Setup(2, 1, inf, 0.03, 2 * 2**20, 1, passes=4)
    assert other.label == "2 x 1 ranks, no limit, bf16, 4 passes, 4 MB"
    assert its.describe() == "2 points, 2 left out (PowerSGD, or not timed alone), on a test"
    assert (count_pieces(97.5), count_pieces(97.5, 2), count_pieces(0.1)) == (4, 2, 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read .No such file"),
        ("{}", "is no file of points"),
        ('{"format": 2}', "has format 2, and 1 is known here"),
        ('{"format": 1, "machine": "m", "points": []}', "has no point with two ranks"),
        (
            json.dumps({"format": 1, "machine": "m", "points": [make_entry(compute_ms=0.0)]}),
            "> 0.0 - at `\\$.points\\[0\\].compute_ms`",
        ),
        (json.dumps({"format": 1, "machine": "m", "points": [make_entry(step_ms=[])]}), "is no file of points"),
    ],
)
def test_invalid_points_files_are_refused(tmp_path: Path, content: str | None, says: str) -> None:
    file = tmp_path / "points.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError, match=says) as caught:
        read_points(file)
    assert "benchmarks.slow_link" in str(caught.value)


def test_shipped_points_have_both_engines_on_several_links() -> None:
    its = read_points(SHIPPED_FILE)
    for engine in ("horovod", "ddp"):
        scope = Scope.from_points(engine, its.points_of(engine), "them", 1.0)
        assert scope.ranks >= 3
        assert scope.slowest_gbit < scope.fastest_gbit
        errors = Errors.summarize(guess_groups(its.points_of(engine), "cpu"))
        assert errors.is_better


# What is typed.

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run_estimate(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `python -m hvd_trainer estimate ...` in this process; return its exit code and what it printed."""

    def call(words: str) -> tuple[int, str]:
        code = cli.main(["estimate", *words.split()])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def test_example_of_the_readme(run_estimate: Run) -> None:
    code, out = run_estimate(EXAMPLE)
    assert code == 0
    for words in (
        "ResNet-50 as published (DLPerf: 354.4 images/s on one V100), batch 128: 361 ms per pass",
        "beside it, published",
        "94% pytorch/examples",
        "horovod on 512 ranks: 8",
        "ddp on 512 ranks: cannot know: 512 ranks are 16 times the 32 where the published tables for ddp",
        "The model is WORSE than the linear guess there.",
        "each set-up from all others",
        "Measured: ",
    ):
        assert words in out


def test_json_document(run_estimate: Run) -> None:
    code, out = run_estimate(f"{EXAMPLE} --json --engine ddp --hosts 8")
    assert code == 0
    document = json.loads(out)
    *_, last = document["rows"]
    assert [row["hosts"] for row in document["rows"]] == [1, 2, 4, 8]
    assert (last["ranks"], last["linear"], last["cannot_know"]) == (64, 1.0, [])
    assert 0.6 < last["low"] < last["efficiency"] < last["high"] <= 1
    # Nobody has published as many: less is sure.
    widths = [row["high"] - row["low"] for row in document["rows"]]
    assert widths == sorted(widths)
    assert last["samples_per_s"] == pytest.approx(64 * 354.4 * last["efficiency"])
    assert {trial["title"].partition(",")[0] for trial in document["held_out"]} == {"ddp"}


def test_compression_and_accumulation_lose_less(run_estimate: Run) -> None:
    def efficiency(more: str = "") -> float:
        out = run_estimate(f"--hosts 4 --gpus-per-host 8 --link-gbit 25 --engine horovod --json {more}")[1]
        return float(json.loads(out)["rows"][-1]["efficiency"])

    plain = efficiency()
    assert efficiency("--compression fp16") > plain
    assert efficiency("--accumulation 4") > plain
    assert efficiency("--latency-us 5000") < plain


def test_job_from_figures(run_estimate: Run) -> None:
    figures = "--step-ms 100 --parameters-mb 50 --hosts 2 --gpus-per-host 8 --link-gbit 50 --engine ddp"
    code, out = run_estimate(figures)
    assert code == 0
    assert "a job of your own: 100 ms per pass of one rank alone, 50 MB of gradients" in out
    assert "samples/s" not in out.partition("Held out")[0]
    assert "samples/s" in run_estimate(f"{figures} --batch-size 32")[1]


SMALL = "--hosts 2 --gpus-per-host 8"
LINKED = f"{SMALL} --link-gbit 100"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (SMALL, 1, "how fast 2 hosts reach each other: type --link-gbit"),
        (f"{LINKED} --batch-size 32", 1, "it is known at 128: type --step-ms or --images-per-s"),
        (f"{LINKED} --images-per-s 9", 1, "how long a pass takes at 9 images/s: type --batch-size"),
        (f"{LINKED} --parameters-mb 9", 1, "how long a rank alone takes for such a batch"),
        (f"{LINKED} --step-ms 9", 1, "how many bytes are exchanged: type --parameters-mb"),
        (f"{LINKED} --compression powersgd", 1, "and the loss that it gives on so many ranks"),
        (f"{SMALL} --link-gbit 1", 1, "1 Gbit/s is 100 times slower than the 100 of the published tables"),
        (f"{SMALL} --link-gbit 1600", 1, "a link of 1600 Gbit/s is 16 times faster than the 100"),
        (
            *("--hosts 256 --gpus-per-host 8 --link-gbit 100", 1),
            "2048 ranks are 4 times the 512 where the published tables for horovod end, and how Horovod's ranks",
        ),
        (
            *(f"{LINKED} --step-ms 5 --parameters-mb 1000", 1),
            "gradients are on this link for 3145.7% of the time that computing takes",
        ),
        (
            *("--hosts 64 --gpus-per-host 1 --link-gbit 0.1 --device cpu", 1),
            " where the measured points for ddp end, and nothing here tests the formula more than",
        ),
        ("--hosts 0 --gpus-per-host 8", 2, "--hosts must be 1 or more, not 0"),
        (f"{SMALL} --link-gbit 0", 2, "--link-gbit must be more than 0"),
        (f"{SMALL} --step-ms 1 --images-per-s 2", 2, "say the same: type one"),
        (f"{SMALL} --from x.json --batch-size 2", 2, "has the job's figures already: leave out --batch-size"),
        (f"{SMALL} --from x.json", 2, "--from x.json cannot be read"),
        (f"{SMALL} --fit x.json", 2, "--fit x.json cannot be read"),
    ],
)
def test_unknowable_and_refused(run_estimate: Run, words: str, code: int, says: str) -> None:
    found, out = run_estimate(words)
    assert found == code
    assert says in out
    assert ("cannot know" in out) == (code == 1)


def test_points_without_an_engine(tmp_path: Path, run_estimate: Run) -> None:
    file = write_points(tmp_path / "points.json", make_entry(), make_entry(link_mbit=1000.0), make_entry(hosts=3))
    words = "--hosts 2 --gpus-per-host 1 --link-gbit 0.1 --device cpu --fit"
    code, out = run_estimate(f"{words} {file} --engine horovod")
    assert (code, "has no points of horovod on several hosts" in out) == (1, True)
    code, out = run_estimate(f"{words} {file}")
    assert (code, "horovod on" in out) == (0, False)
    assert "ddp on 2 ranks: " in out
    gpu = write_points(tmp_path / "gpu.json", make_entry(), make_entry(hosts=3), device="gpu")
    assert "was measured on a gpu, the job computes on a cpu" in run_estimate(f"{words} {gpu}")[1]
    code, out = run_estimate(f"--hosts 2 --gpus-per-host 1 --link-gbit 0.1 --fit {gpu}")
    assert "Costs: fitted to steps that were timed." in out
    assert "Measured: 2 points, on a test." in out


# From a comparison.


def write_comparison(file: Path, ranks: Sequence[int] = (1, 2), device: str = "cuda") -> str:
    """Write the part of `compare`'s file that is read."""
    work = {"batch_size": 64, "passes": 2, "parameters": 25_000_000, "device": device}
    runs = [
        {
            "identity": {"engine": engine, "ranks": number},
            "state": "done",
            "figures": {"work": work, "step_p50_s": seconds, "step_p95_s": 1.0329 * seconds},
        }
        for engine, seconds in (("horovod", 0.4), ("ddp", 0.44))
        for number in ranks
    ]
    file.write_text(json.dumps({"job": ["-m", "my_job"], "runs": runs}))
    return str(file)


def test_job_from_comparison(tmp_path: Path, run_estimate: Run) -> None:
    file = write_comparison(tmp_path / "c.json")
    code, out = run_estimate(f"{LINKED} --from {file}")
    assert code == 0
    assert "-m my_job, batch 64: 200 and 220 ms per pass of one rank alone, which vary by 2.0%" in out
    document = json.loads(run_estimate(f"{LINKED} --json --from {file}")[1])
    computing = {row["engine"]: row["formula"]["compute_s"] for row in document["rows"]}
    assert computing == {"horovod": 0.2, "ddp": 0.22}
    assert document["costs"]["ddp"]["spread"] == pytest.approx(0.02)
    cpu = write_comparison(tmp_path / "cpu.json", device="cpu")
    # On CPUs it follows from what was measured here, which nobody has at such a speed of computing.
    assert "fitted to" in run_estimate(f"--hosts 2 --gpus-per-host 1 --link-gbit 1 --from {cpu}")[1]
    for words, says in (
        (write_comparison(tmp_path / "two.json", ranks=[2]), "has no run on one rank"),
        (write_points(tmp_path / "points.json", make_entry()), "is no comparison"),
        (f"{cpu} --device gpu", "was measured on a cpu, whose steps say"),
    ):
        code, said = run_estimate(f"{LINKED} --from {words}")
        assert (code, says in said) == (2, True)


@pytest.mark.parametrize("work", [{"batch_size": 128, "passes": 1}, {"global_batch_size": 128, "world_size": 1}])
def test_from_reads_the_format_of_compare(tmp_path: Path, work: dict[str, Any]) -> None:
    """Read a file that `compare`'s own code has written, of a job and of a script."""
    variants = make_variants(("-m", "hvd_trainer.mnist"), [])
    (trial,) = make_trials([Entry("ddp", "ddp")], [1], variants, threads=1, conditions={"warmup_steps": 0})
    work |= {"parameters": 21_840, "device": "cpu", "steps": 10}
    figures = {"work": work, "step_p50_s": 0.02, "step_p95_s": 0.025, "first_step_at": 1.0}
    run = RunRecord(trial.identity, 1, "done", 1.0, figures=figures)
    its = Comparison.of([trial], [run], job=("-m", "hvd_trainer.mnist"), machine={})
    file = tmp_path / "comparison.json"
    file.write_text(compare_report.make_report(its).json())
    report = estimate(Options(hosts=1, gpus_per_host=2, from_=file), read_points(SHIPPED_FILE))
    assert report.job.pass_s == {"horovod": 0.02, "ddp": 0.02}
    with pytest.raises(OptionError, match="Type --from"):
        read_points(file)
    varied = Comparison.of([trial], [run], job=("-m", "x"), machine={}, varied=[Axis("seed", ("1",))])
    file.write_text(compare_report.make_report(varied).json())
    with pytest.raises(OptionError, match="has several values of options"):
        estimate(Options(hosts=1, gpus_per_host=2, from_=file), read_points(SHIPPED_FILE))
