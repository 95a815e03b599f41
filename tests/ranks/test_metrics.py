"""Metrics over ranks of unequal shares equal those of one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from launchers import in_ranks
from torch import Tensor

from hvd_trainer import backends
from hvd_trainer.backends import Backend, EngineOptions
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.metric_objects import compute_over_ranks
from hvd_trainer.observe.metrics import Meter, accuracy

torchmetrics = pytest.importorskip("torchmetrics")

SPLITS = {1: [41], 3: [5, 0, 36]}
"""Samples per rank: unequal, and one rank without any."""


class LargestSeen:
    """A user's own metric, which has no more of torchmetrics than the protocol."""

    def __init__(self) -> None:
        self.value = -math.inf

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.value = max(self.value, float(outputs.max()))

    def compute(self) -> float:
        return self.value

    def reset(self) -> None:
        self.value = -math.inf

    def merge_state(self, other: LargestSeen) -> None:
        self.value = max(self.value, other.value)


class AllSeen:
    """A user's own metric with much state, to which others' is added in place."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs)

    def compute(self) -> float:
        return float(sum(len(part) for part in self.outputs))

    def reset(self) -> None:
        self.outputs = []

    def merge_state(self, other: AllSeen) -> None:
        self.outputs += other.outputs


class Correlation(torchmetrics.PearsonCorrCoef):  # type: ignore[misc,name-defined]
    """A metric with means and variances, which are stacked over ranks and not added."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs[:, 0], targets.float())


def metrics() -> dict[str, Any]:
    classes: dict[str, Any] = {"task": "multiclass", "num_classes": 4}
    return {
        "accuracy": accuracy,
        "mean": lambda outputs, targets: outputs.mean(),
        "macro_f1": torchmetrics.F1Score(average="macro", **classes),
        "auroc": torchmetrics.AUROC(**classes),
        "correlation": Correlation(),
        "largest": LargestSeen(),
    }


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(41, 4, generator=generator), torch.randint(4, (41,), generator=generator)


def measure(backend_name: str) -> list[dict[str, float]]:
    """Measure twice with the same objects, the second time all samples twice; nothing of the first may stay."""
    with backends.create(EngineOptions(backend=backend_name)) as backend:  # type: ignore[arg-type]
        rank, split = backend.world.rank, SPLITS[backend.world.size]
        outputs, targets = (whole.split(split)[rank] for whole in data())
        gathered = metrics()
        found = []
        for passes in (1, 2):
            meter = Meter(gathered, backend)
            for _ in range(passes):
                for some, wanted in zip(outputs.split(8), targets.split(8), strict=True):
                    if len(some):
                        loss = torch.nn.functional.cross_entropy(some, wanted)
                        meter.add(loss, some, wanted, len(some))
            if passes == 2:
                found += [meter.recent(), meter.recent()]
            found.append(meter.compute())
        return found


@pytest.fixture(scope="module")
def alone() -> list[dict[str, float]]:
    return measure("single")


def test_metrics_of_ranks_equal_one_process(alone: list[dict[str, float]]) -> None:
    """One engine suffices: a meter uses it for sums and objects only, which test_contract.py checks on both."""
    for rank in in_ranks(3, measure, "ddp"):
        for here, there in zip(rank, alone, strict=True):
            assert here == pytest.approx(there, rel=1e-5, nan_ok=True)


def measure_again(backend_name: str) -> list[float]:
    """Return a metric over all ranks, computed twice, and what it is on this rank afterwards."""
    with backends.create(EngineOptions(backend=backend_name)) as backend:  # type: ignore[arg-type]
        seen = AllSeen()
        seen.update(torch.zeros(20_000), torch.zeros(()))
        values = [compute_over_ranks({"seen": seen}, backend)["seen"] for _ in range(2)]
        return [*values, seen.compute()]


def test_computing_over_ranks_leaves_a_metric_as_it_is() -> None:
    """Of so much state a rank gets its own back, and no copy of it."""
    assert in_ranks(2, measure_again, "ddp") == [[40_000, 40_000, 20_000]] * 2


def test_metrics_equal_their_definitions(alone: list[dict[str, float]]) -> None:
    outputs, targets = data()
    once, since_start, since_then, twice = alone
    assert once["samples"] == 41
    assert twice["samples"] == since_start["samples"] == 82
    assert since_then["samples"] == 0
    assert math.isnan(since_then["loss"])
    assert once["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)), rel=1e-5)
    assert once["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).double().mean()))
    assert once["largest"] == float(outputs.max())
    assert once["auroc"] == pytest.approx(float(metrics()["auroc"](outputs, targets)))
    assert twice["loss"] == pytest.approx(once["loss"])


def measure_once(named: Mapping[str, Any], backend: Backend) -> dict[str, float]:
    meter = Meter(named, backend)
    meter.add(torch.tensor(0.0), *data(), 41)
    return meter.compute()


def test_metric_collection_is_accepted_as_mapping(lone_backend: Backend) -> None:
    collection = torchmetrics.MetricCollection([torchmetrics.Accuracy(task="multiclass", num_classes=4)])
    assert set(measure_once(dict(collection), lone_backend)) == {"loss", "samples", "MulticlassAccuracy"}


def test_metrics_give_numbers_and_arrays_as_well(lone_backend: Backend) -> None:
    """Functions of scikit-learn return such, which ended in an AttributeError."""
    numbers = {
        "float": lambda outputs, targets: 0.1,
        "numpy": lambda outputs, targets: np.float32(0.5),
        "array": lambda outputs, targets: accuracy(outputs, targets).numpy(),
    }
    figures = measure_once({"accuracy": accuracy, **numbers}, lone_backend)
    assert [figures[name] for name in numbers] == pytest.approx([0.1, 0.5, figures["accuracy"]], rel=1e-15)


@pytest.mark.parametrize(
    ("name", "metric", "words"),
    [
        ("loss", accuracy, "cannot be called 'loss'"),
        ("logits", lambda outputs, targets: outputs, "gave (41, 4) values for 41 samples"),
        ("several", lambda outputs, targets: {"f1": 0.5}, "The metric 'several' gave a dict: give a value per"),
        ("table", torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4), "a tensor of shape (4, 4)"),
        (
            "own",
            type("Own", (), {n: lambda self, *_: None for n in ("update", "compute", "reset")})(),
            "merge_state",
        ),
    ],
)
def test_unrecordable_metric_is_refused(name: str, metric: Any, words: str, lone_backend: Backend) -> None:
    with pytest.raises(OptionError) as caught:
        measure_once({name: metric}, lone_backend)
    assert words in str(caught.value)
