"""Both engines, and one process, keep the contract of `backends/base.py`: each through its own launcher."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from batch_norm_checks import rounds_its_results_only
from combinations import case
from launchers import in_ranks, run_ranks
from peak_memory import PeakMemory
from torch import Tensor, nn

from hvd_trainer import backends
from hvd_trainer.backends import Backend, EngineOptions
from hvd_trainer.backends.sync_batch_norm import convert_sync_batch_norm
from hvd_trainer.errors import BackendError, OptionError
from hvd_trainer.utils import accelerator

pytestmark = pytest.mark.warm

CHECKS: dict[str, tuple[Callable[[Backend], None], EngineOptions]] = {}


def check(**options: object) -> Callable[[Callable[[Backend], None]], Callable[[Backend], None]]:
    """Add a check that runs on an engine with these options."""

    def add(function: Callable[[Backend], None]) -> Callable[[Backend], None]:
        CHECKS[function.__name__] = (function, EngineOptions(**options))  # type: ignore[arg-type]
        return function

    return add


def run_checks(name: str) -> tuple[int, dict[str, str | None]]:
    """Run all checks on the engine `name`; return each one's traceback, or None where it held."""
    outcomes: dict[str, str | None] = {}
    rank = 0
    groups: dict[EngineOptions, list[str]] = {}
    for check_name, (_, options) in CHECKS.items():
        groups.setdefault(options, []).append(check_name)
    for options, names in groups.items():
        if name == "single" and options.compression != "none":
            continue  # refused
        with backends.create(_for_engine(options, name)) as backend:
            rank = backend.world.rank
            for check_name in names:
                try:
                    CHECKS[check_name][0](backend)
                    outcomes[check_name] = None
                except Exception:
                    outcomes[check_name] = traceback.format_exc()
    return rank, outcomes


def _for_engine(options: EngineOptions, name: str) -> EngineOptions:
    return EngineOptions(**{**vars(options), "backend": name})  # type: ignore[arg-type]


def ranks_of(backend: Backend) -> range:
    return range(backend.world.size)


def linear(backend: Backend, weight: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare y = w x with one weight, whose gradient is known: d(w x)/dw = x."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return backend.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def backward(backend: Backend, model: nn.Module, slope: float, sync: bool = True) -> None:
    with backend.gradient_sync(model, sync):
        model(torch.tensor([[slope]], device=backend.device)).sum().backward()


def weight_of(optimizer: torch.optim.Optimizer) -> Tensor:
    return optimizer.param_groups[0]["params"][0].detach().cpu()


@check()
def collectives_agree(backend: Backend) -> None:
    rank, ranks = backend.world.rank, ranks_of(backend)
    mine = torch.tensor([1.0, float(rank)], dtype=torch.float64)
    assert backend.collectives.all_reduce(mine).tolist() == [len(ranks), sum(ranks)]
    assert backend.collectives.all_reduce(mine, "max").tolist() == [1, max(ranks)]
    assert backend.collectives.all_reduce(mine, "min").tolist() == [1, 0]
    assert mine.tolist() == [1, rank], "the input must stay as it is"
    assert backend.collectives.all_gather_object({"rank": rank}) == [{"rank": r} for r in ranks]
    assert backend.collectives.broadcast_object(f"from {rank}") == "from 0"
    last = max(ranks)
    for source in (last, 0, last):
        assert backend.collectives.broadcast_object(f"from {rank}", source) == f"from {source}"
    # A learning rate that a function of NumPy's has made.
    assert backend.collectives.all_gather_object({"lr": [np.float64(0.5)]}) == [{"lr": [0.5]}] * len(ranks)
    if len(ranks) > 1:  # alone nothing is sent
        try:
            backend.collectives.broadcast_object(Foreign())
        except BackendError as error:
            assert "test_contract.Foreign" in str(error)
        else:
            raise AssertionError("a value of a class was sent")
    backend.collectives.barrier()


@check()
def large_values_take_little_more_memory_than_their_tensors(backend: Backend) -> None:
    """A state took five times its size on the rank that sent it, and four times on the others."""
    rank, ranks = backend.world.rank, ranks_of(backend)
    num = 24 * 2**20
    for source in {0, max(ranks)}:
        value = {"state": torch.full((num,), rank), "rank": rank} if rank == source else None
        with PeakMemory() as peak:
            received: Any = backend.collectives.broadcast_object(value, source)
        assert received["rank"] == received["state"][0] == received["state"][-1] == source
        assert peak.grown_bytes < 1.3 * num * 8
        del value, received
    gathered = backend.collectives.all_gather_object([torch.full((100_000 * (1 + rank),), rank)])
    assert [(len(its), int(its[-1])) for (its,) in gathered] == [(100_000 * (1 + r), r) for r in ranks]


@check()
def many_broadcasts_are_under_way_at_once(backend: Backend) -> None:
    """Broadcasts may overlap also if their shapes are equal, from one rank or from several."""
    rank, group = backend.world.rank, backend.replica_group
    sources = [group[number % len(group)] for number in range(7)]
    tensors = [torch.tensor([100.0 * rank + number], device=backend.device) for number in range(7)]
    for _ in range(2):
        backend.collectives.broadcast_to_replicas(list(zip(tensors, sources, strict=True)))
        assert [float(tensor) for tensor in tensors] == [
            100 * source + number for number, source in enumerate(sources)
        ]


class Foreign:
    """A class whose objects must not be created by data from the network."""


@check()
def forks_after_an_exchange_live(backend: Backend) -> None:
    """On Python 3.11.7, seven of a thousand forked children hung at their start: see `Collectives._keep_alive`.

    So many forks would miss that in one run of three; each engine runs it, and each run of the suite.
    """
    if backend.world.size != 2:
        return
    for _ in range(150):
        backend.collectives.all_reduce(torch.zeros(1))
        child = os.fork()
        if child == 0:
            os._exit(0)
        deadline = time.monotonic() + 10
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.0005)
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("a child of fork() hangs")


@check()
def ranks_start_equal(backend: Backend) -> None:
    torch.manual_seed(backend.world.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(float(backend.world.rank + 1))
    prepared, _ = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    everyone = backend.collectives.all_gather_object({k: v.cpu() for k, v in model.state_dict().items()})
    for state in everyone:
        for name, tensor in everyone[0].items():
            assert torch.equal(tensor, state[name]), name
    assert everyone[0]["1.running_mean"].tolist() == [1.0] * 4
    assert prepared(torch.zeros(2, 3, device=backend.device)).shape == (2, 4)


@check()
def learning_rate_is_rank_0s(backend: Backend) -> None:
    model = nn.Linear(1, 1)
    rate = 0.5 + backend.world.rank
    _, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
    assert optimizer.param_groups[0]["lr"] == 0.5


@check()
def settings_are_set_in_the_groups_that_others_hold(backend: Backend) -> None:
    """A scheduler or a callback held groups whose learning rate nobody read any more."""
    model = nn.Linear(1, 1)
    given = torch.optim.SGD(model.parameters(), lr=0.5 + backend.world.rank, momentum=0.9)
    model(torch.ones(1, 1)).sum().backward()
    given.step()
    given.zero_grad()
    group, momentum = given.param_groups[0], given.state[model.weight]["momentum_buffer"]
    _, optimizer = backend.prepare(model, given)
    assert group["lr"] == 0.5
    assert optimizer.param_groups[0] is group
    if accelerator.is_host(backend.device):
        assert optimizer.state[model.weight]["momentum_buffer"] is momentum


@check()
def first_adam_update_is_whole(backend: Backend) -> None:
    """Horovod's broadcast_optimizer_state made the update 0.744 of the right one, and decay moved the weights."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    reference = nn.Parameter(torch.ones(1, 1))
    prepared, optimizer = backend.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    backward(backend, prepared, 3.0)
    backend.step(optimizer)
    plain = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.1)
    reference.grad = torch.full((1, 1), 3.0)
    plain.step()
    assert torch.equal(weight_of(optimizer), reference.detach())


@check()
def optimizer_state_survives(backend: Backend) -> None:
    """Horovod's wrapper starts with an empty state; a restored momentum must go on."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    if backend.world.is_first:
        model.weight.grad = torch.full((1, 1), 8.0)
        optimizer.step()
        optimizer.zero_grad()
    prepared, optimizer = backend.prepare(model, optimizer)
    backward(backend, prepared, 1.0)
    backend.step(optimizer)
    assert weight_of(optimizer).item() == -8 - (0.5 * 8 + 1)


@check()
def gradients_are_averaged(backend: Backend) -> None:
    prepared, optimizer = linear(backend)
    backward(backend, prepared, 1.0 + backend.world.rank)
    backend.step(optimizer)
    mean = 1.0 + sum(ranks_of(backend)) / backend.world.size
    assert abs(weight_of(optimizer).item() - (1.0 - mean)) < 1e-6


@check()
def gradients_wait_for_the_last_pass(backend: Backend) -> None:
    """Windows have 3, 1 and 2 passes: the last one of an epoch may be shorter than the others."""
    prepared, optimizer = linear(backend, weight=0.0)
    expected = 0.0
    for passes in (3, 1, 2):
        for number in range(passes):
            backward(backend, prepared, float(1 + number), sync=number == passes - 1)
        expected -= sum(1 + number for number in range(passes))
        backend.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        assert weight_of(optimizer).item() == expected


@check()
def norm_is_clipped_after_averaging(backend: Backend) -> None:
    prepared, optimizer = linear(backend, weight=0.0)
    size = backend.world.size
    backward(backend, prepared, 12.0 if backend.world.is_first else 0.0)
    result = backend.step(optimizer, max_norm=1.0)
    assert result.grad_norm is not None
    assert abs(result.grad_norm.item() - 12.0 / size) < 1e-5
    assert abs(weight_of(optimizer).item() + 1.0) < 1e-5


@check()
def overflow_on_one_rank_skips_all(backend: Backend) -> None:
    """The step after a skipped one must work: it did not in Horovod's issue 3160."""
    prepared, optimizer = linear(backend, weight=1.0)
    scaler = torch.amp.GradScaler(backend.device.type, init_scale=4.0, growth_interval=1000)
    for slope, skipped in ((float("inf"), True), (2.0, False)):
        own = slope if backend.world.is_first else 2.0
        with backend.gradient_sync(prepared, True):
            loss = prepared(torch.tensor([[own]], device=backend.device)).sum()
            scaler.scale(loss).backward()
        result = backend.step(optimizer, scaler=scaler)
        optimizer.zero_grad(set_to_none=True)
        assert result.skipped is skipped
    assert weight_of(optimizer).item() == -1.0


@check()
def gradients_can_be_set_to_none(backend: Backend) -> None:
    """Horovod's own wrapper raises TypeError here: issue 3405."""
    prepared, optimizer = linear(backend)
    backward(backend, prepared, 1.0)
    backend.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in prepared.parameters())
    backward(backend, prepared, 1.0)
    backend.step(optimizer)
    assert weight_of(optimizer).item() == -1.0


class TwoBranches(nn.Module):
    """A model that uses one of its two weights: the one named by `use`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.left.weight, 1.0)
        nn.init.constant_(self.right.weight, 1.0)
        self.use = "left"

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = getattr(self, self.use)(x)
        return branch


@check()
def unused_parameter_is_named(backend: Backend) -> None:
    """Also on one rank, where Horovod trained what DDP refused."""
    if backend.name == "single":
        return  # as PyTorch by hand
    for is_updated in (True, False):  # what the optimizer does not have, DDP refused a step later, without a name
        model = TwoBranches()
        updated = (model if is_updated else model.left).parameters()
        prepared, optimizer = backend.prepare(model, torch.optim.SGD(updated, lr=1.0))
        backward(backend, prepared, 1.0)
        with pytest.raises(BackendError, match=r"\(right.weight\).*--find-unused-parameters"):
            backend.step(optimizer)


@check(find_unused_parameters=True)
def unused_everywhere_stays(backend: Backend) -> None:
    """Horovod set an unused parameter's gradient to zero, so that decay moved it; in one process it stays."""
    model = TwoBranches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    prepared, optimizer = backend.prepare(model, optimizer)
    for _ in range(2):
        backward(backend, prepared, 1.0)
        backend.step(optimizer)
        assert model.right.weight.grad is None
        optimizer.zero_grad(set_to_none=True)
    assert model.right.weight.item() == 1.0
    assert model.left.weight.item() == -1.25


@check(find_unused_parameters=True)
def unused_here_counts_as_zero(backend: Backend) -> None:
    model = TwoBranches()
    prepared, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model.use = "left" if backend.world.is_first else "right"
    size = backend.world.size
    backward(backend, prepared, 1.0)
    backend.step(optimizer)
    assert abs(model.left.weight.item() - (1 - 1 / size)) < 1e-6
    assert abs(model.right.weight.item() - (1 - (size - 1) / size)) < 1e-6


@check()
def buffers_become_their_mean(backend: Backend) -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    prepared, _ = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        prepared(torch.zeros(2, 1, device=backend.device))  # a forward must not overwrite anybody's buffers
    model[1].running_mean.fill_(float(backend.world.rank))
    backend.synchronize_buffers(model)
    mean = sum(ranks_of(backend)) / backend.world.size
    assert torch.allclose(model[1].running_mean.cpu(), torch.full((2,), mean))
    assert int(model[1].num_batches_tracked) == 1


@check()
def tensors_of_all_kinds_start_equal(backend: Backend) -> None:
    """Horovod refused models with booleans, such as a mask of attention; small tensors are sent together."""
    torch.manual_seed(backend.world.rank)
    first = backend.world.is_first
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    model.scale = nn.Parameter(torch.randn(()))
    model.wide = nn.Parameter(torch.randn(200, 300).t())
    kinds = {
        "mask": torch.full((300, 300), first),
        "flags": torch.tensor([first] * 3),
        "count": torch.tensor(first),
    }
    floats = {"fp16": torch.randn(5).half(), "fp64": torch.randn(3).double(), "empty": torch.zeros(0)}
    for name, tensor in {**kinds, **floats, "number": torch.tensor([backend.world.rank])}.items():
        model.register_buffer(name, tensor)
    strides = [tensor.stride() for tensor in model.state_dict().values()]
    backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    values = [tensor.tolist() for tensor in model.state_dict().values()]
    assert backend.collectives.all_gather_object(values) == [values] * backend.world.size
    assert (bool(model.mask.all()), model.flags.tolist(), model.number.item()) == (True, [True] * 3, 0)
    assert [tensor.stride() for tensor in model.state_dict().values()] == strides


@check()
def different_models_are_refused(backend: Backend) -> None:
    if backend.world.size == 1:
        return
    model = nn.Linear(2 + backend.world.rank, 1)
    refused = ""
    try:
        backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except BackendError as error:
        refused = str(error)
    assert "Rank 1 has another model than rank 0: weight float32 [1, 3] against weight float32 [1, 2]" in refused


@check()
def channels_last_is_kept(backend: Backend) -> None:
    """Horovod refuses gradients that are not contiguous."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    prepared, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    images = torch.ones(2, 3, 5, 5, device=backend.device).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    with backend.gradient_sync(prepared, True):
        prepared(images).sum().backward()
    backend.step(optimizer)
    # 2 images of 3x3 places: each weight's gradient is 18 on every rank.
    assert torch.allclose(model.weight.detach(), before - 0.1 * 18)


@check(sync_batch_norm=True)
def batch_norm_sees_the_global_batch(backend: Backend) -> None:
    sees_the_global_batch(backend, nn.BatchNorm1d)


@check()
def batch_norm_that_pytorch_has_converted_sees_it_too(backend: Backend) -> None:
    """DDP refused it on CPUs, and on Horovod each rank had its own statistics."""
    sees_the_global_batch(backend, nn.SyncBatchNorm)


def sees_the_global_batch(backend: Backend, kind: type[nn.Module]) -> None:
    rank, size = backend.world.rank, backend.world.size
    torch.manual_seed(7)
    everything = torch.randn(4 * size, 3, 2, dtype=torch.float32)
    reference = nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 1))
    model = nn.Sequential(kind(3), nn.Flatten(), nn.Linear(6, 1))
    model.load_state_dict(reference.state_dict())
    prepared, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    reference.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    plain = torch.optim.SGD(reference.parameters(), lr=1.0)
    with backend.gradient_sync(prepared, True):
        prepared(everything[rank::size].to(backend.device)).square().mean().backward()
    backend.step(optimizer)
    reference(everything).square().mean().backward()
    plain.step()
    for name, tensor in reference.state_dict().items():
        # Sums in another order: a few units in the last place of fp32 values near 1.
        assert torch.allclose(model.state_dict()[name].cpu(), tensor, atol=2e-6), name


@check(sync_batch_norm=True)
def batch_norm_in_low_precision_rounds_its_results_only(backend: Backend) -> None:
    def over_ranks(plain: nn.BatchNorm1d) -> nn.Module:
        model = nn.Sequential(plain.to(backend.device))
        convert_sync_batch_norm(model, backend.collectives)
        return model

    if backend.world.size > 1:  # alone the model keeps PyTorch's own
        rounds_its_results_only(over_ranks, backend.world.rank, backend.world.size, backend.device)


@check(compression="fp16")
def fp16_on_the_wire(backend: Backend) -> None:
    prepared, optimizer = linear(backend, weight=0.0)
    backward(backend, prepared, 1.0 + 2**-12)  # lost in fp16, which has 10 bits after the point
    backend.step(optimizer)
    assert abs(weight_of(optimizer).item() + 1.0) < (1e-6 if backend.world.size > 1 else 1e-3)
    assert weight_of(optimizer).dtype == torch.float32


@check(compression="bf16")
def bf16_on_the_wire(backend: Backend) -> None:
    prepared, optimizer = linear(backend, weight=0.0)
    backward(backend, prepared, backend.world.size * (1.0 + 2**-9))  # bfloat16 has 7 bits after the point
    backend.step(optimizer)
    # One rank may exchange nothing, and so round nothing.
    rounded = abs(weight_of(optimizer).item() + backend.world.size)
    assert rounded == 0 or (backend.world.size == 1 and rounded == 2**-9)
    assert weight_of(optimizer).dtype == torch.float32


@check()
def sums_of_halves_are_rounded_once(backend: Backend) -> None:
    """Horovod's Gloo returned one summand for some sums: it compared the bits of half-precision numbers."""
    rank, size = backend.world.rank, backend.world.size
    for dtype in (torch.float16, torch.bfloat16):
        pairs = torch.randn(2, 200_003, generator=torch.Generator().manual_seed(3)).mul(1e4).to(dtype)
        # Others add zeros, so that the order of the sum does not matter.
        mine = pairs[rank].clone() if rank < 2 else torch.zeros_like(pairs[0])
        expected = pairs.float().sum(0).to(dtype) if size > 1 else pairs[0]
        assert torch.equal(backend.collectives.all_reduce(mine.to(backend.device), "sum").cpu(), expected)


@check()
def bfloat16_is_a_number_like_others(backend: Backend) -> None:
    """Horovod could not even broadcast a model in bfloat16."""
    rank, ranks = backend.world.rank, ranks_of(backend)
    everyone = torch.tensor([[float(r), -float(r), float("inf"), float("nan")] for r in ranks])
    mine = everyone[rank].bfloat16().to(backend.device)
    for op, expected in (("max", everyone.amax(0)), ("min", everyone.amin(0)), ("sum", everyone.sum(0))):
        found = backend.collectives.all_reduce(mine, op).cpu()  # type: ignore[arg-type]
        assert torch.equal(found[:3], expected[:3].bfloat16()), (op, found)
        assert found[3].isnan()
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0 + rank)
    prepared, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    slope = torch.full((1, 1), float(len(ranks)), dtype=torch.bfloat16, device=backend.device)
    with backend.gradient_sync(prepared, True):
        prepared(slope).sum().backward()
    backend.step(optimizer)
    assert weight_of(optimizer).dtype == torch.bfloat16
    assert weight_of(optimizer).item() == 1.0 - len(ranks)


@check(bucket_mb=0.001)
def many_buckets_give_the_same(backend: Backend) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(5)))
    prepared, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        torch.manual_seed(10 * step + backend.world.rank)
        with backend.gradient_sync(prepared, True):
            prepared(torch.randn(4, 20, device=backend.device)).square().mean().backward()
        backend.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    everyone = backend.collectives.all_gather_object(model[2].weight.detach().cpu())
    assert all(torch.equal(everyone[0], other) for other in everyone)


def refuses(name: str, **options: object) -> str:
    """Return the message with which an engine refuses options before it starts; empty if it accepts them."""
    try:
        backends.create(EngineOptions(**{"backend": name, **options}))  # type: ignore[arg-type]
    except OptionError as error:
        return str(error)
    return ""


WORLDS = [
    *(("single", "python", 1), ("ddp", "torchrun", 2), ("horovod", "horovodrun", 2)),
    *(("ddp", "torchrun", 1), ("ddp", "torchrun", 3), ("horovod", "horovodrun", 1), ("horovod", "horovodrun", 4)),
]
"""Engines, launchers and numbers of ranks; the first three run on each push, the others as long tests."""
SIZES = [
    case(*world, name=f"{world[0]}-{world[2]}", when="" if world in WORLDS[:3] else "long") for world in WORLDS
]


@cache
def outcomes(backend: str, launcher: str, size: int) -> list[dict[str, str | None]]:
    """Run all checks in one launch, which takes as long as a hundred of them."""
    return run_ranks(run_checks, num_processes=size, launcher=launcher, args=(backend,), timeout_s=150)


@pytest.mark.parametrize(("backend", "launcher", "size"), SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_contract(backend: str, launcher: str, size: int, name: str) -> None:
    if backend == "single" and (format := name.partition("_on_the_wire"))[1]:
        assert "nothing to exchange" in refuses("single", compression=format[0])
        return
    for rank, outcome in enumerate(outcomes(backend, launcher, size)):
        assert outcome[name] is None, f"on rank {rank}:\n{outcome[name]}"


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("horovod", {"compression": "powersgd"}, ["--compression powersgd", "--backend ddp"]),
        ("horovod", {"transport": "gloo"}, ["--transport gloo", "--backend ddp"]),
        ("ddp", {"transport": "mpi"}, ["--transport mpi", "--backend horovod"]),
        ("single", {"compression": "fp16"}, ["--compression fp16", "leave it out"]),
        ("mpi", {}, ["--backend must be one of auto, horovod, ddp, single, data-parallel, not 'mpi'"]),
    ],
)
def test_unsupported_options_are_refused(backend: str, options: dict[str, object], words: list[str]) -> None:
    message = refuses(backend, **options)
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["statics_graph", "find_unused_parameters"])
@pytest.mark.parametrize("backend", ["ddp", "horovod", "single"])
def test_arguments_that_ddp_lacks_or_options_set_are_refused(backend: Any, name: str) -> None:
    """On other engines than DDP nobody looked at them."""
    with pytest.raises(OptionError, match=f"ddp_kwargs has {name}, .*It may have: .*static_graph"):
        backends.create(EngineOptions(backend=backend), ddp_kwargs={name: True})


def send_more_than_an_int_counts(name: str) -> int:
    with backends.create(EngineOptions(backend=name)) as backend:  # type: ignore[arg-type]
        value = torch.zeros(2**31 + 2**20, dtype=torch.uint8) if backend.world.is_first else None
        if value is not None:
            value[-1] = 7
        return int(backend.collectives.broadcast_object(value)[-1])  # type: ignore[index]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_values_above_two_gib_are_sent(backend: str) -> None:
    """Horovod counts bytes in an int, and aborted."""
    assert in_ranks(2, send_more_than_an_int_counts, backend) == [7, 7]
