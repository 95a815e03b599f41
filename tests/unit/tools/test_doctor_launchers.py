"""Test the doctor's checks of the shell, of MPI and of Slurm."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_checks import TORCH, only, run_checks
from launchers import REPOSITORY
from slurm_cluster import SlurmCluster

from hvd_trainer.horovod_build.facts import Facts, Gpu
from hvd_trainer.tools.doctor.launchers import mpi_version, nodes_by_state

# The shell.


@pytest.mark.parametrize(
    ("environ", "status", "words", "remedy"),
    [
        ({}, "ok", "no rank variables are left over", ""),
        ({"WORLD_SIZE": "2"}, "error", "WORLD_SIZE set, but RANK, LOCAL_RANK", "unset WORLD_SIZE"),
        (
            {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
            "error",
            "but HOROVOD_LOCAL_RANK",
            "unset HOROVOD_RANK HOROVOD_SIZE",
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "error",
            "rank 5 of size 2, which cannot be",
            "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "ok",
            "this is rank 1 of 2, started by hand",
            "",
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "ok", "no rank variables", ""),
    ],
)
def test_launcher_variables_in_shell(environ: dict[str, str], status: str, words: str, remedy: str) -> None:
    found = only(run_checks("launcher", environ=environ), "launcher")
    assert (found.status, found.remedy) == (status, remedy)
    assert words in found.found


def test_python_on_path_is_compared(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho /somewhere/else\n")
    other.chmod(0o755)
    found = only(run_checks("python", environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"}), "python")
    assert found.status == "warning"
    assert f"is another one: {other}" in found.found
    assert re.match(r"source .*/activate|export PATH=", found.remedy)
    beside = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert only(run_checks("python", environ=beside), "python").status == "ok"


def test_unmet_requirements_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(run_checks("packages"), "packages").status == "ok"
    for name, version in (("tqdm", "0.1"), ("torch", "2.0.1")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = only(run_checks("packages"), "packages")
    assert found.status == "error"
    assert "0.1 tqdm is installed, where tqdm>=" in found.found
    # torchvision asks for a newer torch than this package does, or for one only.
    assert found.found.count("2.0.1 torch is installed, where torch") == 2
    assert found.remedy.count("torch") == 1
    assert "'tqdm>=" in found.remedy


# MPI and Slurm.


def test_mpi_version() -> None:
    assert mpi_version("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...\n") == "Open MPI 4.1.4"
    hydra = "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: ...\n"
    assert mpi_version(hydra) == "MPICH 4.0.2"
    intel = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)\n"
    assert mpi_version(intel).startswith("Intel(R) MPI Library for Linux* OS, Version 2021.10")
    assert mpi_version("") == "of unknown version"


def test_mpi_and_slurm_are_optional(tmp_path: Path) -> None:
    found = run_checks("MPI", "Slurm", environ={"PATH": str(tmp_path)})
    if not any(Path(folder, name).exists() for folder in ("/usr/sbin", "/sbin") for name in ("mpirun", "srun")):
        assert [finding.status for finding in found] == ["ok", "ok"]
        assert all("not needed" in finding.found for finding in found)


INSIDE = """
import sys
sys.path.insert(0, "tests/support")
import doctor_checks
found = doctor_checks.only(doctor_checks.run_checks("Slurm"), "Slurm")
print(found.status, found.found)
"""


def test_slurm_inside_and_outside_of_a_job(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = only(run_checks("Slurm", environ=slurm.environ), "Slurm")
    assert found.status == "ok"
    assert re.search(r"outside of a job; 3 nodes: 3 \w+", found.found)
    monkeypatch.chdir(REPOSITORY)
    inside = slurm.client("salloc", "-n1", sys.executable, "-c", INSIDE, check=False, timeout_s=60)
    assert re.search(r"^ok \S+, inside of job \d+; srun starts tasks$", inside.stdout, re.MULTILINE), inside
    # A cluster whose controller is down, and no cluster at all.
    text = Path(slurm.environ["SLURM_CONF"]).read_text()
    (tmp_path / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", text))
    down = only(run_checks("Slurm", environ={"SLURM_CONF": str(tmp_path / "slurm.conf")}), "Slurm")
    assert down.status == "warning"
    assert "its controller does not answer" in down.found
    none = only(run_checks("Slurm", environ={"SLURM_CONF": str(tmp_path / "nonesuch")}), "Slurm")
    assert none.status == "ok"
    assert "this machine is in no cluster" in none.found


@pytest.mark.parametrize(
    ("ranks", "num_gpus", "words"), [("4(x2)", 1, "4 ranks"), ("4(x2)", 4, ""), ("1(x2)", 1, "")]
)
def test_rank_that_sees_only_its_gpu_is_warned(ranks: str, num_gpus: int, words: str) -> None:
    """Warn of --gpus-per-task=1, with which NCCL cannot reach the neighbours' GPUs by CUDA IPC."""
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": ranks,
        "SLURM_NODEID": "1",
    }
    facts = Facts(replace(TORCH, gpus=[Gpu("A", 1, "9.0")] * num_gpus))
    found = run_checks("visible GPUs", environ=step, facts=facts)
    assert [finding.status for finding in found] == ["warning"] * bool(words)
    assert all(words in finding.found for finding in found)
    assert all("--gres=gpu:4 --gpu-bind=none" in finding.remedy for finding in found)
    assert run_checks("visible GPUs", environ={"SLURM_STEP_ID": "0"}, facts=facts) == []


def test_nodes_of_several_partitions_count_once() -> None:
    assert nodes_by_state("a idle\nb down*\na idle\nc idle\n") == "3 nodes: 2 idle, 1 down*"
    assert nodes_by_state("") == "no nodes"
