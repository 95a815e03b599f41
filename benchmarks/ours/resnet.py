"""ResNet-18 by hvd_trainer's Trainer, on random images in memory."""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy

from benchmarks.raw.resnet import BATCH, make
from hvd_trainer.backends import EngineOptions
from hvd_trainer.config.options import LogOptions, TrainerOptions, TrainOptions
from hvd_trainer.data import TensorData
from hvd_trainer.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["horovod", "ddp"], required=True)
    parser.add_argument("--transport", choices=["auto", "mpi"], default="auto")
    args = parser.parse_args()

    options = TrainerOptions(
        EngineOptions(backend=args.backend, transport=args.transport),
        TrainOptions(epochs=1, batch_size=BATCH),
        LogOptions(quiet=True),
    )
    with Trainer(options) as trainer:
        # The Trainer takes the whole data set and gives each rank its share.
        model, images, labels = make(size=1, rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        trainer.fit(model, optimizer, cross_entropy, TensorData(images, labels))


if __name__ == "__main__":
    main()
