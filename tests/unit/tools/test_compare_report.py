"""`compare`: verdicts, tables, the page and its pictures."""

from __future__ import annotations

import csv
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from compared import compared, only, run_of, trials_of, unseen
from matplotlib.figure import Figure
from pages import open_page

from hvd_trainer.tools.compare import heat_map, report
from hvd_trainer.tools.compare.plots import pictures
from hvd_trainer.tools.compare.result import Comparison, TrialResult
from hvd_trainer.tools.runner.records import RunRecord


@pytest.fixture
def made() -> Comparison:
    plan = trials_of(ranks="1,2", engines="horovod,ddp")
    rates = {"horovod x 1": 1000, "ddp x 1": 1000, "horovod x 2": 1800, "ddp x 2": 1500}
    runs = [run_of(p, n, rates[p.label] + 10 * n + (n if p.ranks == 1 else 0)) for n in range(1, 6) for p in plan]
    return compared(plan, [*runs, RunRecord(plan[0].identity, 6, "failed", 1.0, "no such <file>")])


def test_verdicts_say_who_how_much_and_why(made: Comparison) -> None:
    alone, together = made.verdicts()
    assert alone.startswith("On 1 rank no difference between horovod and ddp is visible at this noise: 1.00 times")
    assert together.startswith(
        "On 2 ranks horovod is 1.20 times as fast as ddp (mean of 5 rounds, 97.5 % interval 1.19 to "
    )
    assert "A step of ddp takes 27.43 ms longer: exchanging gradients +27.43 ms." in together
    assert together.endswith("Both have trained the same weights, to the last bit.")
    first, _, two, _ = made.results
    assert first.note == "failed in round 6: no such <file>"
    assert (first.median("startup_s"), first.weights) == (3.5, "abc")
    assert made.figures[two.trial.key]["efficiency"] == pytest.approx(0.885, abs=0.01)


def test_verdicts_compare_engines_in_each_variant() -> None:
    trials = trials_of(ranks="2", engines="horovod,ddp", batch_size="16,32")
    rates = {"horovod x 2, batch size 16": 150.0, "horovod x 2, batch size 32": 100.0}
    runs = [run_of(t, n, rates.get(t.label, 100.0) + n) for t in trials for n in range(1, 6)]
    small, large = compared(trials, runs, batch_size="16,32").verdicts()
    assert small.startswith("On 2 ranks with batch size 16, horovod is 1.4")
    assert large.startswith("On 2 ranks with batch size 32, no difference between horovod and ddp is visible")


def test_script_gets_the_samples_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.touch()
    plan = trials_of(ranks="2", baselines=[f"ddp {script}"])
    found = compared(plan, [run_of(plan[0], 1, 1000), unseen(plan[1])])
    assert found.results[1].median("samples_per_s") == pytest.approx(500)
    (pair,) = found.pairs
    assert pair.speed.value == pytest.approx(2.0)


def test_results_have_medians_and_the_loss_beside_the_first() -> None:
    trials = trials_of(ranks="1,2", batch_size="16,32")
    first, other, third, last = trials
    runs = [run_of(first, number, rate) for number, rate in enumerate((90, 110, 100), 1)]
    runs += [run_of(other, train_loss=0.51), run_of(third, batch=64, train_loss=9.0)]
    runs += [RunRecord(third.identity, 2, "killed", 9.0, "had not ended")]
    found = compared(trials, runs, batch_size="16,32")
    assert [its.state for its in found.results] == ["done", "done", "done", "not run"]
    its, figures = found.results[0], found.figures[first.key]
    assert (len(its.runs), its.median("samples_per_s"), its.median("step_s")) == (3, 100, 2.56)
    assert (figures["lowest"], figures["highest"]) == (90, 110)
    # The third has steps of another size, and so another training.
    losses = [found.figures[trial.key]["loss_to_first"] for trial in trials]
    assert losses == [0, pytest.approx(0.02), 0, None]
    assert found.results[2].note == "killed in round 2: had not ended"
    assert [its.is_complete for its in found.results] == [True, True, False, False]
    assert found.results[3].trial is last


def test_last_run_of_a_round_counts() -> None:
    trials = trials_of(ranks="1,2,3", stages="1,2")
    failed = RunRecord(trials[0].identity, 1, "failed", 1.0, "out of memory")
    its = TrialResult.of(trials[0], [failed])
    assert (its.state, its.note) == ("failed", "failed in round 1: out of memory")
    its, *others = compared(trials, [failed, run_of(trials[0])], stages="1,2").results
    assert (its.state, its.note) == ("done", "")
    assert [other.state for other in others] == ["impossible", "not run", "not run", "not run", "impossible"]


# Reports.


def test_pictures_leave_out_unknown_figures() -> None:
    """An empty picture once had a warning about its missing names."""
    trial = only(ranks="2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pictures(compared([trial], [unseen(trial)])) == []


@pytest.mark.parametrize("width", [390, 1200])
def test_page_in_a_browser(made: Comparison, browser: Any, tmp_path: Path, width: int) -> None:
    """On a telephone and on a desk: nothing is wider than the window, and nothing is loaded or goes wrong."""
    report.show(made, tmp_path)
    page = open_page(browser, tmp_path / "comparison.html", width)
    assert page.locator("figure svg").count() == 5
    for svg in page.locator("figure svg").all():
        box = svg.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    # Letters of the pictures are to be read on a telephone, too.
    sizes = page.evaluate("[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)")
    assert min(sizes) > 8
    text = page.inner_text("body")
    assert "On 2 ranks horovod is 1.20 times as fast as ddp" in text
    assert "horovod x 1: failed in round 6: no such <file>" in text
    assert "exchanging gradients" in page.locator("figure svg").nth(3).inner_html()
    printed = tmp_path / "page.pdf"
    page.pdf(path=str(printed), format="A4")
    assert printed.read_bytes().count(b"/Type /Page\n") <= 4


def grid() -> Comparison:
    axes = {"stages": "1,2", "chunks": "2,4", "batch_size": "16,32"}
    trials = trials_of(ranks="1,2", **axes)
    done = [trial for trial in trials if trial.reason is None][:-1]
    runs = [run_of(t, rate=1000.0 + 7 * n, batch=32, bubble=0.4) for n, t in enumerate(trials) if t in done]
    return compared(trials, [*runs, RunRecord(trials[-1].identity, 1, "failed", 1.0, "out of memory")], **axes)


def test_report_names_trials_without_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report.show(grid(), tmp_path)
    text = capsys.readouterr().out
    assert re.search(r"ddp +2 +2 +2 +16 +1,084 ", text)
    assert re.search(r"ddp +2 +2 +2 +16 .* 40\.0% +33\.3%", text)
    assert re.search(r"ddp +1 +2 +2 +16 +- .* impossible", text)
    assert re.search(r"ddp +2 +2 +4 +32 .* failed *$", text, re.MULTILINE)
    assert re.search(
        r"^ddp x 1, stages 2, chunks 2, batch size 16; .* and 1 more: impossible: --stages 2 does not divide the ",
        text,
        re.MULTILINE,
    )
    assert "\nddp x 2, stages 2, chunks 4, batch size 32: failed in round 1: out of memory\n" in text
    assert "by more than 10% in " in text
    assert re.search(
        r"^  ddp x 2, stages 2, chunks 4, .* ms \(\+\d+%\) from ddp x 1, stages 1.*\n"
        r"    stages waited, sent and received for 40% of it and not 20%: \+33%; all else: \+\d+%$",
        text,
        re.MULTILINE,
    )
    with (tmp_path / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == [its.state for its in grid().results]
    assert rows[0]["samples_per_s"] == "1000.0"
    page = (tmp_path / "comparison.html").read_text()
    assert "Heat map: throughput, samples/s" in page
    assert "from ddp x 1, stages 1" in page
    # Heat maps of the page once were saved without their style: letters were shapes, and names random.
    assert re.search(r"<text [^>]*>1,084</text>", page)
    report.show(grid(), tmp_path)
    assert (tmp_path / "comparison.html").read_text() == page
    assert json.loads((tmp_path / "comparison.json").read_text())["varied"]["chunks"] == ["2", "4"]


def test_long_heading_stays_in_the_picture() -> None:
    """It was cut at both ends."""
    figure = Figure(figsize=(4.5, 2.6))
    heat_map.set_heading(figure, "imdb --d-model 512 --d-hid 2048 --sequence-length 64, batch size 16, " * 3)
    place = figure.texts[0].get_window_extent()
    assert place.x0 > 0
    assert place.x1 < figure.bbox.width
    assert figure.get_figheight() > 2.6


def test_heat_maps_have_a_panel_for_ranks_and_stages(tmp_path: Path) -> None:
    comparison = grid()
    across, up = heat_map.inner_axes(comparison.axes)
    assert (across.name, up.name) == ("chunks", "batch_size")
    panels = heat_map.panels_of(comparison.results, comparison.axes, across, up)
    assert list(panels) == [f"ranks {r}, stages {s}" for r in (1, 2) for s in (1, 2)]
    assert [len(results) for results in panels.values()] == [4] * 4
    files, element = heat_map.write(comparison, heat_map.QUANTITIES[0], "a heading", tmp_path)
    assert ("a heading" in element, element.startswith("<svg")) == (False, True)
    assert [file.name for file in files] == ["throughput.png", "throughput.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    drawn = files[1].read_text()
    for its in comparison.results:
        rate = its.median("samples_per_s")
        assert rate is None or f">{rate:,.0f}<" in drawn
    for text in ("a heading", "impossible", "failed", "batch size", "throughput, samples/s"):
        assert f">{text}<" in drawn
    assert "<pattern" in drawn  # the hatching
    assert heat_map.write(comparison, heat_map.QUANTITIES[1], "no figures", tmp_path) == ([], "")


def test_heat_maps_of_other_axes() -> None:
    """The memory of a model: no chunks, no batch sizes."""
    axes = {"precision": "fp32,bf16", "shard": "none,optimizer,full"}
    trials = trials_of(ranks="2", engines="ddp,horovod", **axes)
    across, up = heat_map.inner_axes(compared(trials, [], **axes).axes)
    assert (across.name, up.name) == ("shard", "precision")
    across, up = heat_map.inner_axes(compared(trials_of(ranks="1,2"), []).axes)
    assert (across.name, up.name) == ("ranks", "")
