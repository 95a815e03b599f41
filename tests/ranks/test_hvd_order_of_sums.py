"""`hvd.DistributedOptimizer` adds up gradients in the same order in every run, and after a resume.

Of three ranks and more: a + b is b + a, but a ring adds each part of a buffer from another rank on.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import in_ranks
from torch import Tensor, nn

from hvd_trainer import hvd

pytestmark = pytest.mark.warm

STEPS = 5


class Net(nn.Module):
    """Layers that `backward` finishes in another order than the reverse of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(600, 600)
        self.first = nn.Linear(600, 600)
        self.between = nn.ModuleList([nn.Linear(600, 600), *(nn.Linear(600, 600, bias=False) for _ in range(2))])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for layer in self.between:
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


def digests(path: str, first: int, **how: Any) -> list[str]:
    """Train from a step on, and save the state before each; return the weights' digests after each.

    Some layers are frozen in the first two steps.
    """
    hvd.init()
    torch.manual_seed(0)
    model = Net()
    model.between.requires_grad_(first > 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **how)
    if first:
        saved = torch.load(f"{path}.{first}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    hashes = []
    for step in range(first, STEPS):
        if hvd.rank() == 0 and not first:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.{step}")
        model.between.requires_grad_(step > 1)
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 600, generator=generator)).backward()
        optimizer.step()
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        hashes.append(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    hvd.shutdown()
    return hashes


WAYS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "buckets": ({}, {}),
    "exactly Horovod": ({"HVD_TRAINER_EXACTLY_HOROVOD": "1"}, {}),
    "two groups": ({}, {"groups": 2}),
    "fp16": ({}, {"compression": hvd.Compression.fp16}),
    "small buckets": ({"HOROVOD_FUSION_THRESHOLD": "10000"}, {}),
}


@pytest.mark.parametrize(("way", "ranks"), [*((way, 3) for way in WAYS), ("buckets", 4)])
def test_resumed_runs_have_the_bytes_of_the_undisturbed_one(way: str, ranks: int, tmp_path: Path) -> None:
    """Gradients went one by one in a process's first step, and then in the order that `backward` had shown."""
    env, how = WAYS[way]

    def trained(first: int) -> list[str]:
        outcomes: list[list[str]] = in_ranks(ranks, digests, str(tmp_path / "state"), first, env=env, **how)
        assert all(outcome == outcomes[0] for outcome in outcomes)
        return outcomes[0]

    undisturbed = trained(0)
    assert trained(0) == undisturbed
    for first in (1, 2, 4) if way == "buckets" else (2,):
        assert trained(first) == undisturbed[first:]
