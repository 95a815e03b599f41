"""`make gpu-test` itself, on a machine without a GPU; and that all other tests, and benchmarks, see none."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import documents
import pytest
from gpu import run
from gpu.bench import Bench, Check, FailedError
from launchers import QUICKEST, REPOSITORY, launch

from benchmarks import NO_GPUS
from hvd_trainer.measure.start import Start, run_to_end

pytestmark = pytest.mark.warm

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def test_gpu_test_without_a_gpu_says_so() -> None:
    result = launch("python", 1, ["tests/gpu"], check=False)
    assert result.returncode == run.NO_GPU == 69
    assert result.stdout == ""
    assert "sees no GPU here" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def right(bench: Bench) -> dict[str, int]:
    bench.ok("-c", "print('seen in the report')")
    return {"waits": 0}


def wrong(bench: Bench, why: str) -> None:
    raise FailedError(why)


def test_gpu_report_lists_proven_failed_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        Check("right", right),
        Check("without a limit", right, measures=True),
        Check("wrong", wrong, ("two | waits",)),
        Check("of eight", right, needs=("8 gpus",)),
        Check("of another version", right, needs=("--no-such-option",)),
        Check("mistaken", lambda bench: 1 / 0),  # type: ignore[arg-type,return-value]
    ]
    monkeypatch.setitem(run.STAGES, "tried", run.Stage(lambda bench: checks, 60))
    assert run.main(["--device", "cpu", "--stages", "tried", "--out", str(tmp_path)]) == 1
    found = {its["name"]: its for its in json.loads((tmp_path / "gpu-report.json").read_text())["checks"]}
    assert {name: its["status"] for name, its in found.items()} == {
        "right": "proven",
        "without a limit": "measured",
        "wrong": "failed",
        "of eight": "not provable here",
        "of another version": "not provable here",
        "mistaken": "failed",
    }
    assert found["of eight"]["why"] == "it needs 8 GPUs (here: 2)"
    assert "ZeroDivisionError" in found["mistaken"]["why"]
    assert found["right"]["commands"][0]["tail"] == "seen in the report"
    text = (tmp_path / "gpu-report.md").read_text()
    assert "- tried, wrong: two \\| waits" in text
    assert "nothing of GPUs" in text
    # Another stage later, with what is there.
    monkeypatch.setitem(run.STAGES, "more", run.Stage(lambda bench: checks[:1], 60))
    earlier = ["--add", str(tmp_path / "gpu-report.json"), "--out", str(tmp_path)]
    assert run.main(["--device", "cpu", "--stages", "more", *earlier]) == 0
    assert len(json.loads((tmp_path / "gpu-report.json").read_text())["checks"]) == 7


def test_checks_beyond_the_budget_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(bench: Bench) -> None:
        bench.ok("-c", "import time; time.sleep(60)")

    monkeypatch.setitem(run.STAGES, "slow", run.Stage(lambda bench: [Check("a", slow), Check("b", slow)], 9))
    assert run.main(["--device", "cpu", "--stages", "slow", "--budget-s", "6", "--out", str(tmp_path)]) == 0
    checks = json.loads((tmp_path / "gpu-report.json").read_text())["checks"]
    assert [its["why"] for its in checks] == ["it needs more time: the stage's was over"] * 2


@pytest.mark.long
def test_first_stages_run_on_a_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--quick", "--stages", "facts,one-rank", "--out", str(tmp_path)]
    result = launch("python", 1, ["tests/gpu", *options], timeout_s=580)
    assert ", 0 failed, " in result.stdout
    checks = {its["name"]: its for its in json.loads((tmp_path / "gpu-report.json").read_text())["checks"]}
    assert checks["the same bits twice"]["status"] == "proven"
    assert checks["no waits: plain"]["figures"]["waits per step"] >= 0


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_other_stages_run_on_a_cpu(tmp_path: Path) -> None:
    stages = ["gloo", "nccl", "failures", "memory", "several", "speed"]
    options = ["--device", "cpu", "--quick", "--stages", ",".join(stages), "--out", str(tmp_path)]
    result = launch("python", 1, ["tests/gpu", *options], timeout_s=1480)
    assert ", 0 failed, " in result.stdout
    checks = json.loads((tmp_path / "gpu-report.json").read_text())["checks"]
    assert {its["stage"] for its in checks if its["status"] in ("proven", "measured")} == set(stages)


@pytest.mark.parametrize("command", [c for c in documents.commands() if "gpu-test" in c or "tests/gpu" in c])
def test_documented_gpu_commands_exist(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        environ = {name: value for name, value in os.environ.items() if name != "GPU_ARGS"}
        plan = subprocess.run(
            [*words, "--dry-run", f"VENV={tmp_path / 'venv'}"],
            capture_output=True,
            text=True,
            check=True,
            cwd=REPOSITORY,
            env=environ,
        ).stdout
        words = shlex.split(plan.strip().splitlines()[-1])[1:]
    assert words[:2] == ["python", "tests/gpu"]
    run.arguments(words[2:])


@pytest.mark.parametrize("name", run.STAGES)
def test_checks_have_unique_names_and_valid_arguments(name: str, tmp_path: Path) -> None:
    bench = Bench("cpu", 8, None, tmp_path)
    checks = list(run.STAGES[name].checks(bench))
    assert len({its.name for its in checks}) == len(checks)
    for its in checks:
        inspect.signature(its.prove).bind(bench, *its.args)


def test_quick_runs_the_first_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.STAGES, "many", run.Stage(lambda bench: (Check(f"{n}", print) for n in range(9)), 60))
    assert run.main(["--device", "cpu", "--quick", "--stages", "many", "--out", str(tmp_path)]) == 0
    checks = json.loads((tmp_path / "gpu-report.json").read_text())["checks"]
    assert [its["name"] for its in checks] == ["0", "1"]


def test_documented_stages_are_complete() -> None:
    rows = [line.split("|")[1] for line in documents.text_of("docs/gpu.md").splitlines() if line.startswith("| ")]
    names = [name.strip() for row in rows for name in row.split(",")]
    assert names[names.index("stage") + 1 :] == list(run.STAGES)


# All other tests, and benchmarks.


def test_tests_and_their_children_see_no_gpu(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    for launcher in ("python", QUICKEST):
        assert NO_GPUS.items() <= json.loads(launch(launcher, 1, [str(script)]).stdout).items()
    assert NO_GPUS.items() <= os.environ.items()


@pytest.mark.gpu
def test_gpu_mark_shows_gpus() -> None:
    assert not NO_GPUS.items() & os.environ.items()


def test_marked_tests_see_gpus() -> None:
    only = f"{__file__}::{test_gpu_mark_shows_gpus.__name__}"
    environ = {**dict.fromkeys(NO_GPUS), "CUDA_VISIBLE_DEVICES": "5"}
    assert "1 passed" in launch("python", 1, ["-m", "pytest", "-q", "-m", "gpu", only], env=environ).stdout


@pytest.mark.parametrize(("variables", "wanted"), [(NO_GPUS, NO_GPUS), ({}, {"CUDA_VISIBLE_DEVICES": "5"})])
def test_benchmarks_see_gpus_only_if_asked(
    variables: dict[str, str], wanted: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    command, output = [sys.executable, "-c", SHOW], tmp_path / "output"
    assert run_to_end(Start(command, variables), tmp_path, output, limit_s=60) == 0
    assert wanted.items() <= json.loads(output.read_text()).items()
