"""What the ResNet-18 scripts share: the network and one rank's share of a synthetic data set."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models import resnet18

SAMPLES = 2_560
BATCH = 32


def make(size: int, rank: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A ResNet-18 with ten classes, and SAMPLES / size random images (3x32x32) with labels."""
    torch.manual_seed(rank)
    share = -(-SAMPLES // size)
    return resnet18(num_classes=10), torch.randn(share, 3, 32, 32), torch.randint(10, (share,))
