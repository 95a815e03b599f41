"""The batch scripts of examples/slurm, submitted to a real Slurm: they train, and do not meet each other."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import digits_job
import pytest
import slurm_batch
import slurm_cluster
from combinations import case
from environments import HOSTS
from launchers import REPOSITORY, requires

pytestmark = pytest.mark.warm

FOLDER = REPOSITORY / "examples/slurm"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
MOUNTED = sorted({"/tmp", "/usr", str(REPOSITORY), sys.prefix, sys.base_prefix})
ENV = {"VENV": sys.prefix, "PYTHONPATH": str(REPOSITORY)}
DIGITS = ["--dataset", "digits", "--repeat", "1", "--device", "cpu"]
ON_CPUS = ["--cpus-per-task=1", "--open-mode=append"]
"""What a machine with few cores needs; tasks of an array write to one file here."""


def test_each_script_is_listed_and_tells_nothing_of_a_cluster() -> None:
    readme = (FOLDER / "README.md").read_text()
    listed = re.findall(r"^\| \[([\w.]+)\]\(\1\) \|", readme, re.MULTILINE)
    assert sorted(listed) == [script.name for script in SCRIPTS]
    for script in SCRIPTS:
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/bin/bash"
        assert "set -euo pipefail" in lines
        # The user's cluster has partitions and accounts of its own.
        assert not [
            line for line in lines if re.match(r"#SBATCH --(partition|account|qos|constraint|mem)\b", line)
        ]
        assert lines[-1].endswith('"$@"')


@pytest.mark.long
@requires("srun")
def test_data_parallel_twice_at_once_on_the_same_nodes(slurm: slurm_cluster.SlurmCluster, tmp_path: Path) -> None:
    """Two tasks of an array, each with a rank on both nodes: what is said of one is not heard by the other."""
    result = slurm_batch.sbatch(
        slurm,
        (FOLDER / "data_parallel.sh").read_text(),
        *ON_CPUS,
        "--array=1-2",
        "--ntasks-per-node=1",
        arguments=[*DIGITS, "--epochs", "1", "--batch-size", "256"],
        env=ENV,
        cwd=tmp_path,
    )
    assert (result.state, result.returncode) == ("COMPLETED", 0), result.output
    assert result.output.count("2 ranks on 2 nodes, started by srun") == 2, result.output
    first, second = re.findall(r"epoch 1/1 .*? loss ([\d.]+)", result.output)
    assert first == second


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root folder of Debian's shape: what the image would hold is this machine's, mounted there."""
    folder = tmp_path / "image"
    for name in ("dev", "etc", "proc", "root", "sys", "tmp", "usr", *(path.strip("/") for path in MOUNTED)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        shutil.copy(f"/etc/{name}", folder / "etc")
    return folder


@pytest.mark.warm(False)
@pytest.mark.long
@requires("srun", "ch-run")
def test_each_rank_in_a_container(image: Path, slurm: slurm_cluster.SlurmCluster, tmp_path: Path) -> None:
    """By Charliecloud, which Debian has; Apptainer's options are other ones, and what is in the image, too."""
    mounts = [f"--bind={path}" for path in MOUNTED]
    inside = ["ch-run", *mounts, f"--cd={tmp_path}", str(image), "--"]
    result = slurm_batch.sbatch(
        slurm,
        (FOLDER / "container.sh").read_text(),
        *ON_CPUS,
        "--ntasks-per-node=1",
        arguments=[*DIGITS, "--epochs", "1", "--batch-size", "256"],
        env={
            **ENV,
            "CONTAINER": " ".join(inside),
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "USER": "root",
        },
        cwd=tmp_path,
    )
    assert (result.state, result.returncode) == ("COMPLETED", 0), result.output
    assert "2 ranks on 2 nodes, started by srun" in result.output


PLACED = """#!/bin/bash
set -eu
printf 'node2\nnode1\nnode2\n' > hosts
export SLURM_OVERLAP=1 SLURM_MPI_TYPE=none
MASTER_ADDR=127.0.0.1 MASTER_PORT={port} SLURM_HOSTFILE=hosts srun -n 3 --distribution=arbitrary {three} &
srun -n 2 --nodes=1 {two} &
for step in 1 2; do wait -n; done
"""


@pytest.mark.long
@requires("srun")
def test_two_steps_at_once_on_the_same_nodes(slurm: slurm_cluster.SlurmCluster, tmp_path: Path) -> None:
    """One has its ranks placed by a list, and rank 0 not on the first node: it is given the address."""
    lines = {
        name: " ".join([sys.executable, *digits_job.argv("ddp", tmp_path / name, ["--device", "cpu"])])
        for name in ("three", "two")
    }
    options = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    script = PLACED.format(**lines, port=digits_job.free_port())
    result = slurm_batch.sbatch(slurm, script, *options, env=ENV, cwd=tmp_path)
    assert (result.state, result.returncode) == ("COMPLETED", 0), result.output
    sizes = [digits_job.end_record(tmp_path / name)["world_size"] for name in ("three", "two")]
    assert sizes == [3, 2]


@pytest.mark.long
@requires("srun")
def test_a_task_of_an_array_goes_back_into_the_queue_alone(
    slurm: slurm_cluster.SlurmCluster, tmp_path: Path
) -> None:
    """The one that has the array's number: by that alone, Slurm would end and requeue the others as well."""
    # Many epochs: on a busy machine the signal takes seconds to arrive.
    job = [*DIGITS, "--epochs", "40", "--batch-size", "64"]
    options = [*ON_CPUS, "--array=1-2", "--nodes=1", "--ntasks-per-node=1"]
    script = (FOLDER / "requeue.sh").read_text()
    with slurm_batch.submitted(slurm, script, *options, arguments=job, env=ENV, cwd=tmp_path) as batch:
        batch.wait_for(tmp_path / f"runs/{batch.job_id}/metrics.jsonl", '"epoch": 2')
        slurm.client("scancel", "--signal=USR1", f"{batch.job_id}_2")
        result = batch.wait()
        tasks = batch.tasks()
    assert (result.state, result.returncode) == ("COMPLETED", 0), result.output
    assert {task["JobId"]: (task["ArrayTaskId"], task["Restarts"]) for task in tasks} == {
        str(batch.job_id): ("2", "1"),
        str(batch.job_id + 1): ("1", "0"),
    }
    assert result.output.count("It goes back into Slurm's queue, and then on by itself") == 1, result.output
    assert result.output.count("restart  this job was started before, and resumes") == 1, result.output
    undisturbed, requeued = (digits_job.weights(tmp_path / f"runs/{task['JobId']}") for task in tasks)
    assert undisturbed == requeued


@requires("srun")
def test_hosts_are_what_slurm_makes_of_the_list(slurm: slurm_cluster.SlurmCluster) -> None:
    # It refuses a name that goes on after its last bracket, and counts three brackets in an order of its own. It
    # writes neither.
    lists = {text: hosts for text, hosts in HOSTS.items() if not re.search(r"\][^[,]+(,|$)|\[.*\[.*\[", text)}
    assert len(lists) == len(HOSTS) - 2
    shown = slurm.client("scontrol", "show", "hostnames", ",".join(lists)).stdout
    assert shown.split() == " ".join(lists.values()).split()


TEXTS = [
    *("--dataset", "synthetic", "--synthetic-reviews", "64", "--sequence-length", "16", "--epochs", "1"),
    *("--device", "cpu", "--preset", "small", "--precision", "fp32", "--vocabulary", "300"),
]


@pytest.mark.long
@requires("srun")
@pytest.mark.parametrize(
    ("script", "options", "world", "steps"),
    [
        # 4 ranks make up one copy of the model.
        ("pipeline.sh", ["--nodes=2", "--ntasks-per-node=2"], "4 ranks on 2 nodes", 2),
        # Each rank has a copy of its own.
        ("hybrid_2_gpus_per_rank_3x4.sh", ["--ntasks-per-node=1"], "3 ranks on 3 nodes", 1),
        case("hybrid_2_gpus_per_rank_2x8.sh", ["--ntasks-per-node=1"], "2 ranks on 2 nodes", 1, when="long"),
    ],
)
def test_a_model_in_parts(
    script: str, options: list[str], world: str, steps: int, slurm: slurm_cluster.SlurmCluster, tmp_path: Path
) -> None:
    text = (FOLDER / script).read_text()
    result = slurm_batch.sbatch(slurm, text, *ON_CPUS, *options, arguments=TEXTS, env=ENV, cwd=tmp_path)
    assert (result.state, result.returncode) == ("COMPLETED", 0), result.output
    assert f"{world}, started by srun" in result.output
    assert re.search(rf"^done: {steps} steps? in", result.output, re.MULTILINE), result.output
