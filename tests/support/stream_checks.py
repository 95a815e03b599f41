"""Rules of streams, memory and ends that a whole training does not show by itself; run as `device_checks` are.

`hold` stops a stream until a marker is reached: what must not depend on it continues, and what must does not.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from device_checks import controls, kind, rank

LIMIT_S = 20.0


def place(devices: int = 1) -> Any:
    """Return this rank's device, the first of so many."""
    import torch

    chosen = torch.device(kind(), rank() * devices % torch.accelerator.device_count())
    torch.accelerator.set_device_index(chosen.index)
    return chosen


def soon(is_true: Callable[[], bool]) -> bool:
    """Return whether something becomes true in time."""
    until = time.monotonic() + LIMIT_S
    while not is_true():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def ends(run: Callable[[], Any]) -> bool:
    """Return whether a function returns, or raises, in time."""
    thread = threading.Thread(target=lambda: _quietly(run), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return not thread.is_alive()


def _quietly(run: Callable[[], Any]) -> None:
    with suppress(RuntimeError):
        run()


def check_barrier(barrier: Callable[[], Any], gpu: Any) -> None:
    """Check that a barrier waits for what the device has been given before."""
    import torch

    held, queued = controls().hold(gpu.index), torch.Event(gpu)
    queued.record()
    threading.Timer(0.5, held.reach).start()
    barrier()
    assert queued.query(), "the barrier has not waited for the device"


def copy_to_host_is_whole(folder: str) -> tuple[int, None]:
    """What a checkpoint is made of has been computed and copied before it is written; its memory is used again."""
    import torch

    from hvd_trainer.checkpoint import storage
    from hvd_trainer.checkpoint.async_writer import AsyncWriter, PinnedMemory, copy_to_host
    from hvd_trainer.config.options import SaveOptions

    controls().run_in_order("late default stream")
    state = {}
    for number in range(min(2, torch.accelerator.device_count())):
        values = torch.ones(1000, device=torch.device(kind(), number))
        for _ in range(20):
            values = values * 1
        state[str(number)] = values
    for name, copied in copy_to_host(state).tensors.items():
        assert torch.equal(copied, torch.ones(1000)), f"of device {name}: {copied[:3].tolist()}"
    memory, places = PinnedMemory(), []
    for times in (1, 1, 9, 1):
        copied = copy_to_host({"0": state["0"].repeat(times)}, memory).tensors["0"]
        assert copied.is_pinned(), "pageable memory, from which copies are several times as slow"
        places.append(copied.data_ptr())
    assert (places[0], places[2]) == (places[1], places[3]), "page-locked memory is allocated again"
    written: list[Any] = []

    def save(_: Any, copied: Any, **figures: Any) -> None:
        time.sleep(0.3)  # the next one is submitted meanwhile
        written.append(copied.tensors["0"].unique().tolist())

    with mock.patch.object(storage, "save", save), AsyncWriter(Path(folder), SaveOptions()) as writer:
        for number in range(3):
            values = {"0": state["0"] * number}
            writer.submit(time.perf_counter(), values, step=number, epoch=0, figures={})
    assert written == [[0.0], [1.0], [2.0]], "memory is used again while it is written to a file"
    return 0, None


def moves_to_host_are_whole() -> tuple[int, None]:
    """What a model on a GPU and the CPU, or a metric, takes to the host has been computed and copied."""
    import torch

    from hvd_trainer.data.batch import to_device
    from hvd_trainer.parallel.device_pipeline import move_to
    from hvd_trainer.utils.pieces import move_in_pieces

    controls().run_in_order("late default stream")
    values, host = torch.ones(1000, device=place()), torch.device("cpu")
    for _ in range(20):
        values = values * 1
    for moved in (move_to(values, host), to_device((values * 1,), host)[0]):
        assert torch.equal(moved, torch.ones(1000)), f"not computed: {moved[:3].tolist()}"
    pieces: list[Any] = []
    move_in_pieces([values * 1], pieces.append, receives=False)
    assert pieces[0].is_pinned(), "a checkpoint's pieces come from pageable memory, several times as slowly"
    assert torch.equal(pieces[0].view(torch.float32), torch.ones(1000))
    return 0, None


def results_stay() -> tuple[int, None]:
    """A result of Horovod, made on the default stream, stays until the stream that follows has read it."""
    import torch

    from hvd_trainer.backends.horovod_waiter import follow

    gpu = place()
    received = torch.ones(1000, device=gpu) * 1
    with torch.Stream(gpu) as side:
        held = controls().hold(gpu.index)
        read = follow(received) * 1
    del received
    spoiled = torch.full((1000,), 2.0, device=gpu)  # takes over what is free
    torch.accelerator.current_stream(gpu).synchronize()
    held.reach()
    side.synchronize()
    assert read.tolist() == [1.0] * 1000, f"{read[:3].tolist()} once {spoiled[:3].tolist()} was made"
    return rank(), None


def times() -> tuple[int, None]:
    """The time between two marks is the device's, and the host waits for neither."""
    from hvd_trainer.observe.phases import Clock

    gpu = place()
    clock = Clock(gpu)
    start, held = clock.mark(), controls().hold(gpu.index)
    end = clock.mark()
    threading.Timer(0.3, held.reach).start()
    clock.settle()
    assert clock.seconds(start, end) > 0.2
    return rank(), None


def copies_overlap() -> tuple[int, None]:
    """The next batch is copied while the default stream still computes, and the host waits for neither."""
    import torch

    from hvd_trainer.data.transfer import Transfer

    gpu = place()
    batches = ((torch.full((1000, 100), float(number)).pin_memory(),) for number in range(3))
    moved = iter(Transfer(gpu).move(batches))
    torch.zeros(1000, 100, device=gpu).sum().item()  # the first use of a kernel may wait for all others
    held = controls().hold(gpu.index)
    arrived: list[Any] = []
    # The first is asked for, and so are the copies of two.
    assert ends(lambda: arrived.append(next(moved))), "the host waits for the default stream"
    copied = torch.Event(gpu)
    total = arrived[0][0].sum()
    copied.record()
    with torch.Stream(gpu):  # which is not held, and so reads at once
        assert soon(lambda: bool((arrived[0][0].cpu() == 0).all())), "the copy waits for the default stream"
    assert not copied.query()
    held.reach()
    assert total.item() == 0.0
    # Of lengths that stay on the host, and from pageable memory.
    texts = torch.nn.utils.rnn.pack_sequence([torch.full((length, 9), 2.0) for length in (3, 1)])
    [(packed,)] = Transfer(gpu).move([(texts,)])
    assert (packed.data.device, packed.data.unique().tolist(), packed.batch_sizes.is_cpu) == (gpu, [2.0], True)
    return rank(), None


def hvd_in_any_order(orders: Sequence[str]) -> tuple[int, None]:
    """Results of hvd_trainer.hvd on a side stream are those of the numbers, whichever stream is late."""
    import torch

    import hvd_trainer.hvd as hvd

    hvd.init()
    gpu, size = place(), hvd.size()
    side = torch.Stream(gpu)
    for order, number in itertools.product(orders, range(3)):
        controls().run_in_order(order)
        with side:
            values = torch.full((1000,), 1.0, device=gpu) * (hvd.rank() + number)
            handle = hvd.allreduce_async(values, name=f"sum {number}", op=hvd.Sum)
        del values
        together = hvd.synchronize(handle) * 1
        with side:  # which waits neither for the default stream nor its readers
            hvd.allreduce(torch.ones(1000, device=gpu), name=f"next {number}")
        gathered = hvd.allgather(torch.full((3,), float(hvd.rank()), device=gpu), name=f"gather {number}")
        expected = sum(range(number, number + size))
        assert together.tolist() == [float(expected)] * 1000, f"{together[:3].tolist()}, not {expected}"
        assert gathered.tolist() == [float(it) for it in range(size) for _ in range(3)]
    # A thread without a device of its own makes no context on device 0, which is another rank's.
    with ThreadPoolExecutor(1) as thread:
        values = thread.submit(hvd.allreduce, torch.ones(4, device=gpu), name="thread").result()
    assert values.tolist() == [1.0] * 4
    # `poll` tells of the device, not of the queue. Both ranks hold theirs, so that none waits for the other.
    held = controls().hold(gpu.index)
    handle = hvd.allreduce_async(torch.ones(4, device=gpu), name="held")
    time.sleep(0.3)
    assert not hvd.poll(handle), "an operation that waits on the device is said to be done"
    held.reach()
    assert soon(lambda: hvd.poll(handle))
    hvd.synchronize(handle)
    hvd.shutdown()
    return rank(), None


def hvd_join() -> tuple[int, None]:
    """A rank that has joined without a device says what to type; with one, it makes its zeros there."""
    import torch

    import hvd_trainer.hvd as hvd

    hvd.init()
    gpu = place()
    if hvd.rank() == 0:
        hvd.join()
    else:
        time.sleep(0.5)  # rank 0 has joined, or joins meanwhile: either is told
        with pytest.raises(hvd.HorovodInternalError, match=r"Type hvd\.join\(hvd\.local_rank\(\)\)"):
            hvd.allreduce(torch.ones(4, device=gpu), name="too late")
        hvd.join()
    if hvd.rank() == hvd.size() - 1:
        hvd.join(gpu.index)
    else:
        total = hvd.allreduce(torch.ones(4, device=gpu), name="in time", op=hvd.Sum)
        assert total.tolist() == [hvd.size() - 1.0] * 4
        hvd.join(gpu.index)
    hvd.shutdown()
    return rank(), None


def hvd_fuses() -> tuple[int, None]:
    """Tensors travel together only with those of their device, and after all of them are there."""
    import torch

    import hvd_trainer.hvd as hvd

    hvd.init()
    gpus = [torch.device(kind(), 2 * hvd.rank() + number) for number in range(2)]
    place(2)
    streams = [
        (gpu, stream) for gpu in gpus for stream in (torch.accelerator.current_stream(gpu), torch.Stream(gpu))
    ]
    held = []
    for gpu, stream in streams[1::2]:
        with torch.accelerator.device_index(gpu.index), stream:
            held.append(controls().hold(gpu.index))
    handles = []
    for number, (gpu, stream) in enumerate(3 * streams):
        with torch.accelerator.device_index(gpu.index), stream:
            values = torch.full((4,), float(number), device=gpu) * 1
            handles.append(hvd.allreduce_async(values, name=f"part {number}", op=hvd.Sum))
    for marker in held:
        marker.reach()
    for number, handle in enumerate(handles):
        total = hvd.synchronize(handle)
        assert total.device == gpus[number % 4 // 2]
        assert total.tolist() == [float(number * hvd.size())] * 4, f"part {number}: {total.tolist()}"
    hvd.shutdown()
    return rank(), None


def hvd_process_sets() -> tuple[int, None]:
    """Exchanges of process sets that share ranks begin in one order, whichever a rank has asked for first."""
    import torch

    import hvd_trainer.hvd as hvd

    pairs = [hvd.ProcessSet([number, number + 1]) for number in range(int(os.environ["WORLD_SIZE"]) - 1)]
    hvd.init(process_sets=pairs)
    ones = torch.ones(4, device=place())
    own = [hvd.global_process_set, *(pair for pair in pairs if pair.included())]
    totals = []
    for number in range(50):
        first = (number + rank()) % len(own)
        asked = [*own[first:], *own[:first]]
        handles = [hvd.allreduce_async(ones, name=f"sum {number}", op=hvd.Sum, process_set=it) for it in asked]
        totals += [(it.size(), hvd.synchronize(handle)) for it, handle in zip(asked, handles, strict=True)]
    assert ends(torch.accelerator.synchronize), "exchanges wait for each other on different ranks"
    for size, total in totals:
        assert total.tolist() == [size] * 4
    hvd.shutdown()
    return rank(), None


def c10d_in_any_order(orders: Sequence[str]) -> tuple[int, None]:
    """Horovod below torch.distributed: an operation runs on the stream of its call, and others wait for it."""
    import torch
    import torch.distributed as dist

    import hvd_trainer.c10d  # noqa: F401

    dist.init_process_group("horovod", init_method="env://")
    gpu, size = place(), dist.get_world_size()
    side, other = torch.Stream(gpu), torch.Stream(gpu)
    for order, number in itertools.product(orders, range(3)):
        controls().run_in_order(order)
        with side:
            values = torch.full((1000,), 1.0, device=gpu) * (rank() + number)
            work = dist.all_reduce(values, async_op=True)
        expected = float(sum(range(number, number + size)))
        with other:  # the default stream has the result by Horovod itself
            work.wait()
            together = (values * 1).tolist()
        assert together == [expected] * 1000, f"{together[:3]}, not {expected}"
        with side:
            rows = [torch.empty(3, device=gpu) for _ in range(size)]
            work = dist.all_gather(rows, torch.full((3,), float(rank()), device=gpu), async_op=True)
        with other:
            (work.get_future() if number else work).wait()
            gathered = [row.tolist() for row in rows]
        assert gathered == [[float(it)] * 3 for it in range(size)]
    with ThreadPoolExecutor(1) as thread:
        thread.submit(dist.all_reduce, values).result()
    check_barrier(dist.barrier, gpu)
    held = controls().hold(gpu.index)  # where Horovod's result arrives
    with side:
        work = dist.all_reduce(values, async_op=True)
    assert not any((work.is_completed(), time.sleep(0.01))[0] for _ in range(30)), "the device is said to be done"
    held.reach()
    assert soon(work.is_completed)
    for call in (dist.send, dist.recv):
        with pytest.raises(RuntimeError, match=r"Exchange tensor\.cpu\(\)"):
            call(torch.ones(1, device=gpu), (rank() + 1) % size)
    dist.destroy_process_group()
    return rank(), None


def results_are_waited_for(engine: str) -> tuple[int, None]:
    """What collectives return can be read at once; all ranks have one group, and each has the job's time limit."""
    import torch
    import torch.distributed as dist

    from hvd_trainer import backends
    from hvd_trainer.backends import process_group

    with backends.create(backends.EngineOptions(backend=engine, startup_timeout_s=77)) as backend:
        controls().run_in_order("very late side streams")
        gpu, size, collectives = backend.device, backend.world.size, backend.collectives
        ones = torch.ones(1000, device=gpu) * 1  # the first use of a kernel takes longer than a stream is late
        sent = torch.full((1000,), float(rank()), device=gpu)
        collectives.broadcast_to_replicas([(sent, size - 1)])
        results = {
            "all_reduce": (collectives.all_reduce(ones) * 1, float(size)),
            "tree_sum": (collectives.tree_sum(ones) * 1, float(size)),
            "broadcast": (sent * 1, size - 1.0),
        }
        for name, (result, expected) in results.items():
            assert result.tolist() == [expected] * 1000, f"{name}: {result[:3].tolist()}, not {expected}"
        whole: Any = dist.group.WORLD
        alone: Any = backend.group_of([[number] for number in range(size)])
        for group, device in itertools.product((whole, alone), (torch.device("cpu"), gpu)):
            part = group._get_backend(device)  # both: objects do not pass through the memory of a GPU
            assert group.bound_device_id == gpu
            # The monitor finds who does not come to an exchange on a device.
            lasts = device.type != "cpu" and hasattr(part, "set_timeout")
            expected, limit = process_group.NO_TIMEOUT if lasts else timedelta(seconds=77), part.options._timeout
            assert limit == expected, f"exchanges on {device.type} may take {limit}"
        check_barrier(collectives.barrier, gpu)
        assert backend.group_of(backend.replica_groups) is whole, "a second communicator of all ranks"
    return rank(), None


def exchange_is_seen(folder: str) -> tuple[int, None]:
    """A rank whose device waits for another one's gradients is seen to do so, after its host has run ahead."""
    import torch

    from hvd_trainer import backends

    seen = Path(folder, "seen")
    with backends.create(backends.EngineOptions(backend="ddp")) as backend:
        gpu, layer = backend.device, torch.nn.Linear(4, 4)
        layer.to(gpu)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        backend.set_parameter_names(layer, optimizer)
        backend.prepare_stage(layer, passes=1)
        for number in range(2):  # NCCL connects in the first step, and the host waits
            held = controls().hold(gpu.index) if (number, rank()) == (1, 1) else None
            layer(torch.ones(2, 4, device=gpu)).sum().backward()
            backend.step(optimizer)
        if held is None:
            assert backend.activity.is_exchanging(), "the device is said to be done"
            seen.touch()
        else:
            soon(seen.exists)
            held.reach()
        assert soon(lambda: not backend.activity.is_exchanging())
    return rank(), None


def abort_ends_a_wait(kind: str, folder: str) -> tuple[int, None]:
    """A device that waits for a rank which never comes is free again once the exchanges are aborted."""
    import torch

    done = Path(folder, "done")
    if kind == "hvd":
        import hvd_trainer.hvd as hvd
        from hvd_trainer.hvd.common import basics

        hvd.init()
        hvd.allreduce(torch.ones(4, device=place()), name="meet")
        groups = basics.runtime().controller(0)._transport._device_groups
        begin, abort = next(iter(groups.values())).allreduce, basics.runtime().abort_collectives
    else:
        from hvd_trainer import backends
        from hvd_trainer.faults.activity import CollectiveAbortedError

        engine = backends.create(backends.EngineOptions(backend="ddp")).__enter__()
        begin, abort = engine.collectives._all_reduce, engine.abort_collectives
    torch.accelerator.synchronize()
    if rank() == 0:
        values = torch.ones(4, device=place())
        work = begin([values]) if kind == "hvd" else begin(values, "sum")
        if kind == "hvd":
            work.wait()
        time.sleep(0.2)
        threading.Thread(target=abort, daemon=True).start()
        assert ends(torch.accelerator.synchronize), "the device still waits"
        if kind == "ddp":  # what the exchange has left means nothing
            with pytest.raises(CollectiveAbortedError):
                engine.activity.check()
        done.touch()
    # Both end at once, before one can miss the other.
    assert soon(done.exists)
    return rank(), None
