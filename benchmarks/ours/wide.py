"""Three linear layers on MNIST, as wide as is wanted: gradients of some megabytes, and little arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import cross_entropy

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.data import TensorData
from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.models import mlp
from hvd_trainer.jobs.options import ImageOptions
from hvd_trainer.training.job import run_job
from hvd_trainer.training.trainer import Trainer

LR, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True)
class Options(TrainerOptions):
    """The trainer's, and:"""

    data: ImageOptions = field(default_factory=ImageOptions)
    width: int = 512
    """of the hidden layers"""
    samples: int = 60_000
    """images of an epoch, the first of the training set; as many as there are, if that is fewer"""


def main(options: Options) -> None:
    with Trainer(options) as trainer:
        images = load_images(options.data, trainer.backend)
        whole = images.train
        train = TensorData(
            whole.inputs[: options.samples], whole.targets[: options.samples], whole.transform, whole.name
        )
        model = mlp(options.width)
        # With Adam, PowerSGD's error would be divided by the gradients' own size: its authors have it with this.
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        trainer.fit(model, optimizer, cross_entropy, train, images.test)


if __name__ == "__main__":
    run_job(Options, main)
