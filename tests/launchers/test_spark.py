"""Ranks that Spark has started by its TorchDistributor: in the driver, or one in each executor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from combinations import case
from launchers import REPOSITORY, SUPPORT, launch, requires, run_ranks, start
from trainings import fit_small_rank
from waiting import wait_for

from hvd_trainer.tools.migrate.migration import migrate

pytestmark = requires("spark")

# Spark would ask for this machine's name.
VARIABLES: Mapping[str, str] = {"SPARK_LOCAL_IP": "127.0.0.1"}


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
    argv = [str(SUPPORT / "spark_job.py"), master, str(processes), kind, str(tmp_path), engine]
    launch("python", 1, argv, env=VARIABLES, cwd=tmp_path, timeout_s=400)
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text())[0] for rank in range(processes)]
    assert found == [trained[0] for trained in run_ranks(fit_small_rank, num_processes=processes)]


@pytest.mark.long
def test_line_of_the_page_runs(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "examples/first_job.py", tmp_path / "job.py")
    argv = [str(SUPPORT / "spark_job.py"), "local-cluster[2,1,1024]", "2", "page"]
    result = launch("python", 1, argv, env=VARIABLES, cwd=tmp_path, timeout_s=400)
    assert "Finished distributed training with 2 executor processes" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("engine", [case("ddp"), case("horovod")])
def test_killed_executor_ends_the_job_with_its_ranks_name(engine: str, tmp_path: Path) -> None:
    master = "local-cluster[3,1,1024]"
    argv = [str(SUPPORT / "spark_job.py"), master, "3", "file", str(tmp_path), engine, "1.0"]
    with start("python", 1, argv, env=VARIABLES, cwd=tmp_path) as job:
        file = tmp_path / "rank-2.pid"
        rank = psutil.Process(int(wait_for(lambda: file.exists() and file.read_text(), 300)))
        executor = next(parent for parent in rank.parents() if parent.name() == "java")
        executor.kill()
        result = job.wait(200)
    assert result.returncode != 0
    assert "barrier task ResultTask(0, 2) finished unsuccessfully" in result.stderr, "Spark's name of rank 2"
    # Spark may end the other ranks before one has printed its report.
    printed = "".join(file.read_text() for file in tmp_path.glob("spark/work/*/*/stderr"))
    assert set(re.findall(r"failure: rank (\d) of 3 ", printed)) <= {"2"}


RUNNER = """
import os
import sys

import horovod.torch as hvd
import torch
from pyspark.sql import SparkSession
from sparkdl import HorovodRunner


def train(rate):
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
    return model.weight.tolist()


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    print(HorovodRunner(np=-3).run(train, 0.1))
    session.stop()
"""


def train_rank(text: str) -> tuple[int, list[list[float]]]:
    """Train by the function of a script in a rank."""
    names: dict[str, Any] = {"__name__": "job"}
    exec(text, names)
    weights = names["train"](0.1)
    rank = names["hvd"].rank()
    names["hvd"].shutdown()
    return rank, weights


@pytest.mark.long
def test_a_script_for_horovods_runner_trains_by_torchs_distributor(tmp_path: Path) -> None:
    """`sparkdl` is Databricks' own; its results are those of `horovod.torch` in as many ranks."""
    (migrated,) = migrate({tmp_path / "job.py": RUNNER})
    assert not migrated.left
    migrated.path.write_text(migrated.after)
    with start("python", 1, [str(migrated.path)], env=VARIABLES, cwd=tmp_path) as job:
        result = job.wait(400)
        assert result.returncode == 0, job.report("failed")
    old = RUNNER.replace("import horovod.torch as hvd", "from hvd_trainer import hvd")
    old = "".join(line for line in old.splitlines(keepends=True) if "spark" not in line.partition("import")[0])
    expected = run_ranks(train_rank, num_processes=3, launcher="torchrun", args=[old])
    weights = torch.tensor(json.loads(result.stdout.splitlines()[-1]))
    torch.testing.assert_close(weights, torch.tensor(expected[0]))
