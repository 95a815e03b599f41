"""Metrics are sums and counts on the device, brought together over ranks once, at the end of a pass.

A metric is a function of outputs and targets that gives one value per sample (N,) or their mean, or an object of
the torchmetrics kind (see `merge.py`). Each sample counts once, whatever the number of ranks and however unequal
their shares.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.backends import Backend
from hvd_trainer.checkpoint import UNREADABLE
from hvd_trainer.errors import CheckpointError, OptionError, first_line
from hvd_trainer.merge import MetricObject, combined, kept, merged_values, refill, reset

MetricFunction = Callable[[Any, Any], Tensor]
Metric = MetricFunction | MetricObject
TAKEN = ("loss", "samples")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest of the outputs (N, C) is the target's (N,) class: bool, shape (N,)."""
    return outputs.argmax(dim=1) == targets


class Meter:
    """Gathers the loss and the metrics of one pass over data.

    Adding launches a few small operations and waits for nothing; only `recent` and `compute` are collectives.

    Raises:
        OptionError: a metric has a name that is taken, or gives something else than promised.
    """

    def __init__(self, metrics: Mapping[str, Metric], backend: Backend) -> None:
        for name in set(TAKEN) & set(metrics):
            raise OptionError(f"A metric cannot be called {name!r}, which the trainer reports itself: rename it.")
        self._functions = {n: m for n, m in metrics.items() if not isinstance(m, MetricObject)}
        self._objects = {n: m for n, m in metrics.items() if isinstance(m, MetricObject)}
        self._backend = backend
        self._sums = torch.zeros(1 + len(self._functions), dtype=torch.float64, device=backend.device)
        self._before = self._sums.new_zeros(2 + len(self._functions))
        self.samples = 0
        for metric in self._objects.values():
            reset(metric, backend.device)

    @torch.no_grad()
    def add(self, loss: Tensor, outputs: Any, targets: Any, samples: int) -> None:
        """Adds one batch: `loss` is its mean loss (a scalar on the device)."""
        self._sums[0] += loss.detach() * samples
        for position, (name, metric) in enumerate(self._functions.items(), start=1):
            self._sums[position] += _summed(name, metric(outputs, targets), samples)
        for gatherer in self._objects.values():
            gatherer.update(outputs, targets)
        self.samples += samples

    def local_loss(self) -> float:
        """This rank's mean loss so far: waits for the device, so ask seldom."""
        return float(self._sums[0]) / max(1, self.samples)

    def recent(self) -> dict[str, float]:
        """Means over what was added since the last call; loss and functions only. A collective."""
        now = self._totals()
        figures = self._means(now - self._before)
        self._before = now
        return figures

    def compute(self) -> dict[str, float]:
        """Means over all samples of all ranks: `loss`, each metric by name, and `samples`. A collective."""
        return self._means(self._totals()) | merged_values(self._objects, self._backend)

    def state_dict(self) -> dict[str, Any]:
        """What this rank has gathered so far, as a checkpoint holds it."""
        return {
            "names": list(self._functions),
            "sums": self._sums.cpu(),
            "before": self._before.cpu(),
            "samples": self.samples,
            "objects": {name: kept(metric) for name, metric in self._objects.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Goes on where `state_dict` was taken; returns the metrics that cannot, and start anew.

        Sums are exact in float64, so that the pass ends with the figures of an undisturbed one.

        Raises:
            CheckpointError: it is none.
        """
        try:
            return self._load(state)
        except UNREADABLE as error:
            raise CheckpointError(
                f"The checkpoint's metrics are none ({type(error).__name__}: {first_line(error)}). Begin another "
                f"run: --resume none, or another --log-dir"
            ) from error

    def _load(self, state: Mapping[str, Any]) -> list[str]:
        names = ["loss", *self._functions]
        there = {name: place for place, name in enumerate(["loss", *state["names"]])}
        for place, name in enumerate(names):
            if name in there:
                self._sums[place] = state["sums"][there[name]]
                self._before[place] = state["before"][there[name]]
        self._before[-1] = state["before"][-1]
        self.samples = state["samples"]
        anew = [name for name in names if name not in there]
        for name, metric in self._objects.items():
            if not refill(metric, state["objects"].get(name), self._backend.device):
                anew.append(name)
        return anew

    def _totals(self) -> Tensor:
        return self._backend.all_reduce(torch.cat([self._sums, self._sums.new_tensor([self.samples])]))

    def _means(self, totals: Tensor) -> dict[str, float]:
        *sums, samples = totals.tolist()
        names = ("loss", *self._functions)
        means = {n: s / samples if samples else math.nan for n, s in zip(names, sums, strict=True)}
        return {**means, "samples": int(samples)}


def check_state(state: Mapping[str, Any]) -> None:
    """Looks at what should be a `Meter.state_dict` and comes from elsewhere.

    Raises:
        TypeError, ValueError, LookupError, AttributeError: it is none.
    """
    count = len(list(state["names"]))
    lengths = [tuple(state[name].shape) for name in ("sums", "before")]
    if lengths != [(1 + count,), (2 + count,)] or operator.index(state["samples"]) < 0:
        raise ValueError("the metrics are not as many as their sums")
    state["objects"].items()


def combined_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `Meter.state_dict` of one rank that has gathered what several had; the others start empty."""
    first = states[0]
    return {
        "names": first["names"],
        "sums": torch.stack([state["sums"] for state in states]).sum(0),
        "before": first["before"],  # of all ranks, the same on each
        "samples": sum(state["samples"] for state in states),
        "objects": {name: combined([state["objects"][name] for state in states]) for name in first["objects"]},
    }


def _summed(name: str, value: Tensor, samples: int) -> Tensor:
    """The sum over a batch of a metric that gave one value per sample, or their mean."""
    if value.dim() == 0:
        return value * samples
    if value.numel() != samples:
        raise OptionError(
            f"The metric {name!r} gave {tuple(value.shape)} values for {samples} samples: give one per sample, or "
            f"their mean."
        )
    return value.sum()
