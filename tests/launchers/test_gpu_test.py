"""`make gpu-test` on a machine without a GPU; and its tests, on the pretend device."""

from __future__ import annotations

import os
import shlex
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import documents
import pytest
import ways_to_train
from gpu.report import markdown
from launchers import REPOSITORY, Result, launch
from pretend import build, startup

from hvd_trainer.config.parser import parse
from hvd_trainer.jobs.options import ImdbOptions, MnistOptions

needs_compiler = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def commands() -> list[str]:
    return [command for command in documents.commands() if "gpu-test" in command or "tests/gpu" in command]


@pytest.mark.parametrize("command", commands())
def test_documented_command_without_a_gpu_says_so(command: str, tmp_path: Path) -> None:
    words = [word for word in shlex.split(command) if "=" not in word or word.startswith("GPU_ARGS")]
    if words[0] == "make":
        environ = {name: value for name, value in os.environ.items() if name != "GPU_ARGS"}
        dry_run = [*words, "--dry-run", f"VENV={tmp_path / 'venv'}"]
        plan = subprocess.run(dry_run, capture_output=True, text=True, check=True, cwd=REPOSITORY, env=environ)
        words = shlex.split(plan.stdout.strip().splitlines()[-1])[1:]
    assert words[:6] == ["python", "-m", "pytest", "-m", "gpu", "tests/gpu"]
    result = launch("python", 1, words[1:], check=False)
    assert (result.returncode, result.stdout) == (69, "")
    assert "sees no GPU here" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_rows_are_options_that_there_are() -> None:
    rows = [ways_to_train.TWO_RANKS, ways_to_train.ONE_RANK, ways_to_train.NO_WAITS]
    for text in [*(text for row in rows for text in row.values()), ways_to_train.ANY_NUMBER_OF_RANKS]:
        parse(MnistOptions, f"{ways_to_train.DIGITS} {text}".split())
    for engine, text in ways_to_train.TWO_RANKS_OF_TEXTS:
        parse(ImdbOptions, f"{ways_to_train.TEXTS} --backend {engine} {text}".split())


def run_on_pretend_device(selected: str, folder: Path, *more: str, fault: str | None = None) -> Result:
    """Run some of the tests there; their reports are in the folder."""
    build.build()
    words = f"-m pytest -m gpu tests/gpu --minutes 60 --junitxml {folder / 'gpu.xml'}".split()
    environment = {startup.DEVICE: "as queued", startup.FAULT: fault}
    return launch("python", 1, [*words, "-k", selected, *more], env=environment, timeout_s=1400, check=False)


def outcomes(folder: Path) -> Sequence[ElementTree.Element]:
    """Return the JUnit file's test cases."""
    return list(ElementTree.parse(folder / "gpu.xml").iter("testcase"))


@pytest.mark.long
@needs_compiler
def test_reports_say_what_was_shown(tmp_path: Path) -> None:
    result = run_on_pretend_device("test_more_ranks or test_sanitizer", tmp_path, "--maxfail", "1")
    assert result.returncode == 0, result.stdout
    text = (tmp_path / "gpu.md").read_text()
    assert "2 passed, 0 failed, 4 skipped" in text
    for fact in ("device: 2 x pretend", "nvidia-smi: ", "NCCL: ", "torch: 2.", "horovod: ", "typed: pytest "):
        assert f"\n- {fact}" in text
    assert "| test_training.py::test_more_ranks_train_the_same_bits[ddp-2] | passed | weights: " in text
    assert "needs 4 GPUs (here: 2)" in text
    assert [case.get("name") for case in outcomes(tmp_path)][0] == "test_more_ranks_train_the_same_bits[ddp-2]"


@needs_compiler
def test_test_that_fails_is_in_the_reports(tmp_path: Path) -> None:
    fault = "the loss is read in each step"
    result = run_on_pretend_device("test_rule and waits and single and plain", tmp_path, fault=fault)
    assert result.returncode == 1, result.stdout
    text = (tmp_path / "gpu.md").read_text()
    assert "0 passed, 1 failed" in text
    assert "the host waits in each step: {'optim/step.py:" in text
    (case,) = outcomes(tmp_path)
    assert case.find("failure") is not None


@needs_compiler
def test_no_test_begins_when_time_is_over(tmp_path: Path) -> None:
    result = run_on_pretend_device("test_rule and single", tmp_path, "--minutes", "1")
    assert result.returncode == 0, result.stdout
    text = (tmp_path / "gpu.md").read_text()
    assert "0 passed, 0 failed, " in text
    assert "]: Skipped: no time left" in text


def test_report_names_what_hangs_and_a_common_cause_once() -> None:
    """The report of a run that was killed did not name the test that hung."""
    place = ("tests/gpu/test_a.py", 1, "test")
    failed = {name: [pytest.TestReport(name, place, {}, "failed", "no nvcc", "setup")] for name in ("a", "b")}
    text = markdown({}, {**failed, "c": []})
    assert "0 passed, 2 failed, 0 skipped" in text
    assert "### a, b\n\n````\nno nvcc\n" in text
    assert "| c | has not ended |" in text


@needs_compiler
def test_tests_do_not_run_side_by_side(tmp_path: Path) -> None:
    """Those of xdist's workers saw no GPU: all were skipped, with exit code 0."""
    result = run_on_pretend_device("test_rule", tmp_path, "-n", "2")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "leave -n out" in result.stderr


@needs_compiler
@pytest.mark.parametrize(
    "selected",
    [
        "failed_rank and ddp and (killed-1 or device-1)",
        pytest.param(
            "failed_rank and (horovod and killed or ddp and (device-0 or loops))", marks=pytest.mark.long
        ),
        pytest.param("", marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
def test_tests_pass_on_the_pretend_device(selected: str, tmp_path: Path) -> None:
    """They work before somebody has a GPU for them."""
    result = run_on_pretend_device(selected, tmp_path)
    assert result.returncode == 0, result.stdout
