"""A GPU that runs behind its host: waiting for it, reading from it, aborting its exchanges."""

from __future__ import annotations

import json
import os
import pkgutil
import threading
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hvd_trainer.backends import EngineOptions, create, horovod_waiter, process_group
from hvd_trainer.backends.horovod_start import tuning
from hvd_trainer.backends.horovod_waiter import ASYNC_COMPLETION, completes_asynchronously
from hvd_trainer.faults import collectives
from hvd_trainer.faults.activity import Activity, CollectiveAbortedError
from hvd_trainer.faults.monitor import MonitorSettings
from hvd_trainer.faults.monitor_server import MonitorServer
from hvd_trainer.faults.root_cause import RootCause
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.tools.run.engines import _mark_waits
from hvd_trainer.tools.run.torch_groups import _uses_nccl
from hvd_trainer.utils import accelerator

GPU = torch.device("cuda", 1)


def test_device_read_counts_as_waiting() -> None:
    backend = create(EngineOptions(backend="single"), {})
    heard: list[str] = []
    backend.activity.listeners.append(heard.append)
    assert backend.read(torch.tensor([1.5, 2.0])) == [1.5, 2.0]
    assert backend.collectives.all_reduce_numbers([3, 4.5]) == [3, 4.5]
    assert heard == ["collective", "start"] * 2


def test_aborted_exchange_invalidates_what_was_read() -> None:
    """A kernel of NCCL whose communicator is aborted ends, and leaves what was there before."""
    activity = Activity(60)
    activity.enter("step")
    with pytest.raises(CollectiveAbortedError), activity.waiting():
        activity.abort()  # by another thread, while this one waits for the device
    assert activity.in_collective
    for going_on in (activity.check, lambda: activity.enter("save")):
        with pytest.raises(CollectiveAbortedError):
            going_on()


def test_survivors_abort_exchanges_in_elastic_mode_only() -> None:
    """No connection breaks between two GPUs of a host: the survivor's kernel would wait for ever."""
    aborted = threading.Event()
    there = [RankInfo("here", rank, "ddp", (), pid=os.getpid()) for rank in range(2)]
    for elastic_timeout_s, rank in ((None, 1), (5.0, 0), (5.0, 1)):
        aborted.clear()
        settings = MonitorSettings(
            world=World(),
            peers=there,
            activity=Activity(5),
            startup_s=5,
            environ={},
            elastic_timeout_s=elastic_timeout_s,
            abort_collectives=aborted.set,
        )
        monitor = MonitorServer(settings, dist.HashStore(), "127.0.0.1")
        monitor.end_job(RootCause(rank, "it failed", reported=False), 3)
        survives = elastic_timeout_s is not None and rank == 1
        assert aborted.wait(5 if survives else 0.2) is survives
        monitor.start()
        monitor.close()


@pytest.mark.parametrize("kind", ["nccl", "nccl2"])
def test_unfinished_nccl_exchanges_are_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both classes of PyTorch for NCCL, of which the newer one has a record like Gloo's."""
    entry = {
        "profiling_name": f"{kind}:all_reduce",
        "input_sizes": [[1024]],
        "input_dtypes": ["Float"],
        "collective_seq_id": 12,
        "process_group": ["0", "default_pg"],
        "state": "scheduled",
    }
    distributed = torch._C._distributed_c10d
    assert collectives.unfinished() == []

    def dump(backend: str = "gloo", **_: Any) -> bytes:
        return json.dumps({"entries": [entry] if backend == kind else []}).encode()

    monkeypatch.setattr(distributed, "_dump_nccl_trace_json", partial(dump, "nccl"), raising=False)
    monkeypatch.setattr(distributed, "_dump_fr_trace_json", dump)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL2", None, raising=False)
    (exchange,) = collectives.unfinished()
    assert exchange[:3] == (f"{kind}:0", 12, "all_reduce of float[1024], number 12 of group 0")


def test_confirm_exchanges_needs_one_more_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's thread aborts NCCL's exchanges when it misses a rank, before the monitor has decided anything."""
    backend = create(EngineOptions(backend="single"), {})
    backend.confirm_exchanges()
    backend.session.devices = [GPU]

    def lost(*_: Any) -> None:
        raise RuntimeError("Horovod has been shut down")

    monkeypatch.setattr(accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(backend.collectives, "_all_reduce", lost)
    with pytest.raises(RuntimeError, match="shut down"):
        backend.confirm_exchanges()
    assert backend.activity.in_collective


# Groups for NCCL.


@pytest.mark.parametrize(("chosen", "kind"), [("0", "ProcessGroupNCCL"), ("1", "ProcessGroupNCCL2")])
def test_standalone_group_is_of_the_class_that_pytorch_chooses(
    chosen: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    c10d = dist.distributed_c10d
    if not (dist.is_nccl_available() and hasattr(c10d, "ProcessGroupNCCL2")):
        pytest.skip("this PyTorch has one class for NCCL, or none")
    made: list[tuple[str, Any]] = []

    def make(name: str) -> Any:
        result = mock.Mock(side_effect=lambda *given: made.append((name, given)))
        result.Options = torch._C._distributed_c10d.ProcessGroupNCCL.Options
        return result

    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2"):
        monkeypatch.setattr(c10d, name, make(name))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", c10d.ProcessGroupNCCL)
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", chosen)
    monkeypatch.setenv("LOCAL_RANK", "0")
    process_group.standalone_group(dist.HashStore(), 1, 2, GPU)
    ((name, given),) = made
    assert name == kind
    assert given[1:3] == (1, 2)
    assert given[3]._timeout == process_group.NO_TIMEOUT
    assert given[4:] == ((GPU,) if name == "ProcessGroupNCCL2" else ())


@pytest.mark.parametrize("at_once", [False, True])
def test_groups_end_after_a_failure_without_what_is_under_way(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush waited for a dead rank, and the monitor's abort for the flush."""
    ended: list[str] = []
    for name in ("destroy_process_group", "distributed_c10d._abort_process_group"):
        own = pkgutil.resolve_name(f"torch.distributed.{name}")
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *_, own=own: (ended.append(own.__name__), own()))
    session: Any = SimpleNamespace(
        device=torch.device("cpu"), world=World(), store=dist.HashStore(), options=EngineOptions()
    )
    process_group.start(session, "gloo")
    process_group.stop(wait=not at_once, on_accelerator=True)
    assert not dist.is_initialized()
    assert ended == ["_abort_process_group" if at_once else "destroy_process_group"]


# Horovod.


def test_stream_of_a_script_waits_for_horovods_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_waiter, "follow", lambda received: (received, "follows"))
    mpi_ops, script = ModuleType("mpi_ops"), SimpleNamespace(watch=SimpleNamespace(waiting=nullcontext))
    vars(mpi_ops)["synchronize"] = lambda handle: f"result {handle}"
    _mark_waits(mpi_ops, cast("Any", script))
    assert mpi_ops.synchronize(1) == ("result 1", "follows")


@pytest.mark.parametrize(
    ("kind", "built", "is_asynchronous"),
    [("cuda", 22807, True), ("cuda", 0, False), ("xpu", 22807, False), (None, 22807, False)],
)
def test_horovod_completes_asynchronously_on_nccl_only(
    kind: str | None, built: int, is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: kind)
    hvd: Any = SimpleNamespace(nccl_built=lambda: built)
    assert completes_asynchronously(hvd) is is_asynchronous
    assert (ASYNC_COMPLETION.items() <= tuning({}, on_nccl=is_asynchronous).items()) is is_asynchronous


@pytest.mark.parametrize(
    ("backend", "device", "kind", "uses_nccl"),
    [
        ("nccl", None, "cuda", True),
        ("cpu:gloo,cuda:nccl", None, "cuda", True),
        ("gloo", None, "cuda", False),
        ("undefined", None, "cuda", True),
        ("undefined", torch.device("cpu"), "cuda", False),
        ("undefined", None, None, False),
    ],
)
def test_groups_without_a_backend_use_nccl_on_gpus(
    backend: str, device: torch.device | None, kind: str | None, uses_nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `run` their ranks shared a GPU unnoticed, and PyTorch's watchdog ended those of a failed rank."""
    monkeypatch.setattr(accelerator, "kind", lambda: kind)
    assert _uses_nccl(backend, device) is uses_nccl
