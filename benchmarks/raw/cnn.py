"""The network of the MNIST job, and MNIST as tensors for the scripts that keep it in memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import dropout, max_pool2d, relu
from torchvision import datasets


class Net(nn.Module):
    """The small CNN of the PyTorch and Horovod tutorials: 21,840 parameters, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = relu(max_pool2d(self.conv1(x), 2))
        x = relu(max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = relu(self.fc1(x.flatten(1)))
        x = dropout(x, training=self.training)
        return self.fc2(x)


def load(root: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The training images (60000x1x28x28, uint8) and labels (60000)."""
    data = datasets.MNIST(root, train=True)
    return data.data.unsqueeze(1), data.targets


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Bytes to floats with MNIST's mean 0 and deviation 1."""
    return (images.float() / 255 - 0.1307) / 0.3081
