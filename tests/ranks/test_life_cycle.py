"""The life of a training: callbacks and their states, what a resume begins again, names, ends, and evaluations."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import documents
import pytest
import torch
from combinations import case
from launchers import run_ranks
from records import lines
from torch import Tensor, nn
from torch.utils.data import Dataset
from trainings import StopAfter, StoppedError, digest, options_of, signs

from hvd_trainer import Callback, OptionError, RunView, Trainer
from hvd_trainer.errors import CheckpointError

pytestmark = pytest.mark.warm

ENGINES = [case("ddp"), case("horovod")]
NUM = 24


class Scaled(Dataset[tuple[Tensor, Tensor]]):
    """A data set with an attribute that a callback changes."""

    def __init__(self) -> None:
        self.inputs, self.targets = signs(NUM).inputs, signs(NUM).targets
        self.scale = 1.0

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] * self.scale, self.targets[index]


class Course(Callback):
    """A callback that changes the rate and the data after each epoch, and keeps a mean of the weights."""

    def __init__(self, data: Scaled) -> None:
        self.data = data
        self.mean = torch.zeros(2)

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.mean.lerp_(run.model.bias.detach(), 0.5)

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self.data.scale *= 2
        run.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.data.scale, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.scale = state["scale"]
        self.mean.copy_(state["mean"])


def follow(
    backend: str, folder: str | None = None, stop_after: int | None = None, **options: Any
) -> dict[str, Any]:
    """Train with `Course`, until a step or the end; return what this rank then has."""
    data = Scaled()
    options = {"epochs": 3, "global_batch_size": 12, "workers": 0, "log_dir": folder, **options}
    with Trainer(options_of(backend, **options)) as trainer:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        course = Course(data)
        callbacks = [course, StopAfter(stop_after)]
        with suppress(StoppedError):
            trainer.fit(model, optimizer, nn.functional.cross_entropy, data, callbacks=callbacks)
        rank = trainer.world.rank
    return {"rank": rank, "weights": digest(model.state_dict()), "mean": course.mean, "scale": data.scale}


def courses(backend: str, folder: str) -> tuple[int, dict[str, Any]]:
    """Train undisturbed, through loader processes, and in two parts, the first stopped inside the second epoch."""
    follow(backend, f"{folder}/parts", stop_after=3)
    runs = {
        "whole": follow(backend),
        "workers": follow(backend, workers=2),
        "resumed": follow(backend, f"{folder}/parts", resume="auto"),
    }
    return runs["whole"]["rank"], runs


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("size", [1, 3])
def test_callbacks_are_part_of_what_is_saved(backend: str, size: int, tmp_path: Path) -> None:
    """Saved before callbacks ran, a resumed run had the rate of the epoch before, and no state of theirs.

    Loader processes that stayed had a copy of the data set as it was in the first epoch.
    """
    ranks = run_ranks(courses, num_processes=size, args=(backend, str(tmp_path)))
    whole = ranks[0]["whole"]
    assert whole["scale"] == 8
    for rank in ranks:
        for run in rank.values():
            assert run["weights"] == whole["weights"]
            assert (run["mean"].tolist(), run["scale"]) == (whole["mean"].tolist(), whole["scale"])


def resume_course(backend: str, folder: str) -> tuple[int, dict[str, Any]]:
    run = follow(backend, folder, resume="auto")
    return run["rank"], run


def begin_course(backend: str, folder: str) -> tuple[int, Any]:
    return follow(backend, folder, stop_after=3)["rank"], None


def test_state_of_callbacks_is_given_to_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(begin_course, num_processes=2, args=("ddp", str(tmp_path)))
    whole = follow("single")
    for rank in run_ranks(resume_course, num_processes=3, args=("ddp", str(tmp_path))):
        assert rank["scale"] == whole["scale"]
        torch.testing.assert_close(rank["mean"], whole["mean"])


class OnFirst(Course):
    """A callback that rank 0 alone has, so that it must not change the optimizer."""

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self.data.scale *= 2


def on_rank_0(backend: str, folder: str) -> tuple[int, Any]:
    """Train with a callback on rank 0 alone, which ends the training after the second epoch; resume it."""
    results = []
    for resume in ("none", "auto"):
        data, model = Scaled(), nn.Linear(6, 2)
        options = {"epochs": 2 if resume == "none" else 3, "batch_size": 4, "log_dir": folder, "resume": resume}
        with Trainer(options_of(backend, workers=0, **options)) as trainer:
            first = trainer.world.is_first
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            callbacks = [OnFirst(data)] if first else []
            trainer.fit(model, optimizer, nn.functional.cross_entropy, data, callbacks=callbacks)
            results.append(data.scale)
    return trainer.world.rank, results


@pytest.mark.parametrize("backend", ENGINES)
def test_rank_0_alone_may_have_callbacks(backend: str, tmp_path: Path) -> None:
    first, second = run_ranks(on_rank_0, num_processes=2, args=(backend, str(tmp_path)))
    assert (first, second) == ([4, 8], [1, 1])


class Named(Course):
    name = "course"


def resume_with(folder: Path, callbacks: Any, **options: Any) -> Any:
    """Resume a training of `follow` with other callbacks; return the callbacks' data set."""
    data, model = Scaled(), nn.Linear(6, 2)
    options = {"epochs": 2, "global_batch_size": 12, "log_dir": str(folder), "resume": "auto", **options}
    with Trainer(options_of(workers=0, **options)) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        callbacks = [kind(data) for kind in callbacks]
        trainer.fit(model, optimizer, nn.functional.cross_entropy, data, callbacks=callbacks)
    return data.scale


class Forgetful(Course):
    """A callback whose state has another key than it reads."""

    name = "Course"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.scale = state["size"]


def test_callbacks_that_do_not_fit_are_named(tmp_path: Path) -> None:
    follow("single", str(tmp_path), epochs=1)
    reset = r"\(to reset all callbacks: --resume-partial callbacks\)"
    with pytest.raises(
        CheckpointError, match=f"it has a state of the callback Course, and this run has none {reset}"
    ):
        resume_with(tmp_path, [])
    with pytest.raises(
        CheckpointError, match=f"it has no state of the callback course, and this run has one {reset}"
    ):
        resume_with(tmp_path, [Course, Named])
    with pytest.raises(CheckpointError, match="no state of the callback Course 2"):
        resume_with(tmp_path, [Course, Course])
    with pytest.raises(CheckpointError, match=r"Course does not take its state \(KeyError: 'size'\)"):
        resume_with(tmp_path, [Forgetful])
    assert resume_with(tmp_path, [Course, Named], resume_partial=("callbacks",)) == 4


# What a resume begins again.


def adam(groups: int, **settings: Any) -> Any:
    """Return a function that makes Adam with so many groups from a model's weight and bias."""

    def make(model: nn.Linear) -> torch.optim.Optimizer:
        parameters = [model.weight, model.bias]
        return torch.optim.Adam(parameters if groups == 1 else [{"params": [p]} for p in parameters], **settings)

    return make


def in_parts(
    folder: str, backend: str, first: Any, second: Any, scheduler: Any = None, **options: Any
) -> tuple[int, tuple[list[float], list[float]]]:
    """Train an epoch with one optimizer, and another epoch with a second one; return its steps and its rates."""
    for make, part in ((first, {"epochs": 1}), (second, {"epochs": 2, "resume": "auto", **options})):
        model = nn.Linear(6, 2)
        with Trainer(options_of(backend, global_batch_size=12, log_dir=folder, **part)) as trainer:
            optimizer = make(model)
            trainer.fit(model, optimizer, nn.functional.cross_entropy, signs(NUM), scheduler=scheduler)
            rank = trainer.world.rank
    steps = [float(state["step"]) for state in optimizer.state.values()]
    return rank, (steps, [group["lr"] for group in optimizer.param_groups])


def halve(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def partial(
    backend: str, folder: str, groups: int, scheduler: bool, *parts: str
) -> tuple[int, tuple[list[float], list[float]]]:
    made = adam(1, lr=0.1), adam(groups, lr=0.2)
    return in_parts(folder, backend, *made, scheduler=halve if scheduler else None, resume_partial=parts)


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    ("groups", "scheduler", "parts", "steps", "rates"),
    [
        (1, False, (), [4, 4], [0.1]),
        (1, False, ("optimizer",), [2, 2], [0.2]),
        (2, False, ("optimizer",), [2, 2], [0.2, 0.2]),
        # A new optimizer is at the rate of the scheduler that it has.
        (1, True, ("optimizer",), [2, 2], [0.025]),
        (1, True, ("optimizer", "scheduler"), [2, 2], [0.1]),
        (2, True, ("optimizer", "scheduler"), [2, 2], [0.1, 0.1]),
    ],
)
def test_resume_with_a_new_optimizer(
    backend: str,
    groups: int,
    scheduler: bool,
    parts: tuple[str, ...],
    steps: list[float],
    rates: list[float],
    tmp_path: Path,
) -> None:
    """One of the same class kept its state, and one with other groups was a ValueError."""
    args = (backend, str(tmp_path), groups, scheduler, *parts)
    for rank in run_ranks(partial, num_processes=2, args=args):
        assert rank == (steps, pytest.approx(rates))


def test_other_groups_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is for 1 parameter group \(of 2\), not 2 parameter groups \(of 1, 1\) "
    ):
        in_parts(str(tmp_path), "single", adam(1), adam(2))
    with pytest.raises(CheckpointError, match="its scheduler is for 1 group, not 2 groups .*--resume-partial sch"):
        in_parts(
            str(tmp_path / "scheduled"), "single", adam(1), adam(2), scheduler=halve, resume_partial=("optimizer",)
        )


# Several trainings.


def folds(backend: str, folder: str, names: list[str | None], trainers: int = 1) -> tuple[int, Any]:
    """Train several times with `--resume auto`, each trainer once for each name; return what came of it."""
    weights, refusals = [], []
    for _ in range(trainers):
        with Trainer(options_of(backend, epochs=1, batch_size=4, log_dir=folder, resume="auto")) as trainer:
            for number, name in enumerate(names):
                torch.manual_seed(number)
                model = nn.Linear(6, 2)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                try:
                    history = trainer.fit(model, optimizer, nn.functional.cross_entropy, signs(NUM), name=name)
                except OptionError as error:
                    refusals.append(str(error))
                else:
                    weights.append((history[-1]["step"], digest(model.state_dict())))
    return trainer.world.rank, (weights, refusals)


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("size", [1, 2])
def test_each_training_has_a_folder_of_its_own(backend: str, size: int, tmp_path: Path) -> None:
    """The second training resumed the first one's checkpoint: it had nothing left to train."""
    named = run_ranks(folds, num_processes=size, args=(backend, str(tmp_path / "cv"), ["fold-1", "fold-2"]))
    alone = run_ranks(folds, num_processes=size, args=(backend, str(tmp_path / "one"), [None]))
    for (weights, refusals), (first, _) in zip(named, alone, strict=True):
        assert refusals == []
        assert weights[0] == first[0]
        assert weights[1] != weights[0]
    for name in ("fold-1", "fold-2"):
        assert [line["event"] for line in lines(tmp_path / "cv" / name)] == ["epoch", "end"]
        assert (tmp_path / "cv" / name / "checkpoints").is_dir()
    assert not (tmp_path / "cv" / "metrics.jsonl").exists()
    # Started again, each has the weights of its own checkpoint.
    assert (
        run_ranks(folds, num_processes=size, args=(backend, str(tmp_path / "cv"), ["fold-1", "fold-2"])) == named
    )


@pytest.mark.parametrize("backend", ENGINES)
def test_second_training_in_a_folder_is_refused(backend: str, tmp_path: Path) -> None:
    type_this = 'folder of its own, by a name: fit(..., name="fold-2")'
    for weights, refusals in run_ranks(folds, num_processes=2, args=(backend, str(tmp_path / "1"), [None, None])):
        assert (len(weights), len(refusals)) == (1, 1)
        assert refusals[0].startswith("An earlier fit of this Trainer has its log and its checkpoints in ")
        assert refusals[0].endswith(type_this)
    for weights, refusals in run_ranks(folds, num_processes=2, args=(backend, str(tmp_path / "2"), ["a"], 2)):
        assert (len(weights), len(refusals)) == (1, 1)
        assert "An earlier fit of this process has finished the training in " in refusals[0]
        assert refusals[0].endswith(type_this)


@pytest.mark.parametrize("name", ["", "a/b", "..", "checkpoints", "earlier-1", "metrics.jsonl"])
def test_name_that_is_none_of_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    _, (_, refusals) = folds("single", str(tmp_path), [name])
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


def stopped(backend: str, folder: str | None, at: dict[str, Any], **options: Any) -> tuple[int, Any]:
    """Train until a callback ends it; return the steps, and the weights."""
    model = nn.Linear(6, 2)
    chosen = options_of(backend, epochs=4, global_batch_size=12, log_dir=folder, **options)
    with Trainer(chosen) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = nn.functional.cross_entropy
        history = trainer.fit(model, optimizer, loss, signs(6000), signs(7), callbacks=[StopAt(**at)])
        rank = trainer.world.rank
    return rank, ([record["step"] for record in history], digest(model.state_dict()))


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_callback_of_any_rank_ends_the_training(backend: str, size: int, tmp_path: Path) -> None:
    folder, last = str(tmp_path), size - 1
    args = (backend, folder, {"rank": last, "epoch": 2})
    first, *others = run_ranks(stopped, num_processes=size, args=args)
    assert first[0] == [500, 1000]
    assert others == [first] * last
    assert lines(tmp_path)[-1] | {"event": "end", "step": 1000, "stopped": "after epoch 2"} == lines(tmp_path)[-1]
    # Resumed, it has ended; told so, it trains on.
    again = run_ranks(stopped, num_processes=size, args=args, kwargs={"resume": "auto"})
    assert again == [first] * size
    more = {"resume": "auto", "resume_partial": ("callbacks",)}
    longer = run_ranks(stopped, num_processes=size, args=args, kwargs=more)
    assert longer[0][0] == [500, 1000, 1500, 2000]


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("logs", [True, False])
def test_callback_ends_the_training_inside_an_epoch(backend: str, size: int, logs: bool, tmp_path: Path) -> None:
    """All ranks end after the same step, with a checkpoint there, and without a log folder, too."""
    args = (backend, str(tmp_path) if logs else None, {"rank": size - 1, "step": 3})
    first, *others = run_ranks(stopped, num_processes=size, args=args)
    (step,) = first[0]
    assert others == [first] * (size - 1)
    assert 3 <= step < 500
    assert step == 3 or size > 1
    if logs:
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{step:09d}"]
        assert lines(tmp_path)[-1]["stopped"] == "after step 3"


def stop_early(backend: str, folder: str) -> tuple[int, Any]:
    """Train with the callback of docs/training.md and a rate of 0: undisturbed, and in parts."""
    (text,) = (block.text for block in documents.blocks("docs/training.md") if "EarlyStopping" in block.text)
    names: dict[str, Any] = {"Callback": Callback}
    exec(text, names)
    epochs = {}
    parts: list[tuple[str, dict[str, Any]]] = [
        ("whole", {}),
        ("parts", {"max_steps": 1}),
        ("parts", {"epochs": 2}),
        ("parts", {}),
    ]
    for name, options in parts:
        model = nn.Linear(6, 2)
        chosen = {"epochs": 9, "batch_size": 4, "log_dir": f"{folder}/{name}", "resume": "auto", **options}
        with Trainer(options_of(backend, **chosen)) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            callbacks = [names["EarlyStopping"]()]
            loss = nn.functional.cross_entropy
            history = trainer.fit(model, optimizer, loss, signs(NUM), signs(NUM), callbacks=callbacks)
        epochs[name] = [record["epoch"] for record in history]
    return trainer.world.rank, epochs


@pytest.mark.parametrize("backend", ENGINES)
def test_early_stopping_of_the_documentation(backend: str, tmp_path: Path) -> None:
    expected = {"whole": [1, 2, 3, 4], "parts": [1, 2, 3, 4]}
    assert run_ranks(stop_early, num_processes=3, args=(backend, str(tmp_path))) == [expected] * 3
    for name in expected:
        assert lines(tmp_path / name)[-1]["stopped"] == "val loss has not improved for 3 epochs"
