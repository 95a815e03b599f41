"""ResNet-18 on Horovod with its defaults, on random images in memory."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

from benchmarks.raw.resnet import BATCH, make


def main() -> None:
    hvd.init()
    model, images, labels = make(hvd.size(), hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    model.train()
    for image, target in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(image), target).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
