"""MNIST on every GPU or core there is: the whole job. Start it by any launcher, or by none."""

from dataclasses import dataclass, field

import torch
from torch import nn

from hvd_trainer import Trainer, TrainerOptions, accuracy, run_job
from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.options import ImageOptions


@dataclass(frozen=True)
class Options(TrainerOptions):
    data: ImageOptions = field(default_factory=ImageOptions)
    lr: float = 1e-3
    """learning rate"""


def main(options: Options) -> None:
    with Trainer(options) as trainer:
        images = load_images(options.data, trainer.backend)
        trainer.say(images.note)
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 13 * 13, 10)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
        loss = nn.functional.cross_entropy
        trainer.fit(model, optimizer, loss, images.train, images.test, metrics={"accuracy": accuracy})


if __name__ == "__main__":
    run_job(Options, main)
