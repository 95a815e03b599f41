"""`fit(..., weight=...)`: a loss averaged over words trains the same model however the global batch is split."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import case
from launchers import RankError, in_ranks, requires
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from trainings import WholeWeights, fit, options_of

from hvd_trainer import OptionError, TensorData, detect
from hvd_trainer.data import DataShard
from hvd_trainer.data.shard import epoch_order

pytestmark = pytest.mark.warm

NUM, GLOBAL_BATCH, EPOCHS, WORDS = 60, 16, 2, 7  # 4 steps per epoch, the last one of 12 texts
Texts = tuple[Tensor, Tensor]


def texts(num: int) -> Texts:
    """Return texts and their next words (num, 5), of which -1 does not count; in half of the texts none does."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(WORDS, (num, 5), generator=generator)
    lengths = torch.randint(1, 6, (num, 1), generator=generator) * torch.randint(2, (num, 1), generator=generator)
    return inputs, inputs.roll(-1, 1).masked_fill(torch.arange(5) >= lengths, -1)


class Stream(IterableDataset[Texts]):
    """The texts one by one, in the order in which a data set would be trained on."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Texts]:
        inputs, targets = texts(NUM)
        for number in epoch_order(NUM, seed=0, epoch=self.epoch).tolist():
            yield inputs[number], targets[number]


class Batches:
    """The same texts in batches."""

    def batches(self, shard: DataShard, epoch: int | None) -> Iterator[Texts]:
        mine = epoch_order(NUM, seed=0, epoch=epoch or 0)[shard.number :: shard.size]
        yield from zip(*(its[mine].split(GLOBAL_BATCH // shard.size) for its in texts(NUM)), strict=True)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, WORDS))


def sgd(its: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(its.parameters(), lr=0.5, momentum=0.5)


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
    return (losses * (targets >= 0).flatten()).sum()


def words_in(batch: Texts) -> Tensor:
    return (batch[1] >= 0).sum()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over words as it is often written: 0/0 without a word, and so are its gradients."""
    return sum_of_losses(outputs, targets) / (targets >= 0).sum()


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a mean over words; NaN without one."""
    return (outputs.argmax(-1) == targets)[targets >= 0].double().mean()


def is_short(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a value per text."""
    return (targets >= 0).sum(1) < 3


def train(backend: str, data: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Any]:
    """Train with weights in tenths of words, which floats have not exactly; return figures and parameters."""
    its, end = model().to(dtype), WholeWeights()
    usual = {"epochs": EPOCHS, "global_batch_size": GLOBAL_BATCH, "workers": 0, "balance": "time"}
    history = fit(
        options_of(backend, **usual | options),
        its,
        TensorData(*texts(NUM)) if data is None else data(),
        TensorData(*texts(21)),
        optimizer=sgd(its),
        loss=loss,
        metrics={"hits": hits, "short": is_short},
        weight=lambda batch: 0.1 * words_in(batch).double(),
        callbacks=[end],
    )
    names = ("train_loss", "train_hits", "train_short", "val_loss", "val_hits", "val_short")
    return {"figures": [history.end[name] for name in names], "weights": end.weights, "record": history.end}


@cache
def by_hand() -> dict[str, Any]:
    """Train on whole global batches, without the package."""
    its = model().double()
    optimizer, (inputs, targets) = sgd(its), texts(NUM)
    for epoch in range(EPOCHS):
        seen: list[tuple[Texts, Tensor]] = []
        for batch in epoch_order(NUM, seed=0, epoch=epoch).split(GLOBAL_BATCH):
            outputs = its(inputs[batch])
            seen.append(((outputs.detach(), targets[batch]), words_in((inputs, targets[batch]))))
            optimizer.zero_grad()
            (sum_of_losses(outputs, targets[batch]) / seen[-1][1]).backward()
            optimizer.step()
    inputs, targets = texts(21)
    splits = [seen, [((its(inputs).detach(), targets), words_in((inputs, targets)))]]
    figures = []
    for split in splits:
        words = sum(int(count) for _, count in split)
        figures += [sum(float(sum_of_losses(*both)) for both, _ in split) / words]
        figures += [sum(float(hits(*both) * count) for both, count in split) / words]
        figures += [float(torch.cat([is_short(*both) for both, _ in split]).double().mean())]
    return {"figures": figures, "weights": its.state_dict()}


WAYS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "whole": {},
        "accumulated": {"accumulate": 4},
        "accumulated in fp32": {"accumulate": 4, "dtype": torch.float32},
        "micro-batches": {"chunks": 6},
        "two devices": {"chunks": 6, "devices_per_rank": 2},
        "reproducible": {"reproducible": 4},
        "stream": {"data": Stream},
    },
    2: {
        "plain": {},
        "accumulated": {"accumulate": 2, "max_norm": 100.0},
        "in fp32": {"dtype": torch.float32},
        "in stages": {"stages": 2, "chunks": 6},
        "sharded optimizer": {"shard": "optimizer"},
        "reproducible": {"reproducible": 4},
        "batches": {"data": Batches},
        "non-finite steps skipped": {"non_finite": "skip"},
        "fp16": {"precision": "fp16", "dtype": torch.float32, "compression": "fp16"},
    },
    4: {"plain": {}, "in stages": {"stages": 2, "chunks": 6}, "reproducible": {"reproducible": 4}},
}
ONE_ENGINE: dict[str, dict[str, dict[str, Any]]] = {"ddp": {"sharded": {"shard": "full", "accumulate": 2}}}
CASES = [
    *(case("single", 1, name) for name in WAYS[1]),
    *(case(engine, size, name) for size in (2, 4) for engine in ("ddp", "horovod") for name in WAYS[size]),
    *(case(engine, 2, name) for engine, ways in ONE_ENGINE.items() for name in ways),
]


def ways_of(backend: str, size: int) -> dict[str, dict[str, Any]]:
    return WAYS[size] | (ONE_ENGINE.get(backend, {}) if size == 2 else {})


def train_all(backend: str, size: int) -> dict[str, Any]:
    return {name: train(backend, **how) for name, how in ways_of(backend, size).items()}


@cache
def trained(backend: str, size: int) -> list[dict[str, Any]]:
    return in_ranks(size, train_all, backend, size)


@pytest.mark.parametrize(("backend", "size", "name"), CASES)
def test_any_split_trains_the_model_of_whole_batches(backend: str, size: int, name: str) -> None:
    """They differ by the order of sums only. There are ranks, passes and micro-batches without a word."""
    tolerance = 1e-2 if name == "fp16" else 1e-5 if "fp32" in name else 1e-12
    rank, *others = [its[name] for its in trained(backend, size)]
    for other in others:
        assert other["figures"] == rank["figures"]
    assert rank["figures"] == pytest.approx(by_hand()["figures"], rel=tolerance)
    for key, tensor in by_hand()["weights"].items():
        assert float((rank["weights"][key] - tensor).norm() / tensor.norm()) < tolerance, key
    assert rank["record"]["skipped_steps"] == 0


@requires("horovod")
@pytest.mark.parametrize(("size", "name"), [(size, name) for size in (2, 4) for name in WAYS[size]])
def test_engines_train_the_same_bits(size: int, name: str) -> None:
    ddp, horovod = (trained(engine, size)[0][name] for engine in ("ddp", "horovod"))
    assert ddp["figures"] == horovod["figures"]
    for key, tensor in ddp["weights"].items():
        assert tensor.equal(horovod["weights"][key]), key


@pytest.mark.parametrize(("backend", "size"), [case("ddp", 2), case("ddp", 4), case("horovod", 2)])
def test_reproducible_sums_of_weights_do_not_depend_on_ranks(backend: str, size: int) -> None:
    """In fp64, where the last bit of the step's whole weight shows."""
    (alone,), ranks = trained("single", 1), trained(backend, size)
    for key, tensor in alone["reproducible"]["weights"].items():
        assert tensor.equal(ranks[0]["reproducible"]["weights"][key]), key


def lone(weight: Any, data: TensorData | None = None, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Train for an epoch in one process; return the model and its record."""
    its = model()
    its_data = data or TensorData(*texts(NUM))
    options = {"epochs": 1, "batch_size": GLOBAL_BATCH, **options}
    history = fit(options_of("single", **options), its, its_data, optimizer=sgd(its), loss=loss, weight=weight)
    return its, history.end


@pytest.mark.parametrize("chunks", [None, 4])
def test_step_without_any_weight_has_zero_gradients(chunks: int | None) -> None:
    """The first step has no word: neither NaN nor an error, and the others train."""
    inputs, targets = texts(NUM)
    none = targets.index_fill(0, epoch_order(NUM, seed=0, epoch=0)[:GLOBAL_BATCH], -1)
    its, record = lone(words_in, TensorData(inputs, none), chunks=chunks)
    assert record["skipped_steps"] == 0
    assert all(bool(tensor.isfinite().all()) for tensor in its.state_dict().values())
    assert 0 < record["train_loss"] < 3
    its, _ = lone(lambda batch: 0, chunks=chunks)
    for tensor, at_start in zip(its.state_dict().values(), model().state_dict().values(), strict=True):
        assert tensor.equal(at_start)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (lambda batch: batch[1] >= 0, "must give one number for a batch, and gave shape (16, 5)"),
        (lambda batch: None, "must give one number for a batch, and gave a NoneType"),
        (lambda batch: words_in(batch) - 30, "a weight is a finite number from 0 on"),
        (lambda batch: float("nan"), "weight= gave nan for a batch of rank 0"),
        (lambda batch: torch.tensor(float("inf")), "weight= gave inf for a batch of rank 0"),
    ],
)
def test_value_that_is_no_weight_is_refused(weight: Any, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        lone(weight)
    assert words in str(caught.value)


def train_with_one_bad_weight(backend: str, folder: str) -> None:
    """Train where the second rank's weights are negative; every step would be saved."""
    rank, its = detect(os.environ).rank, model()
    fit(
        options_of(backend, global_batch_size=GLOBAL_BATCH, log_dir=folder, save_every_steps=1),
        its,
        TensorData(*texts(NUM)),
        optimizer=sgd(its),
        loss=loss,
        weight=lambda batch: words_in(batch) * (1 - 2 * rank),
    )


@pytest.mark.parametrize("backend", [case("ddp"), case("horovod")])
def test_bad_weight_of_one_rank_ends_all_before_a_save(backend: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"weight= gave -\d+ for a batch of rank 1, and a weight is a finite"):
        in_ranks(2, train_with_one_bad_weight, backend, str(tmp_path))
    assert not list(tmp_path.glob("checkpoints/*"))
