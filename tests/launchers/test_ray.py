"""Ranks that Ray Train has started: workers of a `TorchTrainer`, in whose process the group is made and used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import SUPPORT, Result, launch, requires, run_ranks
from trainings import fit_small_rank

from hvd_trainer.tools.migrate.migration import migrate

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


TRAINER = """
import json
import sys

import horovod.torch as hvd
import ray
import torch
from ray.train import ScalingConfig
from ray.train.horovod import HorovodTrainer


def train(config):
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["rate"] * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
    with open(f"{config['folder']}/rank-{hvd.rank()}.json", "w") as file:
        json.dump(model.weight.tolist(), file)


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    config = {"rate": 0.1, "folder": sys.argv[1]}
    HorovodTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=3)).fit()
"""


def train_rank(text: str, folder: str) -> tuple[int, None]:
    """Train by the function of a script in a rank."""
    names: dict[str, Any] = {"__name__": "job"}
    exec(text, names)
    names["train"]({"rate": 0.1, "folder": folder})
    rank = names["hvd"].rank()
    names["hvd"].shutdown()
    return rank, None


@pytest.mark.long
def test_a_script_for_rays_horovod_trainer_trains_by_torchs(tmp_path: Path) -> None:
    """Ray has the process group ready, which is not made again."""
    (migrated,) = migrate({tmp_path / "job.py": TRAINER})
    assert not migrated.left
    migrated.path.write_text(migrated.after)
    launch("python", 1, [str(migrated.path), str(tmp_path)], env={"RAY_USAGE_STATS_ENABLED": "0"}, timeout_s=500)
    trained = results(tmp_path)
    old = TRAINER.replace("import horovod.torch as hvd", "from hvd_trainer import hvd")
    old = "".join(line for line in old.splitlines(keepends=True) if not re.search("(from|import) ray", line))
    run_ranks(train_rank, num_processes=3, launcher="torchrun", args=[old, str(tmp_path)])
    torch.testing.assert_close(torch.tensor(trained), torch.tensor(results(tmp_path)))
