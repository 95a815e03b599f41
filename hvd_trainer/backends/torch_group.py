"""torch.distributed, started at the store where the ranks met: below DDP, and beside Horovod for stages."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hvd_trainer.errors import BackendError
from hvd_trainer.peers import check_world

if TYPE_CHECKING:
    from hvd_trainer.backends.member import Member


def start(member: Member, transport: str) -> None:
    """Starts the default group of all ranks.

    Args:
        transport: gloo or nccl.

    Raises:
        BackendError: it is already initialised in this process.
        LaunchError: its world is not the launcher's.
    """
    if dist.is_initialized():
        check_world(
            member.world, "torch.distributed, already initialised,", dist.get_rank(), dist.get_world_size()
        )
        raise BackendError(
            "torch.distributed is already initialised in this process. Leave init_process_group to hvd_trainer: "
            "take that call out."
        )
    # Imported before the group exists: this module keeps the default group of the moment in its functions' default
    # arguments, and DDP imports it. A group that is never freed leaves Gloo's threads running at exit, where they
    # abort 3 to 13 % of runs ("terminate called without an active exception").
    import torch.distributed.nn.functional  # noqa: F401

    dist.init_process_group(
        transport,
        store=dist.PrefixStore("ddp", member.store),
        rank=member.world.rank,
        world_size=member.world.size,
        timeout=timedelta(seconds=member.options.startup_timeout_s),
        device_id=member.device if transport == "nccl" else None,
    )
    check_world(member.world, "torch.distributed", dist.get_rank(), dist.get_world_size())


def make(member: Member, groups: Sequence[Sequence[int]], transport: str | None = None) -> dist.ProcessGroup:
    """Makes one group of each list of ranks, and returns the one with this rank. All ranks must call it.

    Beside Horovod, the default group of all ranks is started first.

    Args:
        transport: as in `dist.new_group`; None: that of the default group.
    """
    if not dist.is_initialized():
        start(member, "gloo")
    mine: Any = None
    for ranks in groups:
        made = dist.new_group(list(ranks), backend=transport)
        if member.world.rank in ranks:
            mine = made
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def stop() -> None:
    """Ends all groups; whatever held one must have let it go."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
