"""`from hvd_trainer import hvd`: Horovod's API on torch.distributed, in real ranks."""

from __future__ import annotations

import json
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_norm_checks import rounds_its_results_only
from combinations import case, each_launcher
from hvd_checks import Checks, run_checks
from hvd_elastic_checks import CHECKS as ELASTIC_CHECKS
from launchers import QUICKEST, in_ranks, launch, run_ranks
from peak_memory import PeakMemory
from torch import nn
from waiting import wait_for

from hvd_trainer import hvd
from hvd_trainer.hvd.common import mesh, transport

pytestmark = pytest.mark.warm


CHECKS = Checks()
ALL_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
REDUCIBLE = ALL_DTYPES[3:]
SIZES = ((), (3,), (0,), (7, 5), (1000, 3))
"""Tensors that travel with a request, and larger ones."""


def ranks() -> range:
    return range(hvd.size())


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of a rank: small whole numbers, whose sums are exact in each type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


@CHECKS.add
def allreduce_combines_all_types_and_sizes() -> None:
    combine = {hvd.Sum: torch.sum, hvd.Min: torch.amin, hvd.Max: torch.amax, hvd.Product: torch.prod}
    for dtype in REDUCIBLE:
        for shape in SIZES:
            mine = values(hvd.rank(), shape, dtype)
            everyone = torch.stack([values(rank, shape, dtype) for rank in ranks()])
            for op, function in combine.items():
                for repeat in range(3):  # unknown, then known to all
                    result = hvd.allreduce(mine, name=f"{dtype}.{shape}.{op}", op=op)
                    assert result.dtype == dtype
                    assert torch.equal(result, function(everyone, 0).to(dtype)), (dtype, shape, op, repeat)
            assert torch.equal(mine, values(hvd.rank(), shape, dtype)), "the input was changed"


@CHECKS.add
def allreduce_averages_and_scales() -> None:
    size = hvd.size()
    for repeat in range(3):
        result = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), name="average")
        assert torch.allclose(result, torch.full((3,), (size + 1) / 2)), repeat
        whole = hvd.allreduce(torch.tensor([3, -4, size]), name="whole")
        assert whole.tolist() == [3, -4, size], "integers are cut towards zero"
        scaled = hvd.allreduce(
            torch.ones(5), name="scaled", op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25
        )
        assert torch.allclose(scaled, torch.full((5,), size / 2))


@CHECKS.add
def in_place_operations_return_their_tensor() -> None:
    for shape in SIZES:
        tensor = torch.full(shape, 1.0, requires_grad=True)
        for op, expected in ((hvd.Sum, hvd.size()), (hvd.Average, hvd.size())):
            assert hvd.allreduce_(tensor, op=op) is tensor
            assert torch.equal(tensor.detach(), torch.full(shape, float(expected)))
        whole = torch.full(shape, hvd.rank())
        assert hvd.broadcast_(whole, 0) is whole
        assert torch.equal(whole, torch.full(shape, 0))


@CHECKS.add
def groups_are_one_operation() -> None:
    tensors = [values(hvd.rank(), shape, dtype) for shape in SIZES for dtype in REDUCIBLE]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    expected = [
        sum(values(rank, tuple(tensor.shape), tensor.dtype) for rank in ranks())  # type: ignore[misc]
        for tensor in tensors
    ]
    assert all(map(torch.equal, results, expected))
    assert hvd.grouped_allreduce_(tensors, op=hvd.Sum)[0] is tensors[0]
    assert all(map(torch.equal, tensors, expected))
    one = hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2)], op=hvd.Sum))
    assert isinstance(one, tuple)
    rows = [torch.full((hvd.rank() + 1, 2), hvd.rank()), torch.full((3,), hvd.rank(), dtype=torch.int16)]
    gathered = hvd.grouped_allgather(rows)
    assert gathered[0].shape == (sum(rank + 1 for rank in ranks()), 2)
    assert gathered[1].tolist() == [rank for rank in ranks() for _ in range(3)]
    parts = hvd.grouped_reducescatter([torch.ones(hvd.size(), 2), torch.ones(2 * hvd.size())], op=hvd.Sum)
    assert [tuple(part.shape) for part in parts] == [(1, 2), (2,)]


@CHECKS.add
def allgather_takes_different_numbers_of_rows() -> None:
    for dtype in ALL_DTYPES:
        for columns in (1, 40):
            for rows_of in (lambda rank: 2, lambda rank: rank, lambda rank: rank + 3):
                mine = torch.full((rows_of(hvd.rank()), columns), hvd.rank(), dtype=dtype)
                expected = torch.cat([torch.full((rows_of(r), columns), r, dtype=dtype) for r in ranks()])
                for _ in range(2):
                    assert torch.equal(hvd.allgather(mine, name=f"gather.{dtype}.{columns}"), expected)


@CHECKS.add
def broadcast_sends_from_any_root() -> None:
    for dtype in ALL_DTYPES:
        for shape in SIZES:
            for root in {0, hvd.size() - 1}:
                for _ in range(2):
                    got = hvd.broadcast(values(hvd.rank(), shape, dtype), root, name=f"{dtype}.{shape}.{root}")
                    assert torch.equal(got, values(root, shape, dtype))


@CHECKS.add
def alltoall_sends_rows_and_tells_how_many_came() -> None:
    size, me = hvd.size(), hvd.rank()
    even = hvd.alltoall(torch.arange(size * 2) + 100 * me)
    assert even.tolist() == [100 * rank + 2 * me + row for rank in ranks() for row in (0, 1)]
    splits = torch.tensor([(me + to) % 3 for to in ranks()], dtype=torch.int32)
    rows = torch.cat([torch.full((int(count), 2), 10 * me + to) for to, count in enumerate(splits)])
    for dtype in ALL_DTYPES:
        got, received = hvd.alltoall(rows.to(dtype), splits, name=f"{dtype}")
        assert received.tolist() == [(rank + me) % 3 for rank in ranks()]
        assert received.dtype == torch.int32
        expected = torch.cat([torch.full((int(n), 2), 10 * r + me) for r, n in enumerate(received)])
        assert torch.equal(got, expected.to(dtype))


@CHECKS.add
def reducescatter_gives_the_first_ranks_one_row_more() -> None:
    size, me = hvd.size(), hvd.rank()
    for dtype in REDUCIBLE:
        for extra in (0, 1):
            whole = values(0, (2 * size + extra, 3), dtype)
            got = hvd.reducescatter(whole, op=hvd.Sum, name=f"{dtype}.{extra}")
            first = 2 * me + min(me, extra)
            assert torch.equal(got, whole[first : first + 2 + (me < extra)] * size), (dtype, extra)
    assert torch.allclose(hvd.reducescatter(torch.ones(size), prescale_factor=4.0), torch.tensor([4.0]))


@CHECKS.add
def adasum_averages_parallel_and_adds_orthogonal_gradients() -> None:
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(torch.ones(3), op=hvd.Adasum)
        return
    for dtype in (torch.float16, torch.float32, torch.float64):
        parallel = hvd.allreduce(torch.ones(300, dtype=dtype), op=hvd.Adasum)
        assert torch.allclose(parallel, torch.ones(300, dtype=dtype))
        orthogonal = torch.zeros(hvd.size(), dtype=dtype)
        orthogonal[hvd.rank()] = 2
        assert torch.allclose(hvd.allreduce(orthogonal, op=hvd.Adasum), torch.full((hvd.size(),), 2, dtype=dtype))


@CHECKS.add
def gradients_flow_as_in_horovod() -> None:
    size, me = hvd.size(), hvd.rank()

    def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        tensor = torch.ones(4 * size, requires_grad=True)
        function(tensor).sum().backward()
        assert tensor.grad is not None
        return tensor.grad

    assert torch.equal(gradient(lambda t: hvd.allreduce(t, op=hvd.Sum)), torch.full((4 * size,), float(size)))
    assert torch.allclose(gradient(hvd.allreduce), torch.ones(4 * size))
    assert torch.equal(
        gradient(lambda t: hvd.grouped_allreduce([t], op=hvd.Sum)[0]), torch.full((4 * size,), size)
    )
    assert torch.equal(gradient(hvd.allgather), torch.ones(4 * size))
    root = gradient(lambda t: hvd.broadcast(t, 0))
    assert torch.equal(root, torch.full((4 * size,), float(me == 0)))
    assert torch.equal(gradient(hvd.alltoall), torch.ones(4 * size))
    assert torch.equal(gradient(lambda t: hvd.alltoall(t, [1] * size)[0]), (torch.arange(4 * size) < size).float())
    assert torch.equal(gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum)), torch.full((4 * size,), float(size)))


@CHECKS.add
def operations_are_matched_by_name_in_any_order() -> None:
    names = [f"layer{number}" for number in range(150)]
    order = names[hvd.rank() :] + names[: hvd.rank()]
    for _ in range(3):
        handles = {name: hvd.allreduce_async(torch.full((5,), float(name[5:])), name=name) for name in order}
        for name in reversed(order):
            assert hvd.synchronize(handles[name]).tolist() == [float(name[5:])] * 5


@CHECKS.add
def large_operations_are_matched_by_name_in_any_order() -> None:
    shapes = {f"large{number}": (number + 1, 1000) for number in range(30)}
    order = list(shapes)[hvd.rank() :] + list(shapes)[: hvd.rank()]
    for _ in range(2):
        handles = {name: hvd.allreduce_async(torch.ones(shapes[name]), name=name, op=hvd.Sum) for name in order}
        sent = {name: hvd.broadcast_async(torch.full(shapes[name], hvd.rank()), 0, name=name) for name in order}
        for name in order:
            assert torch.equal(hvd.synchronize(handles[name]), torch.full(shapes[name], float(hvd.size())))
            assert torch.equal(hvd.synchronize(sent[name]), torch.full(shapes[name], 0))


@CHECKS.add
def several_threads_may_submit() -> None:
    def reduce(number: int) -> float:
        total = 0.0
        for step in range(20):
            total += float(hvd.allreduce(torch.tensor(float(number)), name=f"thread{number}.{step % 3}"))
        return total

    order = [(number + hvd.rank()) % 4 for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reduce, order)) == [20.0 * number for number in order]


@CHECKS.add
def poll_and_synchronize_know_their_handles() -> None:
    handle = hvd.allreduce_async(torch.ones(3), name="polled", op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="Handle"):
        hvd.poll(handle)


@CHECKS.add
def mistakes_are_the_same_error_on_all_ranks_and_the_job_goes_on() -> None:
    odd = hvd.rank() % 2
    if hvd.size() == 1:
        return
    mistakes: dict[str, Callable[[], object]] = {
        "tensor shapes": lambda: hvd.allreduce(torch.ones(3 + odd), name="wrong"),
        "data types": lambda: hvd.allreduce(torch.ones(3).to([torch.int32, torch.float32][odd]), name="wrong"),
        "reduction operations": lambda: hvd.allreduce(torch.ones(3), name="wrong", op=[hvd.Sum, hvd.Max][odd]),
        "prescale factors": lambda: hvd.allreduce(torch.ones(3), name="wrong", prescale_factor=1.0 + odd),
        "postscale factors": lambda: hvd.allreduce(torch.ones(3), name="wrong", postscale_factor=1.0 + odd),
        "root ranks": lambda: hvd.broadcast(torch.ones(3), odd, name="wrong"),
        "numbers of tensors": lambda: hvd.grouped_allreduce([torch.ones(3)] * (1 + odd), name="wrong"),
        "operations": lambda: (
            hvd.broadcast(torch.ones(3), 0, name="wrong") if odd else hvd.allreduce(torch.ones(3), name="wrong")
        ),
    }
    for what, call in mistakes.items():
        with pytest.raises(hvd.HorovodInternalError, match=f"Mismatched {what}.*wrong: rank.* 0.*; rank.* 1"):
            call()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@CHECKS.add
def kinds_of_operations_under_one_name_are_told_apart() -> None:
    """They were refused after a second in which each rank had asked for one of them only."""
    operations = {
        "allreduce": lambda: hvd.allreduce_async(torch.ones(500), op=hvd.Sum, name="both"),
        "broadcast": lambda: hvd.broadcast_async(torch.full((500,), float(hvd.rank())), 0, name="both"),
    }
    handles = {}
    for kind in sorted(operations, reverse=hvd.rank() % 2 == 1):
        handles[kind] = operations[kind]()
        time.sleep(1.6)
    assert hvd.synchronize(handles["allreduce"])[0] == hvd.size()
    assert hvd.synchronize(handles["broadcast"])[0] == 0


@CHECKS.add
def operations_that_wait_for_each_other_under_one_name_are_refused_at_any_time() -> None:
    """Only once, about a second after the last operation, were they looked for."""
    if hvd.size() == 1:
        return
    pending = [hvd.allreduce_async(torch.ones(3), name=f"of rank {hvd.rank()}")]
    time.sleep(2.5)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched operations"):
        hvd.broadcast(torch.ones(3), 0, name="same") if hvd.rank() else hvd.allreduce(torch.ones(3), name="same")
    others = [rank for rank in ranks() if rank != hvd.rank()]
    pending += [hvd.allreduce_async(torch.ones(3), name=f"of rank {rank}") for rank in others]
    for handle in pending:
        hvd.synchronize(handle)


@CHECKS.add
def names_in_use_are_refused_at_once() -> None:
    handle = hvd.allreduce_async(torch.ones(1), name="taken") if hvd.rank() == 0 else None
    if handle is not None and hvd.size() > 1:
        with pytest.raises(ValueError, match="taken"):
            hvd.allreduce_async(torch.ones(1), name="taken")
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(1), name="taken")
    assert hvd.synchronize(handle).item() == 1


@CHECKS.add
def unsupported_tensors_are_refused() -> None:
    for call, error in (
        (lambda: hvd.allreduce(torch.ones(2, dtype=torch.uint8)), "ByteTensor"),
        (lambda: hvd.allgather(torch.ones(2, dtype=torch.bool)), "BoolTensor"),
        (lambda: hvd.allreduce(torch.ones(2, 3).t()), "contiguous"),
        (lambda: hvd.broadcast(torch.ones(2), hvd.size()), "root rank"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "scalar"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "scalar"),
        (lambda: hvd.alltoall(torch.ones(hvd.size()), torch.ones(hvd.size())), "32-bit"),
        (lambda: hvd.alltoall(torch.ones(1), [2] * hvd.size()), "do not fit"),
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "supersedes"),
    ):
        with pytest.raises(ValueError, match=error):
            call()
    with pytest.raises(hvd.HorovodInternalError, match="Average and"):
        hvd.reducescatter(torch.ones(4), op=hvd.Max)


@CHECKS.add
def ranks_that_joined_contribute_zeros() -> None:
    size, me = hvd.size(), hvd.rank()
    if size == 1:
        assert hvd.join() == 0
        return
    for known in (False, True):
        if known:
            hvd.allreduce(torch.ones(3), name="joined", op=hvd.Sum)
        for first in {0, size - 1}:
            if me != first:
                for shape in ((3,), (500,)):
                    name = "joined" if shape == (3,) else "joined.large"
                    assert torch.equal(
                        hvd.allreduce(torch.ones(shape), name=name, op=hvd.Sum), torch.full(shape, size - 1.0)
                    )
                with pytest.raises(hvd.HorovodInternalError, match=f"Join.*while rank {first} had joined"):
                    hvd.allgather(torch.ones(3), name="joined.gather")
                hvd.allreduce(torch.ones(3))  # without a name, which the rank that joined does not count
            last = hvd.join()
            assert last != first
            assert hvd.allgather(torch.tensor([last])).tolist() == [last] * size


@CHECKS.add
def barriers_wait_for_all_ranks() -> None:
    began = time.monotonic()
    if hvd.rank() == 0:
        time.sleep(0.3)
    hvd.barrier()
    assert time.monotonic() - began > 0.25


@CHECKS.add
def process_sets_work_by_themselves_and_at_once() -> None:
    size, me = hvd.size(), hvd.rank()
    with pytest.raises(ValueError, match="duplicate"):
        hvd.add_process_set([*ranks()])
    if size == 1:
        return
    even = hvd.add_process_set([*range(0, size, 2)])
    odd = hvd.add_process_set(range(1, size, 2))
    mine, other = (even, odd) if me % 2 == 0 else (odd, even)
    assert mine.included()
    assert not other.included()
    assert mine.rank() == me // 2
    total = hvd.allreduce(torch.tensor([float(me)]), op=hvd.Sum, process_set=mine, name="same name")
    assert total.item() == sum(mine.ranks or ())
    assert hvd.broadcast(torch.tensor([me]), (mine.ranks or [0])[-1], process_set=mine).item() == mine.ranks[-1]
    assert hvd.allgather(torch.tensor([me]), process_set=mine).tolist() == mine.ranks
    with pytest.raises(ValueError, match="not a member"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=mine)
    # One set waits until the other has met, which does not wait for it.
    with tempfile.TemporaryDirectory() as folder:
        met = Path(hvd.broadcast_object(folder)) / "met"
        if me == 0:
            wait_for(met.exists)
        hvd.barrier(mine)
        if mine is odd:
            met.touch()
        hvd.barrier()
    for process_set in (even, odd):
        assert hvd.remove_process_set(process_set)
        assert process_set.process_set_id is None
    assert not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)


@CHECKS.add
def idle_ranks_use_no_cpu() -> None:
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(1.5)
        began = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - began < 0.05
        hvd.allreduce(torch.ones(1), name="late")
    else:
        handle = hvd.allreduce_async(torch.ones(1), name="late")
        time.sleep(0.2)
        began = time.process_time()
        hvd.synchronize(handle)
        if hvd.size() > 1:
            assert time.process_time() - began < 0.1


@CHECKS.add
def rank_and_size_are_the_launchers() -> None:
    assert hvd.is_initialized()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks()[0] == list(ranks())
    assert str(hvd.global_process_set) == (f"ProcessSet(process_set_id=0, ranks={list(ranks())}, mpi_comm=None)")
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_built()


@CHECKS.add
def objects_travel_whole() -> None:
    size, me = hvd.size(), hvd.rank()
    mine = {"rank": me, "tensor": torch.full((me,), me), "kind": type(hvd.Compression.fp16)}
    for _ in range(2):
        everyone = hvd.allgather_object(mine)
        assert [one["rank"] for one in everyone] == [*ranks()]
        assert [len(one["tensor"]) for one in everyone] == [*ranks()]
        assert everyone[0]["kind"] is type(hvd.Compression.fp16)
    # Only the root has it, so its type cannot be the name.
    assert hvd.broadcast_object("from the last" if me == size - 1 else None, size - 1) == "from the last"
    assert hvd.broadcast_object((me, 2), name="pair") == (0, 2)


class Words(str):
    """A class of the script's own."""


@CHECKS.add
def large_tensors_of_objects_are_not_copied_into_a_pickle() -> None:
    """A state took several times its size on each rank."""
    me, num = hvd.rank(), 24 * 2**20
    root = hvd.size() - 1
    weight = torch.arange(100_000.0)
    mine = {
        "large": torch.full((num,), me),
        "array": np.arange(100_000),
        "tied": [weight, weight],
        "view": weight[5:].view(-1, 5),
        "parameter": nn.Parameter(torch.ones(300, 300, dtype=torch.bfloat16)),
        "none": torch.zeros(0),
        "words": Words("own"),
    }
    with PeakMemory() as peak:
        found = hvd.broadcast_object(mine if me == root else None, root, name="large")
    assert peak.grown_bytes < 1.3 * num * 8
    assert found["large"][0] == found["large"][-1] == root
    assert found["tied"][0] is found["tied"][1]
    assert torch.equal(found["view"], mine["view"])
    assert torch.equal(found["parameter"], mine["parameter"])
    assert type(found["parameter"]) is nn.Parameter
    assert type(found["words"]) is Words
    assert (found["array"] == mine["array"]).all()
    found["array"][0] = 1
    found["tied"][0].zero_()
    assert len(found["none"]) == 0
    assert len(hvd.allgather_object(mine["view"])) == hvd.size()


@CHECKS.add
def large_optimizer_states_take_little_more_memory_than_their_tensors() -> None:
    model = nn.Linear(2**12, 2**12, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        optimizer.state[model.weight]["momentum_buffer"] = torch.ones_like(model.weight)
    with PeakMemory() as peak:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert peak.grown_bytes < 1.3 * model.weight.nbytes + 2**24
    assert optimizer.state[model.weight]["momentum_buffer"].sum() == model.weight.numel()


@CHECKS.add
def parameters_become_the_roots() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight.set_(torch.randn(3, 4).t())  # not contiguous
    expected = hvd.broadcast_object(model.state_dict())
    for params in (model.state_dict(), model.named_parameters(), list(model.parameters())):
        hvd.broadcast_parameters(params, root_rank=0)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters("weights", root_rank=0)


@CHECKS.add
def optimizer_state_travels_without_a_fake_step() -> None:
    """Horovod takes a step on zero gradients, and Adam's first update is then 0.744 of what it should be."""
    me = hvd.rank()
    for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS):
        model = nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict(), 0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = kind(model.parameters(), lr=0.1 * (me + 1))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert all(map(torch.equal, before, model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if me == 0:  # it has resumed from a checkpoint, the others have not
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(optimizer.state_dict())
    for state in states:
        assert state["state"].keys() == {0, 1}
        assert torch.equal(state["state"][0]["exp_avg"], states[0]["state"][0]["exp_avg"])


@CHECKS.add
def optimizer_state_is_set_where_others_see_it() -> None:
    """A scheduler that was made before the optimizer was wrapped set a rate that the other ranks did not read."""
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.4 * (hvd.rank() + 1), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    group = inner.param_groups[0]
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    if hvd.rank() == 0:
        inner.state[model.bias]["momentum_buffer"] = torch.ones(2)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert group["lr"] == 0.4
    assert inner.state_dict()["state"][1]["momentum_buffer"].tolist() == [1, 1]
    group["lr"] = 0.3
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert scheduler.optimizer.param_groups is optimizer.param_groups


@CHECKS.add
def compression_restores_the_type() -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in (torch.float32, torch.float64, torch.int64):
            result = hvd.allreduce(torch.full((3,), 2, dtype=dtype), compression=compression)
            assert result.dtype == dtype
            assert result.tolist() == [2, 2, 2]


@CHECKS.add
def batch_norm_is_over_all_ranks() -> None:
    size, me = hvd.size(), hvd.rank()
    torch.manual_seed(0)
    whole = torch.randn(4 * size, 3, 2)
    ours, theirs = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
    mine = whole[4 * me : 4 * me + 4].clone().requires_grad_()
    everyone = whole.clone().requires_grad_()
    (ours(mine) ** 3).sum().backward()
    (theirs(everyone) ** 3).sum().backward()
    assert mine.grad is not None
    assert everyone.grad is not None
    assert torch.allclose(mine.grad, everyone.grad[4 * me : 4 * me + 4], atol=1e-4)
    assert torch.allclose(ours.running_var, theirs.running_var, atol=1e-5)


@CHECKS.add
def batch_norm_in_low_precision_rounds_its_results_only() -> None:
    def over_ranks(plain: nn.BatchNorm1d) -> nn.Module:
        layer = hvd.SyncBatchNorm(plain.num_features).to(plain.weight.dtype)
        layer.load_state_dict(plain.state_dict())
        return layer

    rounds_its_results_only(over_ranks, hvd.rank(), hvd.size())


@CHECKS.add
def timelines_are_json_while_the_job_runs_and_name_operations() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        for mark_cycles in (True, False):
            hvd.start_timeline(str(path), mark_cycles=mark_cycles)
            for name in ("small", "large"):
                hvd.allreduce(torch.ones(2 if name == "small" else 2000), name=name)
            while_it_runs = path.read_text() if hvd.rank() == 0 else ""
            hvd.stop_timeline()
            if hvd.rank() == 0:
                events = json.loads(while_it_runs)
                assert json.loads(path.read_text())[: len(events)] == events
                names = {event["name"] for event in events}
                assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= names
                assert ("CYCLE_START" in names) == mark_cycles
                rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
                assert {"allreduce.small", "allreduce.large"} <= rows
            else:
                assert not path.exists()


# Functions that are launched by themselves.


def time_line_on_a_full_disk(path: str) -> float:
    """Record operations in a file that cannot grow; return what the last one gave."""
    hvd.init()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hvd.start_timeline(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    for _ in range(100):
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="a")[0].item()
    hvd.shutdown()
    return total


def start_and_stop_again() -> tuple[int, list[float]]:
    """Start and stop three times, with process sets, and an operation that nobody waits for."""
    totals = []
    for step in range(3):
        hvd.init(process_sets=[hvd.ProcessSet([0])])
        rank = hvd.rank()
        totals.append(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item())
        hvd.allreduce_async(torch.ones(10_000), name=f"unwaited{step}")
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(hvd.HorovodInternalError, match="not been initialized"):
            hvd.allreduce(torch.ones(1))
        with pytest.raises(ValueError, match="not been initialized"):
            hvd.rank()
    assert not [thread for thread in threading.enumerate() if thread.name in ("horovod", "monitor")]
    return rank, totals


def exchanges_end_as_the_time_to_check_is_up() -> int:
    """Wait in steps as short as an exchange takes: many of them are done just after a step has timed out."""
    mesh.CHECK_S = transport.CHECK_S = 0.001
    hvd.init()
    for turn in range(600):
        if hvd.rank() == 1:
            time.sleep(0.001 * (1 + turn % 2) + 1e-6 * turn)
        hvd.allreduce(torch.ones(1 if turn % 4 < 2 else 1000), name=f"late {turn % 4}")
    return turn


ALL_CHECKS = CHECKS | ELASTIC_CHECKS


@pytest.fixture(scope="module", params=[1, 2, case(3, when="long"), 4])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, str | None]]:
    """The outcome of each check on each rank."""
    result: list[dict[str, str | None]] = in_ranks(request.param, run_checks, ALL_CHECKS)
    return result


@pytest.mark.parametrize("name", ALL_CHECKS)
def test_contract(name: str, outcomes: list[dict[str, str | None]]) -> None:
    failures = [f"rank {rank}:\n{its[name]}" for rank, its in enumerate(outcomes) if its[name]]
    assert not failures, "\n".join(failures)


@each_launcher("hand", "horovodrun", "torchrun", "mpirun", "srun")
def test_any_launcher_starts_it_again_and_again(launcher: str) -> None:
    size = 3 if launcher == "hand" else 2
    assert run_ranks(start_and_stop_again, num_processes=size, launcher=launcher) == [[float(size)] * 3] * size


def test_exchange_that_ends_as_the_time_to_check_is_up_is_no_failure() -> None:
    """PyTorch raised "Operation timed out!", and the exchange was complete by the time it was asked about."""
    assert in_ranks(2, exchanges_end_as_the_time_to_check_is_up) == [599, 599]


@pytest.mark.parametrize(
    ("level", "texts"), [("debug", (True, True)), ("INFO", (True, False)), ("error", (False, False))]
)
def test_log_level_is_horovods(level: str, texts: tuple[bool, bool], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom hvd_trainer import hvd\nhvd.init()\nhvd.allreduce(torch.ones(3), name='x')\n"
    )
    result = launch(QUICKEST, 2, [str(script)], env={"HOROVOD_LOG_LEVEL": level, "HOROVOD_LOG_HIDE_TIME": "1"})
    assert ("[INFO] rank 1 of 2" in result.stderr, "allreduce.x: done" in result.stderr) == texts


def without_a_timeline() -> float:
    """Start with a timeline that cannot be written, and ask for another one."""
    hvd.init()
    hvd.start_timeline("/nowhere/timeline.json")
    total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="a")[0].item()
    hvd.shutdown()
    return total


@pytest.mark.parametrize("path", ["/nowhere/timeline.json", "/proc"])
def test_training_does_without_a_timeline_that_cannot_be_written(path: str) -> None:
    """Rank 0 ended with a FileNotFoundError; Horovod continues, too."""
    env = {"HOROVOD_TIMELINE": path}
    assert in_ranks(3, without_a_timeline, env=env) == [3.0] * 3


def test_timeline_ends_where_the_disk_is_full_and_the_training_continues(tmp_path: Path) -> None:
    """The error ended the training, and the other rank was blamed."""
    path = tmp_path / "timeline.json"
    assert in_ranks(2, time_line_on_a_full_disk, str(path)) == [2.0, 2.0]
    events = json.loads(path.read_text())
    assert 5 < len(events) < 100


def test_results_do_not_depend_on_fusion() -> None:
    names = ["operations_are_matched_by_name_in_any_order", "large_operations_are_matched_by_name_in_any_order"]
    checks = {name: CHECKS[name] for name in names}
    for outcome in in_ranks(2, run_checks, checks, env={"HOROVOD_FUSION_THRESHOLD": "0"}):
        assert not any(outcome.values()), outcome
