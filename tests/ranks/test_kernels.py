"""Options for kernels: channels last, TF32, fused updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import QUICKEST, launch, requires
from safetensors.torch import load_file
from torch import nn
from trainings import fit, options_of, signs

from hvd_trainer import OptionError
from hvd_trainer.jobs.models import MODELS
from hvd_trainer.jobs.optimizers import make_optimizer
from hvd_trainer.jobs.options import OptimizerOptions
from hvd_trainer.utils import accelerator

pytestmark = pytest.mark.warm


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@requires("horovod")
def test_channels_last_weights_are_saved_and_restored(tmp_path: Path) -> None:
    words = "-m hvd_trainer.mnist --dataset digits --repeat 1 --model quick --channels-last --resume auto"
    job = [*words.split(), "--log-dir", str(tmp_path)]
    said = launch(QUICKEST, 2, [*job, "--epochs", "1", "--backend", "horovod"]).stdout
    assert "numbers  fp32, seed 0, channels last" in said
    assert '"channels_last": true' in (tmp_path / "run.json").read_text()
    assert "done: " in launch(QUICKEST, 2, [*job, "--epochs", "2", "--backend", "ddp"]).stdout
    MODELS["quick"]().load_state_dict(load_file(tmp_path / "model.safetensors"))


# What cannot be is said: what options say of each other is in test_config.py.


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(OptionError, match="--tf32 is for GPUs, and this rank trains on CPU: leave it out"):
        fit(options_of(device="cpu", tf32=True), nn.Linear(6, 2), signs(4))


@pytest.mark.parametrize(
    ("device", "words"),
    [("auto", "CPU (ranks cannot train on the mps device of this machine), 1 thread"), ("cpu", "CPU, 1 thread")],
)
def test_unused_accelerator_is_named(
    device: Any, words: str, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    """Training went to the CPU without a warning."""
    monkeypatch.setattr(accelerator, "unsupported", lambda: "mps")
    fit(options_of(device=device, threads=1, max_steps=1, quiet=False), nn.Linear(6, 2), signs(4))
    assert words in logged()


# What is set for the whole process is set back.


def test_tf32_restores_the_setting() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with accelerator.tf32():
            assert torch.get_float32_matmul_precision() == "high"
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.get_float32_matmul_precision() == "highest"


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
