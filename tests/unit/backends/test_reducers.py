"""Gradient buckets, and waiting for Horovod; CPU tensors stand for a GPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_trainer.backends import horovod_waiter
from hvd_trainer.backends.buckets import Bucket, BucketExchange, BucketReducer, GradientBuckets
from hvd_trainer.backends.horovod_waiter import Waiter
from hvd_trainer.backends.session import LOST_RANK_ERRORS
from hvd_trainer.errors import BackendError
from hvd_trainer.faults.activity import Activity, CollectiveAbortedError
from hvd_trainer.utils import accelerator

# Gradients in buckets.


class Model(nn.Module):
    """A model with parameters of several shapes, layouts and types; one may get no gradient."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(4, 5)
        self.short = nn.Parameter(torch.full((3,), 0.3, dtype=torch.bfloat16))
        if unused:
            self.unused = nn.Parameter(torch.ones(2, 2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(images).mean((2, 3))).square().sum() + (self.short.square() / 7).sum()


class Exchange(BucketExchange):
    """Records the buckets that are sent; when they come back, each must hold its parameters' gradients."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.sizes: list[int] = []

    def launch(self, bucket: Bucket) -> None:
        self.sent.append(bucket.flat.clone())
        self.sizes.append(len(bucket.parameters))

    def wait(self, bucket: Bucket) -> None:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            assert parameter.grad is view
            assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


def exchanged(
    steps: int, *, passes: int = 1, keeps_grads: bool = False, unused: bool = False
) -> tuple[list[Any], list[int]]:
    """Return what each step sends, of how many parameters, and `.grad` afterwards; 3 ranks, so that 1/3 rounds."""
    torch.manual_seed(0)
    model = Model(unused)
    exchange = Exchange()
    reducer = BucketReducer(model, exchange, num_ranks=3, limit_bytes=100, passes=passes)
    for _ in range(steps):
        model.zero_grad(set_to_none=not keeps_grads)
        for _ in range(passes):
            model(torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)).backward()
        reducer.finish()
        exchange.sent += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    reducer.close()
    return exchange.sent, exchange.sizes


@pytest.mark.parametrize("options", [{}, {"passes": 2}, {"keeps_grads": True}, {"unused": True}], ids=str)
def test_buckets_on_accelerators_use_two_operations(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    expected, sizes = exchanged(3, **options)
    written: list[int] = []
    copy = torch._foreach_copy_

    def noted(views: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        written.append(len(views))
        copy(views, grads)

    monkeypatch.setattr(accelerator, "is_host", lambda _: False)
    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    monkeypatch.setattr(torch, "mul", None)  # the one that takes one parameter at a time
    found, found_sizes = exchanged(3, **options)
    assert written == found_sizes == sizes
    assert len(found) == len(expected)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, expected, strict=True))


@pytest.mark.parametrize("in_order", [True, False])
def test_buckets_go_in_order_where_ranks_match_them_by_it(in_order: bool) -> None:
    exchange = Exchange()
    exchange.in_order = in_order  # type: ignore[misc]  of this object alone
    buckets = [Bucket.of([nn.Parameter(torch.zeros(number + 1))], number) for number in range(4)]
    gradients = GradientBuckets(buckets, exchange, factor_before=2.0, factor_after=3.0)
    for bucket in buckets:
        bucket.parameters[0].grad = torch.ones_like(bucket.parameters[0])
    for number, sent in ((1, [] if in_order else [1]), (0, [0, 1] if in_order else [1, 0])):
        gradients.add(buckets[number])
        assert [len(flat) - 1 for flat in exchange.sent] == sent
    buckets[3].parameters[0].grad = None
    gradients.launch_rest()
    assert [flat.tolist() for flat in exchange.sent[2:]] == [[2.0] * 3, [0.0] * 4]
    reduced: list[list[float]] = []
    exchange.wait = lambda bucket: None  # type: ignore[method-assign]
    gradients.wait(lambda bucket: reduced.append(bucket.flat.tolist()))
    assert reduced == [[6.0], [6.0] * 2, [6.0] * 3, [0.0] * 4]
    gradients.abandon()
    assert len(exchange.sent) == 4, "no step has begun"
    gradients.add(buckets[2])
    gradients.abandon()
    assert len(exchange.sent) == 8, "the others wait for all"


class BackwardInside(torch.autograd.Function):
    """Calls a module; its backward calls the module's own."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.inputs, ctx.module = inputs.detach().requires_grad_(), module
        with torch.enable_grad():
            ctx.outputs = module(ctx.inputs)
        return ctx.outputs.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.outputs.backward(grad)
        return ctx.inputs.grad, None


@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda layer, x: checkpoint(layer, x, use_reentrant=True), id="checkpoint"),
        pytest.param(lambda layer, x: BackwardInside.apply(x, layer), id="function"),
    ],
)
def test_gradient_that_backward_adds_to_after_it_is_sent_is_refused(
    call: Any, on_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent and divided once more, and the weights were wrong; DDP refuses it, too."""
    if on_accelerator:
        monkeypatch.setattr(accelerator, "is_host", lambda _: False)
    model = nn.ModuleDict({"shared": nn.Linear(3, 3), "last": nn.Linear(3, 1)})
    reducer = BucketReducer(model, Exchange(), num_ranks=2, limit_bytes=1)
    for times in (1, 2):
        value = torch.ones(2, 3, requires_grad=True)
        for _ in range(times):
            value = call(model["shared"], value)
        loss = model["last"](value).sum()
        if times == 1:
            loss.backward()
            reducer.finish()
            continue
        with pytest.raises(BackendError, match=r"shared\..* twice in one pass.*use_reentrant=False"):
            loss.backward()
    reducer.close()


def test_sparse_gradient_of_a_module_that_has_not_said_so_is_refused() -> None:
    """PyTorch failed with an internal assertion where it was written into a bucket."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 2), "last": nn.Linear(2, 1)})
    reducer = BucketReducer(model, Exchange(), num_ranks=2, limit_bytes=1)
    rows = nn.functional.embedding(torch.tensor([1, 2]), model["table"].weight, sparse=True)
    with pytest.raises(BackendError, match=r"table\.weight is sparse.*`sparse = True`"):
        model["last"](rows).sum().backward()
    reducer.close()


# Waiting for Horovod.


class Clock:
    """A clock that advances 10 us with each poll of an operation, and by the length of each sleep.

    Args:
        done_after_s: when the operation is done.
        wakes: whether Horovod has a wait that ends with the operation, as `install-horovod` builds it.
    """

    def __init__(self, done_after_s: float, *, wakes: bool) -> None:
        self.now, self.done_s, self.slept = 0.0, done_after_s, 0
        lib = SimpleNamespace(horovod_torch_wait_done=self.wait_done) if wakes else SimpleNamespace()
        self.mpi_ops = SimpleNamespace(mpi_lib=lib)

    def poll(self, handle: int) -> bool:
        self.now += 10e-6
        return self.now > self.done_s

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now += seconds

    def wait_done(self, seen: int, limit_s: float) -> int:
        if seen < 0:
            return 0
        self.sleep(min(limit_s, max(0.0, self.done_s - self.now)))
        return int(self.now >= self.done_s)

    def synchronize(self, handle: int) -> str:
        return f"result {handle}"


@pytest.fixture(params=[True, False], ids=["own build", "another build"])
def clocked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    def make(done_after_s: float, **options: Any) -> tuple[Clock, Waiter]:
        clock = Clock(done_after_s, wakes=request.param)
        times = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
        monkeypatch.setattr(horovod_waiter, "time", times)
        hvd: Any = clock
        return clock, Waiter(hvd, 60, **options)

    return make


def test_waiter_spins_on_accelerators_only(clocked: Any) -> None:
    clock, waiter = clocked(40e-6)
    assert waiter.result(7) == "result 7"
    assert clock.slept == 1
    clock, waiter = clocked(40e-6, spin_s=horovod_waiter.SPIN_S)
    waiter.wait(7)
    assert clock.slept == 0
    clock, waiter = clocked(1e-3, spin_s=horovod_waiter.SPIN_S)
    waiter.wait(7)
    assert 0 < clock.slept < 20, "nor does it hold a core for long"


def test_waiter_ends_when_another_rank_has_failed(clocked: Any) -> None:
    """Horovod's exchanges, and elastic training with them, waited for the time limit."""
    activity, failed_s = Activity(60), 2.0

    def check() -> None:
        if clock.now > failed_s:
            activity.abort()
        activity.check()

    clock, waiter = clocked(float("inf"), check=check)
    with pytest.raises(CollectiveAbortedError, match="another rank has failed") as caught:
        waiter.wait(7)
    assert failed_s < clock.now < failed_s + 2 * horovod_waiter.MAX_WAIT_S
    assert isinstance(caught.value, LOST_RANK_ERRORS), "as a broken exchange"


def test_waiter_has_a_time_limit(clocked: Any) -> None:
    clock, waiter = clocked(float("inf"))
    with pytest.raises(TimeoutError, match="did not take part in an exchange within 60 s"):
        waiter.wait(7)
    assert 60 < clock.now < 60.001


def test_waiter_returns_a_result_despite_a_failed_rank(clocked: Any) -> None:
    activity = Activity(60)
    activity.abort()
    _, waiter = clocked(0.0, check=activity.check)
    assert waiter.result(3) == "result 3"
