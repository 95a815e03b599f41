"""Train a small network on MNIST."""

from __future__ import annotations

from torch import nn

from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.models import MODELS
from hvd_trainer.jobs.optimizers import make_optimizer
from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.observe.metrics import accuracy
from hvd_trainer.training.trainer import Trainer


def train(options: MnistOptions) -> None:
    """Run the job in this process, as one rank of however many there are."""
    with Trainer(options) as trainer:
        images = load_images(options.data, trainer.backend)
        trainer.say(images.note)
        model = MODELS[options.network.model]()
        trainer.fit(
            model,
            make_optimizer(model, options.optimizer, device=trainer.device, options=options),
            nn.functional.cross_entropy,
            images.train,
            images.test,
            metrics={"accuracy": accuracy},
        )
