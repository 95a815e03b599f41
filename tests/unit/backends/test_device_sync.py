"""The operators that a step adds to the model's own, and when the host waits for the device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import fit, options_of

from hvd_trainer import Callback, RunView, TensorData, accuracy
from hvd_trainer.backends import Backend
from hvd_trainer.errors import NonFiniteError
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.observe.progress import Progress
from hvd_trainer.optim.non_finite import NonFiniteGuard
from hvd_trainer.training.consensus import StepConsensus

VIEWS = ("detach", "slice", "select", "split", "view", "alias", "_record_function")


class Operators(TorchDispatchMode):
    """A dispatch mode that records all operators but those of the forward and backward passes and the update."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.is_counting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if self.is_counting and not name.startswith(VIEWS):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Count no operator inside this block."""
        before, self.is_counting = self.is_counting, False
        try:
            yield
        finally:
            self.is_counting = before


class Quiet(nn.Linear):
    """A model whose own operators do not count."""

    operators: Operators

    def forward(self, inputs: Tensor) -> Tensor:
        with self.operators.apart():
            return super().forward(inputs)


class Window(Callback):
    """A callback that counts the operators of ten steps without a line of the log between them."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators

    def on_step_end(self, run: RunView, result: Any) -> None:
        if self.operators.is_counting:
            self.operators.names.append("step_end")
        self.operators.is_counting = 5 <= run.progress.step < 15


def test_step_adds_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step had 15 operators of its own: sums, norms, a seed of backward."""
    operators = Operators()
    backward = Tensor.backward

    def uncounted(self: Tensor, *args: Any, **options: Any) -> None:
        with operators.apart():
            backward(self, *args, **options)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with operators.apart():
            return nn.functional.cross_entropy(outputs, targets)

    monkeypatch.setattr(Tensor, "backward", uncounted)
    model = Quiet(4, 3)
    model.operators = operators
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = optimizer.step

    def update(*args: Any) -> None:
        with operators.apart():
            step(*args)

    monkeypatch.setattr(optimizer, "step", update)
    # Whether to stop is asked by the clock, a few times a second.
    monkeypatch.setattr(StepConsensus, "poll", lambda *_, **__: frozenset())
    data = TensorData(torch.randn(160, 4), torch.randint(3, (160,)))
    more = {"metrics": {"accuracy": accuracy}, "callbacks": [Window(operators)]}
    with operators:
        fit(options_of(epochs=1, batch_size=8), model, data, optimizer=optimizer, loss=loss, **more)
    steps = " ".join(operators.names).split("step_end")
    assert len(steps) == 11
    # What the clock asks for, such as the progress bar's figure, comes in single steps.
    usual = Counter(" ".join(sorted(step.split())) for step in steps[:10]).most_common(1)
    assert [(step, count > 5) for step, count in usual] == [("argmax eq index_select index_select sum", True)]


# What steers the run is read where a rank says that it waits.


class Reads:
    """A record of whether the backend's activity was marked as waiting at each read of a tensor."""

    def __init__(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[bool] = []

        def seen(method: Any) -> Any:
            def read(tensor: Tensor, *args: Any) -> Any:
                self.waiting.append(backend.activity.is_waiting)
                return method(tensor, *args)

            return read

        for name in ("tolist", "item", "__float__", "__int__", "__bool__"):
            monkeypatch.setattr(Tensor, name, seen(getattr(Tensor, name)))


def test_device_is_read_only_while_waiting(lone_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL a read waits for the GPU; outside of `waiting` a hang was blamed on the wrong rank."""
    lone_backend.activity.enter("step")
    model = nn.Linear(2, 2)
    guard, meter = NonFiniteGuard(lone_backend, "error", model), Meter({"a": accuracy}, lone_backend)
    consensus = StepConsensus(lone_backend, ["stop"])
    reads = Reads(lone_backend, monkeypatch)
    for number in range(3):
        guard.note(number, [torch.tensor(1.0)], torch.tensor(2.0))
        meter.add(torch.tensor(0.5), torch.rand(4, 2), torch.tensor([0, 1, 0, 1]), 4, torch.tensor(2.0))
        assert not reads.waiting, "between two lines of the log nothing is read"
    guard.check()
    meter.recent()
    meter.local_loss()
    consensus.poll()
    assert reads.waiting
    assert all(reads.waiting)


# What is not finite is found at the next line of the log.


@pytest.mark.parametrize(
    ("losses", "norms", "weight", "words"),
    [
        ((1.0, math.nan, math.inf), (1.0, math.nan, 1.0), 1.0, "The loss of rank 0 was not finite in step 2:"),
        ((1.0, 1.0, math.nan), (1.0, math.inf, 1.0), 1.0, "The gradient was not finite in step 2:"),
        ((1.0, 1.0, 1.0), None, math.nan, "The weights were no longer finite after step 3:"),
        ((1.0, 1.0, 1.0), None, -math.inf, "The weights were no longer finite after step 3:"),
    ],
)
def test_guard_names_what_is_not_finite(
    lone_backend: Backend, losses: tuple[float, ...], norms: tuple[float, ...] | None, weight: float, words: str
) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[1, 0] = weight
    guard = NonFiniteGuard(lone_backend, "error", model)
    for step, loss in enumerate(losses, 1):
        guard.note(step, [torch.tensor(loss)], None if norms is None else torch.tensor(norms[step - 1]))
    with pytest.raises(NonFiniteError) as caught:
        guard.check()
    assert str(caught.value).startswith(words)


def test_guard_passes_finite_steps_and_reads_once(lone_backend: Backend) -> None:
    model = nn.Linear(2, 2)
    guard = NonFiniteGuard(lone_backend, "error", model)
    guard.note(1, [torch.tensor(1.0)], None)
    guard.check()
    with torch.no_grad():
        model.weight.fill_(math.nan)
    guard.check()


def test_non_finite_gradient_ends_the_run_without_clipping() -> None:
    """sqrt has an infinite slope at 0: the loss is finite, the gradient is not."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = TensorData(torch.ones(2, 1), torch.zeros(2))
    with pytest.raises(NonFiniteError, match="after step 1"):
        fit(options_of(epochs=1, batch_size=2), model, data, loss=lambda outputs, _: outputs.sqrt().mean())


# Steps that the loss scaler leaves out are counted without waiting for each.


@pytest.mark.parametrize("fused", [None, True])
def test_skipped_steps_are_counted(lone_backend: Backend, fused: bool | None) -> None:
    model = nn.Linear(2, 1, bias=False)
    plain = torch.optim.Adam(model.parameters(), lr=0.5, fused=fused)
    _, optimizer = lone_backend.prepare(model, plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    progress = Progress()
    before = model.weight.detach().clone()
    for slope in (math.inf, 1.0, math.nan):
        scaler.scale(model(torch.tensor([[slope, 1.0]])).sum()).backward()
        result = lone_backend.step(optimizer, scaler=scaler)
        assert isinstance(result.skipped, Tensor if fused else bool)
        progress.count_skipped(result.skipped)
        optimizer.zero_grad()
        if slope == math.inf:
            assert torch.equal(model.weight, before)
    assert progress.state_dict()["skipped_steps"] == progress.skipped_steps == 2
    assert model.weight.isfinite().all()
    assert not torch.equal(model.weight, before)
    assert scaler.get_scale() == 1.0
