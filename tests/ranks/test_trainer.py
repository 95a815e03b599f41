"""The Trainer in library use and as a job: numbers, records, files, and printed lines."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import QUICKEST, REPOSITORY, command_line, in_ranks, launch, requires
from records import OF_ONE_RUN, lines
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from trainings import digest, fit, options_of, signs

from hvd_trainer import Callback, RunView, Trainer, accuracy
from hvd_trainer.config.options import Decay
from hvd_trainer.errors import UserError
from hvd_trainer.jobs.models import conv_net
from hvd_trainer.observe.progress import Progress
from hvd_trainer.optim.learning_rate import StepRate
from hvd_trainer.training.trainer import _finished

NUM = 40


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


class Rates(Callback):
    """A callback that records the effective learning rate of each step, and the calls."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.epochs: list[int] = []

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.rates.append(run.rate.last)

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self.epochs.append(record["epoch"])


def train(
    backend: str,
    folder: str | None = None,
    *,
    lr: float = 0.5,
    scheduler: Any = None,
    on_object: bool = False,
    data: Any = None,
    with_norm: bool = False,
    loss: Any = nn.functional.cross_entropy,
    **options: Any,
) -> dict[str, Any]:
    """Train once; return the records, the learning rates and the fingerprint of the weights."""
    rates = Rates()
    options = {"epochs": 2, "global_batch_size": 8, "log_dir": folder, "log_every": 3, **options}
    with Trainer(options_of(backend, **options)) as trainer:
        model = small_model()
        if with_norm:
            model = nn.Sequential(nn.BatchNorm1d(6), model)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        if on_object:
            scheduler = scheduler(optimizer)
        history = trainer.fit(
            model,
            optimizer,
            loss,
            data or signs(NUM),
            signs(7),
            scheduler=scheduler,
            metrics={"accuracy": accuracy},
            callbacks=[rates],
        )
    return {
        "records": history.epochs,
        "rates": rates.rates,
        "epochs": rates.epochs,
        "weights": digest(model.state_dict()),
        "finite": all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()),
        "own lr": optimizer.param_groups[0]["lr"],
    }


def halve(optimizer: Any) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def closed_form(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 0.5**epoch)


class BadLoss:
    """Cross-entropy that is not finite in some of the forward passes of one rank."""

    def __init__(self, rank: int, passes: set[int], bad: float = math.nan) -> None:
        self.passes, self.bad = (passes if rank == int(os.environ["RANK"]) else set()), bad
        self.count = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.count += 1
        return nn.functional.cross_entropy(outputs, targets) + (self.bad if self.count in self.passes else 0)


def refused(*args: Any, **options: Any) -> str:
    """Train until our own error; return its text."""
    try:
        train(*args, **options)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def many(backend: str, folder: str) -> dict[str, Any]:
    """Train several set-ups in one process, each of which starts the engine anew."""
    log = str(Path(folder) / backend)
    found = {
        "plain": train(backend, log),
        "again": train(backend),
        "halved": train(backend, scheduler=halve),
        "halved object": train(backend, scheduler=halve, on_object=True, lr_scaling="linear", warmup_epochs=0.6),
        "closed form": train(backend, scheduler=closed_form, warmup_epochs=1.6),
        "decayed": train(backend, warmup_epochs=0.4, lr_decay="linear"),
        "half a cosine": train(backend, lr_decay="cosine"),
        "accumulated": train(backend, accumulate=2, global_batch_size=24, max_norm=0.5),
        "bf16": train(backend, precision="bf16"),
        "fp16": train(backend, precision="fp16"),
        "not finite": refused(backend, f"{log}-nan", loss=BadLoss(1, {2})),
        "not finite in fp16": refused(backend, loss=BadLoss(1, {5}, math.inf), precision="fp16"),
        "skipped": train(backend, loss=BadLoss(1, {2, 4}), non_finite="skip", with_norm=True),
        "skipped, reproducible": train(
            backend, loss=BadLoss(1, {3}, math.inf), non_finite="skip", reproducible=4, with_norm=True
        ),
        "all skipped": refused(backend, loss=BadLoss(0, set(range(100))), non_finite="skip"),
    }
    if backend == "horovod":  # whose hooks are ours; compiling takes each rank 11 s
        found["compiled"] = train(backend, compile="default", epochs=1)
    return found


ENGINES = ("ddp", "horovod")
pytestmark = [requires("horovod"), pytest.mark.warm]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run all trainings of `many`, per engine and rank."""
    return {name: in_ranks(2, many, name, str(folder)) for name in ENGINES}


KINDS = (
    *("plain", "again", "halved", "halved object", "closed form", "decayed", "half a cosine"),
    *("accumulated", "bf16", "fp16", "compiled"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_train_the_same_bits(trained: dict[str, list[Any]], kind: str) -> None:
    runs = [rank[kind] for ranks in trained.values() for rank in ranks if kind in rank]
    assert len({run["weights"] for run in runs}) == 1
    assert all(run["rates"] == runs[0]["rates"] for run in runs)
    for run in runs:
        for mine, first in zip(run["records"], runs[0]["records"], strict=True):
            same = ("train_loss", "val_loss", "val_accuracy", "samples", "step", "skipped_steps")
            assert [mine[key] for key in same] == [first[key] for key in same]


def test_second_training_in_one_process_repeats_the_first(trained: dict[str, list[Any]]) -> None:
    for ranks in trained.values():
        assert ranks[0]["plain"]["weights"] == ranks[0]["again"]["weights"]
        assert ranks[0]["plain"]["epochs"] == [1, 2]


def test_learning_rates_follow_warmup_and_schedule(trained: dict[str, list[Any]]) -> None:
    """An epoch has 5 steps. A warm-up longer than an epoch made a closed-form scheduler overshoot."""
    runs = trained["ddp"][0]
    assert runs["plain"]["rates"] == [0.5] * 10
    assert runs["halved"]["rates"] == [0.5] * 5 + [0.25] * 5
    warm = [0.25, 0.5, 0.75, 1, 1]  # a start of 3 steps: 1/4, 2/4, 3/4
    assert runs["halved object"]["rates"] == pytest.approx([2 * 0.5 * share for share in warm] + [0.5] * 5)
    assert runs["halved object"]["own lr"] == 0.125, "the optimizer keeps the user's own rate"
    slow = [min(1, (step + 1) / 9) for step in range(10)]
    rates = [0.5 * slow[step] * (1 if step < 5 else 0.5) for step in range(10)]
    assert runs["closed form"]["rates"] == pytest.approx(rates)
    # A start of 2 steps, and 8 down to the zero that an eleventh would have.
    line = [1 / 3, 2 / 3] + [1 - step / 8 for step in range(8)]
    assert runs["decayed"]["rates"] == pytest.approx([0.5 * share for share in line])
    assert runs["decayed"]["own lr"] == 0.5
    wave = [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert runs["half a cosine"]["rates"] == pytest.approx([0.5 * share for share in wave])


def rate_at(epochs: float, **curves: Any) -> float:
    """Return the rate of a step after so many of four epochs, where it would be 1 without warm-up and decay."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with StepRate(optimizer, Progress(), epochs=4, **curves).apply(epochs):
        return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("steps_per_epoch", [500, 1000])
@pytest.mark.parametrize(("decay", "rate"), [("none", 1.0), ("linear", 0.75), ("cosine", 0.853553)])
def test_decay_resumes_with_another_epoch_length(decay: Decay, rate: float, steps_per_epoch: int) -> None:
    """Resumed at a quarter of all epochs, with half as many steps in each, a decay had ended at a rate of 0.5."""
    assert rate_at(1.0, step_epochs=1 / steps_per_epoch, decay=decay) == pytest.approx(rate)


def resumed_in_warmup(backend: str, folder: str, **options: Any) -> tuple[list[float], float]:
    """Train with warm-up over one epoch; return the rates of all steps, and that of the last line of the log."""
    how = {"global_batch_size": None, "batch_size": 4, "warmup_epochs": 1.0, "lr_decay": "linear", **options}
    return train(backend, folder, **how)["rates"], lines(Path(folder))[-1]["lr"]


@pytest.mark.parametrize(("backend", "before"), [("ddp", 7), ("horovod", 5)])
def test_warmup_resumes_on_half_of_the_ranks(backend: str, before: int, tmp_path: Path) -> None:
    """Warm-up counted steps, of which one rank has twice as many: the rate was 0.6 of what it should be."""
    args = (resumed_in_warmup, backend, str(tmp_path))
    for first, _ in in_ranks(2, *args, max_steps=before):
        assert first[:5] == pytest.approx([0.5 * (step / 5 + 0.2) / 1.2 for step in range(5)])
    ((resumed, _),) = in_ranks(1, *args, resume="auto")
    # A step of one rank is a tenth of an epoch; the second epoch is the decay.
    done = [before / 5 + step / 10 for step in range(20 - 2 * before)]
    assert resumed == pytest.approx([0.5 * (2 - epochs) for epochs in done])
    # Nothing is left to train: the rate is that of the last step, not that of the end of the decay.
    assert in_ranks(1, *args, resume="auto") == [([], pytest.approx(0.05))]


class Diverging(nn.Module):
    """A loss that is infinite in evaluations of the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        self.evaluations += not torch.is_grad_enabled()
        return loss if torch.is_grad_enabled() or self.evaluations > 1 else loss * math.inf


def train_in_parts(backend: str, folder: str) -> list[list[dict[str, Any]]]:
    """Train an epoch, two more, and again when nothing is left, also in another folder; return the records."""
    log = {"log_dir": folder, "resume": "auto"}
    elsewhere = {"log_dir": f"{folder}-2", "resume": folder}
    longer = {"epochs": 4, "max_steps": 17, **log}
    parts = [{"epochs": 1, **log}, *[{"epochs": 3, **log}] * 2, {"epochs": 3, **elsewhere}, longer, longer]
    runs = []
    for part in parts:
        _finished.clear()  # each stands for a process of its own
        runs.append(train(backend, loss=Diverging(), **part))
    return [[{k: v for k, v in r.items() if k not in OF_ONE_RUN} for r in run["records"]] for run in runs]


@pytest.mark.parametrize(("backend", "size"), [("single", 1), ("ddp", 2), ("horovod", 2)])
def test_history_of_a_resumed_run_has_all_epochs(backend: str, size: int, tmp_path: Path) -> None:
    """The history of a finished run was empty: `fit(...)[-1]["val_loss"]` was an IndexError."""
    for rank in in_ranks(size, train_in_parts, backend, str(tmp_path)):
        first, all_three, again, elsewhere, longer, finished = rank
        assert [record["epoch"] for record in all_three] == [1, 2, 3]
        assert all_three[0] == first[0]
        assert (first[0]["val_loss"], again) == (math.inf, all_three)
        figures = ("epoch", "step", "val_loss", "val_accuracy", "train_loss", "lr")
        assert [elsewhere[-1][name] for name in figures] == [again[-1][name] for name in figures]
        assert [record["step"] for record in longer] == [5, 10, 15, 17]
        assert finished == longer
    events = [(line["event"], line["step"]) for line in lines(tmp_path)]
    assert events[-3:] == [("epoch", 15), ("epoch", 17), ("end", 17)]


def test_records_count_steps_and_samples(trained: dict[str, list[Any]]) -> None:
    runs = trained["horovod"][0]
    last = runs["accumulated"]["records"][-1]
    # 20 samples per rank in batches of 6 are 4 batches, in windows of 2.
    assert (last["step"], last["samples"], last["global_batch_size"]) == (4, 80, 24)
    last = runs["plain"]["records"][-1]
    assert (last["step"], last["samples"], last["epoch"], last["world_size"]) == (10, 80, 2, 2)
    assert runs["fp16"]["records"][-1]["skipped_steps"] >= 0


@pytest.mark.parametrize("name", ENGINES)
def test_metrics_jsonl_has_all_records(trained: dict[str, list[Any]], folder: Path, name: str) -> None:
    written = lines(folder / name)
    assert [(line["event"], line["epoch"], line["step"]) for line in written] == [
        *(("step", 1, 3), ("epoch", 1, 5), ("step", 2, 6), ("step", 2, 9), ("epoch", 2, 10), ("end", 2, 10)),
    ]
    accounting = {"backend", "launcher", "world_size", "epoch", "step", "samples", "global_batch_size", "lr"}
    results = {"train_loss", "train_accuracy", "val_loss", "val_accuracy", "samples_per_s"}
    for line in written:
        assert accounting | {"skipped_steps", "train_loss"} <= set(line)
        assert results <= set(line) or line["event"] == "step"
        assert (line["backend"], line["launcher"], line["samples"]) == (name, "hand", 8 * line["step"])
    own = ("event", "time", "started_at")
    epochs = [{k: v for k, v in line.items() if k not in own} for line in written if line["event"] == "epoch"]
    assert epochs == trained[name][0]["plain"]["records"]


@pytest.mark.parametrize("name", ENGINES)
def test_non_finite_loss_ends_all_ranks(trained: dict[str, list[Any]], folder: Path, name: str) -> None:
    """All ranks name the step and the rank whose loss it was, and nothing is saved after it."""
    for rank in trained[name]:
        assert rank["not finite"].startswith("NonFiniteError: The loss of rank 1 was not finite in step 2:")
        assert rank["not finite in fp16"].startswith(
            "NonFiniteError: The loss of rank 1 was not finite in step 5:"
        )
        assert rank["all skipped"].startswith("NonFiniteError: Every step of epoch 1 was skipped")
    (line,) = lines(folder / f"{name}-nan")
    assert (line["event"], line["step"], line["train_loss"]) == ("step", 3, "nan")
    assert not list((folder / f"{name}-nan").glob("checkpoints/*"))


@pytest.mark.parametrize(("kind", "skipped"), [("skipped", 2), ("skipped, reproducible", 1)])
def test_non_finite_steps_are_skipped(trained: dict[str, list[Any]], kind: str, skipped: int) -> None:
    """One rank's loss is not finite: weights, batch norm's statistics and figures stay finite and equal."""
    runs = [rank[kind] for ranks in trained.values() for rank in ranks]
    assert len({run["weights"] for run in runs}) == 1
    for run in runs:
        assert run["finite"]
        assert [record["skipped_steps"] for record in run["records"]] == [skipped, skipped]
        assert all(math.isfinite(record["train_loss"]) for record in run["records"])


@pytest.mark.usefixtures("trained")
def test_run_writes_weights_and_tensorboard(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    weights = [(folder / name / "model.safetensors").read_bytes() for name in ENGINES]
    assert weights[0] == weights[1]
    small_model().load_state_dict(load_file(folder / "ddp" / "model.safetensors"))
    board = EventAccumulator(str(folder / "ddp"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "lr", "step/train/loss"} <= tags
    written = [line["val_loss"] for line in lines(folder / "ddp", "epoch")]
    assert [event.value for event in board.Scalars("val/loss")] == pytest.approx(written)


def test_run_without_tensorboard_names_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorBoard is in an extra; all figures are in metrics.jsonl, too."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level("INFO", "hvd_trainer"):
        fit(options_of(log_dir=str(tmp_path), epochs=1, quiet=False), small_model(), signs(NUM))
    assert caplog.text.count("without TensorBoard's file, which needs: pip install ") == 1
    assert "[tensorboard]'" in caplog.text
    assert [line["event"] for line in lines(tmp_path)][-1] == "end"
    assert not list(tmp_path.glob("events*"))


def test_plateau_scheduler_survives_a_second_fit() -> None:
    model, data = small_model(), signs(NUM)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Trainer(options_of()) as trainer:
        for _ in range(2):
            plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, threshold_mode="abs")
            history = trainer.fit(model, optimizer, nn.functional.cross_entropy, data, data, scheduler=plateau)
            assert len(history.epochs) == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4), "two of three epochs, twice, did not improve"


# As a user starts it.

JOB = ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1", "--epochs", "2", "--batch-size", "64"]


@pytest.mark.long
def test_default_job_learns_the_digits_that_stand_in_for_mnist(tmp_path: Path) -> None:
    """With the batch and the epochs for MNIST, three at that time, 1,438 digits were 9 steps, and 72.7 % right."""
    # Nothing is downloaded through a proxy that is not there.
    offline = {"XDG_CACHE_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    result = launch(QUICKEST, 4, ["-m", "hvd_trainer.mnist", "--backend", "ddp"], env=offline)
    assert "No MNIST, so this run trains on 1,438 embedded digits, 12 times each in an epoch" in result.stdout
    assert float(result.stdout.rpartition("val accuracy ")[2].partition("%")[0]) > 95


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ([], "torchrun --nproc-per-node {}"),
        pytest.param(["--backend", "horovod"], "horovodrun -np {} python", marks=requires("horovod")),
        (["--backend", "single"], None),
    ],
)
def test_lone_rank_is_told_how_to_use_all_cores(options: list[str], command: str | None) -> None:
    argv = ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1", "--max-steps", "1", *options]
    result = launch("python", 1, argv)
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        pytest.skip("this machine has one core, on which a lone rank is right")
    told = [line for line in result.stdout.splitlines() if line.startswith("launch ")]
    assert told == (
        [f"launch   one rank; with one for each core: {command.format(cores)} {' '.join(argv)}"] if command else []
    )


def test_output_in_a_pipe_is_plain_lines(tmp_path: Path) -> None:
    result = launch("torchrun", 2, [*JOB, "--backend", "ddp", "--log-dir", str(tmp_path), "--lr-scaling", "sqrt"])
    out = result.stdout.splitlines()
    heads = [line.split()[0] for line in out]
    assert " ".join(heads) == "backend world batch rate numbers data model log epoch epoch done:"
    text = result.stdout
    for words in (
        "world    2 ranks on 1 node, started by torchrun; CPU, 1 thread each",
        "64 x 2 ranks x 1 pass = 128 per step, 12 steps per epoch",
        "lr 0.00565685 (scaled: sqrt, x 1.41421)",
        "data     digits: 1,438 samples to train on, 359 to validate on",
        f"done: 24 steps in {text.rpartition(' steps in ')[2]}".splitlines()[0],
        f"weights and metrics in {tmp_path}",
    ):
        assert words in text
    last = lines(tmp_path)[-1]
    assert f"val loss {last['val_loss']:.5f} accuracy {last['val_accuracy']:.2%}" in out[-2]
    assert "it/s" not in result.stderr
    assert "samples/s" not in result.stderr, "no bar in a pipe"
    conv_net().load_state_dict(load_file(tmp_path / "model.safetensors"))


class Counter(nn.Linear):
    """A layer with a state that is no tensor, and one whose shape changes: how often it was called."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "shape": torch.zeros(self.calls)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        assert len(state["shape"]) == self.calls


def count_calls(backend: str, folder: str, **options: Any) -> list[list[int]]:
    """Train one epoch, and another one in a resumed run; return the calls of each layer after each."""
    calls = []
    for epochs in (1, 2):
        model = nn.Sequential(Counter(6, 4), Counter(4, 2))
        how = {"epochs": epochs, "global_batch_size": 8, "log_dir": folder, "resume": "auto", **options}
        fit(options_of(backend, **how), model, signs(24))
        calls.append([layer.calls for layer in model])  # type: ignore[misc]
    return calls


@pytest.mark.parametrize(
    ("backend", "options"),
    [("ddp", {}), ("horovod", {}), ("ddp", {"shard": "full"}), ("ddp", {"stages": 2})],
    ids=str,
)
def test_extra_state_of_modules_is_kept(backend: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The start compared its shape, which it need not have, and a stage's was overwritten by another stage's."""
    for rank, (first, second) in enumerate(in_ranks(2, count_calls, backend, str(tmp_path), **options)):
        own = slice(rank, rank + 1) if "stages" in options else slice(None)
        assert min(first[own]) > 0
        assert second[own] == [2 * count for count in first[own]]
    assert load_file(tmp_path / "model.safetensors").keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


class Outputs:
    """A metric that keeps all outputs."""

    def reset(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, outputs: Any, targets: Any) -> None:
        self.kept.append(outputs)

    def merge_state(self, other: Any) -> None:
        self.kept += other.kept

    def compute(self) -> float:
        return float(torch.cat(self.kept).sum())


@pytest.mark.parametrize("options", [{}, {"non_finite": "skip"}, {"chunks": 2}], ids=str)
def test_metrics_get_outputs_without_their_graph(options: dict[str, Any]) -> None:
    """A metric that keeps outputs kept the activations of a whole epoch."""
    outputs = Outputs()
    options = {"epochs": 1, "global_batch_size": 8, **options}
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    fit(options_of("single", **options), model, signs(24), metrics={"outputs": outputs})
    assert len(torch.cat(outputs.kept)) == 24
    assert not any(tensor.requires_grad for tensor in outputs.kept)


class RateOfGroup(Callback):
    """A callback that sets the rate of a parameter group that it was given before the training."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.group["lr"] = 0.0
        self.after_first = self.after_first or run.model[0].bias.tolist()

    after_first: list[float] | None = None


def test_callback_sets_the_rate_of_a_group_that_it_holds_also_after_a_resume(tmp_path: Path) -> None:
    options = {"global_batch_size": 8, "log_dir": str(tmp_path), "save_every_epochs": 1}
    model = small_model()
    fit(options_of("single", epochs=1, **options), model, signs(NUM))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = RateOfGroup(optimizer.param_groups[0])
    options = {**options, "epochs": 2, "resume": "auto"}
    fit(options_of("single", **options), model, signs(NUM), optimizer=optimizer, callbacks=[rate])
    assert model[0].bias.tolist() == rate.after_first


class Frozen(Callback):
    """A callback that notes how many objects garbage collections leave out."""

    def __init__(self) -> None:
        self.counts: set[int] = set()

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.counts.add(gc.get_freeze_count())


def count_frozen(backend: str) -> tuple[int, int]:
    """Train once; return the rank, and how many objects are frozen: the least in its steps, and at the end."""
    frozen, model = Frozen(), small_model()
    fit(options_of(backend, epochs=1), model, signs(NUM), callbacks=[frozen])
    return min(frozen.counts), gc.get_freeze_count()


def test_garbage_collections_leave_out_modules_while_ranks_train() -> None:
    """A full collection took 0.17 s with PyTorch's modules, at another step in each rank."""
    for in_steps, after in in_ranks(2, count_frozen, "ddp"):
        assert in_steps > 100_000
        assert after == 0
    assert count_frozen("single") == (0, 0), "a notebook's next model may need the memory of the last one"


def test_quiet_prints_nothing() -> None:
    quiet = launch("python", 1, [*JOB, "--backend", "single", "--epochs", "1", "--quiet"])
    assert (quiet.stdout, quiet.stderr) == ("", "")


def on_a_terminal(command: list[str], limit_s: float = 90) -> str:
    """Return everything that a command prints on a terminal."""
    leader, follower = pty.openpty()
    # A new one has no columns, in which tqdm draws nothing.
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdout=follower, stderr=follower, stdin=follower, cwd=REPOSITORY, env=environ
    )
    os.close(follower)
    text, deadline = b"", time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            if not select.select([leader], [], [], 1)[0]:
                continue
            try:
                text += os.read(leader, 65536)
            except OSError:
                break
    finally:
        process.kill() if process.poll() is None and time.monotonic() >= deadline else process.wait(20)
        os.close(leader)
    assert process.returncode == 0, text.decode()
    return text.decode()


@pytest.mark.parametrize("launcher", ["python", "horovodrun"])
def test_terminal_shows_one_progress_bar(launcher: str) -> None:
    size = 1 if launcher == "python" else 2
    argv = [*JOB, "--batch-size", "8", "--workers", "0", "--backend", "single" if size == 1 else "horovod"]
    text = on_a_terminal(command_line(launcher, size, argv))
    assert "epoch 1/2:" in text
    assert "samples/s" in text
    assert "[1]<stderr>:" not in text
    assert "done: " in text
