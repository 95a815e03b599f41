"""Batch norm over ranks on the CPU, and as accelerators compute it: their kernels' formulas in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerator_stand_in import StandIn
from torch import Tensor, nn

from hvd_trainer.backends.sync_batch_norm import convert_sync_batch_norm

RANKS = 3


def shaped(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (like.dim() - 2))


def dims(tensor: Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def statistics(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # The kernel's statistics of fp16 and bf16 are fp32.
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    var, mean = torch.var_mean(values, dims(input), correction=0)
    return mean, (var + eps).rsqrt()


def gathered(
    input: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert counts.dtype == (input if running_mean is None else running_mean).dtype, "else the kernel refuses"
    shares = (counts / counts.sum())[:, None]
    mean = (shares * means).sum(0)
    var = (shares * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * counts.sum() / (counts.sum() - 1)).to(running_var.dtype), momentum)
    return mean, (var + eps).rsqrt()


def normalized(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    out = (input - shaped(mean, input)) * shaped(invstd, input)
    out = out if weight is None else out * shaped(weight, input)
    return out if bias is None else out + shaped(bias, input)


def reduced(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *needed: bool
) -> tuple[Tensor | None, ...]:
    assert grad.stride() == input.stride(), "a kernel takes both for laid out alike"
    sum_dy = grad.sum(dims(grad))
    sum_dy_xmu = (grad * (input - shaped(mean, input))).sum(dims(grad))
    sums = (sum_dy, sum_dy_xmu) if needed[0] else (None, None)
    return (*sums, sum_dy_xmu * invstd if needed[1] else None, sum_dy if needed[2] else None)


def passed_back(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype == torch.int32
    assert counts.is_contiguous(), "the kernel reads the counts as they lie in memory"
    total = counts.sum()
    centred = (input - shaped(mean, input)) * shaped(invstd**2 * sum_dy_xmu / total, input)
    scale = invstd if weight is None else invstd * weight
    return (grad - shaped(sum_dy / total, input) - centred) * shaped(scale, input)


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send CPU tensors the way of an accelerator's; return the names of the kernels that were called."""
    calls = StandIn(monkeypatch).calls

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            return kernel(*args)

        return call

    kernels = {
        "batch_norm_stats": statistics,
        "batch_norm_gather_stats_with_counts": gathered,
        "batch_norm_elemt": normalized,
        "batch_norm_backward_reduce": reduced,
        "batch_norm_backward_elemt": passed_back,
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(torch, name, noted(name, kernel))
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
