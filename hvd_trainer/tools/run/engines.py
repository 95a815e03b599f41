"""Replace what a script imports as Horovod or torch.distributed, according to its engine.

    script calls           on ddp                       on horovod
    horovod.torch          hvd_trainer.hvd              Horovod, started among the ranks of any launcher
    hvd_trainer.hvd        itself                       Horovod, too
    torch.distributed      itself                       its backend "horovod", hvd_trainer.c10d

Whichever it is, the ranks meet as those of a `Trainer` do, and are monitored.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import without_ranks
from hvd_trainer.launch.world import detect, is_elastic
from hvd_trainer.utils.import_hooks import ImportHooks
from hvd_trainer.utils.process import set_variables
from hvd_trainer.utils.text import COMMAND

if TYPE_CHECKING:  # torch is imported when the script imports it
    from hvd_trainer.backends.script_session import ScriptSession

logger = logging.getLogger(__name__)
ALIASES = {
    "horovod.torch": "hvd_trainer.hvd",
    "horovod.common.basics": "hvd_trainer.hvd.common.horovod_basics",
    "horovod.common": "hvd_trainer.hvd.common",
}
TO_HOROVOD = {"hvd_trainer.hvd.common": "horovod.common", "hvd_trainer.hvd": "horovod.torch"}
"""A script that was written for `hvd_trainer.hvd` would run on torch.distributed, and be taken for Horovod's."""
HOROVOD = "horovod"
"""The engine's name, and that of its backend of torch.distributed."""
PACKAGE = "hvd_trainer.tools.run.horovod_package"
"""Stands for the package `horovod` itself, and for its `horovod.runner` where no Horovod is installed."""
STARTED_BY_TORCH = ContextVar("STARTED_BY_TORCH", default=False)
"""Whether `init_process_group` starts Horovod, and has met the ranks."""
ABSENT = {
    f"horovod.{name}": f"horovod.{name} is not there on torch.distributed: --backend ddp has Horovod's API for "
    f"PyTorch only. Type: --backend horovod, with a Horovod that was built for it"
    for name in ("tensorflow", "keras", "mxnet", "spark", "ray", "_keras")
}
"""Parts of Horovod that have no counterpart, and what to type."""


def import_hooks(
    engine: str,
    session: ScriptSession | None,
    *,
    bucket_mb: float | None = None,
) -> ImportHooks:
    """Return the hooks that put a script on an engine.

    Args:
        engine: `horovod` or `ddp`.
        session: to be started when the script starts its engine; None in a process that is not the rank itself,
            but was started by it.
        bucket_mb: size of the buckets of DistributedDataParallel; None: as the script says.
    """
    after: dict[str, Callable[[ModuleType], None]] = {
        "torch.distributed.distributed_c10d": functools.partial(_wrap_torch, engine=engine, session=session)
    }
    if session is not None:
        after["torch.optim.optimizer"] = functools.partial(_count_steps, session=session)
        after["torch.multiprocessing.spawn"] = functools.partial(_wrap_spawn, session=session)
        after["hvd_trainer.hvd.common.basics"] = session.attach
    after["horovod.runner.gloo_run"] = _number_ranks
    if bucket_mb is not None:
        after["torch.nn.parallel.distributed"] = functools.partial(_set_buckets, bucket_mb=bucket_mb)
    if engine == "horovod" and not is_elastic(os.environ):
        after["horovod.common.basics"] = functools.partial(_wrap_horovod, session=session)
        if session is not None:
            after["horovod.torch.mpi_ops"] = functools.partial(_mark_waits, session=session)
            after["horovod.torch.optimizer"] = _hook_inner_step
    if engine == "horovod":
        hooks = ImportHooks(aliases=TO_HOROVOD, absent={}, after=after)
    else:
        hooks = ImportHooks(aliases=ALIASES, single=_single(after), absent=ABSENT, after=after)
    after["hvd_trainer.training.trainer"] = functools.partial(_hand_over_to_trainer, session=session, hooks=hooks)
    return hooks


def _single(after: dict[str, Callable[[ModuleType], None]]) -> dict[str, str]:
    """Return what stands for the package `horovod`; the launcher below it is that of an installed Horovod."""
    single = {"horovod": PACKAGE}
    if PathFinder.find_spec("horovod") is None:
        single["horovod.runner"] = PACKAGE
    else:
        after["horovod.runner"] = _start_by_own_run
    return single


def _hand_over_to_trainer(module: ModuleType, session: ScriptSession | None, hooks: ImportHooks) -> None:
    """Let a `Trainer` have its own session, and the engines as they are."""
    original = module.Trainer.__init__

    @functools.wraps(original)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if session is not None:
            session.hand_over()
        hooks.uninstall()
        original(trainer, *args, **kwargs)

    module.Trainer.__init__ = init


def _start_by_own_run(runner: ModuleType) -> None:
    """Make `horovod.runner.run` what `horovod.run` is: the launcher below it is that of the installed Horovod."""
    setattr(runner, "run", importlib.import_module(PACKAGE).run)  # noqa: B010  as above


@functools.cache
def warn_if_alone(session: ScriptSession) -> None:
    """Log once, on rank 0, that each rank trains by itself, if none has started an engine."""
    world = detect(os.environ)
    if world.size > 1 and world.is_first and not session.has_started and not is_elastic(os.environ):
        logger.warning(
            "warning: the script has started neither horovod.torch nor torch.distributed, so each of the %d "
            "processes runs it alone",
            world.size,
        )


def _wrap_spawn(module: ModuleType, session: ScriptSession) -> None:
    """Refuse a script that starts its ranks itself, before it has started an engine, in each of several ranks."""
    original = module.start_processes

    @functools.wraps(original)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        world = detect(os.environ)
        if world.size > 1 and session.is_in_charge and not session.has_started:
            raise LaunchError(
                f"The script starts its ranks itself, and {world.launcher} has started it {world.size} times. "
                f"Start it once, without -np or a launcher: {COMMAND} run -- {' '.join(sys.argv)}"
            )
        return original(*args, **kwargs)

    for holder in (module, sys.modules["torch.multiprocessing"]):
        if hasattr(holder, "start_processes"):
            setattr(holder, "start_processes", start_processes)  # noqa: B010  mypy knows no such attribute


def _count_steps(module: ModuleType, session: ScriptSession) -> None:
    def count_step(*_: object) -> None:
        warn_if_alone(session)
        session.count_step()

    module.register_optimizer_step_post_hook(count_step)


def _set_buckets(module: ModuleType, bucket_mb: float) -> None:
    kind = module.DistributedDataParallel
    original = kind.__init__
    signature = inspect.signature(original)
    assign, most_bytes = module.dist._compute_bucket_assignment_by_size, int(bucket_mb * 2**20)

    def fill(tensors: Any, limits: Sequence[int], *more: Any) -> Any:
        return assign(tensors, [min(limit, most_bytes) for limit in limits], *more)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments["bucket_cap_mb"] = bucket_mb
        module.dist._compute_bucket_assignment_by_size = fill  # else the first step has one bucket for all
        try:
            original(*given.args, **given.kwargs)
        finally:
            module.dist._compute_bucket_assignment_by_size = assign

    kind.__init__ = init


def _mark_waits(module: ModuleType, session: ScriptSession) -> None:
    """Let the session know when Horovod waits for other ranks, and the script's stream wait for the result."""
    from hvd_trainer.backends.horovod_waiter import follow

    original = module.synchronize

    @functools.wraps(original)
    def synchronize(handle: Any) -> Any:
        with session.waiting():
            return follow(original(handle))

    setattr(module, "synchronize", synchronize)  # noqa: B010  mypy knows no such attribute


def _number_ranks(module: ModuleType) -> None:
    """Let horovodrun tell its ranks their numbers where it has inherited those of another rank.

    Its variables stand before those of its own environment in the command of a rank, and so lose.
    """
    original = module._slot_info_to_command_fn

    @functools.wraps(original)
    def slot_info_to_command_fn(run_command: str, env: Mapping[str, str]) -> Any:
        return original(run_command, without_ranks(env))

    setattr(module, original.__name__, slot_info_to_command_fn)


def _hook_inner_step(module: ModuleType) -> None:
    """Let PyTorch call the hooks of a step in Horovod's step only where that calls the optimizer's own."""
    for kind in (module._DistributedOptimizer, module._DistributedAdasumOptimizer):
        kind.step.hooked = True


def _wrap_torch(module: ModuleType, engine: str, session: ScriptSession | None) -> None:
    """Make `init_process_group` begin the session, and use its store where the script names no other.

    On Horovod the script's groups keep the backend's name that it asked for: scripts choose their way by it.
    """
    original, original_group = module.init_process_group, module.new_group
    signature, group_signature = inspect.signature(original), inspect.signature(original_group)
    starts = itertools.count()
    asked = HOROVOD

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        nonlocal asked
        if session is not None and session.has_trainer:
            original(*args, **kwargs)
            return
        given = signature.bind(*args, **kwargs).arguments
        backend = str(given.get("backend") or module.Backend.UNDEFINED)
        if engine == "horovod":
            importlib.import_module("hvd_trainer.c10d")
            given["backend"], asked = HOROVOD, str(module.Backend(backend))
        if session is not None and session.is_in_charge:
            world = session.start(uses_nccl=_uses_nccl(backend, given.get("device_id"))).world
            session.check(given.get("rank", -1), given.get("world_size", -1))
            if given.get("store") is None and given.get("init_method") in (None, "env://"):
                given.pop("init_method", None)
                given["store"] = session.prefix_store(f"script/{next(starts)}")
                given |= {"rank": world.rank, "world_size": world.size}
        token = STARTED_BY_TORCH.set(engine == "horovod")
        try:
            original(**given)
        finally:
            STARTED_BY_TORCH.reset(token)
        if engine == "horovod" and session is not None and session.is_in_charge:
            session.attach_groups(importlib.import_module("hvd_trainer.c10d.context").contexts.close)
        name_backend(module.group.WORLD)

    @functools.wraps(original_group)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = group_signature.bind(*args, **kwargs).arguments
        if asked == HOROVOD or given.get("backend") not in (None, asked):
            return original_group(**given)
        group = original_group(**given | {"backend": HOROVOD})
        name_backend(group)
        return group

    def name_backend(group: Any) -> None:
        """Let PyTorch call a group of Horovod's by the name that the script asked for."""
        if asked != HOROVOD and group in module._world.pg_map:  # a rank has no part in some groups
            module._world.pg_map[group] = asked, module._world.pg_map[group][1]
            module._world.pg_backend_config[group] = str(module.BackendConfig(asked))

    package = sys.modules["torch.distributed"]
    for holder in (module, package):  # the package has the functions only if it was imported before
        for function in (init_process_group, new_group):
            if hasattr(holder, function.__name__):
                setattr(holder, function.__name__, function)


def _uses_nccl(backend: str, device: Any) -> bool:
    """Return whether `init_process_group` makes groups of NCCL: without a backend's name, too, for its tensors."""
    if backend != "undefined":
        return "nccl" in backend
    from hvd_trainer.utils import accelerator

    kind = accelerator.kind()
    return accelerator.COLLECTIVES.get(kind or "") == "nccl" and getattr(device, "type", kind) == kind


def _wrap_horovod(module: ModuleType, session: ScriptSession | None) -> None:
    """Make `hvd.init` begin the session, and start Horovod among its ranks, whichever launcher started them.

    In a process that a script's own launcher has started, Horovod looks for its rank itself: see that it is right.
    """
    original = module.HorovodBasics.init

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_trainer = session is not None and session.has_trainer
        if self.is_initialized() or STARTED_BY_TORCH.get() or by_trainer:
            result = original(self, *args, **kwargs)
            if session is not None and session.is_in_charge:
                atexit.unregister(self.shutdown)  # others may still exchange: the session ends it
            return result
        from hvd_trainer.backends.horovod_start import rank_variables
        from hvd_trainer.backends.horovod_waiter import ASYNC_COMPLETION, completes_asynchronously
        from hvd_trainer.rendezvous.ranks import check_world

        if session is None or not session.is_in_charge:
            result = original(self, *args, **kwargs)
            check_world(detect(os.environ), "Horovod", self.rank(), self.size())
            return result
        started = session.start(uses_nccl=bool(self.nccl_built()))
        several = started.world.size > 1
        variables = rank_variables(started.world, started.peers, started.store, started.address) if several else {}
        if completes_asynchronously(self):
            variables |= {name: value for name, value in ASYNC_COMPLETION.items() if name not in os.environ}
        with set_variables(variables):
            result = original(self, *args, **kwargs)
        check_world(started.world, "Horovod", self.rank(), self.size())
        session.attach_horovod(self.shutdown)
        return result

    module.HorovodBasics.init = init
