"""What a rank records beside its stacks for `diagnose`: its own collectives, starts of loaders, and switches."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, dataloader

from hvd_trainer.measure.collective_calls import OF_TORCH, CollectiveCalls
from hvd_trainer.measure.listener import Step
from hvd_trainer.measure.stack_record import LOADER_START, MAIN, WORKER, Record
from hvd_trainer.measure.stacks import StackSampler
from hvd_trainer.measure.switches import SwitchReader


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back at the end what is replaced meanwhile."""
    for module in (dist, dist.distributed_c10d):
        for name in OF_TORCH:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))
    kind = dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(kind, "__init__", kind.__init__)
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("patched", "group")
def test_own_collectives_are_counted_by_line() -> None:
    calls = CollectiveCalls()
    calls.install()
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    dist.barrier()
    (line, sums), (_, barriers) = sorted(calls.counts.items(), key=lambda item: item[0][0])
    assert (line[0], sums.calls, sums.bytes, len(sums.seconds)) == ("all_reduce", 3, 120, 3)
    assert (barriers.calls, barriers.bytes) == (1, 0)
    calls.clear()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    ((_, asynchronous),) = calls.counts.items()
    assert (asynchronous.calls, asynchronous.bytes, asynchronous.seconds) == (1, 40, [])
    calls.clear()
    dist.broadcast_object_list(["calls broadcast within, twice"], src=0)
    assert [name for name, _ in calls.counts] == ["broadcast_object_list"]


@pytest.mark.usefixtures("patched", "group")
def test_what_an_engine_exchanges_is_not_the_users() -> None:
    """Each of these calls `dist.all_reduce` below a line of the user's; a hook's was that of `backward()`."""
    callers: list[str] = []
    exchange = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        callers.append(sys._getframe(3).f_code.co_name)
        return exchange(*args, **kwargs)

    dist.all_reduce = all_reduce
    calls = CollectiveCalls()
    calls.install()
    model = DistributedDataParallel(nn.Linear(4, 4))
    with model.join():
        model(torch.ones(2, 4)).sum().backward()
    model.register_comm_hook(None, allreduce_hook)
    model(torch.ones(2, 4)).sum().backward()
    assert {"notify_join_context", "_allreduce_fut"} <= {*callers}
    assert calls.counts == {}


@pytest.mark.usefixtures("patched", "group")
def test_a_compiled_graph_stays_whole() -> None:
    """`torch.compile(fullgraph=True)` ended at the clock that timed a collective."""
    calls = CollectiveCalls()
    calls.install()

    @torch.compile(fullgraph=True, backend="eager")
    def total(value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return 2 * value

    assert total(torch.ones(2)).tolist() == [2, 2]
    dist.all_reduce(torch.ones(2))
    assert [name for name, _ in calls.counts] == ["all_reduce"]


class Squares(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index**2


class Slow(Squares):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.3)
        return index


@pytest.mark.parametrize(("persistent", "times"), [(False, 3), (True, 1)])
@pytest.mark.usefixtures("patched")
def test_starts_of_loader_processes_are_counted(persistent: bool, times: int, tmp_path: Path) -> None:
    """Until the first batch the rank waits for them, and then for data."""
    sampler = StackSampler(tmp_path / "rank-0.json")
    sampler.install()
    sampler.on_start(torch.device("cpu"), on_trainer=True)
    sampler.phase = "data"
    loader = DataLoader(Slow(), num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        for batch in loader:
            sampler.on_batch(batch, loader)
    sampler.stop()
    record = msgspec.json.decode((tmp_path / "rank-0.json").read_bytes(), type=Record)
    assert (record.starts.times, record.starts.processes) == (times, 2 * times)
    waited = {phase: sum(s.wall_s for s in record.stacks if s.phase == phase) for phase in (LOADER_START, "data")}
    assert min(waited.values()) > 0.2


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.usefixtures("patched")
def test_loader_processes_are_sampled_however_they_are_started(tmp_path: Path, method: str) -> None:
    """Only forks were, and Python forks none from 3.14 on: nothing told at which line the data set computes."""
    sampler = StackSampler(tmp_path / "rank-0.json")
    sampler.install()
    loader = DataLoader(Slow(), num_workers=1, multiprocessing_context=method)
    assert list(loader) == [0, 1, 2, 3]
    (file,) = tmp_path.glob("rank-0.worker-*.json")
    record = msgspec.json.decode(file.read_bytes(), type=Record)
    assert "Slow.__getitem__" in {frame.function for frame in record.frames}
    assert {stack.phase for stack in record.stacks if stack.thread == MAIN} == {WORKER}


@pytest.mark.usefixtures("group")
def test_switches_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 4).double()]
    wrapped = DistributedDataParallel(models[0], find_unused_parameters=True)
    for _ in range(3):
        wrapped(torch.ones(2, 4)).sum().backward()
    reader = SwitchReader()
    reader.look()
    assert reader.read().anomaly == 0
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    with torch.autograd.detect_anomaly(check_nan=False):
        reader.look()
    on = reader.read()
    assert on.anomaly == 0.5
    assert 0 < on.float64 < 1
    assert on.needless_search
    assert (on.threads, on.variables) == (torch.get_num_threads(), {"TORCH_DISTRIBUTED_DEBUG": "detail"})


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(inputs)
        return result


@pytest.mark.usefixtures("group")
def test_a_search_that_is_needed_is_no_switch() -> None:
    wrapped = DistributedDataParallel(Half(), find_unused_parameters=True)
    reader = SwitchReader()
    for _ in range(3):
        wrapped(torch.ones(2, 4)).sum().backward()
    assert not reader.read().needless_search


@pytest.mark.usefixtures("patched", "group")
def test_a_rank_writes_them(tmp_path: Path) -> None:
    """By one function, for scripts and for Trainer jobs."""
    sampler = StackSampler(tmp_path / "rank-0.json")
    sampler.install()
    sampler.on_start(torch.device("cpu"), on_trainer=True)
    for _ in range(12):
        dist.all_reduce(torch.ones(10))
        time.sleep(0.01)
        sampler.on_step_end(Step(1, 0.1))
    sampler.stop()
    record = msgspec.json.decode((tmp_path / "rank-0.json").read_bytes(), type=Record)
    (call,) = record.calls
    assert call.function == "all_reduce"
    assert call.bytes == 40 * call.calls
    assert call.first + call.calls == 12
    assert len(call.seconds) == call.calls
    assert record.frames[call.frame].file == os.path.realpath(__file__)
    assert record.frames[call.frame].call == "dist.all_reduce"
    assert record.switches.threads == torch.get_num_threads()
    assert record.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert record.machine_s >= 0
