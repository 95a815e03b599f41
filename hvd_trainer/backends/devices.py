"""The devices that a rank computes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_trainer.errors import BackendError
from hvd_trainer.launch.world import World
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.text import COMMAND

Devices = int | Sequence[str]
"""How many, or which by name."""


def choose_devices(world: World, wish: str = "auto", devices: Devices = 1) -> list[torch.device]:
    """Pin this process to its devices, and make the first of them the current one.

    Args:
        world: this process among all.
        wish: `auto`, `cpu`, or a type of accelerator.
        devices: how many, or which by name.

    Raises:
        BackendError: devices were asked for that PyTorch does not see.
    """
    kind = None if wish == "cpu" else accelerator.kind()
    if wish not in ("auto", "cpu", kind):
        raise BackendError(
            f"--device {wish} was asked for, but PyTorch {torch.__version__} sees no such GPU"
            f"{f' (it sees {kind})' if kind else ''}. Type: {COMMAND} doctor, to see why; or train "
            f"{f'with --device {kind}' if kind else 'on CPUs with --device cpu'}"
        )
    visible = accelerator.count(kind)
    if not isinstance(devices, int):
        chosen = [_named(name, kind, visible) for name in devices]
    elif kind is None:
        chosen = [torch.device("cpu")] * devices
    else:
        numbers = gpu_numbers(world.local_rank, world.local_size, visible, devices)
        chosen = [torch.device(kind, number) for number in numbers]
    accelerator.set_current(chosen[0])
    return chosen


def _named(name: str, kind: str | None, visible: int) -> torch.device:
    there = ["cpu", *(f"{kind}:{number}" for number in range(visible))]
    if name not in there:
        raise BackendError(f"--devices {name}: there is no such device here. There are: {', '.join(there)}")
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
