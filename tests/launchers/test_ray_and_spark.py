"""Ranks that Ray Train or Spark's TorchDistributor has started: in workers of their own, or in the driver."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from combinations import case
from launchers import REPOSITORY, SUPPORT, Result, in_ranks, launch, requires, start
from trainings import fit_small
from waiting import wait_for

from hvd_trainer.tools.migrate.migration import migrate

ON_RAY, ON_SPARK = requires("ray", "horovod"), requires("spark")
# Spark would ask for this machine's name.
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "SPARK_LOCAL_IP": "127.0.0.1"}


def run(script: str | Path, *words: object, cwd: Path) -> Result:
    return launch("python", 1, [str(SUPPORT / script), *map(str, words)], env=VARIABLES, cwd=cwd, timeout_s=500)


def results(folder: Path, size: int) -> list[Any]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def weights(results: list[Any]) -> list[str]:
    return [trained[0] for trained in results]


@ON_RAY
@pytest.mark.parametrize("workers", [3, pytest.param(2, marks=pytest.mark.long)])
def test_workers_of_ray_train_on_either_engine_and_by_horovods_api(workers: int, tmp_path: Path) -> None:
    """It ended in a port that was bound twice. The numbers are those of any other launcher."""
    run("ray_job.py", tmp_path, "trains", "--workers", workers, cwd=tmp_path)
    found, alone = results(tmp_path, workers), in_ranks(workers, fit_small, "ddp")
    assert [result["ddp"] for result in found] == [result["horovod"] for result in found] == alone
    assert len({json.dumps(result["hvd"]) for result in found}) == 1
    assert found[0]["hvd"][1] == found[0]["total"] == workers


@ON_RAY
@pytest.mark.long
@pytest.mark.parametrize("what", ["killed", "killed_horovod"])
def test_killed_worker_of_ray_is_started_again_and_resumes(what: str, tmp_path: Path) -> None:
    """On two nodes, and by the callback of docs/cluster.md."""
    result = run("ray_job.py", tmp_path, what, "--nodes", "2", "--again", "1", cwd=tmp_path)
    assert (tmp_path / "killed").exists()
    assert re.search("failure: rank 2 of 3 .*, step 10, step: ended without a word", result.stdout + result.stderr)
    assert weights(results(tmp_path, 3)) == weights(in_ranks(3, fit_small, "ddp"))
    (metrics,) = re.findall("^metrics (.*)", result.stdout, re.MULTILINE)
    assert json.loads(metrics)["epoch"] == 4


@ON_SPARK
@pytest.mark.parametrize(
    ("master", "kind", "engine", "processes"),
    [
        case("local[2]", "function", "horovod", 3),
        case("local[2]", "file", "ddp", 2, when="long"),
        case("local-cluster[3,1,1024]", "file", "horovod", 3, when="long"),
    ],
)
def test_ranks_of_spark_train_as_any_others(
    master: str, kind: str, engine: str, processes: int, tmp_path: Path
) -> None:
    run("spark_job.py", master, processes, kind, tmp_path, engine, cwd=tmp_path)
    assert weights(results(tmp_path, processes)) == weights(in_ranks(processes, fit_small, "ddp"))


@ON_SPARK
@pytest.mark.long
def test_line_of_the_page_on_spark_runs(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "examples/first_job.py", tmp_path / "job.py")
    result = run("spark_job.py", "local-cluster[2,1,1024]", "2", "page", cwd=tmp_path)
    assert "Finished distributed training with 2 executor processes" in result.stderr


@ON_SPARK
@pytest.mark.long
@pytest.mark.parametrize("engine", [case("ddp"), case("horovod")])
def test_killed_executor_of_spark_ends_the_job_with_its_ranks_name(engine: str, tmp_path: Path) -> None:
    argv = [str(SUPPORT / "spark_job.py"), "local-cluster[3,1,1024]", "3", "file", str(tmp_path), engine, "1.0"]
    with start("python", 1, argv, env=VARIABLES, cwd=tmp_path) as job:
        file = tmp_path / "rank-2.pid"
        rank = psutil.Process(int(wait_for(lambda: file.exists() and file.read_text())))
        executor = next(parent for parent in rank.parents() if parent.name() == "java")
        executor.kill()
        result = job.wait()
    assert result.returncode != 0
    assert "barrier task ResultTask(0, 2) finished unsuccessfully" in result.stderr, "Spark's name of rank 2"
    # Spark may end the other ranks before one has printed its report.
    printed = "".join(file.read_text() for file in tmp_path.glob("spark/work/*/*/stderr"))
    assert set(re.findall(r"failure: rank (\d) of 3 ", printed)) <= {"2"}


FOR_HOROVOD = """
import json
import os
import sys

import horovod.torch as hvd
import torch


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


"""
STARTS = {
    "ray": """
import ray
from ray.train import ScalingConfig
from ray.train.horovod import HorovodTrainer

if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    config = {"rate": 0.1, "folder": sys.argv[1]}
    HorovodTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=3)).fit()
""",
    "spark": """
from pyspark.sql import SparkSession
from sparkdl import HorovodRunner

if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    HorovodRunner(np=-3).run(train, {"rate": 0.1, "folder": sys.argv[1]})
    session.stop()
""",
}


def train_rank(text: str, folder: str) -> None:
    """Train by the function of a script in a rank."""
    names: dict[str, Any] = {"__name__": "job"}
    exec(text, names)
    names["train"]({"rate": 0.1, "folder": folder})
    names["hvd"].shutdown()


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("ray", marks=ON_RAY), pytest.param("spark", marks=ON_SPARK)])
def test_a_script_for_horovod_on_a_cluster_trains_by_torchs(kind: str, tmp_path: Path) -> None:
    """Ray has the process group ready, which is not made again; `sparkdl` is Databricks' own."""
    (migrated,) = migrate({tmp_path / "job.py": FOR_HOROVOD + STARTS[kind]})
    assert not migrated.left
    migrated.path.write_text(migrated.after)
    run(migrated.path, tmp_path, cwd=tmp_path)
    trained = results(tmp_path, 3)
    in_ranks(3, train_rank, FOR_HOROVOD.replace("horovod.torch as", "hvd_trainer.hvd as"), str(tmp_path))
    torch.testing.assert_close(torch.tensor(trained), torch.tensor(results(tmp_path, 3)))
