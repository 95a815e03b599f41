"""torch.distributed, started at the store where the ranks met: below DDP, and beside Horovod for stages."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvd_trainer.backends.session import Session
from hvd_trainer.errors import BackendError
from hvd_trainer.rendezvous.ranks import check_world
from hvd_trainer.utils import accelerator


def start(session: Session, transport: str) -> None:
    """Start the default group of all ranks. In all groups CPU tensors are exchanged by Gloo.

    Args:
        session: connected; its store is used.
        transport: the library for tensors on an accelerator: gloo, nccl or xccl.

    Raises:
        BackendError: it is already initialised in this process.
        LaunchError: its world is not the launcher's.
    """
    if dist.is_initialized():
        check_world(
            session.world, "torch.distributed, already initialised,", dist.get_rank(), dist.get_world_size()
        )
        raise BackendError(
            "torch.distributed is already initialised in this process. Leave init_process_group to hvd_trainer: "
            "take that call out."
        )
    # Imported before the group exists: this module keeps the default group of the moment in its functions' default
    # arguments, and DDP imports it. A group that is never freed leaves Gloo's threads running at exit, where they
    # abort 3 to 13 % of runs ("terminate called without an active exception").
    import torch.distributed.nn.functional  # noqa: F401

    by_gloo = transport == "gloo"
    dist.init_process_group(
        "gloo" if by_gloo else accelerator.process_group_backend(session.device),
        store=dist.PrefixStore("ddp", session.store),
        rank=session.world.rank,
        world_size=session.world.size,
        timeout=timedelta(seconds=session.options.startup_timeout_s),
        device_id=None if by_gloo else session.device,
    )
    check_world(session.world, "torch.distributed", dist.get_rank(), dist.get_world_size())


def new_group(
    session: Session, groups: Sequence[Sequence[int]], transport: str | None = None
) -> dist.ProcessGroup:
    """Makes one group of each list of ranks, and returns the one with this rank. All ranks must call it.

    Beside Horovod, the default group of all ranks is started first.

    Args:
        transport: as in `dist.new_group`; None: that of the default group.
    """
    if not dist.is_initialized():
        start(session, "gloo")
    mine: Any = None
    for ranks in groups:
        made = dist.new_group(list(ranks), backend=transport)
        if session.world.rank in ranks:
            mine = made
    assert isinstance(mine, dist.ProcessGroup)
    return mine


_ENDING = threading.Lock()


def abort() -> None:
    """End all groups at once, whatever is under way in them: a GPU that waits for a rank that is gone goes on.

    To be called by another thread than the one that waits.
    """
    with _ENDING:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()


def stop() -> None:
    """Ends all groups; whatever held one must have let it go."""
    with _ENDING:
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()
