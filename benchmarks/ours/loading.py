"""Train on files by hvd_trainer's Trainer, with one loader process or DALI's thread."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.raw.files import NUM_IMAGES, Small, data_set, normalise
from benchmarks.raw.loading import BATCH, by_dali
from hvd_trainer.backends import EngineOptions
from hvd_trainer.config.options import LogOptions, TrainerOptions, TrainOptions
from hvd_trainer.data import DataShard
from hvd_trainer.training.trainer import Trainer


class DaliImages:
    """A `BatchSource` of the images, from DALI."""

    name = "images by DALI"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return NUM_IMAGES

    def batches(self, shard: DataShard, epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        return by_dali(self.folder, *shard, seed=shard.number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--kind", choices=["images", "tokens"], required=True)
    parser.add_argument("--backend", choices=["horovod", "ddp"], required=True)
    parser.add_argument("--dali", action="store_true", help="images by DALI")
    args = parser.parse_args()

    options = TrainerOptions(
        EngineOptions(backend=args.backend),
        TrainOptions(epochs=1, batch_size=BATCH, workers=1),
        LogOptions(quiet=True),
    )
    with Trainer(options) as trainer:
        pixels = args.kind == "images" and not args.dali
        model = Small(args.kind)
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            cross_entropy,
            DaliImages(args.data_dir) if args.dali else data_set(args.data_dir, args.kind, pixels=pixels),
            batch_transform=normalise if pixels else None,
        )


if __name__ == "__main__":
    main()
