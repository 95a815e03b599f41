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


class _Groups:
    """What this process has started of torch.distributed, among the ranks of its session.

    Attributes:
        is_started: whether it has started, or joined, the default group.
        is_joined: whether somebody else has made the default group, and so ends it.
        made: groups that end with the session, beside a default group that does not.
        backend: of groups of some ranks; None: that of the default group.
    """

    def __init__(self) -> None:
        self.is_started = self.is_joined = False
        self.made: list[Any] = []
        self.backend: str | None = None


_groups = _Groups()


def is_started() -> bool:
    """Return whether `start` has been called, and `stop` not yet."""
    return _groups.is_started


def start(session: Session, transport: str) -> dist.ProcessGroup | None:
    """Start the default group of all ranks, or join it if there is one. In every group Gloo exchanges CPU tensors.

    Args:
        session: connected; its store is used.
        transport: the library for tensors on an accelerator: gloo, nccl or xccl.

    Returns:
        The group of all ranks; None: the default group.

    Raises:
        BackendError: there is a default group, for other devices than that of this rank.
        LaunchError: its world is not the launcher's.
    """
    uses_gloo = transport == "gloo"
    backend = "gloo" if uses_gloo else accelerator.process_group_backend(session.device)
    device = None if uses_gloo else session.device
    timeout = timedelta(seconds=session.options.startup_timeout_s)
    is_joined = dist.is_initialized()
    fits = not is_joined or _fits(session.device, transport)
    if not is_joined:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("ddp", session.store),
            rank=session.world.rank,
            world_size=session.world.size,
            timeout=timeout,
            device_id=device,
        )
        _lift_limit(dist.group.WORLD, device)
    _groups.is_started, _groups.is_joined, _groups.made = True, is_joined, []
    _groups.backend = None if fits else backend
    check_world(session.world, "torch.distributed", dist.get_rank(), dist.get_world_size())
    if fits:
        return None
    group = dist.new_group(backend=backend, timeout=timeout, device_id=device)
    assert isinstance(group, dist.ProcessGroup)
    _lift_limit(group, device)
    _groups.made.append(group)
    return group


def _lift_limit(group: Any, device: torch.device | None) -> None:
    """Let exchanges on a device take any time: a rank waits while others compute, the monitor finds a dead one.

    PyTorch's second class for NCCL ends them even with TORCH_NCCL_ASYNC_ERROR_HANDLING=0. The first one does not,
    and has no `set_timeout`.
    """
    backend: Any = None if device is None else group._get_backend(device)
    if hasattr(backend, "set_timeout"):
        backend.set_timeout(NO_TIMEOUT)


def _fits(device: torch.device, transport: str) -> bool:
    """Return whether the default group exchanges CPU tensors by Gloo and those of a device by a transport.

    Raises:
        BackendError: it exchanges no CPU tensors, and this rank trains on a CPU.
    """
    config = dist.get_backend_config()
    by_device = dict(pair.split(":") for pair in config.split(","))
    if accelerator.is_host(device) and "cpu" not in by_device:
        raise BackendError(
            f"torch.distributed is initialised for {config}, and this rank trains on the CPU. Type "
            f"--device {next(iter(by_device))}, or call init_process_group('gloo')"
        )
    return (by_device.get("cpu"), by_device.get(device.type)) == ("gloo", transport)


def new_group(
    session: Session, groups: Sequence[Sequence[int]], transport: str | None = None
) -> dist.ProcessGroup:
    """Make one group of each list of ranks, and return the one with this rank. A collective.

    Beside Horovod, the default group of all ranks is started first.

    Args:
        transport: as in `dist.new_group`; None: that of the group of all ranks.
    """
    if not _groups.is_started:
        start(session, "gloo")
    transport = transport or _groups.backend
    timeout = timedelta(seconds=session.options.startup_timeout_s)
    own: Any = None
    # A default group of Gloo has no device, and NCCL's would take that of LOCAL_RANK, or of the rank among all.
    device = None if transport in (None, "gloo") else session.device
    for ranks in groups:
        made = dist.new_group(list(ranks), timeout=timeout, backend=transport, device_id=device)
        if session.world.rank in ranks:
            own = made
            _lift_limit(made, device)
            _groups.made.append(made)
    assert isinstance(own, dist.ProcessGroup)
    return own


def standalone_group(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
    """Return a group of its own, beside the default group, which it neither needs nor changes. A collective.

    No time limit: a rank may wait as long as the others compute, and the monitor finds a dead one.

    Args:
        store: for this group alone.
        device: of the tensors that the group moves.
    """
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
        if _groups.is_started and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()


def stop(*, wait: bool, on_accelerator: bool) -> None:
    """End what `start` has begun; nothing else may still hold a group.

    A default group that was joined is left as it was; after a failure it ends, since other ranks may wait in it.

    Args:
        wait: False after a failure.
        on_accelerator: whether groups move its tensors: after a failure NCCL would wait for what is under way with
            a dead rank, and let `abort` wait for that.
    """
    if not wait and (on_accelerator or _groups.is_joined):
        abort()
    with _END_LOCK:
        gc.collect()
        if _groups.is_started and dist.is_initialized():
            for group in _groups.made if _groups.is_joined else (None,):
                dist.destroy_process_group(group)
        _groups.is_started, _groups.made = False, []
