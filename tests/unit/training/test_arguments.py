"""Arguments of `fit` and `evaluate` of another kind than they take are refused, all at once, with what to type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from trainings import options_of, signs

from hvd_trainer import Callback, OptionError, Trainer, hvd

ARRAYS = torch.zeros(4, 6), torch.zeros(4)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"model": lambda inputs: inputs}, "model= takes an nn.Module, and not a function"),
        ({"model": nn.LazyLinear(2)}, "model= has weight, whose shape its first call sets: call the model"),
        ({"optimizer": iter([])}, "optimizer= takes one of torch.optim, and not a list_iterator"),
        ({"optimizer": Optimizer([torch.zeros(1)], {"lr": None})}, "optimizer= has no learning rate .* lr="),
        ({"loss": nn.CrossEntropyLoss}, r"loss= is the class CrossEntropyLoss: make one, CrossEntropyLoss\(\)"),
        ({"loss": "mse"}, "loss= takes a function of outputs and targets, and not a str"),
        ({"train_data": ARRAYS}, r"train_data= is a tuple of 2 arrays: say TensorData\(inputs, targets\)"),
        ({"val_data": [np.zeros(3), np.zeros(3)]}, "val_data= is a list of 2 arrays: say TensorData"),
        ({"train_data": ARRAYS[0]}, "train_data= is a Tensor without targets: say TensorData"),
        ({"metrics": [cross_entropy]}, 'metrics= takes functions by their names, {"accuracy": accuracy}, and not'),
        ({"callbacks": nn.Identity()}, "callbacks= takes a list, and not an Identity"),
        ({"callbacks": [Callback]}, r"callbacks= has the class Callback: make one, Callback\(\)"),
        ({"loss": "mse", "metrics": [1]}, "(?s)loss= takes .*metrics= takes "),
        ({"loss": lambda outputs, targets: 1.5}, "The loss function must give one number, .* no tensor, but 1.5"),
    ],
)
def test_other_kinds_are_refused(changed: dict[str, Any], error: str) -> None:
    model = nn.Linear(6, 2)
    arguments = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": cross_entropy,
        "train_data": signs(8),
    } | changed
    with Trainer(options_of(epochs=1)) as trainer, pytest.raises(OptionError, match=error):
        trainer.fit(**arguments)


def test_what_averages_gradients_itself_is_refused() -> None:
    """Gradients were averaged twice, or in part, without a word."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    hvd.init()
    try:
        wrapped = DistributedDataParallel(nn.Linear(6, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        error = "(?s)model= is wrapped in DistributedDataParallel.*optimizer= is an hvd.DistributedOptimizer"
        with pytest.raises(OptionError, match=error):
            Trainer(options_of()).fit(wrapped, optimizer, cross_entropy, signs(8))
    finally:
        hvd.shutdown()
        torch.distributed.destroy_process_group()


def test_evaluate_refuses_as_fit() -> None:
    with Trainer(options_of()) as trainer, pytest.raises(OptionError, match="data= is a tuple of 2 arrays"):
        trainer.evaluate(nn.Linear(6, 2), cross_entropy, ARRAYS)


def test_a_list_of_samples_is_data() -> None:
    """Also of tensors, with a collate."""
    model = nn.Linear(6, 2)

    def collate(samples: list[Any]) -> Any:
        return torch.stack(samples), torch.zeros(len(samples), dtype=torch.int64)

    with Trainer(options_of(epochs=1, workers=0)) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = trainer.fit(model, optimizer, cross_entropy, list(signs(8).inputs), collate=collate)
    assert history[-1]["samples"] == 8
