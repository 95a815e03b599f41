"""A regression on data of your own, with an option and a metric of your own."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn, optim

from hvd_trainer import Callback, MLflowTracker, TensorData, Trainer, TrainerOptions, WandbTracker, run_job


@dataclass(frozen=True)
class Options(TrainerOptions):
    """Fit a noisy wave."""

    hidden: int = 64
    """width of the hidden layer"""
    tracker: Literal["none", "wandb", "mlflow"] = "none"
    """where figures are sent to: Weights & Biases or MLflow"""


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean(dim=1)


def main(options: Options) -> None:
    with Trainer(options) as trainer:
        x = torch.linspace(-3, 3, 10_000).unsqueeze(1)
        y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
        train, test = TensorData(x[::2], y[::2], name="wave"), TensorData(x[1::2], y[1::2], name="wave")
        model = nn.Sequential(nn.Linear(1, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 1))
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        callbacks: list[Callback] = []
        if options.tracker == "wandb":
            callbacks = [WandbTracker(project="wave")]
        if options.tracker == "mlflow":
            callbacks = [MLflowTracker(run_name="wave")]
        metrics = {"mae": mean_absolute_error}
        trainer.fit(model, optimizer, nn.functional.mse_loss, train, test, metrics=metrics, callbacks=callbacks)


if __name__ == "__main__":
    run_job(Options, main)
