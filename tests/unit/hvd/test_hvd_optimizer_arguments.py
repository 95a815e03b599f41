"""`hvd.DistributedOptimizer` in one process: what it refuses, and what it keeps of the user's optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hvd_trainer import hvd


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


@pytest.mark.usefixtures("alone")
class TestMistakes:
    @pytest.mark.parametrize(
        ("named", "text"),
        [
            (lambda model: model.parameters(), "tuples"),
            (lambda model: [("w", parameter) for parameter in model.parameters()], "same name: w"),
            (lambda model: [("w", model[0].weight)], "3 of the optimizer's parameters are not named"),
        ],
    )
    def test_of_named_parameters(self, named: Any, text: str, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named(model))

    @pytest.mark.parametrize(
        ("how", "text"),
        [
            ({"backward_passes_per_step": 0}, "must be > 0"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op != Average"),
            ({"groups": 0}, "positive integer"),
            ({"groups": [["w"]]}, "consist of torch.Tensor"),
        ],
    )
    def test_of_other_arguments(self, how: dict[str, Any], text: str, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **how)

    def test_of_a_parameter_in_two_groups(self, model: nn.Module) -> None:
        groups = [[*model.parameters()], [*model.parameters()]]
        with pytest.raises(ValueError, match="only appear once"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=groups)


@pytest.mark.usefixtures("alone")
def test_num_groups_is_deprecated(model: nn.Module) -> None:
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_groups=2)


@pytest.mark.usefixtures("alone")
def test_class_state_and_settings_are_kept(model: nn.Module) -> None:
    """The real one makes a new optimizer from the parameter groups: momentum is gone."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.03
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert type(wrapped).__name__ == "Adam"
    assert isinstance(wrapped, torch.optim.Adam)
    assert wrapped.state_dict() == before
    assert wrapped.state_dict()["state"][0]["step"] == 1
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, step_size=1)
    wrapped.step()
    scheduler.step()
    assert wrapped.param_groups[0]["lr"] == pytest.approx(0.003)


@pytest.mark.usefixtures("alone")
def test_hooks_of_steps_run_once(model: nn.Module) -> None:
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []
    wrapped.register_step_post_hook(lambda *_: calls.append(1))
    wrapped.load_state_dict(wrapped.state_dict())
    wrapped.step()
    assert calls == [1]
