"""Accumulate losses and metrics as sums and counts; read the device and reduce over ranks only on demand.

A metric is a function of outputs and targets that gives one value per sample (N,) or their mean, or an object of
the torchmetrics kind (see `metric_objects.py`). Each sample counts once, whatever the number of ranks and however
unequal their shares. Where batches have weights, those are what means count by.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvd_trainer.backends import Backend
from hvd_trainer.errors import CheckpointError, OptionError, first_line
from hvd_trainer.observe.metric_objects import (
    MetricObject,
    compute_over_ranks,
    export_state,
    import_state,
    merge_state,
    reset,
)
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.files import UNREADABLE

MetricFunction = Callable[[Any, Any], Tensor]
Metric = MetricFunction | MetricObject
TAKEN = ("loss", "samples")
MAX_UNREAD = 1000
"""Batches whose figures stay on the device at most: a few hundred bytes of its memory each."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return whether the largest of the outputs (N, C) is the target's (N,) class: bool, shape (N,)."""
    return outputs.argmax(dim=1) == targets


class _Row(NamedTuple):
    """What was added of one batch, the loss first."""

    samples: int
    weight: Tensor | None
    sums: list[Tensor]
    """those of the metrics, and the mean of the loss"""
    are_means: list[bool]
    """whether each is a mean, which counts by the weight, and no sum over samples"""


class Meter:
    """Accumulate the loss and the metrics of one pass over data.

    Adding a batch launches what the metrics themselves need, and waits for nothing: what they give stays on the
    device until a figure is asked for. Only `recent` and `compute` are collectives.

    Raises:
        OptionError: a metric has a name that is taken, or gives something else than promised.
    """

    def __init__(self, metrics: Mapping[str, Metric], backend: Backend) -> None:
        for name in set(TAKEN) & set(metrics):
            raise OptionError(f"A metric cannot be called {name!r}, which the trainer reports itself: rename it.")
        self._functions = {n: m for n, m in metrics.items() if not isinstance(m, MetricObject)}
        self._objects = {n: m for n, m in metrics.items() if isinstance(m, MetricObject)}
        self._backend = backend
        self._sums = [0.0] * (1 + len(self._functions))
        self._counts = [0.0] * len(self._sums)
        self._before = [0.0] * (2 * len(self._sums) + 1)
        self._unread: list[_Row] = []
        self.samples = 0
        for metric in self._objects.values():
            reset(metric, backend.device)

    def add(self, loss: Tensor, outputs: Any, targets: Any, samples: int, weight: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            loss: its mean loss (a scalar on the device).
            weight: by which the loss and metrics that are means count (a scalar on the device); None: its samples.
        """
        row = _Row(samples, weight, [loss.detach()], [True])
        if self._functions or self._objects:
            with torch.no_grad():
                for name, metric in self._functions.items():
                    value = _as_tensor(name, metric(outputs, targets))
                    row.are_means.append(value.dim() == 0)
                    # A metric may have computed on the host.
                    row.sums.append(accelerator.copy_to(_sum(name, value, samples, weight), loss.device))
                for gatherer in self._objects.values():
                    gatherer.update(outputs, targets)
        self._unread.append(row)
        self.samples += samples
        if len(self._unread) >= MAX_UNREAD:
            self._read()

    def _read(self) -> None:
        """Read all pending batches from the device with one wait, and add them up in their order."""
        if not self._unread:
            return
        rows, self._unread = self._unread, []
        samples = [row.samples for row in rows]
        weights = [row.weight for row in rows if row.weight is not None]
        losses, *others = zip(*(row.sums for row in rows), strict=True)
        columns = [torch._foreach_mul(list(losses), weights or samples), *others, *([weights] if weights else [])]
        sums = self._backend.read(torch.stack([torch.stack(list(column)).double() for column in columns]))
        counts = self._check_weights(sums.pop()) if weights else samples
        for place, column in enumerate(sums):
            for row, value, count in zip(rows, column, counts, strict=True):  # `sum` would round in another way
                self._sums[place] += value
                self._counts[place] += count if row.are_means[place] else row.samples

    def _check_weights(self, weights: list[float]) -> list[float]:
        for weight in weights:
            if not 0 <= weight < math.inf:
                raise OptionError(
                    f"weight= gave {weight:g} for a batch of rank {self._backend.world.rank}, and a weight is a "
                    f"finite number from 0 on. Correct the function; to leave a batch out, let it return 0"
                )
        return weights

    def local_loss(self) -> float:
        """Return this rank's mean loss so far: waits for the device, so ask seldom."""
        self._read()
        return self._sums[0] / (self._counts[0] or 1)

    def recent(self) -> dict[str, float]:
        """Return the means over what was added since the last call; loss and functions only. A collective."""
        now = self._totals()
        figures = self._means([total - before for total, before in zip(now, self._before, strict=True)])
        self._before = now
        return figures

    def compute(self) -> dict[str, float]:
        """Return means over all samples of all ranks: `loss`, each metric by name, and `samples`. A collective."""
        return self._means(self._totals()) | compute_over_ranks(self._objects, self._backend)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has accumulated so far, for a checkpoint."""
        self._read()
        return {
            "names": list(self._functions),
            "sums": torch.tensor(self._sums, dtype=torch.float64),
            "counts": torch.tensor(self._counts, dtype=torch.float64),
            "before": torch.tensor(self._before, dtype=torch.float64),
            "samples": self.samples,
            "objects": {name: export_state(metric) for name, metric in self._objects.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Resume from a `state_dict`; return the names of metrics that cannot, and start from zero.

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
        saved = {name: place for place, name in enumerate(["loss", *state["names"]])}
        for place, name in enumerate(names):
            if name in saved:
                self._sums[place] = float(state["sums"][saved[name]])
                self._counts[place] = float(state["counts"][saved[name]])
                self._before[place] = float(state["before"][saved[name]])
                self._before[len(names) + place] = float(state["before"][len(saved) + saved[name]])
        self._before[-1] = float(state["before"][-1])
        self.samples = state["samples"]
        reset = [name for name in names if name not in saved]
        for name, metric in self._objects.items():
            if not import_state(metric, state["objects"].get(name), self._backend.device):
                reset.append(name)
        return reset

    def _totals(self) -> list[float]:
        self._read()
        return self._backend.collectives.all_reduce_numbers([*self._sums, *self._counts, self.samples])

    def _means(self, totals: Sequence[float]) -> dict[str, float]:
        names = ("loss", *self._functions)
        sums, counts = totals[: len(names)], totals[len(names) : -1]
        means = {n: s / c if c else math.nan for n, s, c in zip(names, sums, counts, strict=True)}
        return {**means, "samples": int(totals[-1])}


def check_state(state: Mapping[str, Any]) -> None:
    """Check that a value from a checkpoint is a `Meter.state_dict`.

    Raises:
        TypeError, ValueError, LookupError, AttributeError: it is none.
    """
    count = len(list(state["names"]))
    lengths = [tuple(state[name].shape) for name in ("sums", "counts", "before")]
    if lengths != [(1 + count,), (1 + count,), (3 + 2 * count,)] or operator.index(state["samples"]) < 0:
        raise ValueError("the metrics are not as many as their sums")
    state["objects"].items()


def combine_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the `Meter.state_dict` of several ranks into that of one rank; the others start from zero."""
    first = states[0]
    return {
        "names": first["names"],
        **{name: torch.stack([state[name] for state in states]).sum(0) for name in ("sums", "counts")},
        "before": first["before"],  # of all ranks, the same on each
        "samples": sum(state["samples"] for state in states),
        "objects": {name: merge_state([state["objects"][name] for state in states]) for name in first["objects"]},
    }


def _as_tensor(name: str, value: Any) -> Tensor:
    """Return what a metric has given; arrays and numbers, such as scikit-learn's, as a tensor on the host."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int | float | np.ndarray | np.generic):
        return torch.as_tensor(value, dtype=torch.float64)
    raise OptionError(
        f"The metric {name!r} gave a {type(value).__name__}: give a value per sample, or their mean."
    )


def _sum(name: str, value: Tensor, samples: int, weight: Tensor | None) -> Tensor:
    """Return the sum over a batch of a metric that gave one value per sample, or their mean."""
    if value.dim() == 0:
        # The mean over a batch without weight may be 0/0.
        return value * samples if weight is None else (value * weight).where(weight != 0, 0.0)
    if value.numel() != samples:
        raise OptionError(
            f"The metric {name!r} gave {tuple(value.shape)} values for {samples} samples: give one per sample, or "
            f"their mean."
        )
    return value.sum()
