"""Begin a script's session with `init_process_group`, and put its groups of torch.distributed on its engine."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import forget_outer_launchers
from hvd_trainer.launch.world import World, detect
from hvd_trainer.utils.import_hooks import wrap

if TYPE_CHECKING:  # torch is imported when the script imports it
    from hvd_trainer.backends.script_engine import ScriptEngine

HOROVOD = "horovod"
"""The engine's name, and that of its backend of torch.distributed."""
STARTED_BY_TORCH = ContextVar("STARTED_BY_TORCH", default=False)
"""Whether `init_process_group` starts Horovod, and has met the ranks."""


def wrap_torch(module: ModuleType, engine: str, script: ScriptEngine | None) -> None:
    """Make `init_process_group` begin the session, and use its store where the script names no other.

    On Horovod the script's groups keep the backend's name that it asked for: scripts choose their way by it.
    """
    starts = itertools.count()
    asked = HOROVOD

    def init_process_group(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        nonlocal asked
        if script is not None and script.has_trainer:
            original(*args, **kwargs)
            return
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        backend = str(given.get("backend") or module.Backend.UNDEFINED)
        on_horovod, asked = engine == HOROVOD and not _hvd_runs(), HOROVOD
        if on_horovod:
            importlib.import_module("hvd_trainer.c10d")
            given["backend"], asked = HOROVOD, str(module.Backend(backend))
        rank = script if script is not None and script.is_in_charge and not _makes_own_ranks(given) else None
        if rank is not None:
            device = given.get("device_id")
            session = rank.meet(uses_nccl=_uses_nccl(backend, device), has_device=_has_chosen(device))
            world = session.world
            _check_rank(world, given.get("rank", -1), given.get("world_size", -1))
            if given.get("store") is None and given.get("init_method") in (None, "env://"):
                given.pop("init_method", None)
                given["store"] = module.PrefixStore(f"script/{next(starts)}", session.store)
                given |= {"rank": world.rank, "world_size": world.size}
        token = STARTED_BY_TORCH.set(on_horovod)
        try:
            original(**given)
        finally:
            STARTED_BY_TORCH.reset(token)
        if on_horovod and rank is not None:
            rank.attach_groups(importlib.import_module("hvd_trainer.c10d.context").contexts.close)
        name_backend(module.group.WORLD)

    def new_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if asked == HOROVOD or given.get("backend") not in (None, asked):
            return original(**given)
        group = original(**given | {"backend": HOROVOD})
        name_backend(group)
        return group

    def name_backend(group: Any) -> None:
        """Let PyTorch call a group of Horovod's by the name that the script asked for."""
        if asked != HOROVOD and group in module._world.pg_map:  # a rank has no part in some groups
            module._world.pg_map[group] = asked, module._world.pg_map[group][1]
            module._world.pg_backend_config[group] = str(module.BackendConfig(asked))

    for wrapper in (init_process_group, new_group):
        wrap(wrapper.__name__, wrapper, module)


def _hvd_runs() -> bool:
    """Return whether the script has called `hvd.init`: its groups of torch.distributed stay what they are then."""
    hvd = sys.modules.get("horovod.torch")
    return hvd is not None and bool(hvd.is_initialized())


def _makes_own_ranks(given: Mapping[str, Any]) -> bool:
    """Return whether the script, which was started once, makes this process one of several ranks of its own.

    Args:
        given: arguments of `init_process_group`; without a size, the variables say it that the script has set.
    """
    if detect(os.environ).size > 1:
        return False
    environ = dict(os.environ)
    forget_outer_launchers(environ)
    return bool(max(given.get("world_size", -1), detect(environ).size) > 1)


def _check_rank(world: World, rank: int, size: int) -> None:
    """Raise LaunchError if what the script says of this rank contradicts the launcher; -1: it says nothing."""
    if rank not in (-1, world.rank) or size not in (-1, world.size):
        raise LaunchError(
            f"The script starts torch.distributed as rank {rank} of {size}, but {world.launcher} has started "
            f"{world}. Leave rank and world_size out of init_process_group, or start as many ranks as it wants"
        )


def _uses_nccl(backend: str, device: Any) -> bool:
    """Return whether `init_process_group` makes groups of NCCL, or XCCL: without a name, too, for GPU tensors."""
    from hvd_trainer.utils import accelerator

    kind = accelerator.kind()
    if kind is None or backend != "undefined":
        return accelerator.COLLECTIVES.get(kind or "", "nccl") in backend
    return getattr(device, "type", kind) == kind


def _has_chosen(device: Any) -> bool:
    """Return whether a script has chosen a GPU: by `device_id`, by `set_device`, or by its first tensor there."""
    from hvd_trainer.utils import accelerator

    return device is not None or accelerator.is_initialized()
