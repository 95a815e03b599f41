"""Rows about models that change, and about losses and buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.idioms.idiom import Idiom


class Unfreeze(Idiom):
    """The frozen layer is in the optimizer from the start."""

    number, title = "1a", "unfreeze a layer between epochs"

    def prepare(self) -> None:
        self.model[0].requires_grad_(False)

    def after_epoch(self, epoch: int) -> None:
        if epoch == 1:
            self.model[0].requires_grad_(True)


class AddGroup(Unfreeze):
    """The frozen layer comes to the optimizer when it is unfrozen."""

    number, title = "1b", "`optimizer.add_param_group` between epochs"

    def make_optimizer(self) -> Optimizer:
        return SGD(self.model[2].parameters(), lr=0.1)

    def after_epoch(self, epoch: int) -> None:
        super().after_epoch(epoch)
        if epoch == 1:
            self.optimizer.add_param_group({"params": [*self.model[0].parameters()]})


class Freeze(Idiom):
    """Gradient descent without momentum, so that a frozen layer keeps its values."""

    number, title = "2a", "freeze a layer between epochs"

    def after_epoch(self, epoch: int) -> None:
        if epoch == 1:
            self.model[0].requires_grad_(False)
            self.optimizer.zero_grad(set_to_none=True)


class FreezesInForward(nn.Module):
    """A model that trains its first layer in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.passes = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.layers[0].requires_grad_(self.passes not in (3, 4, 5))
        return self.layers(inputs)


class FreezeInForward(Idiom):
    """Frozen in steps 3 to 5 of 7."""

    number, title = "2b", "freeze and unfreeze a layer in `forward`"
    epochs = 7

    def make_model(self) -> nn.Module:
        return FreezesInForward()


class ConvertAndBack(Idiom):
    """As for an export between two epochs."""

    number, title = "3a", "`model.double()` and `.float()` between epochs"

    def after_epoch(self, epoch: int) -> None:
        if epoch == 1:
            self.model.double()
            self.model.float()


class ReplaceHead(Idiom):
    """The new head is the same on all ranks, and takes the place of the old one in the optimizer."""

    number, title = "3b", "replace a head between epochs"

    def after_epoch(self, epoch: int) -> None:
        if epoch == 1:
            torch.manual_seed(7)
            self.model[2] = nn.Linear(3, 1)
            self.optimizer.param_groups[0]["params"] = [*self.model.parameters()]


class LossWithScale(nn.Module):
    """A mean of squares over a scale that is learned, as losses with an uncertainty have it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # The square makes the gradient of the scale differ by rank also if that of the weights is exchanged.
        return ((outputs - targets) ** 2 * torch.exp(-self.scale) + self.scale).mean()


class LossWithParameters(Idiom):
    """Its parameter is in the optimizer."""

    number, title = "4", "a loss with parameters"

    def prepare(self) -> None:
        self.loss = LossWithScale()


class WithBuffers(nn.Module):
    """A mask, tables of positions, and a bank of unit vectors that each rank fills with its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("mask", torch.full((4,), torch.finfo(torch.float32).min))
        table = torch.linspace(0.1, 7, 200)
        self.register_buffer("table_bf16", table.bfloat16())
        self.register_buffer("table_fp16", table.half())
        self.register_buffer("bank", nn.functional.normalize(torch.ones(4, 2)))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.bank.copy_(nn.functional.normalize(inputs.detach()[:4]))
        return self.layer(inputs)


class Buffers(Idiom):
    """With an evaluation after each epoch, before which libraries may make buffers equal."""

    number, title = "10", "buffers: a mask of `finfo.min`, tables in fp16 and bf16, a memory bank"
    right = "no constant changed; vectors of length 1"
    expected = (0.0, 0.0)

    def make_model(self) -> nn.Module:
        return WithBuffers()

    def prepare(self) -> None:
        self.before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.val_data = self.data

    def metric(self, outputs: Any, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)

    def values(self) -> list[float]:
        now = dict(self.model.named_buffers())
        changed = sum(int((now[name] != self.before[name]).sum()) for name in now if name != "bank")
        error = float((now["bank"].norm(dim=1) - 1).abs().max())
        return [float(changed), error]


ROWS = (*(Unfreeze, AddGroup, Freeze, FreezeInForward, ConvertAndBack, ReplaceHead, LossWithParameters, Buffers),)
