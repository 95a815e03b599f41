"""What the peers train: the same as the raw scripts."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchvision import datasets, transforms

from benchmarks.raw import resnet
from benchmarks.raw.cnn import Net


class Job(NamedTuple):
    """Data, network and optimizer of one process."""

    data: Dataset[Any]
    batch_size: int
    model: nn.Module
    optimizer: torch.optim.Optimizer


def parse(description: str | None, *engines: str) -> argparse.Namespace:
    """The options of a peer's script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--job", choices=["mnist", "resnet18"], required=True)
    parser.add_argument("--data-dir", help="MNIST's folder")
    if engines:
        parser.add_argument("--engine", choices=engines, required=True)
    return parser.parse_args()


def make(name: str, data_dir: str | None) -> Job:
    """The whole data set, which the peer shares out among the processes."""
    torch.manual_seed(42)
    if name == "resnet18":
        bare, images, labels = resnet.make(size=1, rank=0)
        sgd = torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9)
        return Job(TensorDataset(images, labels), resnet.BATCH, bare, sgd)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    model = Net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    return Job(datasets.MNIST(str(data_dir), train=True, transform=transform), 128, model, adam)
