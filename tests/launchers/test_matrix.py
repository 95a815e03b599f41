"""Any launcher with any engine: real launches of one job, and the same weights from all of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import digits_job
import pytest
import slurm_batch
import slurm_cluster
from combinations import PAIRS, case
from launchers import REPOSITORY, launch, requires, run_ranks

pytestmark = pytest.mark.warm

BACKENDS = [case("horovod"), case("ddp", when="long")]
SESSION = """
import sys
import hvd_trainer
from hvd_trainer.mnist import MnistOptions, train

def rank_job(args):
    # Defined in the session, as in a notebook's cell.
    train(hvd_trainer.parse(MnistOptions, args))
    return sys.argv[0]

if __name__ == "__main__":
    assert len(hvd_trainer.run(rank_job, num_processes=2, args=(sys.argv[1:],))) == 2
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights that every launch of 2 ranks must give: those of torchrun with DDP."""
    folder = tmp_path_factory.mktemp("reference")
    port = digits_job.free_port()
    # Users also name the port, instead of --standalone.
    launch("torchrun", 2, digits_job.argv(None, folder), options=["--master-port", port])
    check(folder, "ddp", "torchrun")
    return digits_job.weights(folder)


def check(folder: Path, backend: str, launcher: str, size: int = 2) -> None:
    end = digits_job.end_record(folder)
    found = {key: end[key] for key in ("backend", "launcher", "world_size", "global_batch_size", "step")}
    steps = -(-1437 // (256 * size))
    assert found == {
        "backend": backend,
        "launcher": launcher,
        "world_size": size,
        "global_batch_size": 256 * size,
        "step": steps,
    }


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [case(*pair, when="" if pair in PAIRS[:5] else "long") for pair in PAIRS if pair != ("torchrun", "ddp")],
)
def test_every_launcher_trains_with_every_engine(
    launcher: str, backend: str, tmp_path: Path, reference: bytes
) -> None:
    size = 1 if launcher == "python" else 2
    is_usual = backend == ("horovod" if launcher == "horovodrun" else "ddp")
    result = launch(launcher, size, digits_job.argv(None if is_usual else backend, tmp_path))
    assert (", the default" in result.stdout) == is_usual
    check(tmp_path, backend, launcher, size)
    if size == 2:
        assert digits_job.weights(tmp_path) == reference
    assert result.stdout.count("epoch 1/1") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_starts_ranks_from_a_python_session(backend: str, tmp_path: Path, reference: bytes) -> None:
    (tmp_path / "session.py").write_text(SESSION)
    options = digits_job.argv(backend, tmp_path)[2:]
    # What an outer launcher or a batch script left in the session's environment is not the children's.
    outer = {**digits_job.by_hand(3, 8), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    launch("python", 1, [str(tmp_path / "session.py"), *options], env={**outer, "PYTHONPATH": str(REPOSITORY)})
    check(tmp_path, backend, "run")
    assert digits_job.weights(tmp_path) == reference


@pytest.mark.parametrize(
    ("variables", "backend"),
    [
        case((), "ddp"),
        case((), "horovod"),
        case(("LOCAL_RANK={rank}",), "ddp", when="long"),  # as in Azure ML
        case(("MASTER_ADDR=::1",), "ddp", when="long"),
    ],
)
def test_ranks_by_hand_train_the_same_weights(
    variables: tuple[str, ...], backend: str, tmp_path: Path, reference: bytes
) -> None:
    """LOCAL_RANK and LOCAL_WORLD_SIZE were asked for, which `init_process_group` does not need."""
    launch("hand", 2, digits_job.argv(backend, tmp_path), options=variables)
    check(tmp_path, backend, "hand")
    assert digits_job.weights(tmp_path) == reference


# The nodes and hosts are names of one machine. Ranks number them when they meet, since horovodrun does not.
PLACES: dict[str, tuple[list[str], list[tuple[int, ...]]]] = {
    "srun": (["-N", "2"], [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]),
    "horovodrun": (["-H", "localhost:1,127.0.0.1:1"], [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)]),
    # Several nodes without mpi4py need an address. MASTER_ADDR alone sets no RANK, which env:// needs.
    "mpirun": (["-x", "MASTER_ADDR=127.0.0.1", "-x", "MASTER_PORT"], [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]),
    "hand": ([], [(rank, 4, rank, 4, 0, 1) for rank in range(4)]),
}


@pytest.mark.parametrize("launcher", [case(name) for name in PLACES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_know_their_nodes(launcher: str, backend: str) -> None:
    options, expected = PLACES[launcher]
    worlds = run_ranks(
        digits_job.world_of,
        num_processes=len(expected),
        launcher=launcher,
        args=(backend,),
        options=options,
        env={"MASTER_PORT": digits_job.free_port()} if launcher == "mpirun" else {},
    )
    assert [world[:7] for world in worlds] == [(*numbers, launcher) for numbers in expected]


def four(prefix: str) -> list[str]:
    numbers = {"RANK": "{rank}", "SIZE": "{size}", "LOCAL_RANK": "{rank}", "LOCAL_SIZE": "{size}"}
    return [f"{prefix}_{name}={number}" for name, number in numbers.items()]


NOT_THE_FOUR = ["RANK=", "WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT="]
FLUX = ["FLUX_TASK_RANK={rank}", "FLUX_JOB_SIZE={size}", "FLUX_TASK_LOCAL_ID={rank}", "FLUX_JOB_ID=7"]
VARIABLES = {
    "flux": [*NOT_THE_FOUR, *FLUX, "FLUX_JOB_NNODES=1"],
    "mpirun_rsh": [*NOT_THE_FOUR, *four("MV2_COMM_WORLD"), "MPIRUN_ID=7"],
    "PALS": [*NOT_THE_FOUR[:2], *four("PMI"), "PALS_RANKID={rank}"],
    "jsrun": [*NOT_THE_FOUR[:2], *four("JSM_NAMESPACE")[:3]],
}


@pytest.mark.parametrize("launcher", VARIABLES)
def test_ranks_meet_by_the_variables_of_launchers_that_are_not_here(launcher: str) -> None:
    """In a file by the job's name on one node, else at MASTER_ADDR and MASTER_PORT."""
    worlds = run_ranks(
        digits_job.world_of, num_processes=3, launcher="hand", args=("ddp",), options=VARIABLES[launcher]
    )
    assert [world[:7] for world in worlds] == [(rank, 3, rank, 3, 0, 1, launcher) for rank in range(3)]


@requires("mpi4py")
def test_mpi_of_another_kind_than_the_launchers_is_refused() -> None:
    """Each rank took itself for the only one of MPI, and an empty text for rank 0's address."""
    apart = ["MV2_COMM_WORLD_LOCAL_RANK=0", "MV2_COMM_WORLD_LOCAL_SIZE=1"]
    variables = [*NOT_THE_FOUR, *four("MV2_COMM_WORLD"), *apart]
    result = launch("hand", 2, digits_job.argv("ddp"), options=variables, timeout_s=60, check=False)
    assert result.returncode == 2
    assert "mpirun_rsh started 2 ranks, and mpi4py's MPI knows of 1" in result.stderr, result.stderr


BATCH = """#!/bin/sh
set -e
job="{python} -m hvd_trainer.mnist {options}"
# As many batch scripts do; neither may be taken for a launcher.
export WORLD_SIZE=2
mpirun --allow-run-as-root --oversubscribe -np 2 $job --backend ddp --log-dir {folder}/mpirun
srun --mpi=none $job --backend ddp --log-dir {folder}/srun
$job --backend single --log-dir {folder}/alone || echo refused with $?
unset WORLD_SIZE
$job --backend single --log-dir {folder}/alone
"""


@pytest.mark.long
@requires("srun", "mpirun")
def test_launchers_work_inside_a_batch_job(
    slurm: slurm_cluster.SlurmCluster, tmp_path: Path, reference: bytes
) -> None:
    options = " ".join(digits_job.OPTIONS)
    script = BATCH.format(python=sys.executable, options=options, folder=tmp_path)
    result = slurm_batch.sbatch(slurm, script, "--ntasks=2")
    assert result.returncode == 0, result.output
    for launcher in ("mpirun", "srun"):
        check(tmp_path / launcher, "ddp", launcher)
        assert digits_job.weights(tmp_path / launcher) == reference
    assert "refused with 2" in result.output
    check(tmp_path / "alone", "single", "python", size=1)
    assert result.output.count("warning: This Slurm job has 2 tasks") == 1


@pytest.mark.parametrize(
    ("launcher", "backend", "asked", "threads"),
    [
        # horovodrun sets nothing: each rank would start a thread per core, twice too many.
        case("horovodrun", "horovod", None, max(1, len(os.sched_getaffinity(0)) // 2)),
        case("torchrun", "ddp", "2", 2),
    ],
)
def test_ranks_share_the_cores_unless_told(launcher: str, backend: str, asked: str | None, threads: int) -> None:
    env = {"OMP_NUM_THREADS": asked}
    worlds = run_ranks(digits_job.world_of, num_processes=2, launcher=launcher, args=(backend,), env=env)
    assert [world[7] for world in worlds] == [threads] * 2
