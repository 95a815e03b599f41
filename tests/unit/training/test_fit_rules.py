"""What is refused once the device, the optimizer and the metrics of a training are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from trainings import fit, options_of, signs

from hvd_trainer import OptionError
from hvd_trainer.training.fit_rules import data_mistakes, fit_mistakes


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(signs(4).inputs, signs(4).targets, strict=True)


class Batches:
    def batches(self, shard: Any, epoch: int | None) -> Iterator[Any]:
        yield signs(4).inputs, signs(4).targets


def test_all_mistakes_in_the_data_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was told after the other, some by loaders; the log folder was there by then."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which --reproducible sets
    folder = tmp_path / "log"
    options = options_of(
        reproducible=2, prefetch=2, workers=0, warmup_epochs=0.5, lr_decay="cosine", log_dir=str(folder)
    )
    with pytest.raises(OptionError) as caught:
        fit(options, nn.Linear(6, 2), Stream(), Batches())
    for words in (
        "--reproducible needs a data set with a length and an order, and Stream is a stream",
        "--prefetch 2 is for loader processes, and the data set (Stream) is loaded without: add --workers 2",
        "--reproducible needs a data set with a length and an order, and Batches gives batches",
        # A source of batches knows nothing of --workers.
        "the data set (Batches) is loaded without: leave it out",
        "--warmup-epochs needs a data set that knows its length, and Stream does not",
        "--lr-decay needs a data set that knows its length, and Stream does not",
    ):
        assert words in str(caught.value)
    assert not folder.exists()


def test_stages_need_the_same_samples_on_all_ranks() -> None:
    loader: Any = SimpleNamespace(name="Stream", shards_by_rank=True, num_samples=None)
    (mistake,) = data_mistakes(options_of(stages=2), loader, None)
    assert mistake.startswith("--stages gives several ranks the same samples, and Stream gives each rank others")


def test_only_lbfgs_needs_a_closure() -> None:
    backend: Any = SimpleNamespace(device=torch.device("cpu"))
    kinds = [kind for kind in torch.optim.Optimizer.__subclasses__() if kind.__module__.startswith("torch.optim.")]
    assert len(kinds) > 10
    for kind in kinds:
        optimizer: Any = kind([nn.Parameter(torch.zeros(2, 2))])  # type: ignore[call-arg]
        mistakes = list(fit_mistakes(options_of(), backend, optimizer, nn.functional.mse_loss, []))
        assert bool(mistakes) == (kind is torch.optim.LBFGS), kind
