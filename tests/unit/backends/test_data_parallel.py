"""`--backend data-parallel`: its arithmetic without GPUs, where one of two copies is computed after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from trainings import options_of

from hvd_trainer import BackendError, OptionError, TensorData, Trainer, backends
from hvd_trainer.backends.data_parallel import DataParallelBackend
from hvd_trainer.measure import measured
from hvd_trainer.tools.compare.options import CompareOptions
from hvd_trainer.tools.compare.plan import plan
from hvd_trainer.utils import accelerator

JOB = ("-m", "hvd_trainer.mnist")


class InTurn(nn.Module):
    """A wrapper that does what `nn.DataParallel` does, on one device."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.module(part) for part in inputs.chunk(2)])


class OnTwoCopies(DataParallelBackend):
    num_replicas = 2  # type: ignore[assignment]

    def _start(self) -> None:
        pass

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, exchange: bool = True
    ) -> tuple[nn.Module, Optimizer]:
        return InTurn(model), optimizer


def train(backend: str, batch_size: int) -> tuple[int, list[dict[str, object]], dict[str, Tensor]]:
    with Trainer(options_of(backend, epochs=2, batch_size=batch_size)) as trainer:
        inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(1))
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorData(inputs, (inputs[:, 0] > 0).long())
        history = trainer.fit(model, optimizer, nn.functional.cross_entropy, data)
        return history.end["global_batch_size"], history.epochs, model.state_dict()


def test_data_parallel_step_takes_a_batch_per_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has the samples of one process with twice the batch, summed in another order."""
    monkeypatch.setitem(backends.BACKENDS, "data-parallel", f"{__name__}:OnTwoCopies")
    size, epochs, weights = train("data-parallel", 8)
    alone_size, alone_epochs, alone_weights = train("single", 16)
    assert size == alone_size == 16
    assert [epoch["step"] for epoch in epochs] == [epoch["step"] for epoch in alone_epochs] == [7, 14]
    assert [epoch["samples"] for epoch in epochs] == [100, 200]
    for name, tensor in weights.items():
        # Of 14 steps, each with a rounding or two of 1.2e-7.
        torch.testing.assert_close(tensor, alone_weights[name], rtol=1e-5, atol=1e-6)


def test_data_parallel_needs_two_gpus() -> None:
    with pytest.raises(BackendError, match="needs two GPUs or more in one process, and this one has none"):
        Trainer(options_of("data-parallel", device="cpu")).__enter__()


@pytest.mark.parametrize("reproducible", [2, None])
def test_data_parallel_refuses_conflicting_options(reproducible: int | None) -> None:
    options = options_of("data-parallel", sync_batch_norm=True, reproducible=reproducible)
    with pytest.raises(OptionError, match="--reproducible|--sync-batch-norm with --backend data-parallel"):
        Trainer(options).__enter__()


def test_compare_gives_data_parallel_a_gpu_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "count", lambda kind: 4)
    trials = plan(JOB, [], CompareOptions(np="1,2,4", backend="ddp,data-parallel"), {})
    labels = [trial.label for trial in trials]
    assert labels == ["ddp x 1", "ddp x 2", "data-parallel x 2", "ddp x 4", "data-parallel x 4"]
    log = Path("log")
    processes: list[int] = []
    monkeypatch.setattr(measured, "read_figures", lambda log, number, warmup_steps: processes.append(number))
    assert [trial.read(log) for trial in trials] == [None] * 5
    assert processes == [1, 2, 1, 4, 1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert trials[2].start(log).variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert trials[2].start(log).variables["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert "CUDA_VISIBLE_DEVICES" not in trials[1].start(log).variables


@pytest.mark.parametrize(("most", "gpus"), [(2, 1), (1, 4), (4, 2)])
def test_compare_refuses_data_parallel_without_enough_gpus(
    most: int, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "count", lambda kind: gpus)
    with pytest.raises(OptionError, match="needs as many GPUs as ranks"):
        plan(JOB, [], CompareOptions(np=f"1,{most}", backend="data-parallel"), {})
