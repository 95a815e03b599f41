"""Evaluations: they change no bit of a training, stop at once with the job, and give the same figures anywhere."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import case
from launchers import in_ranks
from records import lines
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trainings import digest, fit, options_of, signs, train

from hvd_trainer import Callback, OptionError, PreemptedError, RunView, Trainer, accuracy, detect

pytestmark = pytest.mark.warm

ENGINES = [case("ddp"), case("horovod")]
WORLDS = [case("single", 1), case("ddp", 3), case("horovod", 3)]
NUM, BATCH = 30, 4
EVALUATED = 150
"""Batches of rank 0's validation data."""
SECONDS = 0.04
"""Time that each takes in a run that is disturbed."""


class Restless(nn.Module):
    """A model with batch norm and dropout, which also in an evaluation draws numbers and changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.net[1].eval()  # as for frozen layers
        self.register_buffer("calls", torch.zeros(()))

    def train(self, mode: bool = True) -> Restless:
        super().train(mode)
        self.net[1].train(mode and self.calls.item() > 3)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.randn(2) * 0.01 * torch.sin(self.calls)
        return self.net(inputs) + noise


class Mean:
    """A metric object with a state, of no kind but its own."""

    def reset(self) -> None:
        self.total = self.count = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += float(outputs.sum())
        self.count += len(targets)

    def merge_state(self, other: Any) -> None:
        self.total += other.total
        self.count += other.count

    def compute(self) -> float:
        return self.total / self.count

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Unequal(IterableDataset[tuple[Tensor, Tensor]]):
    """Validation data of which rank 0 has most, and the last of several ranks a few batches.

    Args:
        signals: in which pass the last rank gets a SIGTERM, while the others are slow.
    """

    shards_by_rank = True

    def __init__(self, rank: int, size: int, signals: int | None) -> None:
        self.has_signal, self.signals = rank == size - 1, signals
        self.batches = 5 if self.has_signal and size > 1 else EVALUATED // (rank + 1)
        self.passes = self.taken = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes, self.taken = self.passes + 1, 0
        data = signs(BATCH * self.batches)
        for number, sample in enumerate(zip(data.inputs, data.targets, strict=True), 1):
            if self.passes == self.signals:
                time.sleep(SECONDS / BATCH)
                self.taken = number // BATCH
                if self.has_signal and number == 5 * BATCH:
                    os.kill(os.getpid(), signal.SIGTERM)
            yield sample


def follow(backend: str, folder: str, signals: int | None = None, **options: Any) -> dict[str, Any]:
    """Train until the end, or a signal in a pass over the validation data; return what this rank then has."""
    world = detect(os.environ)
    data = Unequal(world.rank, world.size, signals)
    how = {"epochs": 3, "batch_size": BATCH, "workers": 0, "log_dir": folder, "save_every_s": None, **options}
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    try:
        samples = signs(20 * world.size)
        trained = train(backend, Restless, samples, data, optimizer=momentum, metrics={"mean": Mean()}, **how)
    except PreemptedError:
        return {"taken": data.taken}
    figures = ("train_loss", "train_mean", "val_loss", "val_mean", "step", "samples")
    return {"weights": trained.weights, "records": trained.records(*figures), "passes": data.passes}


def disturbed_and_not(backend: str, folder: str) -> list[dict[str, Any]]:
    """Train undisturbed, and stopped in the second evaluation and resumed."""
    parts = f"{folder}/parts"
    return [
        follow(backend, f"{folder}/whole"),
        *(follow(backend, parts, signals=2), follow(backend, parts, resume="auto")),
    ]


@pytest.mark.parametrize(("backend", "size"), WORLDS)
def test_signal_stops_an_evaluation(backend: str, size: int, tmp_path: Path) -> None:
    """It was heard after the evaluation; ranks that have no batch left stop with the others.

    What the evaluation had drawn and averaged until then is not part of the save.
    """
    for whole, stopped, resumed in in_ranks(size, disturbed_and_not, backend, str(tmp_path)):
        assert stopped["taken"] < EVALUATED / 2
        assert (resumed["weights"], resumed["records"]) == (whole["weights"], whole["records"])
        assert math.isfinite(whole["records"][-1][0])


# trainer.evaluate


class Items(Dataset[tuple[Tensor, Tensor]]):
    """`signs` one by one."""

    def __init__(self, num: int) -> None:
        self.data = signs(num)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index]


class Flow(IterableDataset[tuple[Tensor, Tensor]]):
    """`signs` as a stream."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from (signs(self.num)[index] for index in range(self.num))


class Scaled(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("weight", torch.tensor([1.0, 3.0]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.scale * nn.functional.cross_entropy(outputs, targets, self.weight)


def in_pairs(samples: list[Any]) -> Any:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def by_size(batch: Any) -> Tensor:
    return batch[1].sum() + 1


class Inside(Callback):
    """A callback that evaluates after a step and at each epoch's end."""

    def __init__(self, trainer: Trainer, how: dict[str, Any]) -> None:
        self.trainer, self.how = trainer, how
        self.inside: list[dict[str, float]] = []
        self.at_end: list[dict[str, float]] = []

    def evaluate(self, run: RunView) -> dict[str, float]:
        modes = [module.training for module in run.model.modules()]
        figures = self.trainer.evaluate(run.model, **self.how)
        assert [module.training for module in run.model.modules()] == modes
        return figures

    def on_step_end(self, run: RunView, result: Any) -> None:
        if run.progress.step == 2:
            self.inside.append(self.evaluate(run))

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self.at_end.append(self.evaluate(run))


WAYS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "memory": (signs, {}, {}),
    "data set": (Items, {}, {"collate": in_pairs, "weight": by_size}),
    "stream": (Flow, {}, {"batch_transform": torch.neg}),
    "loader": (lambda num: DataLoader(Items(num), batch_size=6), {}, {}),
    "bf16": (signs, {"precision": "bf16", "channels_last": True}, {}),
    "fp16": (signs, {"precision": "fp16"}, {}),
    "reproducible": (signs, {"reproducible": 4}, {}),
    "sharded optimizer": (signs, {"shard": "optimizer"}, {}),
    "a loss with parameters": (signs, {}, {"loss": Scaled}),
}


def evaluated(backend: str, name: str, start: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Train from other weights on each rank, and evaluate before, in and after; or only train, from a start."""
    make, options, how = WAYS[name]
    torch.seed()
    model, data = Restless(), make(NUM + 1)
    loss = how.get("loss", nn.CrossEntropyLoss)()
    how = {**how, "loss": loss, "metrics": {"accuracy": accuracy, "mean": Mean()}}
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    result: dict[str, Any] = {}
    with Trainer(options_of(backend, **{"epochs": 2, "batch_size": BATCH, "workers": 0, **options})) as trainer:
        inside = Inside(trainer, {**how, "data": data})
        if start is None:
            result["before"] = trainer.evaluate(model, data=data, **how)
            result["start"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        else:
            model.load_state_dict(start)
        callbacks = [inside] if start is None else []
        history = trainer.fit(model, optimizer, train_data=signs(NUM), val_data=data, callbacks=callbacks, **how)
        result["weights"] = digest(model.state_dict())
        if start is None:
            result["after"] = trainer.evaluate(model, data=data, **how)
    names = ("loss", "accuracy", "mean")
    result["records"] = [{name: record[f"val_{name}"] for name in names} for record in history]
    return {**result, "inside": inside.inside, "at end": inside.at_end}


def same_figures(backend: str, names: list[str]) -> dict[str, Any]:
    """Train in several ways, with evaluations and without; return figures and weights of both."""
    results = {}
    for name in names:
        results[name] = evaluated(backend, name)
        results[name]["undisturbed"] = evaluated(backend, name, results[name].pop("start"))["weights"]
    return results


@pytest.mark.parametrize(
    ("backend", "size"),
    [case("ddp", 1), case("ddp", 3), case("horovod", 4)]
    + [case(*world, when="long") for world in (("horovod", 1), ("horovod", 3), ("ddp", 4))],
)
def test_evaluate_gives_the_figures_of_a_training(backend: str, size: int) -> None:
    """And changes no bit of it, before the first step, between two, and at the end of an epoch."""
    names = [name for name in WAYS if size == 4 or name != "reproducible"]
    first, *others = in_ranks(size, same_figures, backend, names)
    assert others == [first] * (size - 1)
    for name in names:
        way = first[name]
        everything = [{**record, "samples": NUM + 1} for record in way["records"]]
        assert way["at end"] == everything, name
        assert way["after"] == everything[-1], name
        assert way["before"]["samples"] == way["inside"][0]["samples"] == NUM + 1
        assert way["before"]["loss"] != way["inside"][0]["loss"] != way["after"]["loss"]
        assert way["weights"] == way["undisturbed"], name


def evaluate_alone(backend: str) -> dict[str, float]:
    """Evaluate a model that only rank 0 has loaded."""
    with Trainer(options_of(backend, batch_size=BATCH)) as trainer:
        model = Restless().train()
        torch.manual_seed(trainer.world.rank)
        for parameter in model.parameters():
            parameter.data.normal_()
        figures = trainer.evaluate(model, nn.functional.cross_entropy, signs(NUM), metrics={"accuracy": accuracy})
        assert model.training
    return figures


@pytest.mark.parametrize("backend", ENGINES)
def test_evaluate_without_fit_takes_the_weights_of_rank_0(backend: str) -> None:
    first, *others = in_ranks(3, evaluate_alone, backend)
    assert others == [first] * 2
    assert first == pytest.approx(evaluate_alone("single"), abs=0.05)  # it draws numbers
    assert first["samples"] == NUM


def in_parts(backend: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Evaluate a model in parts in a callback; return its figures, those of the record, and the refusal after."""
    chosen = {"epochs": 1, "batch_size": BATCH, "workers": 0, **options}
    with Trainer(options_of(backend, **chosen)) as trainer:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how = {"loss": nn.functional.cross_entropy, "metrics": {"accuracy": accuracy}}
        inside = Inside(trainer, {**how, "data": signs(NUM)})
        history = trainer.fit(
            model, optimizer, train_data=signs(NUM), val_data=signs(NUM), callbacks=[inside], **how
        )
        with pytest.raises(OptionError, match="evaluate is for whole models, and --.* cuts them: give the data"):
            trainer.evaluate(model, data=signs(NUM), **how)
    record = {"loss": history[-1]["val_loss"], "accuracy": history[-1]["val_accuracy"], "samples": NUM}
    return inside.at_end, record


@pytest.mark.parametrize(
    ("backend", "size", "options"),
    [
        ("ddp", 2, {"stages": 2}),
        ("horovod", 4, {"stages": 2}),
        ("ddp", 3, {"shard": "full"}),
        ("ddp", 1, {"chunks": 2}),
    ],
    ids=str,
)
def test_callback_evaluates_a_model_in_parts(backend: str, size: int, options: dict[str, Any]) -> None:
    for at_end, record in in_ranks(size, in_parts, backend, **options):
        assert at_end == [record]


# --evaluate-every-steps


class Counting(Callback):
    """A callback that counts evaluations in its state, and ends the training after some."""

    def __init__(self, last: int | None = None) -> None:
        self.count, self.last = 0, last

    def on_record(self, run: RunView, event: str, record: Any) -> None:
        self.count += event == "evaluation"
        if self.count == self.last:
            run.stop(f"after evaluation {self.count}")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def often(backend: str, folder: str, last: int | None = None, **options: Any) -> dict[str, Any]:
    """Train with an evaluation after each third step; return what this rank then has, and how many there were."""
    counting = Counting(last)
    how = {"evaluate_every_steps": 3, "epochs": 2, "callbacks": [counting], **options}
    return follow(backend, folder, **how) | {"count": counting.count}


def figures_of(folder: Path, event: str) -> list[list[Any]]:
    names = ("epoch", "step", "samples", "val_loss", "val_mean")
    return [[line[name] for name in names] for line in lines(folder, event)]


def often_and_not(backend: str, folder: str) -> dict[str, Any]:
    """Train two epochs of five steps with evaluations and without, and in parts that end in several places."""
    in_evaluation = {"signals": 3}  # that after step 6, of those after steps 3, 5, 6, 9 and 10
    parts: dict[str, list[dict[str, Any]]] = {
        "in an evaluation": [in_evaluation],
        "again before a save": [in_evaluation, {"stop_after": 7, "resume": "auto"}],
        "after a save": [{"stop_after": 8, "save_every_steps": 3}],
        "by steps": [{"max_steps": 6}],
    }
    runs = {
        "without": often(backend, f"{folder}/without", evaluate_every_steps=None),
        "whole": often(backend, f"{folder}/whole"),
    }
    for name, each in parts.items():
        for options in each:
            often(backend, f"{folder}/{name}", **options)
        runs[name] = often(backend, f"{folder}/{name}", resume="auto")
    return runs


@pytest.mark.parametrize(("backend", "size"), WORLDS)
def test_evaluations_inside_epochs_change_nothing(backend: str, size: int, tmp_path: Path) -> None:
    """Not the weights; and a resumed run has each of them once, also the one in which it was stopped."""
    first, *others = in_ranks(size, often_and_not, backend, str(tmp_path))
    evaluations = figures_of(tmp_path / "whole", "evaluation")
    assert [line[:3] for line in evaluations] == [[1, 3, 12 * size], [2, 6, 24 * size], [2, 9, 36 * size]]
    for name, run in first.items():
        assert run["weights"] == first["whole"]["weights"], name
        assert run["records"] == first["whole"]["records"], name
        if name != "without":
            assert run["count"] == 3, name
            assert figures_of(tmp_path / name, "evaluation") == evaluations, name
    assert others == [first] * (size - 1)


@pytest.mark.parametrize("backend", ENGINES)
def test_callback_ends_the_training_after_an_evaluation(backend: str, tmp_path: Path) -> None:
    """The record of the epoch that is not complete has the figures of that evaluation, and no further one."""
    folder = tmp_path / "run"
    first, *others = in_ranks(3, often, backend, str(folder), 2)
    assert others == [first] * 2
    assert first["passes"] == 3
    assert [record[-2] for record in first["records"]] == [5, 6]
    end = lines(folder)[-1]
    assert (end["event"], end["step"], end["stopped"]) == ("end", 6, "after evaluation 2")
    assert figures_of(folder, "evaluation")[-1] == figures_of(folder, "epoch")[-1]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000000005", "step-000000006"]


def test_until_ends_at_an_evaluation_and_the_best_checkpoint_may_be_of_one(tmp_path: Path) -> None:
    often("single", str(tmp_path / "all"), save_every_steps=3, keep=1, keep_best="max:val_loss")
    losses = {
        line[1]: line[3]
        for line in [*figures_of(tmp_path / "all", "evaluation"), *figures_of(tmp_path / "all", "epoch")]
    }
    assert [*losses] == [3, 6, 9, 5, 10]
    best = max(losses, key=losses.__getitem__)
    assert best in (3, 6, 9)
    kept = {path.name for path in (tmp_path / "all" / "checkpoints").iterdir()}
    assert kept == {f"step-{best:09d}", "step-000000010"}
    run = often("single", str(tmp_path / "until"), until=f"val_loss<={losses[6]}")
    assert run["records"][-1][-2] == min(step for step, loss in losses.items() if loss <= losses[6])


def test_evaluations_inside_epochs_need_data() -> None:
    options = options_of(evaluate_every_steps=2)
    with pytest.raises(OptionError, match="--evaluate-every-steps: this job has nothing to evaluate on. Give fit"):
        fit(options, nn.Linear(6, 2), signs(NUM))


def test_evaluation_inside_an_epoch_is_printed(logged: Any) -> None:
    options = options_of(evaluate_every_steps=1, epochs=1, batch_size=NUM // 2, quiet=False)
    fit(options, nn.Linear(6, 2), signs(NUM), signs(NUM))
    assert "step 1  val loss " in logged()
