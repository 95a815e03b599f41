"""Read the world from recorded environments of all launchers, and from wrong ones."""

from __future__ import annotations

import os
import random
import re
from contextlib import suppress
from dataclasses import replace

import environments
import pytest

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import LAUNCHERS, choose_launcher, forget_outer_launchers
from hvd_trainer.launch.slurm import expand_counts, slurm_job, slurm_step_id
from hvd_trainer.launch.world import UNKNOWN, World, detect, lone_process_warning, may_be_first, rank_variables
from hvd_trainer.rendezvous.ranks import (
    RankInfo,
    check_world,
    cpu_share,
    number_local_ranks,
    one_per_node_warning,
    ranks_sharing_gpu,
    resolve_nodes,
)
from hvd_trainer.rendezvous.registry import job_file


def one_node(size: int) -> list[tuple[int, ...]]:
    """(rank, size, local_rank, local_size, node_rank, num_nodes) of each rank."""
    return [(rank, size, rank, size, 0, 1) for rank in range(size)]


ALONE = [(0, 1, 0, 1, 0, 1)]
TWO_BY_TWO = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
UNKNOWN_NODES = [(*row[:4], UNKNOWN, UNKNOWN) for row in TWO_BY_TWO]
EXPECTED = {
    "python": ("python", ALONE),
    "horovodrun_2": ("horovodrun", one_node(2)),
    # One rank on each of two hosts: node ranks are not known before the rendezvous.
    "horovodrun_2_hosts": ("horovodrun", [(rank, 2, 0, 1, UNKNOWN, UNKNOWN) for rank in range(2)]),
    "torchrun_2": ("torchrun", one_node(2)),
    "torchrun_2_nodes": ("torchrun", UNKNOWN_NODES),
    "mpirun_2": ("mpirun", one_node(2)),
    "mpirun_3": ("mpirun", one_node(3)),
    "srun_2": ("srun", one_node(2)),
    "srun_2_cpus_per_task_2": ("srun", one_node(2)),
    "srun_3_on_1_node": ("srun", one_node(3)),
    "srun_3_on_2_nodes": ("srun", [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]),
    "sbatch_python": ("python", ALONE),
    "sbatch_1_task_python": ("python", ALONE),
    "sbatch_2_nodes_python": ("python", ALONE),
    "sbatch_srun": ("srun", one_node(2)),
    "sbatch_2_nodes_srun": ("srun", TWO_BY_TWO),
    "sbatch_array_srun": ("srun", [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)]),
    "srun_3_scattered": ("srun", [(0, 3, 0, 2, 1, 2), (1, 3, 0, 1, 0, 2), (2, 3, 1, 2, 1, 2)]),
    "sbatch_horovodrun": ("horovodrun", one_node(2)),
    "sbatch_torchrun": ("torchrun", one_node(2)),
    "sbatch_srun_torchrun": ("torchrun", one_node(2)),
    "sbatch_mpirun": ("mpirun", one_node(2)),
    "salloc_python": ("python", ALONE),
    "salloc_srun": ("srun", one_node(2)),
    "salloc_interactive": ("srun", ALONE),
    # Who sets PyTorch's variables without LOCAL_WORLD_SIZE: the places on the nodes follow from the meeting.
    "azureml_2_nodes": ("hand", [(rank, 4, rank % 2, *[UNKNOWN] * 3) for rank in range(4)]),
    "deepspeed_2_nodes": ("hand", [(rank, 4, rank % 2, *[UNKNOWN] * 3) for rank in range(4)]),
    **dict.fromkeys(
        ["pytorchjob_v1", "dask_2", "dlc_2_nodes"], ("hand", [(n, 2, *[UNKNOWN] * 4) for n in (0, 1)])
    ),
    "submitit_2": ("hand", one_node(2)),
    "accelerate_2": ("torchrun", one_node(2)),
    "trainjob_v2_torchrun": ("torchrun", UNKNOWN_NODES),
    "trainjob_v2_python": ("python", ALONE),
    "sagemaker_torchrun": ("torchrun", UNKNOWN_NODES),
    "sagemaker_mpi": ("mpirun", UNKNOWN_NODES),
    "openmpi5_2": ("mpirun", one_node(2)),
    "mvapich_2": ("mpirun_rsh", one_node(2)),
    "pals_2_nodes": ("PALS", UNKNOWN_NODES),
    "jsrun_2_nodes": ("jsrun", [(rank, 4, rank % 2, *[UNKNOWN] * 3) for rank in range(4)]),
    "flux_1_node": ("flux", one_node(2)),
    "flux_2_nodes": ("flux", [(rank, 4, rank % 2, UNKNOWN, UNKNOWN, 2) for rank in range(4)]),
}


def numbers(world: World) -> tuple[int, ...]:
    return world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.num_nodes


def test_detect_expectations_cover_all_recorded_environments() -> None:
    assert EXPECTED.keys() == environments.CASES.keys()


@pytest.mark.parametrize("case", EXPECTED)
def test_detect_recorded_environment(case: str) -> None:
    launcher, expected = EXPECTED[case]
    environs = environments.CASES[case]
    worlds = [detect(environ) for environ in environs[: len(expected)]]
    assert [numbers(world) for world in worlds] == expected
    assert {world.launcher for world in worlds} == {launcher}
    assert [may_be_first(environ) for environ in environs] == [detect(environ).is_first for environ in environs]


def test_no_other_rank_speaks_for_one_that_cannot_be() -> None:
    """It waited 10 s for rank 0 to say what was wrong."""
    numbers = {"0 2": True, "1 2": False, "1 ": False, "1 two": False, "2 2": True, "a 2": True}
    for text, may_be in numbers.items():
        rank, size = text.split(" ")
        assert may_be_first({"RANK": rank, "WORLD_SIZE": size}) == may_be, text


# MPICH's mpiexec.hydra -n 3, as seen with MPICH 4.0.2.
HYDRA = {"HYDI_CONTROL_FD": "7", "PMI_FD": "8", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
BY_HAND = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"}
RUN = {f"HVD_TRAINER_{name}": "1" for name in ("RANK", "LOCAL_RANK")} | {
    f"HVD_TRAINER_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")
}


def test_detect_reads_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(os.environ)
    assert (detect().rank, detect().size) == (1, 3)


def test_detect_launchers_without_recordings() -> None:
    hydra = {**HYDRA, "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}
    assert detect(hydra) == World(1, 3, 1, 3, 0, 1, "mpiexec")
    # Hydra starts its proxies by srun, so its ranks inherit their step's variables.
    assert detect({**environments.CASES["srun_2"][0], **hydra}).launcher == "mpiexec"
    assert detect(BY_HAND) == World(2, 4, 2, 4, 0, 1, "hand")
    assert detect(RUN) == World(1, 2, 1, 2, 0, 1, "run")


def test_variables_of_others_do_not_hide_srun() -> None:
    """PMI2's, which Hydra sets, too, PMIx's, and those that a batch script sets for its job."""
    srun = environments.CASES["srun_2"][1]
    for others in (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9"},
        {"PMIX_RANK": "1"},
        {"WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
    ):
        assert detect({**srun, **others}).launcher == "srun"


COMPLETE = {
    "horovodrun": environments.CASES["horovodrun_2"][1],
    "torchrun": environments.CASES["torchrun_2"][1],
    "hand": BY_HAND,
    "mpirun": environments.CASES["mpirun_2"][1],
    "mpiexec": {**HYDRA, "PMI_RANK": "1", "MPI_LOCALRANKID": "1"},
    "srun": environments.CASES["srun_2"][1],
    "run": RUN,
}
ROWS = {launcher.name: launcher for launcher in reversed(LAUNCHERS)}


def test_place_on_the_node_may_be_left_out() -> None:
    """A missing rank is never taken for 0; a local one is found when the ranks meet."""
    four = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert detect(four) == World.somewhere(2, 4, "hand")
    assert detect({**four, "LOCAL_RANK": "1"}) == replace(World.somewhere(2, 4, "hand"), local_rank=1)
    assert detect({**four, "LOCAL_WORLD_SIZE": "2"}) == replace(World.somewhere(2, 4, "hand"), local_size=2)
    assert numbers(detect({**four, "RANK": "0", "WORLD_SIZE": "1"})) == ALONE[0]
    for lost in ("RANK", "WORLD_SIZE"):
        with pytest.raises(LaunchError, match=f"but {lost} is not"):
            detect({name: number for name, number in four.items() if name != lost} | {"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("name", "variable"),
    [(name, v) for name in COMPLETE for v in ROWS[name].variables() if v not in ROWS[name].optional],
)
def test_detect_names_missing_variable(name: str, variable: str) -> None:
    environ = {key: value for key, value in COMPLETE[name].items() if key != variable}
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    message = str(caught.value)
    assert f"{variable} is not." in message
    assert "by hand" in message if name == "hand" else f"by {name}" in message
    assert "horovodrun -np 2 python" in message
    # The command that it suggests leads to a single process.
    unset = re.search(r"type: unset ([A-Z_ ]+)$", message)
    assert unset is not None
    assert detect({k: v for k, v in environ.items() if k not in unset[1].split()}).size == 1


MALFORMED = ["", " ", "x", "1.0", "-1", "+1", "1_0", "0x1", "١", "²", "9" * 30, "9" * 5000, "1 ", "\n", "None"]


@pytest.mark.parametrize(("name", "variable"), [(name, v) for name in COMPLETE for v in ROWS[name].variables()])
def test_detect_refuses_non_numbers(name: str, variable: str) -> None:
    for text in MALFORMED:
        with pytest.raises(LaunchError, match=variable) as caught:
            detect({**COMPLETE[name], variable: text})
        assert len(str(caught.value)) < 300


def test_detect_random_environments() -> None:
    """Random mixtures of all launchers' variables, valid and invalid, give a world or LaunchError."""
    random_number = random.Random(0)
    variables = sorted({v for launcher in LAUNCHERS for v in (*launcher.variables(), *launcher.markers)})
    values = [*MALFORMED, *"012345", "2(x2)", "4(x2),2", "2(x", "(x2)", "1,1", "9(x999999)", "4(x99999999999)"]
    outcomes = set()
    for _ in range(5_000):
        launcher = random_number.choice(LAUNCHERS)
        chosen = {*launcher.variables(), *random_number.sample(variables, random_number.randint(0, 3))}
        environ = {name: random_number.choice(values) for name in sorted(chosen)}
        try:
            world = detect(environ)
        except LaunchError:
            outcomes.add("refused")
        else:
            assert 0 <= world.rank < world.size
            assert UNKNOWN in (world.local_rank, world.local_size) or world.local_rank < world.local_size
            assert UNKNOWN <= world.local_size <= world.size
            outcomes.add(world.launcher)
        may_be_first(environ)
        slurm_step_id(environ)
    assert {"refused"} < outcomes


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("horovodrun", {"HOROVOD_RANK": "2"}, "horovodrun says rank 2 of size 2"),
        ("torchrun", {"LOCAL_RANK": "2"}, "torchrun says local_rank 2 of local_size 2"),
        ("torchrun", {"WORLD_SIZE": "0"}, "rank 1 of size 0"),
        ("mpirun", {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "5 processes on this node but only 2 in all"),
        ("srun", {"SLURM_NODEID": "1"}, "speaks of 1 nodes, but SLURM_NODEID is 1"),
        ("srun", {"SLURM_STEP_NUM_TASKS": "8"}, "makes 2 tasks, but SLURM_STEP_NUM_TASKS is 8"),
        ("srun", {"SLURM_STEP_NUM_NODES": "0"}, "node_rank 0 of num_nodes 0"),
        # What is to be changed is named.
        ("hand", {"RANK": "4"}, "Set RANK and WORLD_SIZE on each rank: they count from 0"),
        ("horovodrun", {"HOROVOD_RANK": "2"}, "Leave HOROVOD_RANK and HOROVOD_SIZE to horovodrun"),
        ("hand", {"RANK": "first"}, "Leave it to the launcher, or type: export RANK=NUMBER"),
    ],
)
def test_detect_refuses_contradictions(case: str, changes: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        detect({**COMPLETE[case], **changes})


@pytest.mark.parametrize(("text", "counts"), [("1", [1]), ("8(x3)", [8, 8, 8]), ("3,2(x2),1", [3, 2, 2, 1])])
def test_expand_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", ",", "2,", "2(x)", "2(x2", "2x2", "(x2)", "a", "2(x2)3", "2(x2))"])
def test_expand_counts_refuses_malformed(text: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(r"should look like 4(x2),2")):
        expand_counts(text)


@pytest.mark.parametrize(
    ("case", "warns"),
    [
        ("python", False),
        ("sbatch_python", True),
        ("sbatch_2_nodes_python", True),
        ("sbatch_1_task_python", False),
        ("salloc_python", True),
        ("salloc_interactive", True),
        ("salloc_srun", False),
        ("sbatch_srun_torchrun", False),
        ("trainjob_v2_torchrun", False),
    ],
)
def test_lone_process_warning(case: str, warns: bool) -> None:
    """In a TrainJob, whose variables are for torchrun, each node trained alone."""
    environ = environments.CASES[case][0]
    warning = lone_process_warning(detect(environ), environ)
    assert (warning is not None) is warns
    if warning is not None:
        assert f"{environ['SLURM_NTASKS']} tasks" in warning
        assert "srun python" in warning

    environ = environments.CASES["trainjob_v2_python"][0]
    assert "PET_NNODES=2 is for torchrun" in str(lone_process_warning(detect(environ), environ))


POD = environments.CASES["pytorchjob_v1"][0]


@pytest.mark.parametrize("case", ["mpirun_3", "srun_3_on_1_node"])
def test_variables_of_a_pod_are_not_those_of_several_processes(case: str) -> None:
    """Each of three would be rank 0 of 2; but they may start more ranks than they are."""
    environ = {**environments.CASES[case][1], **POD}
    launcher = "mpirun" if case == "mpirun_3" else "srun"
    words = f"RANK and WORLD_SIZE say rank 0 of 2, but {launcher} has started 3 processes"
    with pytest.raises(LaunchError, match=rf"{words} .*Type before it: unset RANK WORLD_SIZE "):
        detect(environ)
    assert detect({**environ, "RANK": "3", "WORLD_SIZE": "6"}) == World.somewhere(3, 6, "hand")


def test_a_rank_of_run_may_set_the_variables_of_a_smaller_job() -> None:
    """It has horovodrun's beside those that were set by hand, and horovodrun has started nothing."""
    world = World(0, 4, 0, 4)
    environ = {**rank_variables("hand", world), **rank_variables("horovodrun", world)}
    choose_launcher(environ, "hand")
    smaller = detect({**environ, **rank_variables("hand", World(1, 2, 1, 2))})
    assert (smaller.rank, smaller.size) == (1, 2)


def test_prterun_that_tells_no_size_is_refused() -> None:
    """Each process trained alone."""
    words = r"PMIX_RANK is set, so this process looks started by mpirun, but .*type: unset PMIX_RANK$"
    with pytest.raises(LaunchError, match=words):
        detect({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-node1-7@1"})


def test_ranks_that_count_nodes_are_told_of_torchrun() -> None:
    """Alibaba's DLC sets RANK and WORLD_SIZE to the numbers of nodes: of eight GPUs, one was used."""
    gpus = tuple(f"g{number}" for number in range(8))
    everyone = [RankInfo(host, 0, "ddp", (), gpus) for host in "ab"]
    world = resolve_nodes(detect(environments.CASES["dlc_2_nodes"][1]), everyone)
    warning = one_per_node_warning(world, everyone)
    assert warning is not None
    assert "torchrun --nnodes $WORLD_SIZE --node-rank $RANK --nproc-per-node 8 " in warning
    for others in (
        [replace(peer, gpus=gpus[:1]) for peer in everyone],
        [replace(p, num_devices=8) for p in everyone],
    ):
        assert one_per_node_warning(world, others) is None
    assert one_per_node_warning(replace(world, launcher="mpirun"), everyone) is None
    together = [RankInfo("a", rank, "ddp", (), gpus) for rank in range(2)]
    assert one_per_node_warning(resolve_nodes(World.somewhere(0, 2, "hand"), together), together) is None


@pytest.mark.parametrize("case", ["mpirun_2", "srun_2", "mvapich_2", "flux_1_node", "openmpi5_2"])
def test_ranks_of_a_job_meet_in_a_file_of_its_own(case: str) -> None:
    first, second = (job_file(detect(environ), environ, "0") for environ in environments.CASES[case])
    assert first is not None
    assert first == second
    names = next(row.job for row in LAUNCHERS if row.name == EXPECTED[case][0])
    other = {**environments.CASES[case][0], **dict.fromkeys(names, "7")}
    assert job_file(detect(other), other, "0") != first
    nameless = {name: text for name, text in other.items() if name not in names}
    with suppress(LaunchError):  # srun needs them
        assert job_file(detect(nameless), nameless, "0") is None


def test_slurm_step_id_only_under_srun() -> None:
    assert slurm_step_id(environments.CASES["sbatch_srun"][0]) == "6.0"
    for case in ("python", "sbatch_python", "sbatch_mpirun", "sbatch_srun_torchrun"):
        assert slurm_step_id(environments.CASES[case][0]) is None


def test_slurm_job_id_of_array_task() -> None:
    """`scontrol requeue 968508` would end and requeue all tasks of that array, not only the one of that number."""
    with_the_arrays_number = environments.CASES["sbatch_array_srun"][0]
    assert slurm_job(with_the_arrays_number).job_id == "968508_2"
    # Other tasks have job IDs of their own; so has a job submitted by the first, which inherits the variables.
    assert slurm_job({**with_the_arrays_number, "SLURM_JOB_ID": "968509"}).job_id == "968509"
    assert slurm_job(environments.CASES["sbatch_srun"][0]).job_id == "6"
    assert slurm_job({}).job_id is None


# After the ranks have exchanged RankInfo.


def peer(host: str = "a", local_rank: int = 0, cpus: range = range(4), gpu: str | None = None) -> RankInfo:
    return RankInfo(host=host, local_rank=local_rank, backend="ddp", cpus=tuple(cpus), gpus=(gpu,) if gpu else ())


def test_resolve_nodes_numbers_nodes_by_first_rank() -> None:
    peers = [peer("b"), peer("b", 1), peer("a")]
    worlds = [World(rank, 3, p.local_rank, 2 - rank // 2, UNKNOWN, UNKNOWN) for rank, p in enumerate(peers)]
    located = [resolve_nodes(world, peers) for world in worlds]
    assert [(world.node_rank, world.num_nodes) for world in located] == [(0, 2), (0, 2), (1, 2)]


def test_local_ranks_are_counted_by_host_where_none_are_set() -> None:
    hosts = ["b", "a", "b", "b"]
    given = [UNKNOWN, UNKNOWN, 0, UNKNOWN]  # one that is set counts
    peers = number_local_ranks([peer(host, local) for host, local in zip(hosts, given, strict=True)])
    located = [resolve_nodes(World.somewhere(rank, 4, "hand"), peers) for rank in range(4)]
    places = [(world.local_rank, world.local_size, world.node_rank, world.num_nodes) for world in located]
    assert places == [(1, 3, 0, 2), (0, 1, 1, 2), (0, 3, 0, 2), (2, 3, 0, 2)]
    assert resolve_nodes(replace(World.somewhere(0, 4, "hand"), local_size=4), peers).local_size == 4


def test_resolve_nodes_refuses_duplicate_local_rank() -> None:
    with pytest.raises(LaunchError, match=r"Ranks 0 and 1 both say .* local rank 0 on a\. Give each"):
        resolve_nodes(World(0, 2, 0, 2), [peer(), peer()])


@pytest.mark.parametrize(
    ("cpus", "fair"),
    [
        # Not bound to CPUs, as by horovodrun and torchrun: the node's CPUs are divided.
        ([range(16)] * 4, [4, 4, 4, 4]),
        ([range(2)] * 4, [1, 1, 1, 1]),
        ([range(10)] * 3, [3, 3, 3]),
        # Bound, as by mpirun -np 2 (a core each) or srun --cpus-per-task 8.
        ([range(1), range(1, 2)], [1, 1]),
        ([range(8 * i, 8 * i + 8) for i in range(4)], [8, 8, 8, 8]),
        # Two sockets with two ranks on each.
        ([range(8), range(8), range(8, 16), range(8, 16)], [4, 4, 4, 4]),
        # One bound rank among unbound ones: its CPU is shared, the others are divided.
        ([range(1), range(4), range(4)], [1, 1, 1]),
        ([range(4)], [4]),
    ],
)
def test_cpu_share(cpus: list[range], fair: list[int]) -> None:
    size = len(cpus)
    peers = [peer("a", rank, ids) for rank, ids in enumerate(cpus)]
    other_node = [peer("b", rank, ids) for rank, ids in enumerate(cpus)]
    for rank in range(size):
        assert cpu_share(World(rank, size, rank, size), peers) == fair[rank]
        assert cpu_share(World(rank, 2 * size, rank, size, 0, 2), peers + other_node) == fair[rank]


def test_ranks_sharing_gpu() -> None:
    peers = [peer("a", 0, gpu="u1"), peer("a", 1, gpu="u1"), peer("b", 0, gpu="u1"), peer("b", 1)]
    sharing = [
        ranks_sharing_gpu(World(rank, 4, p.local_rank, 2, rank // 2, 2), peers) for rank, p in enumerate(peers)
    ]
    assert sharing == [[1], [0], [], []]


def test_check_world() -> None:
    world = World(1, 4, 1, 4, launcher="torchrun")
    check_world(world, "Horovod", 1, 4)
    for rank, size in ((0, 4), (1, 2)):
        words = f"torchrun started rank 1 of 4, .*Horovod.* says rank {rank} of {size}.*horovodrun -np 4 python"
        with pytest.raises(LaunchError, match=words):
            check_world(world, "Horovod", rank, size)


@pytest.mark.parametrize("outer", ["python", "horovodrun_2", "torchrun_2", "mpirun_2", "srun_2"])
@pytest.mark.parametrize("inner", ["horovodrun_2", "torchrun_2", "mpirun_2", "srun_2"])
def test_nearest_launcher_counts(outer: str, inner: str) -> None:
    """A rank inherits the variables of all launchers above it; another rank's are not its own."""
    environ = dict(environments.CASES[outer][0])
    launcher = detect(environ).launcher
    environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environ |= {f"HOROVOD_{name}": number for name, number in (("RANK", "0"), ("SIZE", "1"))}
    choose_launcher(environ, launcher)
    before = dict(environ)
    forget_outer_launchers(environ)
    assert environ == before, "a program that a rank starts is none of another launcher"
    nearest = environments.CASES[inner][1]
    environ |= nearest
    forget_outer_launchers(environ)
    assert detect(environ) == detect(nearest)
