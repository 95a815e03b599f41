"""torch.distributed's process groups, on the session's store: for DDP, and beside Horovod for models in stages."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_trainer.backends.session import Session
from hvd_trainer.errors import BackendError
from hvd_trainer.rendezvous.ranks import check_world
from hvd_trainer.utils import accelerator

NO_TIMEOUT = timedelta(days=365)


def start(session: Session, transport: str) -> None:
    """Start the default group of all ranks. In every group Gloo exchanges CPU tensors.

    Args:
        session: connected; its store is used.
        transport: the library for tensors on an accelerator: gloo, nccl or xccl.

    Raises:
        BackendError: torch.distributed is already initialised in this process.
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
    # DDP imports this module, whose functions keep the default group of that moment in their default arguments. So
    # it is imported before there is a group: one that is never freed leaves Gloo's threads running at exit, which
    # aborted 3 to 13 % of runs ("terminate called without an active exception").
    import torch.distributed.nn.functional  # noqa: F401

    uses_gloo = transport == "gloo"
    dist.init_process_group(
        "gloo" if uses_gloo else accelerator.process_group_backend(session.device),
        store=dist.PrefixStore("ddp", session.store),
        rank=session.world.rank,
        world_size=session.world.size,
        timeout=timedelta(seconds=session.options.startup_timeout_s),
        device_id=None if uses_gloo else session.device,
    )
    check_world(session.world, "torch.distributed", dist.get_rank(), dist.get_world_size())


def new_group(
    session: Session, groups: Sequence[Sequence[int]], transport: str | None = None
) -> dist.ProcessGroup:
    """Make one group of each list of ranks, and return the one with this rank. A collective.

    Beside Horovod, the default group of all ranks is started first.

    Args:
        transport: as in `dist.new_group`; None: that of the default group.
    """
    if not dist.is_initialized():
        start(session, "gloo")
    own: Any = None
    # A default group of Gloo has no device, and NCCL's would take that of LOCAL_RANK, or of the rank among all.
    device = None if transport in (None, "gloo") else session.device
    for ranks in groups:
        made = dist.new_group(list(ranks), backend=transport, device_id=device)
        if session.world.rank in ranks:
            own = made
    assert isinstance(own, dist.ProcessGroup)
    return own


def standalone_group(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
    """Return a group of its own, beside the default group, which it neither needs nor changes. A collective.

    No time limit: a rank may wait as long as the others compute, and the monitor finds a dead one.

    Args:
        store: for this group alone.
        device: of the tensors that the group moves.
    """
    # Imported before there is a group, for the reason in `start`.
    import torch.distributed.nn.functional  # noqa: F401

    if accelerator.is_host(device):
        return dist.ProcessGroupGloo(store, rank, size, NO_TIMEOUT)
    name = accelerator.collectives(device)
    registry: Any = dist.Backend
    getattr(registry, "_ensure_backend_registered", lambda name: None)(name)
    maker = registry._plugins.get(name.upper())
    if maker is None:  # PyTorch before 2.15 registers none for its own
        kind = getattr(dist, f"ProcessGroup{name.upper()}")
        options = kind.Options()
        options._timeout = NO_TIMEOUT
        return kind(store, rank, size, options)
    if not maker.extended_api:
        return maker.creator_fn(store, rank, size, NO_TIMEOUT)
    # Of PyTorch's two classes for NCCL, the one that TORCH_DIST_USE_NCCL2 chooses.
    wanted: Any = dist.distributed_c10d._DistributedBackendOptions()
    wanted.store, wanted.group_rank, wanted.group_size = store, rank, size
    wanted.timeout, wanted.group_id = NO_TIMEOUT, "hvd"
    wanted.process_group = dist.ProcessGroup(store, rank, size)
    wanted.process_group.bound_device_id = device  # else that of LOCAL_RANK
    return maker.creator_fn(wanted, None)


_END_LOCK = threading.Lock()


def abort() -> None:
    """End all groups at once, with whatever is under way in them, so that a GPU stops waiting for a dead rank.

    To be called by another thread than the one that waits.
    """
    with _END_LOCK:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()


def stop(*, at_once: bool = False) -> None:
    """End all groups; nothing else may still hold one.

    Args:
        at_once: as `abort`, after a failure: else NCCL would wait for what is under way with a dead rank, and let
            `abort` wait for that.
    """
    if at_once:
        abort()
        return
    with _END_LOCK:
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()
