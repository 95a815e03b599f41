"""Batch norm over ranks on the CPU, and by the pretend device's kernels, which CPU tensors are sent to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend.kernels import all_of_batch_norm
from torch import Tensor, nn

from hvd_trainer.backends.sync_batch_norm import convert_sync_batch_norm
from hvd_trainer.utils import accelerator

RANKS = 3


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send CPU tensors the way of an accelerator's; return the names of the kernels that were called."""
    calls: list[str] = []
    monkeypatch.setattr(accelerator, "is_host", lambda _: False)

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            return kernel(*args)

        return call

    for kernel in all_of_batch_norm():
        monkeypatch.setattr(torch, kernel.__name__, noted(kernel.__name__, kernel))
    return calls


class Ranks:
    """An engine whose other ranks are passes made before: sums are taken over what each has sent.

    A rank's n-th collective is the n-th of all others, so that a pass is repeated until all have sent all.
    """

    def __init__(self) -> None:
        self.sent: list[list[Tensor]] = [[] for _ in range(RANKS)]

    def of(self, rank: int) -> Any:
        """Return the collectives in one pass of one rank."""
        mine: list[Tensor] = []
        before = [list(tensors) for tensors in self.sent]
        self.sent[rank] = mine

        def all_reduce(tensor: Tensor) -> Tensor:
            number = len(mine)
            mine.append(tensor.detach().clone())
            others = [its[number] for other, its in enumerate(before) if other != rank and number < len(its)]
            return sum(others, start=tensor.clone())

        return SimpleNamespace(world=SimpleNamespace(size=RANKS, rank=rank), all_reduce=all_reduce)


def outcome(model: nn.Module, inputs: list[Tensor], targets: list[Tensor]) -> list[dict[str, Tensor]]:
    """Train all ranks together; return each rank's output, gradients and buffers."""
    ranks = Ranks()
    found: list[dict[str, Tensor]] = [{} for _ in range(RANKS)]
    for _ in range(3):  # forward, backward of the layer's own sums, and all of that with the sums of all
        for rank in range(RANKS):
            mine = copy.deepcopy(model)
            convert_sync_batch_norm(mine, ranks.of(rank))
            input = inputs[rank].clone(memory_format=torch.preserve_format).requires_grad_()
            out = mine(input)
            (out * targets[rank]).sum().backward()
            assert input.grad is not None
            found[rank] = {"output": out.detach(), "input": input.grad, **dict(mine.named_buffers())}
            found[rank] |= {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}
    return found


def unbiased() -> nn.Module:
    layer = nn.BatchNorm1d(4)
    layer.register_parameter("bias", None)
    return layer


LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "2d": (lambda: nn.BatchNorm2d(4, momentum=None), (5, 4, 3, 2)),
    "3d, plain": (lambda: nn.BatchNorm3d(4, affine=False), (5, 4, 2, 3, 2)),
    "untracked": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (5, 4, 3, 2)),
    "unbiased": (unbiased, (5, 4)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("place", ["cpu", "accelerator"])
def test_sync_batch_norm_equals_the_whole_batch(
    kind: str, channels_last: bool, place: str, request: pytest.FixtureRequest
) -> None:
    """Ranks have different batch sizes; in fp64 the results differ by rounding only, within 1e-12."""
    kernels = request.getfixturevalue("accelerated") if place == "accelerator" else []
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(make()).double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    inputs = [3 * torch.randn(shape[0] + rank, *shape[1:], dtype=torch.float64) + 1 for rank in range(RANKS)]
    if channels_last and len(shape) == 4:
        inputs = [input.contiguous(memory_format=torch.channels_last) for input in inputs]
    targets = [torch.randn(input.shape, dtype=torch.float64) for input in inputs]
    expected = of_the_whole_batch(model, inputs, targets)
    for mine, wanted in zip(outcome(model, inputs, targets), expected, strict=True):
        assert mine.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-12, atol=1e-12, msg=name)
    assert len(set(kernels)) == (5 if place == "accelerator" else 0), "all five kernels are used, or none"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_running_statistics_in_low_precision_count_all_samples(dtype: torch.dtype, accelerated: list[str]) -> None:
    """Ranks have 70,000 samples, 1 and 257: fp16 ends at 65,504, and bf16 has no 257."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None)).to(dtype)
    inputs = [(torch.randn(count, 4) + 7 * rank).to(dtype) for rank, count in enumerate((70_000, 1, 257))]
    exact = torch.cat(inputs).double()
    for buffers in outcome(model, inputs, inputs):
        assert torch.equal(buffers["0.running_mean"], exact.mean(0).to(dtype))
        assert torch.equal(buffers["0.running_var"], exact.var(0).to(dtype))


def of_the_whole_batch(model: nn.Module, inputs: list[Tensor], targets: list[Tensor]) -> list[dict[str, Tensor]]:
    """Compute the same by PyTorch's own batch norm; weight and bias have each rank's part of the gradient."""
    whole = copy.deepcopy(model)
    batch = torch.cat(inputs).requires_grad_()
    out = whole(batch)
    losses = [(part * its).sum() for part, its in zip(out.split([*map(len, inputs)]), targets, strict=True)]
    grad = torch.autograd.grad(sum(losses), batch, retain_graph=True)[0].split([*map(len, inputs)])
    outputs, parameters = out.detach().split([*map(len, inputs)]), dict(whole.named_parameters())
    found: list[dict[str, Tensor]] = []
    for output, input, loss in zip(outputs, grad, losses, strict=True):
        found.append({"output": output, "input": input, **dict(whole.named_buffers())})
        for name, parameter in parameters.items():
            found[-1][name] = torch.autograd.grad(loss, parameter, retain_graph=True)[0]
    return found
