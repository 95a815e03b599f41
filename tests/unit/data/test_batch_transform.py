"""`batch_transform`: the inputs of a batch converted on the training device, whatever the data set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_checks import Stream
from torch import Tensor, nn
from trainings import fit, options_of

from hvd_trainer import backends
from hvd_trainer.backends import EngineOptions
from hvd_trainer.data import LoaderPlan, TensorData, make_loader

PIXELS, TARGETS = torch.arange(12, dtype=torch.uint8).view(6, 2), torch.arange(6)
LISTED = list(zip(PIXELS, TARGETS, strict=True))


def halve(inputs: Tensor) -> Tensor:
    return inputs.float() / 2


@pytest.mark.parametrize(
    ("data", "workers"),
    [(TensorData(PIXELS, TARGETS), None), (LISTED, 0), (LISTED, 1), (Stream(6), 0)],
    ids=["memory", "data set", "worker", "stream"],
)
def test_inputs_of_each_batch_are_transformed(data: Any, workers: int | None) -> None:
    with backends.create(EngineOptions(backend="single")) as backend:

        def load(**options: Any) -> list[Any]:
            loader = make_loader(data, backend, LoaderPlan(4, shuffle=False, num_workers=workers, **options))
            return [*loader.epoch(0), *loader.epoch(0, 4), *loader.evaluation()]

        plain, transformed = load(), load(batch_transform=halve)
    assert [len(inputs) for inputs, _ in transformed] == [4, 2, 2, 4, 2]
    for (inputs, targets), (its, same) in zip(plain, transformed, strict=True):
        torch.testing.assert_close(its, inputs.float() / 2, rtol=0, atol=0)
        assert str(same) == str(targets)


def test_trainer_gives_the_model_transformed_inputs() -> None:
    """A linear layer refuses bytes, in training and in evaluation."""
    options = options_of(epochs=1, batch_size=4)
    history = fit(options, nn.Linear(2, 6), LISTED, LISTED, batch_transform=halve)
    assert history.end["val_loss"] > 0
