"""Options for kernels: captured steps, channels last, TF32, cuDNN's benchmark, fused updates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launchers import QUICKEST, launch, requires, run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from trainings import digest, fit, options_of, signs

from hvd_trainer import OptionError, TensorData, Trainer, accuracy
from hvd_trainer.jobs.models import MODELS
from hvd_trainer.jobs.optimizers import make_optimizer
from hvd_trainer.jobs.options import OptimizerOptions
from hvd_trainer.utils import accelerator

pytestmark = pytest.mark.warm


class Kept:
    """A metric object that keeps the outputs themselves until the end."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs.detach())

    def compute(self) -> float:
        return float(torch.cat(self.outputs).double().sum()) if self.outputs else 0.0

    def reset(self) -> None:
        self.outputs = []

    def merge_state(self, other: Kept) -> None:
        self.outputs += other.outputs


class Where(nn.Module):
    """A model that records at which addresses its inputs were."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.places.append(inputs.data_ptr())
        return inputs


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        Where(), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(64, 3)
    )


def optimizer_of(kind: str, its: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(its.parameters(), lr=0.25, momentum=0.5, fused=True)
    return torch.optim.AdamW(its.parameters(), lr=0.03125, weight_decay=0.5, fused=True)


def train(backend: str, *, optimizer: str = "adamw", weight: Any = None, **options: Any) -> dict[str, Any]:
    """Train two epochs of 17 steps, the last one smaller; the rates are exact in fp32, too."""
    wanted = {"epochs": 2, "global_batch_size": 8, "max_norm": 1.0, **options}
    launches: list[Callable[[], None]] = []

    def capture(run: Callable[[], None], stream: Any) -> Callable[[], None]:
        assert stream == "that of prepare"
        launches.append(run)
        return run

    with (
        mock.patch.object(accelerator, "can_capture", return_value=True),
        mock.patch.object(accelerator, "capture", capture),
        mock.patch.object(accelerator, "side_stream", return_value=nullcontext("that of prepare")),
        Trainer(options_of(backend, **wanted)) as trainer,
    ):
        its = model()
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(132, 2, 6, 6, generator=generator)
        data = TensorData(inputs, torch.randint(3, (132,), generator=generator))
        history = trainer.fit(
            its,
            optimizer_of(optimizer, its),
            nn.functional.cross_entropy,
            data,
            data,
            scheduler=lambda its: torch.optim.lr_scheduler.StepLR(its, 1, 0.5),
            metrics={"accuracy": accuracy, "sum": Kept()},
            weight=weight,
        )
        rank = trainer.world.rank
    where = its[0]
    assert isinstance(where, Where)
    return {
        "weights": digest({name: tensor.contiguous() for name, tensor in its.state_dict().items()}),
        "figures": [
            {k: v for k, v in record.items() if k.endswith(("loss", "accuracy", "sum")) and math.isfinite(v)}
            for record in history.epochs
        ],
        "captured": len(launches),
        "places": len(set(where.places[-16:-1])),  # all of the second epoch's, but the last one
        "strides": its[1].weight.stride(),
        "rank": rank,
    }


def sum_of_classes(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[1].sum()


def both(backend: str) -> tuple[int, list[dict[str, Any]]]:
    """Train captured and not, each plain, with channels-last parameters, and with batches that have weights."""
    found = [
        train(backend),
        train(backend, capture_step=True),
        train(backend, channels_last=True),
        train(backend, channels_last=True, capture_step=True),
        train(backend, weight=sum_of_classes),
        train(backend, weight=sum_of_classes, capture_step=True),
    ]
    return found[0]["rank"], found


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_captured_step_trains_the_same_bits(optimizer: str, max_norm: float | None) -> None:
    """A stand-in replaces the graph; compared are the weights and the figures, also after a smaller batch."""
    plain = train("single", optimizer=optimizer, max_norm=max_norm)
    captured = train("single", optimizer=optimizer, max_norm=max_norm, capture_step=True)
    assert (plain["captured"], captured["captured"]) == (0, 1)
    assert captured["weights"] == plain["weights"]
    assert captured["figures"] == plain["figures"]
    assert plain["places"] > 1
    assert captured["places"] == 1, "each batch is brought to where the first one was"


@requires("horovod")
def test_engines_train_the_same_bits_captured_and_channels_last() -> None:
    """Horovod's exchange follows its graph, and DDP's is part of it."""
    runs = {name: run_ranks(both, num_processes=2, args=(name,)) for name in ("ddp", "horovod")}
    ranks = [rank for engine in runs.values() for rank in engine]
    assert [its["captured"] for its in ranks[0]] == [0, 1, 0, 1, 0, 1]
    assert ranks[0][4]["weights"] != ranks[0][0]["weights"]
    for plain, captured in ((0, 1), (2, 3), (4, 5)):
        found = {rank[number]["weights"] for rank in ranks for number in (plain, captured)}
        assert len(found) == 1
        assert {rank[captured]["places"] for rank in ranks} == {1}
        assert all(rank[captured]["figures"] == rank[plain]["figures"] for rank in ranks)
    for rank in ranks:
        assert rank[0]["strides"] == (18, 9, 3, 1)
        assert rank[2]["strides"] == rank[3]["strides"] == (18, 1, 6, 2)


@requires("horovod")
def test_channels_last_weights_are_saved_and_restored(tmp_path: Path) -> None:
    job = ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--model", "quick", "--channels-last"]
    job += ["--log-dir", str(tmp_path), "--resume", "auto"]
    said = launch(QUICKEST, 2, [*job, "--epochs", "1", "--backend", "horovod"]).stdout
    assert "numbers  fp32, seed 0, channels last" in said
    assert '"channels_last": true' in (tmp_path / "run.json").read_text()
    assert "done: " in launch(QUICKEST, 2, [*job, "--epochs", "2", "--backend", "ddp"]).stdout
    MODELS["quick"]().load_state_dict(load_file(tmp_path / "model.safetensors"))


# What cannot be is said: what options say of each other is in test_config.py.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"capture_step": True},
            "--capture-step needs a GPU that captures graphs, and this rank trains on CPU: leave",
        ),
        ({"tf32": True}, "--tf32 is for GPUs, and this rank trains on CPU: leave it out"),
        ({"cudnn_benchmark": True}, "--cudnn-benchmark needs cuDNN, and CPU has none: leave it out"),
    ],
)
def test_gpu_options_are_refused_on_a_cpu(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        fit(options_of(device="cpu", **options), nn.Linear(6, 2), signs(4))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("auto", "CPU (ranks cannot train on the mps device of this machine), 1 thread"),
        ("cpu", "CPU, 1 thread"),
    ],
)
def test_unused_accelerator_is_named(
    device: Any, words: str, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    """Training went to the CPU without a warning."""
    monkeypatch.setattr(accelerator, "unsupported", lambda: "mps")
    fit(options_of(device=device, threads=1, max_steps=1, quiet=False), nn.Linear(6, 2), signs(4))
    assert words in logged()


def test_capture_step_needs_a_fused_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "optimizer_of", lambda kind, its: torch.optim.AdamW(its.parameters()))
    with pytest.raises(OptionError, match="this AdamW does not: make it with fused=True"):
        train("single", capture_step=True)


# What is set for the whole process is set back.


def test_fast_kernels_restores_settings() -> None:
    def now() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = now()
        with accelerator.fast_kernels(tf32=True, cudnn_benchmark=True):
            assert now() == ("high", True)
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert now() == before == ("highest", False)
        with accelerator.fast_kernels(tf32=False, cudnn_benchmark=False):
            assert now() == before


# One kernel for an update, where that is quicker.


@pytest.mark.parametrize(
    ("name", "device", "options", "fused"),
    [
        ("adam", CPU, {}, None),
        ("sgd", CPU, {}, None),
        ("adam", CUDA, {}, True),
        ("adamw", CUDA, {"precision": "fp16"}, True),
        ("adamw", CUDA, {"shard": "full"}, True),
        ("sgd", CUDA, {}, True),
        ("sgd", CUDA, {"precision": "fp16"}, None),
        ("sgd", CUDA, {"shard": "full"}, None),
    ],
)
def test_updates_are_fused_on_accelerators(
    name: Any, device: torch.device, options: dict[str, Any], fused: bool | None
) -> None:
    """The model is still on the CPU when its optimizer is made."""
    model = nn.Linear(2, 2)
    choice = OptimizerOptions(name, lr=0.1)
    made = make_optimizer(model, choice, device=device, options=options_of(**options))
    assert [group["fused"] for group in made.param_groups] == [fused]


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(CPU, CUDA), (CUDA, CPU)])
def test_checkpoint_of_another_device_keeps_fused(saved_on: torch.device, loaded_on: torch.device) -> None:
    """PyTorch restores `fused` from the checkpoint: a GPU's, resumed on CPUs, trained other bits; and the other
    way round a loss scaler met an optimizer that did not expect it.
    """
    inputs = torch.ones(1, 2)

    def made(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        choice = OptimizerOptions("adam", lr=0.1)
        return model, make_optimizer(model, choice, device=device, options=options_of())

    model, optimizer = made(saved_on)
    model(inputs).sum().backward()
    optimizer.step()
    other, its = made(loaded_on)
    wanted = its.param_groups[0]["fused"]
    its.load_state_dict(optimizer.state_dict())
    assert its.param_groups[0]["fused"] is wanted
    assert its.state_dict()["state"][0]["step"] == 1
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(other(inputs).sum()).backward()
    scaler.step(its)
