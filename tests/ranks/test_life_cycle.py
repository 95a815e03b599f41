"""The life of a training: callbacks and their states, what a resume begins again, names, ends, and evaluations."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import documents
import pytest
import torch
from bit_jobs import Course, Scaled, followed, halve, linear
from combinations import case
from launchers import in_ranks
from records import lines
from torch import nn
from trainings import digest, options_of, signs, train

from hvd_trainer import Callback, OptionError, RunView, Trainer
from hvd_trainer.errors import CheckpointError

pytestmark = pytest.mark.warm

ENGINES = [case("ddp"), case("horovod")]
WORLDS = [case("single", 1), case("ddp", 3), case("horovod", 3)]
NUM = 24


def follow(backend: str, folder: str | None = None, **options: Any) -> Course:
    """Train with `Course`; return it."""
    how = followed(log_dir=folder, **options)
    train(backend, **how)
    course: Course = how["callbacks"][0]
    return course


def test_state_of_callbacks_is_given_to_any_number_of_ranks(tmp_path: Path) -> None:
    in_ranks(2, follow, "ddp", str(tmp_path), stop_after=3)
    whole = follow("single")
    assert whole.data.scale == 8
    for rank in in_ranks(3, follow, "ddp", str(tmp_path), resume="auto"):
        assert rank.data.scale == 8
        torch.testing.assert_close(rank.mean, whole.mean)


class OnFirst(Course):
    """A callback that rank 0 alone has, so that it must not change the optimizer."""

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self.data.scale *= 2


def on_rank_0(backend: str, folder: str) -> list[float]:
    """Train with a callback on rank 0 alone, which ends the training after the second epoch; resume it."""
    results = []
    for resume, epochs in (("none", 2), ("auto", 3)):
        data = Scaled()
        options = options_of(backend, workers=0, epochs=epochs, batch_size=4, log_dir=folder, resume=resume)
        with Trainer(options) as trainer:
            model = linear()
            callbacks = [OnFirst(data)] if trainer.world.is_first else []
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            trainer.fit(model, optimizer, nn.functional.cross_entropy, data, callbacks=callbacks)
        results.append(data.scale)
    return results


@pytest.mark.parametrize("backend", ENGINES)
def test_rank_0_alone_may_have_callbacks(backend: str, tmp_path: Path) -> None:
    assert in_ranks(2, on_rank_0, backend, str(tmp_path)) == [[4, 8], [1, 1]]


class Named(Course):
    name = "course"


def resume_with(folder: Path, kinds: Any, **options: Any) -> float:
    """Resume a training of `follow` with other callbacks; return their data set's scale."""
    data = Scaled()
    how = {"epochs": 2, "resume": "auto", "log_dir": str(folder), **options}
    train("single", **followed(train_data=data, callbacks=[kind(data) for kind in kinds], **how))
    return data.scale


class Forgetful(Course):
    """A callback whose state has another key than it reads."""

    name = "Course"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.scale = state["size"]


def test_callbacks_that_do_not_fit_are_named(tmp_path: Path) -> None:
    follow("single", str(tmp_path), epochs=1)
    reset = r"\(to reset all callbacks: --resume-partial callbacks\)"
    for kinds, said in (
        ([], f"it has a state of the callback Course, and this run has none {reset}"),
        ([Course, Named], f"it has no state of the callback course, and this run has one {reset}"),
        ([Course, Course], "no state of the callback Course 2"),
        ([Forgetful], r"Course does not take its state \(KeyError: 'size'\)"),
    ):
        with pytest.raises(CheckpointError, match=said):
            resume_with(tmp_path, kinds)
    assert resume_with(tmp_path, [Course, Named], resume_partial=("callbacks",)) == 4


# What a resume begins again.


def adam(groups: int, **settings: Any) -> Any:
    """Return a function that makes Adam with so many groups from a model's weight and bias."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.Adam(
            [weight, bias] if groups == 1 else [{"params": [p]} for p in (weight, bias)], **settings
        )

    return make


def new_optimizer(
    backend: str, folder: str, groups: int, scheduler: Any, *parts: str, lr: float = 0.2
) -> tuple[list[float], list[float]]:
    """Train an epoch with Adam, and another epoch with a second one; return its steps and its rates."""
    how = {"scheduler": scheduler, "global_batch_size": 12, "log_dir": folder}
    train(backend, linear, signs(NUM), optimizer=adam(1, lr=0.1), epochs=1, **how)
    how = {**how, "epochs": 2, "resume": "auto", "resume_partial": parts}
    optimizer = train(backend, linear, signs(NUM), optimizer=adam(groups, lr=lr), **how).optimizer
    steps = [float(state["step"]) for state in optimizer.state.values()]
    return steps, [group["lr"] for group in optimizer.param_groups]


NEW = [
    (1, None, (), [4, 4], [0.1]),
    (1, None, ("optimizer",), [2, 2], [0.2]),
    (2, None, ("optimizer",), [2, 2], [0.2, 0.2]),
    # A new optimizer is at the rate of the scheduler that it has.
    (1, halve, ("optimizer",), [2, 2], [0.025]),
    (1, halve, ("optimizer", "scheduler"), [2, 2], [0.1]),
    (2, halve, ("optimizer", "scheduler"), [2, 2], [0.1, 0.1]),
]


def new_optimizers(backend: str, folder: str) -> list[tuple[list[float], list[float]]]:
    return [
        new_optimizer(backend, f"{folder}/{number}", groups, scheduler, *parts)
        for number, (groups, scheduler, parts, *_) in enumerate(NEW)
    ]


@pytest.mark.parametrize("backend", ENGINES)
def test_resume_with_a_new_optimizer(backend: str, tmp_path: Path) -> None:
    """One of the same class kept its state, and one with other groups was a ValueError."""
    for rank in in_ranks(2, new_optimizers, backend, str(tmp_path)):
        for (*how, steps, rates), found in zip(NEW, rank, strict=True):
            assert found == (steps, pytest.approx(rates)), how


def test_other_groups_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is for 1 parameter group \(of 2\), not 2 parameter groups \(of 1, 1\) "
    ):
        new_optimizer("single", str(tmp_path), 2, None)
    with pytest.raises(CheckpointError, match="its scheduler is for 1 group, not 2 groups .*--resume-partial sch"):
        new_optimizer("single", str(tmp_path / "scheduled"), 2, halve, "optimizer")


# Several trainings.


def folds(backend: str, folder: str, names: list[str | None], trainers: int = 1) -> tuple[list[Any], list[str]]:
    """Train several times with `--resume auto`, each trainer once for each name; return weights and refusals."""
    weights, refusals = [], []
    for _ in range(trainers):
        with Trainer(options_of(backend, epochs=1, batch_size=4, log_dir=folder, resume="auto")) as trainer:
            for number, name in enumerate(names):
                torch.manual_seed(number)
                model = linear()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                try:
                    history = trainer.fit(model, optimizer, nn.functional.cross_entropy, signs(NUM), name=name)
                except OptionError as error:
                    refusals.append(str(error))
                else:
                    weights.append((history[-1]["step"], digest(model.state_dict())))
    return weights, refusals


@pytest.mark.parametrize(("backend", "size"), WORLDS)
def test_each_training_has_a_folder_of_its_own(backend: str, size: int, tmp_path: Path) -> None:
    """The second training resumed the first one's checkpoint: it had nothing left to train."""
    folder, names = str(tmp_path / "cv"), ["fold-1", "fold-2"]
    named = in_ranks(size, folds, backend, folder, names)
    alone = in_ranks(size, folds, backend, str(tmp_path / "one"), [None])
    for (weights, refusals), (first, _) in zip(named, alone, strict=True):
        assert refusals == []
        assert weights[0] == first[0]
        assert weights[1] != weights[0]
    for name in names:
        assert [line["event"] for line in lines(tmp_path / "cv" / name)] == ["epoch", "end"]
        assert (tmp_path / "cv" / name / "checkpoints").is_dir()
    assert not (tmp_path / "cv" / "metrics.jsonl").exists()
    assert in_ranks(size, folds, backend, folder, names) == named, "each has the weights of its own checkpoint"


@pytest.mark.parametrize("backend", ENGINES)
def test_second_training_in_a_folder_is_refused(backend: str, tmp_path: Path) -> None:
    of_trainer = "An earlier fit of this Trainer has its log and its checkpoints in "
    of_process = "An earlier fit of this process has finished the training in "
    for args, said in (([None, None], 1), of_trainer), ((["a"], 2), of_process):
        for weights, (refusal,) in in_ranks(2, folds, backend, str(tmp_path / said), *args):
            assert len(weights) == 1
            assert refusal.startswith(said)
            assert refusal.endswith('folder of its own, by a name: fit(..., name="fold-2")')


@pytest.mark.parametrize("name", ["", "a/b", "..", "checkpoints", "earlier-1", "metrics.jsonl"])
def test_name_that_is_none_of_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    _, refusals = folds("single", str(tmp_path), [name])
    assert "a training is named by letters, digits" in refusals[0]


# Callbacks that end a training.


class StopAt(Callback):
    """A callback that ends the training on one rank, after a step or an epoch."""

    def __init__(self, rank: int, *, step: int | None = None, epoch: int | None = None) -> None:
        self.rank, self.step, self.epoch = rank, step, epoch

    def on_step_end(self, run: RunView, result: Any) -> None:
        if run.world.rank == self.rank and self.step is not None and run.progress.step >= self.step:
            run.stop(f"after step {self.step}")

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        if run.world.rank == self.rank and record["epoch"] == self.epoch:
            run.stop(f"after epoch {self.epoch}")


def stopped(backend: str, folder: str | None, at: StopAt, num: int, **options: Any) -> tuple[list[int], str]:
    """Train until a callback ends it; return the steps, and the weights."""
    how = {"epochs": 4, "global_batch_size": 12, "log_dir": folder, "callbacks": [at], **options}
    trained = train(backend, linear, signs(num), signs(7), **how)
    return [record["step"] for record in trained.history], trained.weights


@pytest.mark.parametrize(("backend", "size"), WORLDS)
def test_callback_of_any_rank_ends_the_training(backend: str, size: int, tmp_path: Path) -> None:
    args = (size, stopped, backend, str(tmp_path), StopAt(size - 1, epoch=2), 600)
    first, *others = in_ranks(*args)
    assert first[0] == [50, 100]
    assert others == [first] * (size - 1)
    assert lines(tmp_path)[-1] | {"event": "end", "step": 100, "stopped": "after epoch 2"} == lines(tmp_path)[-1]
    # Resumed, it has ended; told so, it trains on.
    assert in_ranks(*args, resume="auto") == [first] * size
    longer = in_ranks(*args, resume="auto", resume_partial=("callbacks",))
    assert longer[0][0] == [50, 100, 150, 200]


@pytest.mark.parametrize(("backend", "size"), WORLDS)
@pytest.mark.parametrize("logs", [True, False])
def test_callback_ends_the_training_inside_an_epoch(backend: str, size: int, logs: bool, tmp_path: Path) -> None:
    """All ranks end after the same step, with a checkpoint there, and without a log folder, too."""
    folder = str(tmp_path) if logs else None
    first, *others = in_ranks(size, stopped, backend, folder, StopAt(size - 1, step=3), 6000)
    (step,) = first[0]
    assert others == [first] * (size - 1)
    assert 3 <= step < 500
    assert step == 3 or size > 1
    if logs:
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{step:09d}"]
        assert lines(tmp_path)[-1]["stopped"] == "after step 3"


def stop_early(backend: str, folder: str) -> dict[str, list[int]]:
    """Train with the callback of docs/training.md and a rate of 0: undisturbed, and in parts."""
    (text,) = (block.text for block in documents.blocks("docs/training.md") if "EarlyStopping" in block.text)
    names: dict[str, Any] = {"Callback": Callback}
    exec(text, names)
    epochs = {}
    parts: Any = ("whole", {}), ("parts", {"max_steps": 1}), ("parts", {"epochs": 2}), ("parts", {})
    for name, options in parts:
        how = {"epochs": 9, "batch_size": 4, "log_dir": f"{folder}/{name}", "resume": "auto", **options}
        how = {"optimizer": partial(torch.optim.SGD, lr=0.0), "callbacks": [names["EarlyStopping"]()], **how}
        epochs[name] = [
            record["epoch"] for record in train(backend, linear, signs(NUM), signs(NUM), **how).history
        ]
    return epochs


@pytest.mark.parametrize("backend", ENGINES)
def test_early_stopping_of_the_documentation(backend: str, tmp_path: Path) -> None:
    expected = {"whole": [1, 2, 3, 4], "parts": [1, 2, 3, 4]}
    assert in_ranks(3, stop_early, backend, str(tmp_path)) == [expected] * 3
    for name in expected:
        assert lines(tmp_path / name)[-1]["stopped"] == "val loss has not improved for 3 epochs"
