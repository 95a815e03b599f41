"""ResNet-18 on DistributedDataParallel with its defaults, on random images in memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.raw.resnet import BATCH, make


def main() -> None:
    dist.init_process_group("gloo")
    bare, images, labels = make(dist.get_world_size(), dist.get_rank())
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for image, target in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(image), target).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
