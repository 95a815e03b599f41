"""What listeners are told of a script, and what those record that write files."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

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
    assert [float(one) for one in step.losses] == [float(loss.detach())]


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
    assert list(step.losses) == losses


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


class Gated(Dataset[torch.Tensor]):
    """Samples that a thread waits for until another one lets it."""

    def __init__(self) -> None:
        self.asked, self.given = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.set()
        assert self.given.wait(30)
        return torch.ones(2)


def test_steps_are_seen_beside_a_thread_that_fetches(tmp_path: Path) -> None:
    """A fetch under way was taken for the phase of the thread that trains: backward passes and steps were lost."""
    model, steps, data = nn.Linear(2, 1), Steps(), Gated()
    loader = DataLoader(data, batch_size=1)
    fetching = threading.Thread(target=lambda: list(loader))
    with observed(tmp_path, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fetch_the_rest(_: object) -> None:
            data.given.set()
            fetching.join()

        fetching.start()
        assert data.asked.wait(30)
        hidden = model(torch.ones(1, 2))
        hidden.register_hook(fetch_the_rest)  # ends within the backward pass what began before it
        hidden.sum().backward()
        optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(steps.made) == 2


def test_losses_of_one_step_may_differ_in_shape_and_are_bounded(tmp_path: Path) -> None:
    model, steps = nn.Linear(2, 1), Steps()
    with observed(tmp_path, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(1500):  # a script that updates by hand
            loss = model(torch.ones(1, 2))  # shape (1, 1)
            loss.backward()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    (step,) = steps.made
    assert len(step.losses) == 1024
    times = StepRecorder(tmp_path, 0)
    times.on_start(torch.device("cpu"), on_trainer=False)
    times.on_step_end(step)
    times.on_end(End({}, {}, ""))
    recorded = float(np.load(tmp_path / "steps/rank-0.npz")["loss"][0])
    assert math.isclose(recorded, float(loss.detach()), rel_tol=1e-6)  # of a mean of equal numbers


def test_batches_of_two_loaders_in_one_step_are_traced(tmp_path: Path) -> None:
    """The second loader, such as that of a further epoch, hid the batches of the first."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observed(tmp_path, Trace(tmp_path, 0, 1, 2)):
        for _ in range(2):
            for size in (2, 3):
                batch = next(iter(DataLoader(torch.ones(size, 2), batch_size=size)))
                model(batch).sum().backward()
            optimizer.step()
    trace = read_trace("ddp", tmp_path)
    assert trace is not None
    assert [trace.lines(when)[0]["counts"] for when in trace.steps] == [[2, 3], [2, 3]]


def test_the_start_is_that_before_the_first_of_the_updates_of_a_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    first = model.weight.detach().flatten().tolist()

    def compute() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    with observed(tmp_path, Trace(tmp_path, 0, 1, 2)):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        optimizer.step(compute)
    trace = read_trace("ddp", tmp_path)
    assert trace is not None
    assert trace.ranks[0][trace.moments[0]].values()["parameters/weight"].tolist() == first


def test_gradients_and_skipped_steps_of_a_fused_optimizer_are_traced(tmp_path: Path) -> None:
    """A GradScaler leaves it to such an optimizer to unscale the gradients, and to skip the update."""
    model, steps = nn.Linear(2, 1), Steps()

    class Fused(torch.optim.SGD):
        """Stands for Adam, whose fused step is for GPUs."""

        grad_scale: torch.Tensor
        found_inf: torch.Tensor

        def step(self, closure: Any = None) -> None:
            """Skip the update."""

    optimizer = Fused(model.parameters(), lr=0.1)
    with observed(tmp_path, Trace(tmp_path, 0, 1, 1)), observed(tmp_path, steps):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
        (8 * model(torch.ones(1, 2)).sum()).backward()
        optimizer.step()
    trace = read_trace("ddp", tmp_path)
    assert trace is not None
    assert trace.ranks[0][trace.steps[0]].values()["gradients/weight"].tolist() == [1.0, 1.0]
    assert [bool(step.skipped) for step in steps.made] == [True]
