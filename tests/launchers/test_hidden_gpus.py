"""All tests but those marked `gpu` see no GPU, and benchmarks see them only if asked."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launchers import QUICKEST, launch

from benchmarks import NO_GPUS
from hvd_trainer.measure.start import Start, run_to_end

pytestmark = pytest.mark.warm
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


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
