"""Make traces of runs for test_parity_tool.py that are equal but for what a test edits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.observe.checksums import checksum
from hvd_trainer.tools.parity.traces import Moment, Snapshot, Trace

Edit = Callable[[int, str, dict[str, Any], dict[str, Tensor]], None]
"""Given the rank, the moment (`step 2`), its line and its tensors; changes them."""
FACTS = {
    "device": "cpu",
    "threads": 1,
    "optimizer": "SGD",
    "train_samples": 64,
    "batch_size": 4,
    "model": "Sequential",
    "global_batch_size": 8,
}
OPTIONS = {
    "precision": "fp32",
    "reproducible": None,
    "compression": "none",
    "leave_out": (),
    "accumulate": 1,
    "sync_batch_norm": False,
    "lr_scaling": "none",
    "backend": "ddp",
}
SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}


def draw_tensor(text: str, count: int) -> Tensor:
    seed = int.from_bytes(text.encode(), "big") % (2**63 - 25)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def make_line(rank: int, ranks: int, moment: Moment, per_rank: int) -> dict[str, Any]:
    """Make the line of a rank at a moment, without its checksums."""
    its: dict[str, Any] = {"event": moment.name, "step": moment.step}
    if moment.name == "start":
        return its | {
            "copy": rank,
            "copies": ranks,
            "stride": 1,
            "shapes": {name: str(shape) for name, shape in SHAPES.items()},
            "sliced": [],
            "dropout": [],
            "batch_norm": [],
            "settings": [{"momentum": "0.9", "weight_decay": "0.0"}],
        }
    if moment.name == "evaluation":
        return its | {"figures": {"test_loss": 0.5, "test_accuracy": 0.75}}
    # Of each step of 8, rank r of n takes every n-th sample.
    samples = range((moment.step - 1) * 8 + rank, moment.step * 8, ranks)
    return its | {
        "epoch": 1 + (moment.step > 2),
        "samples": [f"x{number}-y{number % 4}" for number in samples],
        "counts": [per_rank],
        "losses": [1.0 / moment.step],
        "lr": [0.1],
        "grad_norm": 2.0,
        "skipped": False,
    }


def make_tensors(rank: int, moment: Moment) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        for kind in ("gradients", "parameters"):
            if moment.name == "step" or (moment.name == "start" and kind == "parameters"):
                values[f"{kind}/{name}"] = draw_tensor(f"{kind}{name}{moment.step}", math.prod(shape))
        if moment.name == "step":
            values[f"optimizer/{name}/momentum_buffer"] = draw_tensor(f"o{name}{moment.step}", math.prod(shape))
    own = rank if moment.name == "step" else 0
    values["buffers/n.running_mean"] = draw_tensor(f"n{own}{moment.step}", 3)
    return values


def make_trace(
    name: str = "ddp",
    edit: Edit | None = None,
    *,
    ranks: int = 2,
    steps: int = 4,
    facts: Any = None,
    **options: Any,
) -> Trace:
    """Make the trace of two epochs of two steps each, with an evaluation at its end."""
    moments = [Moment(0, 0), *(Moment(step, 1) for step in range(1, steps + 1)), Moment(steps, 2)]
    everyone = []
    for rank in range(ranks):
        its = {}
        for moment in moments:
            line, values = make_line(rank, ranks, moment, 8 // ranks), make_tensors(rank, moment)
            if edit is not None:
                edit(rank, f"{moment.name} {moment.step}", line, values)
            sums: dict[str, dict[str, str]] = {}
            for key, value in values.items():
                kind, _, rest = key.partition("/")
                sums.setdefault(kind, {})[rest] = checksum(value)
            its[moment] = Snapshot({**line, "checksums": sums}, lambda values=values: values)  # type: ignore[misc]
        everyone.append(its)
    return Trace(name, {**FACTS, **(facts or {})}, {**OPTIONS, "backend": name, **options}, everyone)
