"""The main job: MNIST on all ranks. `horovodrun -np 4 python -m hvd_trainer.mnist --help`"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from hvd_trainer.config.checks import at_least, more_than
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.jobs.images import ImageOptions, load_images
from hvd_trainer.jobs.models import MODELS
from hvd_trainer.jobs.optimizers import OptimizerName, make_optimizer
from hvd_trainer.observe.metrics import accuracy
from hvd_trainer.training.trainer import Trainer


@dataclass(frozen=True)
class ModelOptions:
    """The model and its optimizer."""

    model: Literal["cnn", "mlp", "quick"] = "cnn"
    """the small convolutional network of the tutorials; two hidden layers; or one that learns quickest"""
    optimizer: OptimizerName = "adam"
    """how gradients become updates"""
    lr: float = 2e-3
    """learning rate, before --lr-scaling (the tutorials' 1e-4 would not reach 97 % in 3 epochs)"""
    momentum: float = 0.9
    """sgd only"""
    weight_decay: float = 0.0
    """decay of the weights (adamw: decoupled)"""


@dataclass(frozen=True)
class MnistOptions(TrainerOptions):
    """Train a small network on MNIST, on Horovod or on native DDP, under any launcher."""

    data: ImageOptions = field(default_factory=ImageOptions)
    network: ModelOptions = field(default_factory=ModelOptions)

    def mistakes(self) -> list[str]:
        network = self.network
        return [
            *super().mistakes(),
            *at_least(0, momentum=network.momentum, weight_decay=network.weight_decay),
            *more_than(0, lr=network.lr),
        ]


def train(options: MnistOptions) -> None:
    """Runs the job in this process, as one rank of however many there are."""
    with Trainer(options) as trainer:
        images = load_images(options.data, trainer.backend)
        trainer.say(images.note)
        network = options.network
        model = MODELS[network.model]()
        trainer.fit(
            model,
            make_optimizer(
                model,
                network.optimizer,
                lr=network.lr,
                momentum=network.momentum,
                weight_decay=network.weight_decay,
                device=trainer.device,
                options=options,
            ),
            nn.functional.cross_entropy,
            images.train,
            images.test,
            metrics={"accuracy": accuracy},
        )
