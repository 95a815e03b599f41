"""Compiled models: gradients are exchanged while backward still runs, and the engines give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from launchers import in_ranks, requires
from torch import Tensor, nn
from trainings import digest

from hvd_trainer import backends
from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.backends.compiled import compile_in_buckets
from hvd_trainer.launch.world import World

pytestmark = requires("horovod")

WIDTH, LAYERS, STEPS = 512, 4, 3
BUCKET_MB = 1.0  # a layer


def compiled_functions(result: Tensor) -> Iterator[Any]:
    """Return the nodes of the backward graph that are compiled functions."""
    seen, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in node.name():
            yield node
        waiting += [earlier for earlier, _ in node.next_functions]


def train(name: str) -> dict[str, Any]:
    """Train some steps; return the weights and the last step's events: compiled backwards and sent buckets."""
    events: list[str] = []
    with backends.create(EngineOptions(backend=name, bucket_mb=BUCKET_MB)) as backend:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backend.compile(model, "default", exchange=True)
        prepared, optimizer = backend.prepare(model, optimizer)
        for step in range(STEPS):
            torch.manual_seed(10 * step + backend.world.rank)
            with backend.gradient_sync(prepared, True):
                loss = prepared(torch.randn(8, WIDTH)).square().sum()
                events.clear()
                for node in compiled_functions(loss):
                    node.register_prehook(lambda _: events.append("backward"))
                loss.backward()
            backend.step(optimizer)
            optimizer.zero_grad()
            if step == 0:
                _note_sending(backend, events)
        return {"weights": digest(model.state_dict()), "events": list(events)}


def _note_sending(backend: Any, events: list[str]) -> None:
    """Record an event for each bucket that Horovod is given from now on; DDP sends from C++."""
    if backend._reducer is not None:
        exchange = backend._reducer._buckets.exchange
        launch = exchange.launch
        exchange.launch = lambda bucket: events.append("sent") or launch(bucket)


@cache
def ranks(backend: str) -> list[dict[str, Any]]:
    """Train in three ranks, once for all tests: compiling takes each rank some 10 s."""
    return in_ranks(3, train, backend, timeout_s=300)


def test_compiled_backward_overlaps_with_the_exchange() -> None:
    """A compiled backward was one function, and the exchange began only after it."""
    for rank in ranks("horovod"):
        assert rank["events"] == ["backward", "sent"] * LAYERS


@pytest.mark.long
def test_compiled_models_train_the_same_bits() -> None:
    assert len({rank["weights"] for name in ("horovod", "ddp") for rank in ranks(name)}) == 1
    assert [rank["events"] for rank in ranks("ddp")] == [["backward"] * LAYERS] * 3, "cut as ours"


@pytest.mark.parametrize(("size", "exchange", "cut"), [(2, True, True), (2, False, False), (1, True, False)])
def test_compile_cuts_only_if_there_is_an_exchange(
    monkeypatch: pytest.MonkeyPatch, size: int, exchange: bool, cut: bool
) -> None:
    """Without an exchange one function is faster; and with --reproducible it is the same on any ranks."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(nn.Module, "compile", lambda model, **how: asked.update(how))
    backend = create(EngineOptions(backend="horovod"), environ={})
    backend.session.world = World(rank=0, size=size, local_rank=0, local_size=size, launcher="torchrun")
    backend.compile(nn.Linear(2, 2), "reduce-overhead", exchange=exchange)
    assert callable(asked.get("backend")) == cut
    assert asked.get("mode") == (None if cut else "reduce-overhead")


def test_compile_cuts_the_backward_by_buckets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    compiled: list[list[tuple[int, ...]]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> torch.fx.GraphModule:
        assert options == torch._inductor.list_mode_options("max-autotune")
        compiled.append([tuple(its.shape) for its in inputs if isinstance(its, nn.Parameter)])
        return graph

    monkeypatch.setattr(torch._inductor, "compile", note)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    compile_in_buckets(model, "max-autotune", limit_bytes=2 * 4 * 4 * 4)
    inputs = torch.ones(3, 4)
    with torch.no_grad():
        expected = model(inputs)
    assert [len(graph) for graph in compiled] == [4]
    compiled.clear()
    assert torch.equal(model(inputs), expected)
    assert [len(graph) for graph in compiled] == [2, 2]
    torch._dynamo.reset()
