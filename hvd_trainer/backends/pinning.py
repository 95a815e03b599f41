"""Which GPUs a rank computes on."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from hvd_trainer.errors import BackendError
from hvd_trainer.launch import World

Devices = int | Sequence[str]
"""How many, or which by name."""


def choose_devices(world: World, wish: str = "auto", devices: Devices = 1) -> list[torch.device]:
    """Pins this process to its GPUs, and makes the first of them the current one.

    Raises:
        BackendError: GPUs were asked for that PyTorch does not see.
    """
    visible = 0 if wish == "cpu" else torch.cuda.device_count()
    if not isinstance(devices, int):
        chosen = [_named(name, visible) for name in devices]
    elif visible == 0:
        if wish == "cuda":
            raise BackendError(
                f"--device cuda was asked for, but PyTorch {torch.__version__} sees no GPU. "
                f"Check nvidia-smi and CUDA_VISIBLE_DEVICES, or train on CPUs with --device cpu"
            )
        chosen = [torch.device("cpu")] * devices
    else:
        numbers = gpu_numbers(world.local_rank, world.local_size, visible, devices)
        chosen = [torch.device("cuda", number) for number in numbers]
    if chosen[0].type == "cuda":
        torch.cuda.set_device(chosen[0])
    return chosen


def _named(name: str, visible: int) -> torch.device:
    number = re.fullmatch(r"cuda:([0-9]{1,4})", name)
    if name != "cpu" and (number is None or int(number[1]) >= visible):
        there = ", ".join(["cpu", *(f"cuda:{number}" for number in range(visible))])
        raise BackendError(f"--devices {name}: there is no such device here. There are: {there}")
    return torch.device(name)


def gpu_numbers(local_rank: int, local_size: int, visible: int, count: int = 1) -> list[int]:
    """The GPUs of one rank, by their numbers among the visible ones: the first rank's come first.

    One each is the local rank modulo the visible ones, so that a task that sees one works. For several, either all
    ranks of the node see the GPUs of all, or each its own alone.

    Raises:
        BackendError: there are too few.
    """
    if count > 1 and visible != count and local_size * count > visible:
        raise BackendError(
            f"{local_size} {'rank' if local_size == 1 else 'ranks'} on this node with {count} devices each need "
            f"{local_size * count} GPUs, and {visible} are visible. Type --devices-per-rank "
            f"{max(1, visible // local_size)}, or start {max(1, visible // count)} per node"
        )
    first = local_rank * count % visible
    return list(range(first, first + count))
