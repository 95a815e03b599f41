"""Slurm: steps read from recorded environments, lists, ports, discovery on real sockets, and MUNGE."""

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


@pytest.mark.parametrize("text", environments.HOSTS)
def test_expand_hosts(text: str) -> None:
    assert expand_hosts(text) == environments.HOSTS[text].split()


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
def test_expand_hosts_refuses_malformed(text: str) -> None:
    with pytest.raises(LaunchError, match=r"should look like gpu\[03-05,9\],login") as caught:
        expand_hosts(text)
    assert len(str(caught.value)) < 200


def test_read_step_with_uneven_nodes() -> None:
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


def test_read_step_smaller_than_its_job() -> None:
    """2 of 8 tasks, each with 2 of the node's 4 GPUs, in a task of an array."""
    for environ in ARRAY:
        step = read_step(environ)
        assert (step.hosts, step.ranks_per_node, step.array) == (("node1", "node2"), (1, 1), (968508, 2))
        assert step.gpu_ids == ("4", "5")
        assert environ["SLURM_JOB_GPUS"] == "4,5,6,7"


def test_read_step_takes_cpus_of_step_not_of_sbatch() -> None:
    """From Slurm 22.05 on, srun ignores sbatch's --cpus-per-task, but tasks see its variable all the same."""
    exact = {**UNEVEN[0], "SLURM_CPUS_PER_TASK": "2"}
    assert read_step(exact).cpus_per_task == 1
    assert read_step(environments.CASES["srun_2_cpus_per_task_2"][0]).cpus_per_task == 2
    assert read_step({k: v for k, v in exact.items() if k != "SLURM_CPUS_ON_NODE"}).cpus_per_task is None


def test_read_step_with_arbitrary_distribution() -> None:
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
        # A task that is bound to one of four GPUs.
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "0,1,2,3", "SLURM_JOB_GPUS": "0,1,2,3"}, ("0",)),
        ({"GPU_DEVICE_ORDINAL": "1", "SLURM_STEP_GPUS": "4,5"}, ("1",)),
        ({"SLURM_STEP_GPUS": "4,5", "SLURM_JOB_GPUS": "4,5,6"}, ("4", "5")),
        ({"SLURM_JOB_GPUS": "6"}, ("6",)),
    ],
)
def test_visible_gpus(variables: dict[str, str], seen: tuple[str, ...] | None) -> None:
    assert visible_gpus(variables) == seen
    assert read_step({**UNEVEN[0], **variables}).gpu_ids == seen


def test_detect_slurm_outside_of_step() -> None:
    for case in ("python", "torchrun_2", "sbatch_python", "sbatch_2_nodes_python", "salloc_python"):
        assert detect_slurm(environments.CASES[case][0]) is None
    # Here srun has started torchrun once per node; the ranks are torchrun's.
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
def test_detect_slurm_refuses_contradictions(changes: dict[str, str | None], words: str) -> None:
    environ = {name: value for name, value in {**UNEVEN[0], **changes}.items() if value is not None}
    with pytest.raises(LaunchError, match=words):
        detect_slurm(environ)


def test_read_step_of_large_cluster() -> None:
    """Grouped tasks per node, and the job number of a federation, which has ten digits."""
    several = {
        "SLURM_STEP_NODELIST": "r[01-02]n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),2,1",
        "SLURM_NODEID": "2",
    }
    step = read_step({**UNEVEN[0], **several, "SLURM_JOB_ID": "4227858431", "SLURM_CPUS_ON_NODE": "64"})
    assert step.ranks_per_node == (4, 4, 2, 1)
    assert (step.host, step.cpus_per_task, step.job) == ("r02n1", 32, 4227858431)


# Ports.


def test_first_ports_of_steps_differ() -> None:
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


def announced(name: str, ports: list[int]) -> list[str]:
    """Return the texts that are announced for a step on this machine."""
    return [word for node, address, word in StepDiscovery(name, ports, {"node1": LOOPBACK}).discover()]


def test_discovery_tells_apart_steps_at_one_port() -> None:
    ports = free_ports(3)
    assert announced("7.0", ports) == []
    StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
    StepDiscovery("8.1", ports).announce(LOOPBACK, "b")
    for _ in range(2):  # by two ranks
        assert announced("7.0", ports) == ["a"]
        assert announced("8.1", ports) == ["b"]
    # A requeued job whose first start is still running; and a step whose name begins with the same characters.
    assert announced("7.0 start 1", ports) == []
    assert announced("7", ports) == []


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"hvd_trainer 7.0 x y\n", b"\xff" * 999])
def test_discovery_ignores_other_programs(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program at one of the ports that sends nothing, or something else."""
    monkeypatch.setattr(slurm_discovery, "ANSWER_TIMEOUT_S", 0.2)
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[0])) as program:

        def answer() -> None:
            line, _ = program.accept()
            line.sendall(says)
            # Blocks until the other side closes.
            line.recv(1)
            line.close()

        thread = threading.Thread(target=answer)
        thread.start()
        StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
        assert announced("7.0", ports) == ["a"]
        thread.join(5)
        assert not thread.is_alive()


def test_discovery_limits_time_of_slow_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit once applied to each byte: a slow program could hold a rank for hours."""
    monkeypatch.setattr(slurm_discovery, "ANSWER_TIMEOUT_S", 0.3)
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[0])) as program:

        def drip() -> None:
            line, _ = program.accept()
            with line, suppress(OSError):
                for _ in range(100):
                    line.sendall(b"h")
                    time.sleep(0.1)

        thread = threading.Thread(target=drip)
        thread.start()
        StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
        assert announced("7.0", ports) == ["a"]
        assert thread.is_alive()
        thread.join(5)
        assert not thread.is_alive()


def test_announce_survives_idle_and_closed_connections() -> None:
    ports = free_ports(1)
    StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
    with socket.create_connection(("127.0.0.1", ports[0])):
        socket.create_connection(("127.0.0.1", ports[0])).close()
        assert announced("7.0", ports) == ["a"]


def test_discovery_finds_rank_0_on_any_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an arbitrary distribution rank 0 is not always on the first node."""
    environ = environments.CASES["srun_3_scattered"][1]
    endpoint = store_client.serve(LOOPBACK)
    step = read_step(environ)
    # A process on the first node repeats what is announced on the second: the endpoint is not that node's.
    with socket.create_server(("127.0.0.2", step.ports[0])):
        pass
    StepDiscovery("968510.0 start 0", step.ports).announce("127.0.0.2", f"node2:{endpoint.port}/{'0' * 32}")
    StepDiscovery("968510.0 start 0", step.ports).announce(LOOPBACK, f"node2:{endpoint.port}/{endpoint.token}")
    addresses = {"node1": "127.0.0.2", "node2": LOOPBACK}
    monkeypatch.setattr(slurm_discovery, "node_address", addresses.__getitem__)
    monkeypatch.setattr(shared_stores, "_stores", {})
    # Other tests of this process have begun sessions.
    monkeypatch.setattr(shared_stores, "_sessions", itertools.count())
    rendezvous = connect.open_store(detect(environ), environ, timeout_s=10)
    assert rendezvous.host == "127.0.0.1"
    store_client.connect(endpoint, timedelta(seconds=10)).set("hvd_trainer.0/key", "value")
    assert rendezvous.store.get("key") == b"value"
    store_client.release(endpoint)


@pytest.fixture
def uncached_munge() -> Iterator[None]:
    """Clear what this process has cached about MUNGE."""
    munge.socket_option.cache_clear()
    munge.is_available.cache_clear()
    yield
    munge.socket_option.cache_clear()
    munge.is_available.cache_clear()


@requires("srun")
@pytest.mark.usefixtures("uncached_munge")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_munge_credential_is_for_this_user(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real Slurm's MUNGE: other users cannot decode what is announced."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.folder / "slurm.conf"))
    credential = munge.encode("a token")
    assert credential.startswith(munge.PREFIX)
    assert "a token" not in credential
    assert [munge.decode(credential) for _ in range(2)] == ["a token"] * 2  # by two ranks of a host
    assert attacks.by_another_user(munge.decode, credential) is None
    ports = free_ports(2)
    StepDiscovery("7.0", ports).announce(LOOPBACK, "a")
    assert announced("7.0", ports) == ["a"]
    assert attacks.by_another_user(announced, "7.0", ports) == []
    # Plain text and credentials of other users are ignored.
    assert munge.decode("evil") is None
    theirs = attacks.by_another_user(encoded_for_root, munge.socket_option())
    assert theirs.startswith(munge.PREFIX)
    assert munge.decode(theirs) is None
    assert munge.decode(f"{munge.PREFIX}evil:") is None


def encoded_for_root(option: list[str]) -> str:
    command = ["munge", *option, "--restrict-uid", "0", "--string", "evil"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.usefixtures("uncached_munge")
def test_munge_missing_falls_back_to_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster with another authentication; the error about a credential says what to install."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert munge.decode(munge.encode("a token")) == "a token"
    with pytest.raises(LaunchError, match=r"apt-get install munge .*HVD_TRAINER_SECRET_FILE=FILE"):
        munge.decode(f"{munge.PREFIX}AwQ:")


def test_announce_without_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            LaunchError, match=rf"The ports {port} of this machine are in use.* export MASTER_ADDR="
        ):
            StepDiscovery("7.0", [port]).announce(LOOPBACK, "a")
