"""The devices that a rank computes on."""

from __future__ import annotations

import torch

from hvd_trainer.errors import BackendError
from hvd_trainer.launch.world import World
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.text import COMMAND


def choose_devices(world: World, kind: str = "auto", count: int = 1) -> list[torch.device]:
    """Return the devices of this process, the first of which the caller may make its current one.

    Args:
        kind: `auto`, `cpu`, or a type of accelerator.
        count: of devices.

    Raises:
        BackendError: devices were asked for that PyTorch does not see.
    """
    visible = visible_gpus(kind)
    if not visible:
        return [torch.device("cpu")] * count
    numbers = gpu_numbers(world.local_rank, world.local_size, len(visible), count)
    return [visible[number] for number in numbers]


def visible_gpus(kind: str = "auto") -> list[torch.device]:
    """Return the GPUs that this process sees; none if it is to train on the CPU.

    Args:
        kind: as in `choose_devices`.

    Raises:
        BackendError: GPUs were asked for that PyTorch does not see.
    """
    present = None if kind == "cpu" else accelerator.kind()
    if kind not in ("auto", "cpu", present):
        raise BackendError(
            f"--device {kind} was asked for, but PyTorch {torch.__version__} sees no such GPU"
            f"{f' (it sees {present})' if present else ''}. Type: {COMMAND} doctor, to see why; or train "
            f"{f'with --device {present}' if present else 'on CPUs with --device cpu'}"
        )
    return [] if present is None else [torch.device(present, n) for n in range(accelerator.count(present))]


def gpu_numbers(local_rank: int, local_size: int, visible: int, count: int = 1) -> list[int]:
    """Return the indices of one rank's GPUs among the visible ones.

    With one GPU per rank it is the local rank modulo the visible ones, so that a rank that sees only its own takes
    that. With several, either all ranks of the node see all GPUs, or each rank sees only its own.

    Raises:
        BackendError: too few GPUs are visible.
    """
    if count > 1 and visible != count and local_size * count > visible:
        raise BackendError(
            f"{local_size} {'rank' if local_size == 1 else 'ranks'} on this node with {count} devices each need "
            f"{local_size * count} GPUs, and {visible} are visible. Type --devices-per-rank "
            f"{max(1, visible // local_size)}, or start {max(1, visible // count)} per node"
        )
    first = local_rank * count % visible
    return list(range(first, first + count))
