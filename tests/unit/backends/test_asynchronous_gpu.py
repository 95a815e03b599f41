"""A GPU that runs behind its host: waiting for it, reading from it, aborting its exchanges, steps as graphs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerator_stand_in import StandIn
from torch import nn

from hvd_trainer.backends import EngineOptions, create, exchange_monitor
from hvd_trainer.faults import stack_dump
from hvd_trainer.faults.activity import Activity, ExchangeAbortedError
from hvd_trainer.faults.monitor import MonitorSettings
from hvd_trainer.faults.monitor_server import MonitorServer
from hvd_trainer.faults.root_cause import RootCause
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.utils import accelerator

GPU = torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def test_gpu_in_an_exchange_counts_as_waiting(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host runs ahead until its GPU's queue is full: such a rank counted as busy, and was blamed."""
    backend = create(EngineOptions(backend="ddp"), {})
    backend.session.devices = [GPU]
    backend._exchange_monitor = exchange_monitor.ExchangeMonitor(GPU)
    activity = backend.activity
    model = nn.Linear(1, 1)
    monkeypatch.setattr(backend, "_finish_exchange", lambda _: None)
    backend.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert gpu.calls == ["event 1 on compute"]
    activity.enter("forward")
    assert not activity.is_waiting, "the driver is not asked while the host gets on"
    activity.since -= 2
    assert activity.is_waiting
    gpu.events[0].done.set()
    monkeypatch.setattr(exchange_monitor, "MAX_ANSWER_S", 60)
    assert not activity.is_waiting


def test_device_read_counts_as_waiting() -> None:
    backend = create(EngineOptions(backend="single"), {})
    heard: list[str] = []
    backend.activity.listeners.append(heard.append)
    assert backend.read(torch.tensor([1.5, 2.0])) == [1.5, 2.0]
    assert backend.collectives.all_reduce_numbers([3, 4.5]) == [3, 4.5]
    assert heard == ["reduce", "start"] * 2


def test_aborted_exchange_invalidates_what_was_read() -> None:
    """A kernel of NCCL whose communicator is aborted ends, and leaves what was there before."""
    activity = Activity(60)
    activity.enter("step")
    with pytest.raises(ExchangeAbortedError), activity.waiting():
        activity.abort()  # by another thread, while this one waits for the device
    assert activity.in_exchange
    for going_on in (activity.check, lambda: activity.enter("save")):
        with pytest.raises(ExchangeAbortedError):
            going_on()


def test_survivors_abort_exchanges_in_elastic_mode_only() -> None:
    """No connection breaks between two GPUs of a host: the survivor's kernel would wait for ever."""
    aborted = threading.Event()
    there = [RankInfo("here", rank, "ddp", (), pid=os.getpid()) for rank in range(2)]
    for elastic_timeout_s, rank in ((None, 1), (5.0, 0), (5.0, 1)):
        aborted.clear()
        settings = MonitorSettings(
            world=World(0, 2),
            peers=there,
            activity=Activity(5),
            startup_s=5,
            environ={},
            elastic_timeout_s=elastic_timeout_s,
            abort_exchanges=aborted.set,
        )
        monitor = MonitorServer(settings, dist.HashStore(), "127.0.0.1")
        monitor.end_job(RootCause(rank, "it failed", reported=False), 3)
        survives = elastic_timeout_s is not None and rank == 1
        assert aborted.wait(5 if survives else 0.2) is survives
        monitor.start()
        monitor.close()


def test_stack_dump_names_unfinished_nccl_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[1024]],
        "collective_seq_id": 12,
        "process_group": ["0", "default_pg"],
        "state": "scheduled",
    }
    distributed = torch._C._distributed_c10d
    assert "Exchanges that" not in stack_dump.own_stacks()
    monkeypatch.setattr(
        distributed, "_dump_nccl_trace_json", lambda **_: json.dumps({"entries": [entry]}).encode(), raising=False
    )
    shown: list[str] = []
    asking = threading.Thread(target=lambda: shown.append(stack_dump.own_stacks()))
    asking.start()
    asking.join()
    assert stack_dump.unfinished_section(shown[0]) == (
        "Exchanges that are not finished:\n  nccl:all_reduce of [[1024]], number 12 of group 0"
    )
    assert "test_asynchronous_gpu.py" in stack_dump.main_thread_section(shown[0])


def test_barrier_synchronizes_the_gpu(gpu: StandIn) -> None:
    backend = create(EngineOptions(backend="single"), {})
    backend.session.devices = [GPU]
    backend.collectives.barrier()
    assert gpu.calls == ["synchronize cuda:1"]


def test_confirm_exchanges_needs_one_more_exchange(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's thread aborts NCCL's exchanges when it misses a rank, before the monitor has decided anything."""
    backend = create(EngineOptions(backend="single"), {})
    backend.confirm_exchanges()
    backend.session.devices = [GPU]

    def lost(*_: Any) -> None:
        raise RuntimeError("Horovod has been shut down")

    monkeypatch.setattr(backend.collectives, "_all_reduce", lost)
    with pytest.raises(RuntimeError, match="shut down"):
        backend.confirm_exchanges()
    assert backend.activity.in_exchange


def test_capture_uses_the_preparation_stream(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures on another stream than DDP's own failed: Megatron-LM's pull request 6021."""

    class Graph:
        def replay(self) -> None:
            gpu.calls.append("replay")

    @contextmanager
    def graph(graph: Graph, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        gpu.calls.append(f"capture on {stream.name}, {capture_error_mode}")
        yield
        gpu.calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with accelerator.side_stream(GPU) as stream:
        gpu.calls.append(f"prepare on {gpu.current.name}")
    launch = accelerator.capture(lambda: gpu.calls.append("step"), stream)
    launch()
    assert gpu.calls == [
        *("side waits for compute", "prepare on side", "compute waits for side"),
        *("capture on side, thread_local", "step", "end", "replay"),
    ]
