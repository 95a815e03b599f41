"""Grids of ranks, cuts of models, schedules and the sharded optimizer, without launching ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvd_trainer.backends.ddp_collectives import DDPCollectives
from hvd_trainer.backends.devices import gpu_numbers
from hvd_trainer.backends.horovod_collectives import HorovodCollectives
from hvd_trainer.errors import BackendError, OptionError
from hvd_trainer.observe.progress import Progress
from hvd_trainer.optim.step import StepParts
from hvd_trainer.parallel import sharded_optimizer
from hvd_trainer.parallel.device_pipeline import clock_cycles
from hvd_trainer.parallel.grid import make_grid
from hvd_trainer.parallel.microbatch import split_batch
from hvd_trainer.parallel.partition import balance_weights, block_names, make_partitions, parse_balance
from hvd_trainer.parallel.pipeline import StageStep
from hvd_trainer.parallel.schedule import bubble
from hvd_trainer.parallel.sharded_optimizer import (
    BUCKET_BYTES,
    MAX_BUCKETS_IN_FLIGHT,
    ShardedOptimizer,
    assign_owners,
    make_buckets,
)


@pytest.mark.parametrize(
    ("nodes", "stages", "rows"),
    [
        ("aaaa", 2, "01 23"),
        ("aabb", 2, "01 23"),
        ("abab", 2, "02 13"),  # as srun --distribution=cyclic deals them out
        ("aaabbb", 2, "01 25 34"),  # what is left of two nodes makes a pipeline across them
        ("aabb", 4, "0123"),
        ("aaabbb", 3, "012 345"),
        ("abc", 1, "0 1 2"),
    ],
)
def test_grid_keeps_replicas_on_a_node(nodes: str, stages: int, rows: str) -> None:
    grid = make_grid(list(nodes), stages)
    assert " ".join("".join(map(str, row)) for row in grid.stage_groups) == rows
    assert grid.stage_groups[0][0] == 0
    assert sorted(rank for group in grid.replica_groups for rank in group) == list(range(len(nodes)))
    for rank in range(len(nodes)):
        replica, stage = grid.place(rank)
        assert grid.stage_groups[replica][stage] == rank
        assert rank in grid.replica_groups[stage]


def every_cut(weights: Sequence[float], parts: int) -> list[tuple[float, float]]:
    """Return the largest part and the sum of squares for each way to cut."""
    found = []
    for inner in itertools.combinations(range(1, len(weights)), parts - 1):
        edges = [0, *inner, len(weights)]
        sums = [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]
        found.append((max(sums), sum(x * x for x in sums)))
    return found


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balance_weights_finds_the_best_cut(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    sizes = balance_weights([float(weight) for weight in weights], parts)
    assert len(sizes) == parts
    assert min(sizes) >= 1
    rest = iter(weights)
    sums = [sum(itertools.islice(rest, size)) for size in sizes]
    assert next(rest, None) is None
    assert (max(sums), sum(x * x for x in sums)) == min(every_cut(weights, parts))


def test_parts_are_balanced_by_bytes_hand_or_time() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    names = block_names(model, "--stages 2")
    by_bytes = make_partitions(model, names, 2, "bytes", "--stages 2", None)
    assert [part.names for part in by_bytes] == [("0",), ("1", "2", "3")]
    assert [part.parameters for part in by_bytes] == [72, 90]
    by_hand = make_partitions(model, names, 2, "3,1", "--stages 2", None)
    assert [list(part.blocks) for part in by_hand] == [[0, 1, 2], [3]]
    by_time = make_partitions(model, names, 2, "time", "--stages 2", [0.1, 0.7, 0.1, 0.1])
    assert [part.names for part in by_time] == [("0", "1"), ("2", "3")]
    assert by_time[0].seconds == pytest.approx(0.8)


@pytest.mark.parametrize("text", ["", "3,", "a", "3,-1", "3,0,1", "4,1", "1,2", "5"])
def test_balance_by_hand_must_fit(text: str) -> None:
    with pytest.raises(OptionError, match="--balance 3,2|none of them empty. Type for instance: --balance 2,2"):
        parse_balance(text, 4, 2)


def test_block_names_refuses_models_that_cannot_be_cut() -> None:
    with pytest.raises(OptionError, match="--stages 2 needs a model that is a sequence of blocks"):
        block_names(nn.Linear(1, 1), "--stages 2")
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(OptionError, match="the blocks 0 and 2 share a parameter"):
        block_names(tied, "--stages 2")


def test_clock_cycles_order_parts_on_several_devices() -> None:
    drawn = [" ".join(f"{part}:{chunk}" for part, chunk in tick) for tick in clock_cycles(2, 3)]
    assert drawn == ["0:0", "0:1 1:0", "0:2 1:1", "1:2"]


def test_bubble_equals_the_published_formulas() -> None:
    assert bubble("gpipe", 4, 8) == bubble("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert bubble("interleaved", 4, 8, 2) == pytest.approx(3 / 19)
    assert bubble("zero-bubble", 4, 8) == pytest.approx(3 / 27)
    assert bubble("gpipe", 1, 8) == 0


def test_split_batch_pads_a_short_batch() -> None:
    numbers = torch.arange(10)
    chunks = split_batch((numbers, numbers), 4, 3)
    assert [chunk.inputs.tolist() for chunk in chunks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 9, 9]]
    assert [chunk.targets.tolist() for chunk in chunks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [chunk.samples for chunk in split_batch((numbers[:2], numbers[:2]), 3, 2)] == [2, 0, 0]


def test_broadcast_buckets_are_small() -> None:
    """Engines keep what they have sent last: copies of all parameters cost the memory that sharding saves."""
    sizes = [5, 3 * 2**18, 2**20, 2**22, 2**18, 7]  # 2**20 of them are a bucket
    parameters = [torch.zeros(size) for size in sizes] + [torch.zeros(4, dtype=torch.float64)]
    found = make_buckets(parameters)
    assert [parameter for bucket in found for parameter in bucket] == parameters
    assert [[parameter.numel() for parameter in bucket] for bucket in found] == [
        *([5, 3 * 2**18], [2**20], [2**22]),
        *([2**18, 7], [4]),
    ]
    for bucket in found:
        assert len(bucket) == 1 or sum(p.numel() * p.element_size() for p in bucket) <= BUCKET_BYTES


@pytest.mark.parametrize("kind", [DDPCollectives, HorovodCollectives])
def test_broadcasts_start_before_the_first_wait(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket was waited for before the next began, and Horovod takes 0.15 ms or more for an answer."""
    calls: list[str] = []

    def started(*_: Any, **__: Any) -> Any:
        calls.append("start")
        return SimpleNamespace(wait=lambda: calls.append("wait"))

    monkeypatch.setattr(dist, "broadcast", started)
    collectives = kind(None)
    collectives.hvd = SimpleNamespace(broadcast_async_=started)
    collectives.waiter = SimpleNamespace(result=lambda handle: handle.wait())
    collectives.broadcast_to_replicas([(torch.zeros(1), 0)] * 3)
    assert calls == ["start"] * 3 + ["wait"] * 3


def test_sharded_optimizer_sends_updates_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates sent together are waited for less often, but copies of all would be as large as the model.

    Each rank packed all parameters, and overwrote what it had packed of the others' with what they sent.
    """
    monkeypatch.setattr(sharded_optimizer, "BUCKET_BYTES", 8)
    sent: list[list[int]] = []
    packed: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: packed.append(len(parts)) or cat(parts))

    def broadcast_to_replicas(pairs: list[tuple[torch.Tensor, int]]) -> None:
        sent.append([rank for _, rank in pairs])
        for tensor, rank in pairs:
            if rank == 1:
                tensor.fill_(7)

    backend: Any = SimpleNamespace(
        replica_group=[0, 1],
        world=SimpleNamespace(rank=0),
        activity=SimpleNamespace(waiting=nullcontext),
        collectives=SimpleNamespace(broadcast_to_replicas=broadcast_to_replicas),
    )
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4 * MAX_BUCKETS_IN_FLIGHT)]  # two fit into a bucket
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    updates = ShardedOptimizer(backend, optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    optimizer.step()
    assert sent == [[0] * MAX_BUCKETS_IN_FLIGHT, [1] * MAX_BUCKETS_IN_FLIGHT]
    assert packed == [2] * MAX_BUCKETS_IN_FLIGHT
    assert [p.item() for p in parameters] == [-1 if updates.owns(p) else 7 for p in parameters]


def test_assign_owners_balances_sizes() -> None:
    assert assign_owners([10, 1, 1, 8, 2], 2) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("local_rank", "local_size", "visible", "count", "chosen"),
    [
        (0, 2, 4, 2, [0, 1]),
        (1, 2, 4, 2, [2, 3]),  # all ranks see all GPUs of the node
        (1, 2, 2, 2, [0, 1]),  # each sees its own
        (3, 4, 1, 1, [0]),
        (3, 4, 2, 1, [1]),
    ],
)
def test_gpu_numbers_are_disjoint(
    local_rank: int, local_size: int, visible: int, count: int, chosen: list[int]
) -> None:
    assert gpu_numbers(local_rank, local_size, visible, count) == chosen


def test_gpu_numbers_refuses_too_few_gpus() -> None:
    with pytest.raises(
        BackendError, match="need 8 GPUs, and 4 are visible. Type --devices-per-rank 1, or start 2"
    ):
        gpu_numbers(0, 4, 4, 2)


def test_total_norm_copies_indices_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying a list to a GPU waits for all of the GPU's work; each step did that."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend: Any = SimpleNamespace(device=torch.device("cpu"))
    guard: Any = SimpleNamespace(policy="stop")
    runner: Any = SimpleNamespace(group=None)
    parts = StepParts(
        backend=backend,
        train_model=model,
        eval_model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        progress=Progress(),
        guard=guard,
    )
    step = StageStep(parts, runner=runner, chunks=1, chunk_size=2, seed=0, replica=0)
    copies: list[list[int]] = []
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, **how: copies.append(data) or tensor(data, **how))
    both = {"weight": torch.full((2, 2), 2.0), "bias": torch.full((2,), 3.0)}
    for names in (["weight", "bias"], ["weight", "bias"], ["bias"], ["bias"]):
        for name, parameter in model.named_parameters():
            parameter.grad = both[name] if name in names else None
        grads = [both[name] for name in names]
        assert step.total_norm(grads) == nn.utils.get_total_norm(grads)
    assert copies == [[0, 1], [1]]
