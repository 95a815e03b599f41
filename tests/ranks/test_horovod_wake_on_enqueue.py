"""In the Horovod that we build nobody polls: neither its thread for tensors, nor who waits for an operation."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from launchers import in_ranks, requires, run_ranks

from hvd_trainer import EngineOptions, backends

pytestmark = requires("horovod")

CYCLE_S, EXCHANGES = 1.0, 20
ASKED = {"HOROVOD_WAKE_ON_ENQUEUE": "1", "HOROVOD_CYCLE_TIME": str(1000 * CYCLE_S)}


def exchange() -> tuple[int, tuple[float, str | None]]:
    """Return the rank, the seconds that the exchanges took, and HOROVOD_CYCLE_TIME afterwards."""
    with backends.create(EngineOptions(backend="horovod")) as backend:
        backend.collectives.barrier()
        started = time.monotonic()
        for _ in range(EXCHANGES):
            backend.collectives.all_reduce(torch.ones(3))
        return backend.world.rank, (time.monotonic() - started, os.environ.get("HOROVOD_CYCLE_TIME"))


def test_wake_on_enqueue_ends_the_pause() -> None:
    """As published, 20 exchanges in cycles of 1 s take 20 s. A variable that the user sets is kept."""
    for seconds, cycle in run_ranks(exchange, num_processes=2, launcher="horovodrun", env=ASKED):
        assert seconds < EXCHANGES * CYCLE_S / 3
        assert cycle == "1000.0"


def test_cycle_time_of_the_user_is_kept() -> None:
    env = {"HOROVOD_CYCLE_TIME": "100"}
    for seconds, cycle in run_ranks(exchange, num_processes=2, launcher="horovodrun", env=env):
        assert seconds > (EXCHANGES - 2) * 0.1
        assert cycle == "100"


def exchange_in_pairs() -> float:
    """Return the seconds that exchanges take in two groups at once; the last rank has nothing to exchange."""
    import hvd_trainer.c10d  # noqa: F401

    dist.init_process_group("horovod")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    started = time.monotonic()
    if rank < 4:
        for number in range(EXCHANGES):
            total = torch.tensor([rank + number])
            dist.all_reduce(total, group=pairs[rank // 2])
            assert total.item() == 2 * number + (1 if rank < 2 else 5)
    seconds = time.monotonic() - started
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(5)])
    dist.destroy_process_group()
    return seconds


def test_tensors_of_some_ranks_wake_all() -> None:
    """All ranks take part in every cycle: the exchanges of two waited for the pause of those without a tensor."""
    seconds = in_ranks(5, exchange_in_pairs, env=ASKED)
    assert max(seconds) < EXCHANGES * CYCLE_S / 3


LATE_S = 2.0


def wait_for_late_rank() -> tuple[int, tuple[float, int]]:
    """Return the CPU time of waiting for the other rank, and how many operations ended meanwhile."""
    import horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
    hvd.allreduce(torch.ones(1), name="first")
    wait_done = hvd.mpi_ops.mpi_lib.horovod_torch_wait_done
    num_done = wait_done(-1, 0.0)
    time.sleep(LATE_S * rank)
    began = time.process_time()
    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="late"))
    cpu_s = time.process_time() - began
    num_done = wait_done(num_done, 60.0) - num_done
    hvd.shutdown()
    return rank, (cpu_s, num_done)


def test_waiting_takes_no_cpu_time() -> None:
    """`synchronize` called sched_yield() for as long as it waited."""
    for cpu_s, num_done in run_ranks(wait_for_late_rank, num_processes=2, launcher="horovodrun", env=ASKED):
        assert num_done == 1
        assert cpu_s < LATE_S / 4
