"""What Slurm tells a rank: pure functions of recorded environments and of texts; and the door, on real sockets."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import attacks
import environments
import pytest
from requirements import requires
from slurm_cluster import SlurmCluster

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.slurm import SlurmStep, detect_slurm, expand_hosts, read_step, visible_gpus
from hvd_trainer.launch.world import detect
from hvd_trainer.rendezvous import connect, munge, slurm_discovery, store_client
from hvd_trainer.rendezvous.shared_stores import shared_stores
from hvd_trainer.rendezvous.slurm_discovery import StepDiscovery
from hvd_trainer.utils.network import LOOPBACK

UNEVEN = environments.CASES["srun_3_on_2_nodes"]
ARRAY = environments.CASES["sbatch_array_srun"]
HOSTS = {
    "node1": "node1",
    "n[1-3],m5": "n1 n2 n3 m5",
    "gpu[03-05,9],login": "gpu03 gpu04 gpu05 gpu9 login",
    "gpu[03-05,9]-ib[1-2]": "gpu03-ib1 gpu03-ib2 gpu04-ib1 gpu04-ib2 gpu05-ib1 gpu05-ib2 gpu9-ib1 gpu9-ib2",
    "n[1-2]m[3-4]k[7,08]": "n1m3k7 n1m3k08 n1m4k7 n1m4k08 n2m3k7 n2m3k08 n2m4k7 n2m4k08",
    "n[08-11]": "n08 n09 n10 n11",
    "n[098-101]": "n098 n099 n100 n101",
    "n[9-10],x-1-[2-3]": "n9 n10 x-1-2 x-1-3",
    "n[001-3]": "n001 n002 n003",
    "r1n[0-0],r1n7": "r1n0 r1n7",
    "n[1-2]-ib.cluster": "n1-ib.cluster n2-ib.cluster",
}


@pytest.mark.parametrize("text", HOSTS)
def test_hosts_are_written_out(text: str) -> None:
    assert expand_hosts(text) == HOSTS[text].split()


MALFORMED = [
    *("", ",", "a,", ",a", "a,,b", "n[", "n[1", "n]1", "n[]", "n[1-]", "n[-1]", "n[1--2]", "n[3-1]", "n[a-b]"),
    *(
        "n[1-2-3]",
        "n[[1-2]]",
        "a b",
        "n[1-2",
        "a[1,]",
        "n[0-999999999]",
        "n[1-400]m[1-400]",
        "n[" + "9" * 30 + "]",
    ),
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:16]))
def test_malformed_hosts_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"should look like gpu\[03-05,9\],login") as caught:
        expand_hosts(text)
    assert len(str(caught.value)) < 200


def test_a_step_with_uneven_nodes() -> None:
    first, _, last = (read_step(environ) for environ in UNEVEN)
    assert first == SlurmStep(
        job=3,
        number=0,
        host="node1",
        hosts=("node1", "node2"),
        ranks_per_node=(2, 1),
        cpus_per_task=1,
        gpu_ids=None,
        array=None,
        scattered=False,
    )
    assert (last.host, last.master_address, last.master_port) == ("node2", "node1", first.master_port)


def test_a_step_is_not_its_job_and_a_rank_has_gpus_of_its_own() -> None:
    """2 of the 8 tasks, each with 2 of the node's 4 GPUs, in a task of an array."""
    for environ in ARRAY:
        step = read_step(environ)
        assert (step.hosts, step.ranks_per_node, step.array) == (("node1", "node2"), (1, 1), (968508, 2))
        assert step.gpu_ids == ("4", "5")
        assert environ["SLURM_JOB_GPUS"] == "4,5,6,7"


def test_cpus_are_the_step_s_and_not_what_sbatch_was_told() -> None:
    """From 22.05 on srun does not take --cpus-per-task from sbatch, whose variable the tasks see nevertheless."""
    exact = {**UNEVEN[0], "SLURM_CPUS_PER_TASK": "2"}
    assert read_step(exact).cpus_per_task == 1
    assert read_step(environments.CASES["srun_2_cpus_per_task_2"][0]).cpus_per_task == 2
    assert read_step({k: v for k, v in exact.items() if k != "SLURM_CPUS_ON_NODE"}).cpus_per_task is None


def test_where_rank_0_is_if_tasks_are_placed_by_a_list() -> None:
    step = read_step(environments.CASES["srun_3_scattered"][0])
    assert (step.host, step.hosts, step.ranks_per_node) == ("node2", ("node1", "node2"), (1, 2))
    with pytest.raises(LaunchError, match="does not tell on which of node1, node2 rank 0 is. Type"):
        _ = step.master_address


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ("2",)),
        ({"CUDA_VISIBLE_DEVICES": "0, 3"}, ("0", "3")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ("1",)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c,MIG-1b4f"}, ("GPU-8932f937-d72c", "MIG-1b4f")),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-8932f937-d72c/1/0"}, ("MIG-GPU-8932f937-d72c/1/0",)),
        # A task that is bound to one of four.
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "0,1,2,3", "SLURM_JOB_GPUS": "0,1,2,3"}, ("0",)),
        ({"GPU_DEVICE_ORDINAL": "1", "SLURM_STEP_GPUS": "4,5"}, ("1",)),
        ({"SLURM_STEP_GPUS": "4,5", "SLURM_JOB_GPUS": "4,5,6"}, ("4", "5")),
        ({"SLURM_JOB_GPUS": "6"}, ("6",)),
    ],
)
def test_visible_gpus(variables: dict[str, str], seen: tuple[str, ...] | None) -> None:
    assert visible_gpus(variables) == seen
    assert read_step({**UNEVEN[0], **variables}).gpu_ids == seen


def test_without_a_step_there_is_none() -> None:
    for case in ("python", "torchrun_2", "sbatch_python", "sbatch_2_nodes_python", "salloc_python"):
        assert detect_slurm(environments.CASES[case][0]) is None
    # A launcher that srun starts once on each node has its own ranks, on the nodes of the step.
    step = detect_slurm(environments.CASES["sbatch_srun_torchrun"][0])
    assert step is not None
    assert step.ranks_per_node == (1,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_NODELIST": None}, "srun should set SLURM_STEP_NODELIST and has not"),
        ({"SLURM_JOB_ID": None, "SLURM_NODEID": None}, "should set SLURM_JOB_ID, SLURM_NODEID and has not"),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID should be a whole number"),
        ({"SLURM_STEP_NODELIST": "node1"}, "names 1 nodes, .* speaks of 2 nodes, and SLURM_NODEID is 0"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID is 2. One of them was changed by hand"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2("}, "SLURM_STEP_TASKS_PER_NODE should look like"),
    ],
)
def test_half_a_step_and_contradictions_are_refused(changes: dict[str, str | None], words: str) -> None:
    environ = {name: value for name, value in {**UNEVEN[0], **changes}.items() if value is not None}
    with pytest.raises(LaunchError, match=words):
        detect_slurm(environ)


def test_large_clusters() -> None:
    """Tasks per node in groups, and a job number of a federation, which has ten digits."""
    several = {
        "SLURM_STEP_NODELIST": "r[01-02]n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),2,1",
        "SLURM_NODEID": "2",
    }
    step = read_step({**UNEVEN[0], **several, "SLURM_JOB_ID": "4227858431", "SLURM_CPUS_ON_NODE": "64"})
    assert step.ranks_per_node == (4, 4, 2, 1)
    assert (step.host, step.cpus_per_task, step.job) == ("r02n1", 32, 4227858431)


# Ports.


def test_no_two_steps_of_a_node_have_the_same_first_port() -> None:
    one = read_step({**UNEVEN[0], "SLURM_JOB_ID": "600000"})
    steps = [replace(one, job=one.job + job, number=number) for job in range(196) for number in range(61)]
    assert len({step.master_port for step in steps}) == len(steps)
    assert {20_000 <= port < 32_000 for step in steps[::50] for port in step.ports} == {True}
    assert {len(set(step.ports)) for step in steps[::50]} == {4}


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def asked(name: str, ports: list[int]) -> list[str]:
    """The words that are told, at the first door of that name."""
    return [word for node, address, word in StepDiscovery(name, ports, {"node1": LOOPBACK}).discover()]


def test_two_steps_that_come_to_one_port_do_not_meet() -> None:
    ports = free_ports(3)
    assert asked("7.0", ports) == []
    StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
    StepDiscovery("8.1", ports).announce(LOOPBACK, "b")
    for _ in range(2):  # by two ranks
        assert asked("7.0", ports) == ["a"]
        assert asked("8.1", ports) == ["b"]
    # A job that was requeued, and whose first start has not ended everywhere; and one whose name begins alike.
    assert asked("7.0 start 1", ports) == []
    assert asked("7", ports) == []


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"hvd_trainer 7.0 x y\n", b"\xff" * 999])
def test_whoever_else_listens_is_no_rank(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that says nothing, or something else."""
    monkeypatch.setattr(slurm_discovery, "ANSWER_TIMEOUT_S", 0.2)
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[0])) as stranger:

        def answer() -> None:
            line, _ = stranger.accept()
            line.sendall(says)
            # Until the other side has given up.
            line.recv(1)
            line.close()

        thread = threading.Thread(target=answer)
        thread.start()
        StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
        assert asked("7.0", ports) == ["a"]
        thread.join(5)
        assert not thread.is_alive()


def test_a_stranger_that_never_comes_to_its_lines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte was waited for anew: one in a while held a rank for hours, beyond all limits."""
    monkeypatch.setattr(slurm_discovery, "ANSWER_TIMEOUT_S", 0.3)
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[0])) as stranger:

        def drip() -> None:
            line, _ = stranger.accept()
            with line, suppress(OSError):
                for _ in range(100):
                    line.sendall(b"h")
                    time.sleep(0.1)

        thread = threading.Thread(target=drip)
        thread.start()
        StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
        assert asked("7.0", ports) == ["a"]
        assert thread.is_alive()
        thread.join(5)
        assert not thread.is_alive()


def test_a_door_outlives_visitors_that_hang_on_or_go() -> None:
    ports = free_ports(1)
    StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
    with socket.create_connection(("127.0.0.1", ports[0])):
        socket.create_connection(("127.0.0.1", ports[0])).close()
        assert asked("7.0", ports) == ["a"]


def test_rank_0_is_looked_for_wherever_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node of the list is not its node, if tasks were placed by another list."""
    environ = environments.CASES["srun_3_scattered"][1]
    endpoint = store_client.serve(LOOPBACK)
    step = read_step(environ)
    # Somebody on the first node repeats what is told on the second: the ticket is not for there.
    with socket.create_server(("127.0.0.2", step.ports[0])):
        pass
    StepDiscovery("968510.0 start 0", step.ports).announce("127.0.0.2", f"node2:{endpoint.port}/{'0' * 32}")
    StepDiscovery("968510.0 start 0", step.ports).announce(LOOPBACK, f"node2:{endpoint.port}/{endpoint.token}")
    addresses = {"node1": "127.0.0.2", "node2": LOOPBACK}
    monkeypatch.setattr(slurm_discovery, "node_address", addresses.__getitem__)
    monkeypatch.setattr(shared_stores, "_stores", {})
    monkeypatch.setattr(
        shared_stores, "_sessions", itertools.count()
    )  # other tests of this process have begun some
    meeting = connect.open_store(detect(environ), environ, timeout_s=10)
    assert meeting.host == "127.0.0.1"
    store_client.connect(endpoint, timedelta(seconds=10)).set("hvd_trainer.0/word", "heard")
    assert meeting.store.get("word") == b"heard"
    store_client.release(endpoint)


@pytest.fixture
def no_memory() -> Iterator[None]:
    """What a process has found out of MUNGE is for its life, and here for one test."""
    munge.socket_option.cache_clear()
    munge.is_available.cache_clear()
    yield
    munge.socket_option.cache_clear()
    munge.is_available.cache_clear()


@requires("srun")
@pytest.mark.usefixtures("no_memory")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_letter_is_for_this_user(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the MUNGE of a real Slurm: what is told at the door is of no use to others who knock."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.folder / "slurm.conf"))
    credential = munge.encode("a token")
    assert credential.startswith(munge.PREFIX)
    assert "a token" not in credential
    assert [munge.decode(credential) for _ in range(2)] == ["a token"] * 2  # by two ranks of a host
    assert attacks.by_another_user(munge.decode, credential) is None
    ports = free_ports(2)
    StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
    assert asked("7.0", ports) == ["a"]
    assert attacks.by_another_user(asked, "7.0", ports) == []
    # What others tell is not heard: openly, or in a letter of theirs.
    assert munge.decode("evil") is None
    theirs = attacks.by_another_user(sealed_for_root, munge.socket_option())
    assert theirs.startswith(munge.PREFIX)
    assert munge.decode(theirs) is None
    assert munge.decode(f"{munge.PREFIX}evil:") is None


def sealed_for_root(option: list[str]) -> str:
    command = ["munge", *option, "--restrict-uid", "0", "--string", "evil"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.usefixtures("no_memory")
def test_without_munge_the_token_is_told_openly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster that authenticates by other means; a letter from elsewhere says what to install."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert munge.decode(munge.encode("a token")) == "a token"
    with pytest.raises(LaunchError, match=r"apt-get install munge .*HVD_TRAINER_SECRET_FILE=FILE"):
        munge.decode(f"{munge.PREFIX}AwQ:")


def test_a_machine_without_a_port_left_says_what_to_type() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            LaunchError, match=rf"The ports {port} of this machine are in use.* export MASTER_ADDR="
        ):
            StepDiscovery("7.0", [port]).announce(LOOPBACK, "a")
