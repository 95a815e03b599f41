"""Ranks that Spark has started by its TorchDistributor: in the driver, or one in each executor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from combinations import case
from launchers import REPOSITORY, SUPPORT, launch, requires, run_ranks, start
from trainings import fit_small_rank
from waiting import wait_for

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
