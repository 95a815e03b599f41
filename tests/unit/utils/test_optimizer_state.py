"""States loaded into an optimizer: its values, in the objects that the optimizer had."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hvd_trainer.utils.optimizer_state import load_in_place


def trained(kind: Any, steps: int, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with two parameter groups and its optimizer, after so many steps."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": part.parameters()} for part in model]
    optimizer = kind(model.parameters() if kind is torch.optim.LBFGS else groups, **copy.deepcopy(settings))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": torch.tensor(0.1), "amsgrad": True}),
        (torch.optim.LBFGS, {"lr": 0.1}),
    ],
)
def test_loaded_state_is_that_of_the_own_method_in_the_same_objects(
    kind: Any, settings: dict[str, Any], steps: int
) -> None:
    _, source = trained(kind, 2, **{**settings, "lr": settings["lr"] * 2})
    _, expected = trained(kind, steps, **settings)
    _, found = trained(kind, steps, **settings)
    groups, state, rate = found.param_groups, found.state, found.param_groups[0]["lr"]
    dicts = [*groups, *state.values()]
    tensors = [value for its in state.values() for value in its.values() if isinstance(value, torch.Tensor)]
    expected.load_state_dict(copy.deepcopy(source.state_dict()))
    load_in_place(found, copy.deepcopy(source.state_dict()))
    assert str(found.state_dict()) == str(expected.state_dict())
    assert found.param_groups is groups
    assert found.state is state
    assert all(one is other for one, other in zip(dicts, [*groups, *state.values()], strict=False))
    if isinstance(rate, torch.Tensor):
        assert groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(0.2)
    if kind is not torch.optim.LBFGS:  # whose tensors take other shapes
        kept = [value for its in state.values() for value in its.values() if isinstance(value, torch.Tensor)]
        assert all(one is other for one, other in zip(tensors, kept, strict=steps > 0))


def test_settings_of_this_process_stay_and_state_that_is_gone_goes() -> None:
    _, fresh = trained(torch.optim.SGD, 0, lr=0.1, momentum=0.9)
    _, optimizer = trained(torch.optim.SGD, 1, lr=0.3, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    load_in_place(optimizer, fresh.state_dict())
    assert not optimizer.state
    assert [(group["lr"], group["initial_lr"]) for group in optimizer.param_groups] == [(0.1, 0.3)] * 2


class Wrapper(torch.optim.SGD):
    """An optimizer around another one, which takes the groups that are loaded, as SAM's usual code does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)
        self.inner = inner
        inner.param_groups = self.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def test_optimizer_within_another_one_sees_the_rates_that_are_set() -> None:
    _, inner = trained(torch.optim.SGD, 1, lr=0.3)
    wrapper = Wrapper(inner)
    load_in_place(wrapper, copy.deepcopy(wrapper.state_dict()))
    wrapper.param_groups[0]["lr"] = 0.7
    assert inner.param_groups[0]["lr"] == 0.7
