"""Scripts by `hvd_trainer run`, and a training under PyTorch's sanitizer of CUDA's streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_mnist
from launchers import REPOSITORY
from ways_to_train import DIGITS, ENGINES

from gpu.machine import cuda_only, launch, variables_of

pytestmark = pytest.mark.gpu
LOSSES: list[list[float]] = []
"""The losses of each script and engine so far: all must be those of the first."""
SANITIZED = {"TORCH_CUDA_SANITIZER": "1"}
RACE = """
import torch
values = torch.ones(1000, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    values.mul_(2)
"""


@pytest.mark.parametrize("script", ["plain_ddp.py", "plain_horovod.py"])
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_script_by_run(engine: str, script: str, tmp_path: Path) -> None:
    small_mnist.write(tmp_path)
    options = ["--data-dir", str(tmp_path), "--batch-size", "32", "--json", str(tmp_path / "result.json")]
    job = ["-m", "hvd_trainer", "run", "--backend", engine, "--", str(REPOSITORY / "examples/mnist" / script)]
    launch("torchrun", 2, [*job, *options], env=variables_of(2))
    (epoch,) = json.loads((tmp_path / "result.json").read_text())["epochs"]
    LOSSES.append(epoch["step_losses"])
    assert epoch["step_losses"] == pytest.approx(LOSSES[0], rel=1e-2)


@cuda_only
def test_sanitizer_sees_a_race() -> None:
    result = launch("python", 1, ["-c", RACE], env=SANITIZED, check=False)
    assert result.returncode != 0
    assert "data race" in result.stderr


@cuda_only
@pytest.mark.parametrize(("backend", "ranks"), [("single", 1), ("ddp", 2)])
def test_sanitizer_sees_no_race_in_a_training(backend: str, ranks: int) -> None:
    job = ["-m", "hvd_trainer.mnist", *DIGITS.split(), "--backend", backend]
    launch("torchrun", ranks, job, env={**variables_of(ranks), **SANITIZED})
