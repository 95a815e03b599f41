"""The networks of the MNIST job, each a sequence of blocks, so that it can be cut into pipeline stages."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def conv_net() -> nn.Sequential:
    """Build the small convolutional network of the PyTorch and Horovod tutorials: 21,840 parameters.

    It maps images (N, 1, 28, 28) to the logits of 10 classes, (N, 10). It has dropout after the second convolution
    (whole channels) and between the linear layers.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 10, kernel_size=5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, kernel_size=5),
            conv2_drop=nn.Dropout2d(),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(320, 50),
            relu3=nn.ReLU(),
            fc1_drop=nn.Dropout(),
            fc2=nn.Linear(50, 10),
        )
    )


def mlp(width: int = 256) -> nn.Sequential:
    """Build two hidden layers on the flattened image: (N, 1, 28, 28) to logits (N, 10)."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(784, width),
            relu1=nn.ReLU(),
            fc2=nn.Linear(width, width),
            relu2=nn.ReLU(),
            fc3=nn.Linear(width, 10),
        )
    )


def quick_net() -> nn.Sequential:
    """Build a convolutional network that learns MNIST within an epoch or two: 67,570 parameters.

    It maps images (N, 1, 28, 28) to the logits of 10 classes, (N, 10). Batch norm lets it learn at a high rate.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 24, kernel_size=5, stride=2, padding=2, bias=False),
            norm1=nn.BatchNorm2d(24),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(24, 48, kernel_size=5, stride=2, padding=2, bias=False),
            norm2=nn.BatchNorm2d(48),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(48, 64, kernel_size=3, padding=1, bias=False),
            norm3=nn.BatchNorm2d(64),
            relu3=nn.ReLU(),
            pool=nn.MaxPool2d(2, padding=1),
            flatten=nn.Flatten(),
            fc=nn.Linear(1024, 10),
        )
    )


MODELS = {"cnn": conv_net, "mlp": mlp, "quick": quick_net}
