"""Options on how this rank's device computes: refuse those that it lacks, and switch the others on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from hvd_trainer.config.checks import refuse
from hvd_trainer.config.options import TrainOptions
from hvd_trainer.optim.reproducible import deterministic_algorithms
from hvd_trainer.utils import accelerator


def check_kernels(train: TrainOptions, device: torch.device) -> None:
    """Refuse options that are for other devices.

    Raises:
        OptionError: there are some.
    """
    mistakes, name = [], accelerator.name(device)
    if train.tf32 and accelerator.is_host(device):
        mistakes.append(f"--tf32 is for GPUs, and this rank trains on {name}: leave it out")
    if train.cudnn_benchmark and not accelerator.has_cudnn(device):
        mistakes.append(f"--cudnn-benchmark needs cuDNN, and {name} has none: leave it out")
    refuse(mistakes)


@contextmanager
def use_kernels(train: TrainOptions, device: torch.device) -> Iterator[None]:
    """Compute inside with TF32, cuDNN's benchmark or deterministic algorithms, as the options ask for."""
    deterministic = nullcontext() if train.reproducible is None else deterministic_algorithms(device)
    with accelerator.fast_kernels(tf32=train.tf32, cudnn_benchmark=train.cudnn_benchmark), deterministic:
        yield
