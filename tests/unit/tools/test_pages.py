"""Pages of all tools in a real browser: on a telephone and on a desk, light and dark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from compared import RAN, compared, publish, run_of, trials_of
from made_traces import make_trace, multiply
from pages import find_barriers, open_page

from hvd_trainer.cli import main
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.stack_record import MAIN, Frame, Record, StackCount
from hvd_trainer.tools.diagnose.evidence import Evidence
from hvd_trainer.tools.diagnose.profile import RankProfile
from hvd_trainer.tools.diagnose.report import Diagnosis, conclude
from hvd_trainer.tools.parity import report as parity
from hvd_trainer.tools.parity.comparison import Pair
from hvd_trainer.tools.show import DISPLAYS
from hvd_trainer.tools.verify_resume.kills import Killed
from hvd_trainer.tools.verify_resume.report import Campaign


def write_comparison(folder: Path) -> Path:
    plan = trials_of(ranks="1,2", backends="horovod,ddp")
    rates = {"horovod x 1": 1000, "ddp x 1": 1000, "horovod x 2": 1800, "ddp x 2": 1500}
    runs = [run_of(trial, n, rates[trial.label] + 10 * n * trial.ranks) for n in range(1, 3) for trial in plan]
    publish(compared(plan, runs), folder)
    return folder / "comparison.html"


def write_diagnosis(folder: Path) -> Path:
    """One of two ranks sleeps in this file, and the other waits for it."""
    loop = Frame("/x/hvd_trainer/training/loop.py", 83, "TrainingLoop._train_epoch", "run.step", "hvd_trainer")
    module = Frame("/v/site-packages/torch/nn/modules/module.py", 9, "Module._call_impl", "call", "library")
    sleep = Frame(__file__, 40, "Save.on_step_end", "time.sleep", "user")
    parts = {"forward": ([0, 1], 0.01, 1.0), "callback": ([0, 2], 0.05, 0.0), "collective": ([0], 0.05, 0.0)}

    def rank(*phases: str) -> RankProfile:
        shown = [(phase, *parts[phase]) for phase in phases]
        stacks = [
            StackCount(MAIN, phase, frames, 50 * s, 50 * s * cpu, looks=9, squares=50 * s**2)
            for phase, frames, s, cpu in shown
        ]
        known: dict[str, Any] = {"uses_gpu": False, "blocks": 50, "elements": 5000, "cpu_s": 0.5, "system_s": 0.0}
        known |= {"major_faults": 0, "queued_s": 0.0, "durations": [0.06] * 50, "seconds": 3.0}
        return RankProfile([Record(**known, frames=[loop, module, sleep], stacks=stacks)])

    normal = MeasuredTrial(job=["train.py"], engine="ddp", ranks=2)
    evidence = Evidence(profiles=[rank("forward", "callback"), rank("forward", "collective")], cores=2)
    conclude(Diagnosis(ran=RAN, evidence=evidence, normal=normal)).write(folder, "diagnosis")
    return folder / "diagnosis.html"


def write_parity(folder: Path) -> Path:
    pair = Pair.compare(make_trace("horovod"), make_trace("ddp", {"step 2": multiply(2, "gradients")}))
    parity.conclude([], [pair], folder, [], RAN).write(folder, "parity")
    return folder / "parity.html"


def write_resume(folder: Path) -> Path:
    kills = [Killed("rank 1", 5, 4.0, 0, "last.pt"), Killed("the launcher", 4, 3.0, 0)]
    Campaign(kills, 3, last_steps=9, last_s=3.3, same=True).report(RAN).write(folder, "resume")
    return folder / "resume.html"


def write_runs(folder: Path) -> Path:
    """Two runs, of which one was started again, and has failed then."""
    for number, name in enumerate(("first", "second")):
        (folder / name / "failures").mkdir(parents=True)
        known = {"backend": "ddp", "world_size": 2, "lr": 0.1}
        with (folder / name / "metrics.jsonl").open("w") as lines:
            for step in range(1, 11):
                times = {"time": 1e9 + 60 * step, "started_at": 1e9 + (300 if step > 5 else 0)}
                at = {"epoch": 1 + step // 6, "step": step, **times}
                event = "epoch" if step % 5 == 0 else "step"
                figures = {
                    "train_loss": 1 / (step + number),
                    "val_loss": 1.5 / (step + number),
                    "samples_per_s": 90.0 + step,
                }
                lines.write(json.dumps({"event": event, **known, **at, **figures}) + "\n")
            if number == 0:
                lines.write(json.dumps({"event": "end", **known, **at, **figures, "peak_memory_mb": 300.0}) + "\n")
                lines.write(
                    '{"event": "step", "step": 99, "started_at": "yesterday"}\n'
                    '{"event": "step", "step": 98, "started_at": 1.0}\n[1]\n{"event": "step", "torn'
                )
        (folder / name / "config.yaml").write_text(yaml.safe_dump({"lr": 0.1 + number, "seed": 1}))
    (folder / "second" / "failures" / "stall.txt").touch()
    assert main(["show", str(folder / "first"), str(folder / "second"), "--out", str(folder / "out")]) == 0
    return folder / "out" / "show.html"


PAGES: dict[str, Callable[[Path], Path]] = {
    "compare": write_comparison,
    "diagnose": write_diagnosis,
    "parity": write_parity,
    "verify-resume": write_resume,
    "show": write_runs,
}
ANSWERS = {
    "compare": "TOO FEW ROUNDS",
    "diagnose": "83% OF A STEP",
    "parity": "DIFFERENT IN STEP 2",
    "verify-resume": "NOTHING LOST",
    "show": "LOWEST VAL LOSS 0.1364",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in DISPLAYS:
            patch.delenv(name, raising=False)
        yield {name: write(tmp_path_factory.mktemp(name)) for name, write in PAGES.items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_answer_is_above_the_fold(written: dict[str, Path], browser: Any, width: int, scheme: str) -> None:
    for name, file in written.items():
        page = open_page(browser, file, width, scheme)
        assert page.locator("header .badge").inner_text() == ANSWERS[name]
        assert page.title().startswith(ANSWERS[name])
        page.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == width, name
        # Letters of the pictures are to be read on a telephone, too.
        letters = "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)"
        assert min(page.evaluate(letters), default=9) > 8, name
        if width == 1280:
            page.pdf(path=str(file.with_suffix(".pdf")), format="A4")
            assert file.with_suffix(".pdf").read_bytes().count(b"/Type /Page\n") <= 4, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_keeps_people_from_reading(written: dict[str, Path], browser: Any, name: str, scheme: str) -> None:
    page = open_page(browser, written[name], 400, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
    assert find_barriers(page) == []


def test_steps_are_whole_numbers(written: dict[str, Path]) -> None:
    """They were drawn between ticks at 1.5."""
    chart = written["parity"].read_text()
    assert "first difference</text>" in chart
    assert not re.search(r">[1-3]\.5</text>", chart)


def test_each_run_has_a_colour_and_training_a_dash(written: dict[str, Path]) -> None:
    """Training and validation of two runs had four colours, of which none told what belongs together."""
    page = written["show"].read_text()
    chart = page.partition(">loss</h3>")[2].partition("</figure>")[0]
    lines = re.findall(r'<path d="[^"]*" clip-path="[^"]*" style="([^"]*)"', chart)
    lines = [style for style in lines if "#0072b2" in style or "#d55e00" in style]
    assert [("#0072b2" in style, "dasharray" in style) for style in lines] == [
        (True, False),
        (True, True),
        (False, False),
        (False, True),
    ]
    assert "second has the lowest val loss, 0.1364, beside 0.15 of first." in page
    assert re.search(r"<details open><summary>Options that differ", page)


def test_values_are_shown_under_the_mouse(written: dict[str, Path], browser: Any) -> None:
    for name, said in (
        ("show", "training, second, step 1: 0.5"),
        ("parity", "ddp, step 3: 0.333333"),
        ("compare", "horovod, ranks 2: 1830"),
    ):
        page = open_page(browser, written[name], 1280, "light")
        drawn = page.locator("circle.value", has_text=said).first.bounding_box()
        chart = page.locator("figure > svg", has_text=said).first.bounding_box()
        assert chart["x"] < drawn["x"] < chart["x"] + chart["width"]
        assert chart["y"] < drawn["y"] < chart["y"] + chart["height"]


def test_runs_are_shown_with_what_happened(written: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = written["show"].read_text()
    for text in (">loss<", ">samples per second<", ">learning rate<", "> restart<", "Options that differ"):
        assert text in page
    assert "first: 10 steps, train loss 0.1, val loss 0.15." in page
    assert "started_at" not in page
    assert main(["show", str(written["show"].parent / "third")]) == 2
    assert "third has no metrics.jsonl" in capsys.readouterr().err


def test_a_damaged_run_is_shown_as_far_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list for options, and a word for a figure that another run has, ended it with a traceback."""
    for name in DISPLAYS:
        monkeypatch.delenv(name, raising=False)
    for name, loss in (("good", 0.5), ("damaged", "low")):
        (tmp_path / name).mkdir()
        line = {"event": "step", "step": 1, "time": 1e9, "started_at": 1e9, "train_loss": loss}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / name / "config.yaml").write_text("- a list\n")
    assert main(["show", str(tmp_path / "good"), str(tmp_path / "damaged"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "show.md").read_text()
    assert "| train_loss | 0.5 | - |" in text
    assert "damaged: 1 step so far.**" in text
