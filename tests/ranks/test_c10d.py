"""Horovod as a backend of torch.distributed: collectives, groups, DDP and what stands on them, in real ranks."""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from combinations import case, each_launcher
from launchers import in_ranks, requires, run_ranks
from torch import Tensor, nn

pytestmark = [requires("horovod"), pytest.mark.warm]


@contextlib.contextmanager
def job(backend: str = "horovod", **options: Any) -> Iterator[tuple[int, int]]:
    """Start the default group; yield rank and size."""
    import hvd_trainer.c10d  # noqa: F401

    # What makes no progress ends with its name, before the test does without a word.
    dist.init_process_group(backend, **{"timeout": datetime.timedelta(seconds=120), **options})
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        gc.collect()  # a Gloo group that its own thread is the last to hold aborts the process
        dist.destroy_process_group()


def refusal(function: Any, *arguments: Any, **options: Any) -> str:
    """Return the text of the error that a call raises."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it raised nothing")


# Collectives.

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
MOVED_DTYPES = (*DTYPES, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)


def numbers(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor that tells ranks apart."""
    return (torch.arange(6).view(2, 3) % 5 + number + 1).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def check_all_reduce(group: dist.ProcessGroup | None, size: int) -> None:
    rank, everyone = dist.get_rank(group), [numbers(number) for number in range(size)]
    for dtype in DTYPES:
        stacked = torch.stack([numbers(number, torch.float64) for number in range(size)])
        for op, expected in (
            (dist.ReduceOp.SUM, stacked.sum(0)),
            (dist.ReduceOp.MIN, stacked.amin(0)),
            (dist.ReduceOp.MAX, stacked.amax(0)),
            (dist.ReduceOp.PRODUCT, stacked.prod(0)),
        ):
            mine = numbers(rank, dtype)
            dist.all_reduce(mine, op=op, group=group)
            assert torch.equal(mine, expected.to(dtype)), (dtype, op)
    for op, expected in (
        (dist.ReduceOp.AVG, torch.stack(everyone).mean(0)),
        (dist._make_nccl_premul_sum(0.5), torch.stack(everyone).sum(0) / 2),
    ):
        mine = numbers(rank)
        dist.all_reduce(mine, op=op, group=group)
        torch.testing.assert_close(mine, expected)
    mask = torch.tensor([1 << rank])
    dist.all_reduce(mask, op=dist.ReduceOp.BOR, group=group)
    assert mask.item() == (1 << size) - 1


def check_all_reduce_of_shapes(group: dist.ProcessGroup | None, size: int) -> None:
    rank, total = dist.get_rank(group), sum(numbers(number) for number in range(size))
    strided = numbers(rank).t()
    dist.all_reduce(strided, group=group)
    assert torch.equal(strided, total.t())
    several = [numbers(rank), numbers(rank) + 1]
    dist.all_reduce_coalesced(several, group=group)
    assert torch.equal(several[1], total + size)
    dist.all_reduce(torch.empty(0), group=group)


def check_one_root(group: dist.ProcessGroup | None, size: int) -> None:
    """Check the collectives in which one rank has, or gets, more than the others."""
    rank, everyone = dist.get_rank(group), [numbers(number) for number in range(size)]
    for root in range(size):
        mine = numbers(rank)
        dist.reduce(mine, group_dst=root, group=group)
        assert torch.equal(mine, sum(everyone) if rank == root else numbers(rank))
        parts = [torch.zeros(2, 3) for _ in everyone] if rank == root else None
        dist.gather(numbers(rank), parts, group_dst=root, group=group)
        assert rank != root or all(map(torch.equal, parts, everyone))
        mine = torch.zeros(2, 3)
        dist.scatter(mine, everyone if rank == root else None, group_src=root, group=group)
        assert torch.equal(mine, numbers(rank))


def check_moves(group: dist.ProcessGroup | None, size: int) -> None:
    """Check the collectives that only move elements, for all types."""
    rank = dist.get_rank(group)
    for dtype in MOVED_DTYPES:
        mine = numbers(rank, dtype)
        dist.broadcast(mine, group_src=size - 1, group=group)
        assert torch.equal(bits(mine), bits(numbers(size - 1, dtype))), dtype
        parts = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, numbers(rank, dtype), group=group)
        for number, part in enumerate(parts):
            assert torch.equal(bits(part), bits(numbers(number, dtype))), dtype
        whole = torch.zeros(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(whole, numbers(rank, dtype), group=group)
        assert torch.equal(bits(whole), bits(torch.cat(parts))), dtype
        received = torch.zeros(size, 3, dtype=dtype)
        sent = torch.stack([numbers(10 * rank + number, dtype)[0] for number in range(size)])
        dist.all_to_all_single(received, sent, group=group)
        expected = torch.stack([numbers(10 * number + rank, dtype)[0] for number in range(size)])
        assert torch.equal(bits(received), bits(expected)), dtype


def check_lists(group: dist.ProcessGroup | None, size: int) -> None:
    """Check all-gathers and all-to-alls of lists and of uneven parts."""
    rank = dist.get_rank(group)
    pairs = [[torch.zeros(2, 3), torch.zeros(2, 3)] for _ in range(size)]
    dist.all_gather_coalesced(pairs, [numbers(rank), numbers(rank) + 1], group=group)
    for number, (one, two) in enumerate(pairs):
        assert torch.equal(one, numbers(number))
        assert torch.equal(two, numbers(number) + 1)
    uneven = [torch.zeros(number + 1) for number in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)), group=group)
    assert [part.tolist() for part in uneven] == [[float(number)] * (number + 1) for number in range(size)]
    # Rank r sends r + n + 1 rows to rank n.
    sizes = [rank + number + 1 for number in range(size)]
    received = torch.zeros(sum(sizes), 2)
    dist.all_to_all_single(received, torch.full((sum(sizes), 2), float(rank)), sizes, sizes, group=group)
    expected = torch.cat([torch.full((sizes[number], 2), float(number)) for number in range(size)])
    assert torch.equal(received, expected)
    outputs = [torch.zeros(count) for count in sizes]
    dist.all_to_all(outputs, [torch.full((count,), float(rank)) for count in sizes], group=group)
    assert torch.equal(torch.cat(outputs), expected[:, 0])


def check_reduce_scatter(group: dist.ProcessGroup | None, size: int) -> None:
    rank, everyone = dist.get_rank(group), [numbers(number) for number in range(size)]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        parts = [numbers(rank) * (number + 1) for number in range(size)]
        total = {dist.ReduceOp.SUM: sum(everyone), dist.ReduceOp.MAX: everyone[-1]}.get(op, sum(everyone) / size)
        for scatter, sent in ((dist.reduce_scatter, parts), (dist.reduce_scatter_tensor, torch.cat(parts))):
            kept = torch.zeros(2, 3)
            scatter(kept, sent, op=op, group=group)
            torch.testing.assert_close(kept, total * (rank + 1))


def check_objects(group: dist.ProcessGroup | None, size: int) -> None:
    rank = dist.get_rank(group)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 10 * rank}, group=group)
    assert objects == [{"rank": number, "text": "x" * 10 * number} for number in range(size)]
    dist.gather_object(rank, objects if rank == 0 else None, group_dst=0, group=group)
    assert rank != 0 or objects == list(range(size))
    texts = [f"from {rank}"]
    dist.broadcast_object_list(texts, group_src=size - 1, group=group)
    assert texts == [f"from {size - 1}"]
    mine = [None]
    dist.scatter_object_list(mine, [f"to {number}" for number in range(size)], group_src=0, group=group)
    assert mine == [f"to {rank}"]


def check_send(group: dist.ProcessGroup | None, size: int) -> None:
    """Check what goes by Gloo, to and from each rank of a ring at once."""
    rank = dist.get_rank(group)
    if size == 1:
        return
    passed = torch.zeros(2)
    works = [
        dist.isend(torch.full((2,), float(rank)), group_dst=(rank + 1) % size, group=group),
        dist.irecv(passed, group_src=(rank - 1) % size, group=group),
    ]
    for work in works:
        work.wait()
    assert passed.tolist() == [float((rank - 1) % size)] * 2


CHECKS = (
    check_all_reduce,
    check_all_reduce_of_shapes,
    check_one_root,
    check_moves,
    check_lists,
    check_reduce_scatter,
    check_objects,
    check_send,
)


def check_collectives(group: dist.ProcessGroup | None, size: int) -> None:
    """Compare each collective of a group with what it should give."""
    for check in CHECKS:
        check(group, size)
    dist.barrier(group=group)


def collectives() -> None:
    with job() as (rank, size):
        assert (dist.get_backend(), os.environ.get("HOROVOD_RANK")) == ("horovod", None)
        check_collectives(None, size)


def test_collectives_give_what_they_should() -> None:
    in_ranks(2, collectives)


def groups() -> None:
    with job() as (rank, size):
        lists = [[1, 2], [0, 1, 3], [0, 2, 3], [3], list(range(size)), [1, 2]]
        made = [(ranks, dist.new_group(ranks)) for ranks in lists]
        for ranks, group in made:
            if rank in ranks:
                check_collectives(group, len(ranks))
        # At once in groups that share ranks, in one order on some ranks and in the other on the rest.
        mine = [(len(ranks), group) for ranks, group in made if rank in ranks]
        works = [
            (count, dist.all_reduce(torch.ones(5), group=group, async_op=True))
            for count, group in (mine if rank % 2 else mine[::-1])
        ]
        for count, work in works:
            work.wait()
            assert work.result()[0].tolist() == [float(count)] * 5
        if rank == 0:
            senders = [dist.recv(torch.zeros(1)) for _ in range(size - 1)]
            assert sorted(senders) == list(range(1, size))
        else:
            dist.send(torch.ones(1), 0)
        if rank in (1, 3):
            check_collectives(dist.new_group([1, 3], use_local_synchronization=True), 2)
        dist.destroy_process_group(made[0][1])
        dist.barrier()


def test_groups_are_process_sets() -> None:
    # 8 s on two idle cores, 40 s beside four others of its kind: four ranks make many groups.
    in_ranks(4, groups)


def uneven_groups() -> None:
    """Make more kinds of operations than are counted, some of them in a group that one rank is not in."""
    from hvd_trainer.c10d import context

    context.MAX_COUNTS = 5
    with job(timeout=datetime.timedelta(seconds=15)) as (rank, _):
        pair = dist.new_group([0, 1])
        for length in range(1, 5) if rank < 2 else ():
            dist.all_reduce(torch.ones(length), group=pair)
        for length in [1, 2, 3, 4] * 3:
            dist.all_reduce(torch.ones(length))


def test_ranks_count_the_operations_of_each_group() -> None:
    """All counts began anew on a rank with more groups, and from then on no name was the same as elsewhere."""
    in_ranks(3, uneven_groups)


def started_twice() -> tuple[int, Any]:
    sums = []
    for _ in range(2):
        with job() as (rank, _):
            ones = torch.ones(1)
            dist.all_reduce(ones)
            sums.append(ones.item())
    return rank, sums


@each_launcher("horovodrun", "torchrun", "mpirun", "srun")
def test_each_launcher_starts_it_and_again(launcher: str) -> None:
    assert run_ranks(started_twice, num_processes=2, launcher=launcher) == [[2.0, 2.0]] * 2


def spawned(rank: int, size: int, file: str) -> None:
    with job(init_method=f"file://{file}", rank=rank, world_size=size):
        check_collectives(None, size)


def test_ranks_that_are_spawned_find_each_other_by_a_file(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(spawned, (2, str(tmp_path / "ranks")), nprocs=2)


# Asynchronous operations.


def asynchronous() -> None:
    with job() as (rank, size):
        works = [dist.all_reduce(torch.full((4,), float(i)), async_op=True) for i in range(50)]
        for number, work in reversed(list(enumerate(works))):
            work.wait()
            assert work.is_completed()
            assert work.is_success()
            assert work.result()[0].tolist() == [float(number * size)] * 4
        # Where no one waits for the first ones, the last one is done nevertheless.
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(20)]
        works[-1].wait()
        chained = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0] + 1)
        assert chained.wait().tolist() == [size + 1.0] * 2
        many = [dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(30)]
        assert [one[0].item() for one in torch.futures.wait_all(many)] == [float(size)] * 30
        late = dist.broadcast(torch.ones(1), 0, async_op=True)
        late.wait()
        assert late.get_future().wait()[0].item() == 1


def test_operations_are_asynchronous_and_have_futures() -> None:
    in_ranks(2, asynchronous)


def without_handles() -> Any:
    """Begin operations of which nobody keeps a handle, and wait in a barrier."""
    with job() as (rank, size):
        parts, column = [torch.zeros(2) for _ in range(size)], torch.full((4, 2), float(rank))[:, 0]
        dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True)
        dist.broadcast(column, size - 1, async_op=True)
        dist.barrier(async_op=True).wait()
        return [part.tolist() for part in parts], column.tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_barrier_waits_for_operations_whose_handles_nobody_keeps(size: int) -> None:
    """Results that are copied into their place stayed zeros: vector-quantize-pytorch gathers its samples so."""
    expected = [[float(number)] * 2 for number in range(size)], [size - 1.0] * 4
    assert in_ranks(size, without_handles) == [expected] * size


def pending() -> None:
    """Begin many operations of one shape while one rank is late, and wait for the last one only."""
    with job() as (rank, size):
        store = dist.distributed_c10d._get_default_store()
        if rank == size - 1:
            store.wait(["all are pending"], datetime.timedelta(seconds=60))
        tensors = [torch.full((2,), float(number)) for number in range(5000)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works[::2]]
        store.set("all are pending", "")
        works[-1].wait()
        torch.futures.wait_all(futures)
        for work in works:
            work.wait()
        assert [tensor[0].item() for tensor in tensors] == [float(number * size) for number in range(5000)]


def test_thousands_of_operations_wait_for_a_late_rank() -> None:
    """The 700th of a name was a RecursionError."""
    in_ranks(3, pending)


def monitored() -> Any:
    with job() as (rank, size):
        limit = datetime.timedelta(seconds=20)
        dist.monitored_barrier(timeout=limit)
        texts = []
        if rank == 0:
            for wait_all in (False, True):
                texts.append(refusal(dist.monitored_barrier, timeout=limit / 200, wait_all_ranks=wait_all))
            texts.append(refusal(dist.group.WORLD.monitored_barrier, datetime.timedelta()))
        dist.barrier()
        if rank != 0:
            for _ in range(2):
                texts.append(refusal(dist.monitored_barrier, timeout=limit / 200))
        return texts


def test_monitored_barrier_names_ranks_that_are_missing() -> None:
    """Gloo, not yet connected to them, waited for them for the group's 30 minutes."""
    first, *others = in_ranks(3, monitored)
    assert "Rank 1 failed to pass monitoredBarrier in 100 ms" in first[0]
    assert "Ranks 1, 2 failed to pass monitoredBarrier in 100 ms" in first[1]
    assert "Rank 0 timed out in monitoredBarrier: Rank 1 failed to pass monitoredBarrier in 0 ms" in first[2]
    assert all("successfully reached monitoredBarrier, but" in text for texts in others for text in texts)


# DDP and what stands on it.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.first, self.last = nn.Linear(4 * 36, 16), nn.Linear(16, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, images: Tensor, use_all: bool) -> Tensor:
        out = self.last(self.first(self.norm(self.conv(images)).flatten(1)).relu())
        return self.unused(out) if use_all else out


def digest(model: nn.Module) -> str:
    return hashlib.blake2b(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def train(options: dict[str, Any], hook: str, zero: bool, use_all: bool, num_steps: int) -> str:
    """Train a model with DDP, and return the digest of its weights."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(dist.get_rank())  # DDP starts all ranks from rank 0's weights
    model = DistributedDataParallel(Model(), **options)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    settings = {"lr": 0.1, "momentum": 0.9}
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **settings)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **settings)
    for step in range(num_steps):
        accumulates = use_all and step % 2 == 0
        with model.no_sync() if accumulates else contextlib.nullcontext():
            model(torch.randn(4, 1, 8, 8), use_all).square().mean().backward()
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
    return digest(model)


CASES: list[dict[str, Any]] = [
    {"options": {}, "hook": "", "zero": False, "use_all": True},
    {"options": {"bucket_cap_mb": 0.0005}, "hook": "", "zero": False, "use_all": True},
    {"options": {"find_unused_parameters": True}, "hook": "", "zero": False, "use_all": False},
    {"options": {"static_graph": True}, "hook": "", "zero": False, "use_all": False},
    {"options": {"gradient_as_bucket_view": True}, "hook": "fp16_compress_hook", "zero": False, "use_all": True},
    {"options": {}, "hook": "bf16_compress_hook", "zero": False, "use_all": True},
    {"options": {}, "hook": "allreduce_hook", "zero": True, "use_all": True},
    # In one bucket and without unused parameters: PowerSGD exchanges in callbacks, which on Gloo run beside the
    # main thread. What that exchanges meanwhile came in another order on each rank, and Gloo aborted.
    {"options": {}, "hook": "powersgd", "zero": False, "use_all": True},
]


def join_uneven() -> str:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    with model.join():
        for _ in range(3 + 2 * dist.get_rank()):
            model.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
    return digest(model)


def train_sharded() -> list[float]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_all(backend: str) -> dict[str, Any]:
    with job(backend):
        digests = [train(**case, num_steps=6) for case in CASES]
        return {"ddp": digests, "sharded": train_sharded(), "uneven": join_uneven()}


@cache
def trained(backend: str, size: int = 2) -> list[dict[str, Any]]:
    return in_ranks(size, train_all, backend)


@pytest.mark.parametrize("size", [2, case(3, when="long")])
def test_ddp_gives_the_bits_of_gloo(size: int) -> None:
    for number, how in enumerate(CASES):
        runs = [*trained("horovod", size), *trained("gloo", size)]
        assert len({its["ddp"][number] for its in runs}) == 1, how


def test_ranks_join_with_uneven_data() -> None:
    assert len({its["uneven"] for its in trained("horovod")}) == 1


def test_fsdp2_trains_as_on_gloo() -> None:
    for ours, theirs in zip(trained("horovod"), trained("gloo"), strict=True):
        assert ours["sharded"] == pytest.approx(theirs["sharded"])


def fabric() -> tuple[int, Any]:
    import lightning_fabric
    from lightning_fabric.strategies import DDPStrategy

    import hvd_trainer.c10d  # noqa: F401

    strategy = DDPStrategy(process_group_backend="horovod")
    runner = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    runner.launch()
    torch.manual_seed(runner.global_rank)
    model = runner.setup(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runner.backward(model(torch.randn(3, 4)).sum())
    optimizer.step()
    found = runner.global_rank, (dist.get_backend(), digest(model))
    dist.destroy_process_group()
    return found


def accelerate() -> tuple[int, Any]:
    from accelerate import Accelerator

    with job() as (rank, _):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(rank)
        model = accelerator.prepare(nn.Linear(4, 2))
        accelerator.backward(model(torch.randn(3, 4)).sum())
        torch.optim.SGD(model.parameters(), 0.1).step()
        assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]
        return rank, (dist.get_backend(), digest(model))


@pytest.mark.parametrize(("library", "function"), [("lightning_fabric", fabric), ("accelerate", accelerate)])
def test_libraries_on_top_of_ddp_run_on_it(library: str, function: Any) -> None:
    # Importing it would change the environment of this process.
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library.replace('_', '-')}")
    (one_backend, one), (_, other) = run_ranks(function, num_processes=2, launcher="torchrun")
    assert one_backend == "horovod"
    assert one == other


# Mistakes.


def late() -> Any:
    """Return the errors of a rank that waits for one that does not come to a step of DDP."""
    from torch.nn.parallel import DistributedDataParallel

    with job() as (rank, _):
        model = DistributedDataParallel(nn.Linear(3, 2))
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.wait(["has failed"], datetime.timedelta(seconds=60))
            return []
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
        texts = [refusal(model(torch.ones(1, 3)).sum().backward)]
        texts.append(refusal(dist.all_reduce(torch.ones(7), async_op=True).get_future().wait))
        store.set("has failed", "")
        return texts


def test_an_operation_that_ddp_waits_for_in_vain_is_an_error() -> None:
    """It was a SIGSEGV: to C++, an exception that Python had put into a future was the tensors."""
    for text in in_ranks(2, late)[1]:
        assert "DistBackendError: all_reduce of SUM float32" in text
        assert "Timed out after 1 s: other ranks have not called it" in text


def mistakes() -> Any:
    with job() as (rank, size):
        texts = {
            "splits": refusal(dist.all_to_all_single, torch.zeros(3), torch.zeros(3)),
            "gather": refusal(dist.all_gather_into_tensor, torch.zeros(5), torch.zeros(2)),
            "reduce_scatter": refusal(dist.reduce_scatter_tensor, torch.zeros(2), torch.zeros(5)),
            "too many": refusal(dist.all_gather, [torch.zeros(2)] * (size + 1), torch.zeros(2)),
            "other size": refusal(dist.all_gather, [torch.zeros(3)] * size, torch.zeros(2)),
            "type": refusal(dist.reduce_scatter_tensor, torch.zeros(1).byte(), torch.zeros(size).byte()),
        }
        work = dist.all_reduce(torch.zeros(1 + rank), async_op=True)
        texts["shapes"] = refusal(work.wait, datetime.timedelta(seconds=0.5))
        ones = torch.ones(3)  # no other operation has this shape
        dist.all_reduce(ones)
        return texts, ones[0].item()


def test_mistakes_are_errors_and_the_job_goes_on() -> None:
    for rank, (texts, ones) in enumerate(in_ranks(2, mistakes)):
        assert ones == 2
        # As Gloo's: scripts catch RuntimeError to try what a backend can do.
        assert all(text.startswith("RuntimeError: ") for name, text in texts.items() if name != "shapes")
        assert f"a list for [2, 2, 2] elements, and rank {rank} of 2 sends 2" in texts["too many"]
        assert f"a list for [3, 3] elements, and rank {rank} of 2 sends 2" in texts["other size"]
        assert "3 rows, which 2 ranks cannot share" in texts["splits"]
        assert "5 elements for 2 ranks of 2 elements each" in texts["gather"]
        assert "5 elements for 2 ranks of 2 elements each" in texts["reduce_scatter"]
        assert "Horovod cannot reduce torch.uint8 by SUM" in texts["type"]
        assert f"all_reduce of SUM float32[{1 + rank}] in group" in texts["shapes"]
        assert " Timed out after 0.5 s: other ranks" in texts["shapes"]
        assert "other ranks have not called it, or with other shapes" in texts["shapes"]
