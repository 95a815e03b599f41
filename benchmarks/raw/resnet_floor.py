"""ResNet-18 in each rank on its own: the arithmetic of the job with nothing exchanged, also no memory."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.raw.resnet import BATCH, make
from hvd_trainer.backends.malloc import keep_freed_memory


def main() -> None:
    keep_freed_memory(os.environ)
    dist.init_process_group("gloo")
    model, images, labels = make(dist.get_world_size(), dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    dist.barrier()
    for image, target in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(image), target).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
