"""What is refused once the device, the optimizer and the metrics of a training are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trainings import fit, options_of, signs

from hvd_trainer import OptionError
from hvd_trainer.training.fit_rules import fit_mistakes


@pytest.mark.parametrize(
    ("device", "uses_nccl", "refused"), [("cpu", False, False), ("cuda:1", True, False), ("cuda:1", False, True)]
)
def test_stages_on_gpus_need_nccl(device: str, uses_nccl: bool, refused: bool) -> None:
    """Gloo would take a GPU's address for one of the host's memory, and the job would crash."""
    backend: Any = SimpleNamespace(device=torch.device(device), uses_nccl=uses_nccl)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    mistakes = list(fit_mistakes(options_of(stages=2), backend, optimizer, torch.nn.functional.mse_loss, []))
    assert bool(mistakes) == refused
    if refused:
        assert "--stages 2 sends tensors of cuda:1 to other ranks" in mistakes[0]
        assert "Leave out --transport gloo, so that nccl sends them" in mistakes[0]


def test_all_mistakes_of_a_training_are_told_at_once() -> None:
    model = nn.Linear(6, 2)
    options = options_of(device="cpu", tf32=True, until="val_loss<=0.1", keep_best="max:val_f1", log_dir="unused")
    with pytest.raises(OptionError) as caught:
        fit(options, model, signs(4), optimizer=torch.optim.LBFGS(model.parameters()))
    for words in (
        "LBFGS computes the loss several times in a step, by a closure, and a Trainer once: take another",
        "--tf32 is for GPUs",
        "--until 'val_loss<=0.1': this job has no val_loss, but train_loss",
        "--keep-best max:val_f1: this job has no val_f1, but train_loss",
    ):
        assert words in str(caught.value)


OPTIMIZERS = sorted(torch.optim.Optimizer.__subclasses__(), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind.__module__.startswith("torch.optim.")])
def test_only_lbfgs_needs_a_closure(kind: Any) -> None:
    shape = (2, 2) if kind.__name__ == "Muon" else (2,)
    optimizer = kind([nn.Parameter(torch.zeros(shape))])
    backend: Any = SimpleNamespace(device=torch.device("cpu"))
    mistakes = list(fit_mistakes(options_of(), backend, optimizer, nn.functional.mse_loss, []))
    assert bool(mistakes) == (kind is torch.optim.LBFGS)
