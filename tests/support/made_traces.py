"""Make traces of runs for test_parity_tool.py that are equal but for what a test changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.measure.trace_format import checksum
from hvd_trainer.tools.parity.traces import Moment, Snapshot, Trace

Change = Callable[[int, dict[str, Any], dict[str, Tensor]], None]
"""Given a rank, its line and its tensors at a moment; changes them."""
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
    "accumulate": 1,
    "sync_batch_norm": False,
}
SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}


def set_line(**changes: Any) -> Change:
    return lambda rank, line, values: line.update(changes)


def set_tensor(name: str, *numbers: float) -> Change:
    return lambda rank, line, values: values.update({name: torch.tensor(numbers)})


def multiply(factor: float, *names: str, only: int | None = None) -> Change:
    """Multiply the tensors whose names begin so, on all ranks or on one."""

    def change(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        if only in (None, rank):
            values.update({name: value * factor for name, value in values.items() if name.startswith(names)})

    return change


def combine(*changes: Change) -> Change:
    def change(rank: int, line: Any, values: dict[str, Tensor]) -> None:
        for one in changes:
            one(rank, line, values)

    return change


def set_samples(value_of: Callable[[int, int], str]) -> Change:
    """Replace the samples, given the rank and the place in its batch."""
    return lambda rank, line, values: line.update(
        samples=[value_of(rank, place) for place in range(len(line["samples"]))]
    )


def draw_tensor(text: str, count: int) -> Tensor:
    seed = int.from_bytes(text.encode(), "big") % (2**63 - 25)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def make_line(rank: int, ranks: int, moment: Moment) -> dict[str, Any]:
    """Make the line of a rank at a moment, without its checksums."""
    line: dict[str, Any] = {"event": moment.name, "step": moment.step}
    if moment.name == "start":
        shapes = {name: str(shape) for name, shape in SHAPES.items()}
        settings = [{"momentum": "0.9", "weight_decay": "0.0"}]
        line |= {"copy": rank, "copies": ranks, "stride": 1, "shapes": shapes, "settings": settings}
        return line | {"sliced": [], "dropout": [], "batch_norm": []}
    if moment.name == "evaluation":
        return line | {"figures": {"val_loss": 0.5, "val_accuracy": 0.75}}
    # Of each step of 8, rank r of n takes every n-th sample.
    samples = [
        f"x{number}-y{number % 4}" for number in range((moment.step - 1) * 8 + rank, moment.step * 8, ranks)
    ]
    line |= {"samples": samples, "counts": [len(samples)], "losses": [1.0 / moment.step]}
    return line | {"lr": [0.1], "grad_norm": 2.0, "skipped": False}


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
    changes: Mapping[str, Change] | None = None,
    *,
    ranks: int = 2,
    steps: int = 4,
    facts: Any = None,
    **options: Any,
) -> Trace:
    """Make the trace of two epochs of two steps each, with an evaluation at its end.

    Args:
        changes: by moment, such as `step 2`.
    """
    moments = [Moment(0, 0), *(Moment(step, 1) for step in range(1, steps + 1)), Moment(steps, 2)]
    everyone = []
    for rank in range(ranks):
        snapshots = {}
        for moment in moments:
            line, values = make_line(rank, ranks, moment), make_tensors(rank, moment)
            if (change := (changes or {}).get(f"{moment.name} {moment.step}")) is not None:
                change(rank, line, values)
            sums: dict[str, dict[str, str]] = {}
            for key, value in values.items():
                kind, _, rest = key.partition("/")
                sums.setdefault(kind, {})[rest] = checksum(value)
            snapshots[moment] = Snapshot({**line, "checksums": sums}, lambda values=values: values)  # type: ignore[misc]
        everyone.append(snapshots)
    return Trace(name, {**FACTS, **(facts or {})}, {**OPTIONS, "backend": name, **options}, everyone)
