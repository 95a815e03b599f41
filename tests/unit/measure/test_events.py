"""What listeners are told of a script, and what those record that write files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_trainer.measure.events import ScriptEvents
from hvd_trainer.measure.listener import End, Listener, Step
from hvd_trainer.measure.message import NO_STEPS
from hvd_trainer.measure.steps import StepRecorder
from hvd_trainer.measure.trace import Trace
from hvd_trainer.tools.parity.traces import read_trace


class Steps(Listener):
    """Keeps what it is told of steps."""

    def __init__(self) -> None:
        self.made: list[Step] = []

    def on_step_end(self, step: Step) -> None:
        self.made.append(step)


@contextmanager
def observed(log: Path, listener: Listener) -> Iterator[None]:
    events = ScriptEvents(log, listener)
    events.install()
    try:
        yield
    finally:
        events.uninstall()


def test_a_part_that_is_computed_again_is_no_pass_of_its_own(tmp_path: Path) -> None:
    """The backward pass within the backward pass hid the loss: it was unknown for each step."""
    model, steps = nn.Linear(2, 1), Steps()
    with observed(tmp_path, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = checkpoint(model, torch.ones(3, 2, requires_grad=True), use_reentrant=True).sum()
        loss.backward()
        optimizer.step()
    (step,) = steps.made
    assert (step.passes, [float(one) for one in step.losses]) == (1, [float(loss.detach())])


def test_the_losses_of_a_step_are_those_of_all_its_passes(tmp_path: Path) -> None:
    """The last pass stood for all of them, where the Trainer gives their mean."""
    model, steps = nn.Linear(2, 1), Steps()
    with observed(tmp_path, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [model(torch.full((1, 2), float(number))).sum() for number in range(3)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    (step,) = steps.made
    assert (step.passes, list(step.losses)) == (3, losses)


@pytest.mark.parametrize("by_closure", [False, True])
def test_gradients_are_traced_before_the_update_changes_them(tmp_path: Path, by_closure: bool) -> None:
    """Nesterov's momentum is added to the gradients in place, which were copied behind it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)

    def compute() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with observed(tmp_path, Trace(tmp_path, 0, 1, 3)):
        for _ in range(3):
            if by_closure:
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
    trace = read_trace("ddp", tmp_path)
    assert trace is not None
    assert [when.step for when in trace.steps] == [1, 2, 3]
    for when in trace.steps:
        assert trace.ranks[0][when].values()["gradients/weight"].tolist() == [1.0, 1.0]
    assert trace.loss(trace.steps[0]) > trace.loss(trace.steps[1])
    assert not (tmp_path / NO_STEPS).exists()


def test_a_rank_that_ends_while_it_writes_its_steps_leaves_no_half_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn file ended the tool with BadZipFile."""

    def write(file: Any, **columns: Any) -> None:
        with file if hasattr(file, "write") else open(file, "wb") as opened:
            opened.write(b"PK torn")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", write)
    times = StepRecorder(tmp_path, 0)
    times.on_start(torch.device("cpu"), on_trainer=False)
    times.on_step_end(Step(1, 1.0))
    with pytest.raises(KeyboardInterrupt):
        times.on_end(End({}, {}, ""))
    assert list((tmp_path / "steps").iterdir()) == []
