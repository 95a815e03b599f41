"""Slurm: steps read from recorded environments, lists of hosts, ports, and ranks that meet on real sockets."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace

import environments
import pytest

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.slurm import SlurmStep, detect_slurm, first_host, read_step, visible_gpus
from hvd_trainer.launch.world import detect
from hvd_trainer.rendezvous import connect, store_client
from hvd_trainer.rendezvous.shared_stores import JobStore, shared_stores
from hvd_trainer.utils.network import LOOPBACK

UNEVEN = environments.CASES["srun_3_on_2_nodes"]
ARRAY = environments.CASES["sbatch_array_srun"]


@pytest.mark.parametrize("text", environments.HOSTS)
def test_first_host(text: str) -> None:
    assert first_host(text) == environments.HOSTS[text].split()[0]


MALFORMED = [
    *("", ",", ",a", "n[", "n[1", "n]1", "n[]", "n[-1]", "n[a-b]", "n[[1-2]]", "a b", "n[1-2", "n[" + "9" * 30)
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:16]))
def test_malformed_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"should look like gpu\[03-05,9\],login") as caught:
        first_host(text)
    assert len(str(caught.value)) < 200


def test_all_ranks_of_a_step_compute_one_address() -> None:
    assert {read_step(environ) for environ in UNEVEN} == {SlurmStep(job=3, number=0, master_address="node1")}


def test_step_smaller_than_its_job() -> None:
    """2 of 8 tasks, each with 2 of the node's 4 GPUs, in a task of an array."""
    for environ in ARRAY:
        assert read_step(environ).master_address == "node1"
        assert visible_gpus(environ) == ("4", "5")
        assert environ["SLURM_JOB_GPUS"] == "4,5,6,7"


def test_arbitrary_distribution_wants_an_address() -> None:
    """Tasks were placed by a list, and rank 0 is on any of the nodes."""
    environ = environments.CASES["srun_3_scattered"][0]
    with pytest.raises(LaunchError, match=r"on which of node\[1-2\] rank 0 is. Type before srun: export"):
        connect.open_store(detect(environ), environ)


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


def test_detect_slurm_outside_of_step() -> None:
    for case in ("python", "torchrun_2", "sbatch_python", "sbatch_2_nodes_python", "salloc_python"):
        assert detect_slurm(environments.CASES[case][0]) is None
    # Here srun has started torchrun once per node; the ranks are torchrun's.
    assert detect_slurm(environments.CASES["sbatch_srun_torchrun"][0]) is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_NODELIST": None}, "srun should set SLURM_STEP_NODELIST and has not"),
        ({"SLURM_JOB_ID": None, "SLURM_STEP_NODELIST": None}, "set SLURM_JOB_ID, SLURM_STEP_NODELIST and has not"),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID should be a whole number"),
    ],
)
def test_detect_slurm_refuses_missing_and_malformed(changes: dict[str, str | None], words: str) -> None:
    environ = {name: value for name, value in {**UNEVEN[0], **changes}.items() if value is not None}
    with pytest.raises(LaunchError, match=words):
        detect_slurm(environ)


def test_job_number_of_a_federation() -> None:
    """It has ten digits."""
    assert read_step({**UNEVEN[0], "SLURM_JOB_ID": "4227858431"}).job == 4227858431


# Ports, and meeting at them.


def test_ports_of_steps_differ() -> None:
    one = read_step({**UNEVEN[0], "SLURM_JOB_ID": "600000"})
    steps = [replace(one, job=one.job + job, number=number) for job in range(196) for number in range(61)]
    assert len({step.master_port for step in steps}) == len(steps)
    assert {20_000 <= step.master_port < 32_000 for step in steps[::50]} == {True}


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have no store of other tests, and the job's nodes on this machine."""
    monkeypatch.setattr(shared_stores, "_stores", {})
    monkeypatch.setattr(connect, "node_address", lambda node: LOOPBACK)
    monkeypatch.setattr(store_client, "_servers", servers := {})
    yield
    for server in servers.values():
        store_client._end(server.process)


def meet(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> JobStore:
    """Return the store that a rank opens first."""
    monkeypatch.setattr(shared_stores, "_sessions", itertools.count())
    return connect.open_store(detect(environ), environ, timeout_s=timeout_s)


def numbered(environ: Mapping[str, str], job: int) -> dict[str, str]:
    """Return the environment of a step of another job."""
    return {**environ, "SLURM_JOB_ID": str(job)}


@pytest.mark.usefixtures("own_process")
def test_steps_at_one_port_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs whose numbers are far apart compute the same port; so does a requeued one whose first start lasts."""
    job = os.getpid()
    first, _, last = (numbered(environ, job) for environ in UNEVEN)
    other = numbered(last, job + 12_000)
    assert read_step(other).master_port == read_step(first).master_port
    meet(first, monkeypatch, 10).store.set("key", "value")
    assert meet(last, monkeypatch, 10).store.get("key") == b"value"
    for stranger in (other, {**last, "SLURM_RESTART_COUNT": "1"}):
        with pytest.raises(LaunchError, match="waited 1 s for rank 0, which never said where it is"):
            meet(stranger, monkeypatch, 1)


@pytest.mark.usefixtures("own_process")
def test_port_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = numbered(UNEVEN[0], os.getpid() + 1)
    port = read_step(environ).master_port
    with (
        socket.create_server((LOOPBACK, port)),
        pytest.raises(LaunchError, match=rf"cannot listen at 127.0.0.1:{port}: Address already in use.*MASTER_"),
    ):
        meet(environ, monkeypatch, 10)
