"""Ranks that Ray Train has started: workers of a `TorchTrainer`, in whose process the group is made and used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from launchers import SUPPORT, Result, launch, requires, run_ranks
from trainings import fit_small_rank

pytestmark = requires("ray", "horovod")


def train_in_ray(what: str, folder: Path, *options: str, workers: int = 3, check: bool = True) -> Result:
    argv = [str(SUPPORT / "ray_job.py"), str(folder), what, "--workers", str(workers), *options]
    return launch("python", 1, argv, env={"RAY_USAGE_STATS_ENABLED": "0"}, timeout_s=500, check=check)


def results(folder: Path, workers: int = 3) -> list[Any]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(workers)]


@pytest.mark.parametrize("workers", [3, pytest.param(2, marks=pytest.mark.long)])
def test_workers_train_on_either_engine_and_by_horovods_api(workers: int, tmp_path: Path) -> None:
    """It ended in a port that was bound twice. The numbers are those of any other launcher."""
    train_in_ray("trains", tmp_path, workers=workers)
    alone = run_ranks(fit_small_rank, num_processes=workers)
    found = results(tmp_path, workers)
    assert [result["ddp"] for result in found] == [result["horovod"] for result in found] == alone
    assert len({json.dumps(result["hvd"]) for result in found}) == 1
    assert found[0]["hvd"][1] == found[0]["total"] == workers


@pytest.mark.long
@pytest.mark.parametrize("what", ["killed", "killed_horovod"])
def test_killed_worker_is_started_again_and_resumes(what: str, tmp_path: Path) -> None:
    """On two nodes, and by the callback of docs/cluster.md."""
    result = train_in_ray(what, tmp_path, "--nodes", "2", "--again", "1")
    assert (tmp_path / "killed").exists()
    assert re.search("failure: rank 2 of 3 .*, step 10, step: ended without a word", result.stdout + result.stderr)
    alone = run_ranks(fit_small_rank, num_processes=3)
    assert [trained[0] for trained in results(tmp_path)] == [trained[0] for trained in alone]
    (metrics,) = re.findall("^metrics (.*)", result.stdout, re.MULTILINE)
    assert json.loads(metrics)["epoch"] == 4
