"""The stages of `make gpu-test`, one test each."""

from __future__ import annotations

from pathlib import Path

import pytest
from launchers import launch

from gpu import run


@pytest.mark.gpu
@pytest.mark.parametrize("stage", run.STAGES)
def test_gpu_stage_proves_its_checks(stage: str, tmp_path: Path) -> None:
    result = launch(
        "python", 1, ["tests/gpu", "--stages", stage, "--out", str(tmp_path)], timeout_s=590, check=False
    )
    if result.returncode == run.NO_GPU:
        pytest.skip("PyTorch sees no GPU")
    assert result.returncode == 0, (tmp_path / "gpu-report.md").read_text()
