"""Train some steps of a compiled model in every rank for `test_compiled.py`, and record their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from trainings import digest

from hvd_trainer import backends
from hvd_trainer.backends import EngineOptions

WIDTH, LAYERS, STEPS = 512, 4, 3
BUCKET_MB = 1.0  # one layer's weight


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


def train(name: str) -> tuple[int, dict[str, Any]]:
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
        return backend.world.rank, {"weights": digest(model.state_dict()), "events": list(events)}


def _note_sending(backend: Any, events: list[str]) -> None:
    """Record an event for each bucket that Horovod is given from now on; DDP sends from C++."""
    if backend._reducer is not None:
        exchange = backend._reducer._exchange
        send = exchange.send
        exchange.send = lambda bucket: events.append("sent") or send(bucket)
