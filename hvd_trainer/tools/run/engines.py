"""Replace what a script imports as Horovod or torch.distributed, according to its engine.

    script calls           on ddp                       on horovod
    horovod.torch          hvd_trainer.hvd              Horovod, started among the ranks of any launcher
    hvd_trainer.hvd        itself                       Horovod, too
    torch.distributed      itself                       its backend "horovod", hvd_trainer.c10d

One that calls `hvd.init`, and then `init_process_group` for something else, keeps its own groups beside Horovod.
Whichever it is, the ranks meet as those of a `Trainer` do, and are monitored.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import without_ranks
from hvd_trainer.launch.world import detect, is_elastic
from hvd_trainer.measure.message import Message
from hvd_trainer.tools.run.torch_groups import STARTED_BY_TORCH, wrap_torch
from hvd_trainer.utils.import_hooks import ImportHooks, wrap
from hvd_trainer.utils.text import COMMAND

if TYPE_CHECKING:  # torch is imported when the script imports it
    from hvd_trainer.backends.script_engine import ScriptEngine
    from hvd_trainer.tools.run.wrapped_models import WrappedModels

logger = logging.getLogger(__name__)
ALIASES = {
    "horovod.torch": "hvd_trainer.hvd",
    "horovod.common.basics": "hvd_trainer.hvd.common.horovod_basics",
    "horovod.common": "hvd_trainer.hvd.common",
}
TO_HOROVOD = {"hvd_trainer.hvd.common": "horovod.common", "hvd_trainer.hvd": "horovod.torch"}
"""A script that was written for `hvd_trainer.hvd` would run on torch.distributed, and be taken for Horovod's."""
PACKAGE = "hvd_trainer.tools.run.horovod_package"
"""Stands for the package `horovod` itself, and for its `horovod.runner` where no Horovod is installed."""
ABSENT = {
    f"horovod.{name}": f"horovod.{name} is not there on torch.distributed: --backend ddp has Horovod's API for "
    f"PyTorch only. Type: --backend horovod, with a Horovod that was built for it"
    for name in ("tensorflow", "keras", "mxnet", "spark", "ray", "_keras")
}
"""Parts of Horovod that have no counterpart, and what to type."""


def import_hooks(
    engine: str,
    script: ScriptEngine | None,
    *,
    bucket_mb: float | None = None,
    wrapped: WrappedModels | None = None,
) -> ImportHooks:
    """Return the hooks that put a script on an engine.

    Args:
        engine: `horovod` or `ddp`.
        script: whose session begins when it starts its engine; None in a process that is not the rank itself,
            but was started by it.
        bucket_mb: size of the buckets of DistributedDataParallel; None: as the script says.
        wrapped: compares what the script wraps.
    """
    after: dict[str, Callable[[ModuleType], None]] = {
        "torch.distributed.distributed_c10d": functools.partial(wrap_torch, engine=engine, script=script)
    }
    if script is not None:
        after["torch.optim.optimizer"] = functools.partial(_count_steps, script=script)
        after["torch.multiprocessing.spawn"] = functools.partial(_wrap_spawn, script=script)
        after["hvd_trainer.hvd.common.basics"] = functools.partial(_attach_hvd, script=script)
    after["horovod.runner.gloo_run"] = _number_ranks
    after["horovod.runner" if engine == "horovod" else PACKAGE] = _wrap_run
    if bucket_mb is not None:
        after["torch.nn.parallel.distributed"] = functools.partial(_set_buckets, bucket_mb=bucket_mb)
    if engine == "horovod" and not is_elastic(os.environ):
        after["horovod.common.basics"] = functools.partial(_wrap_horovod, script=script)
        if script is not None:
            after["horovod.torch.mpi_ops"] = functools.partial(_mark_waits, script=script)
            after["horovod.torch.optimizer"] = _hook_inner_step
    for name, watch in (wrapped.hooks() if wrapped is not None else {}).items():
        after[name] = _both(after[name], watch) if name in after else watch
    if engine == "horovod":
        hooks = ImportHooks(aliases=TO_HOROVOD, absent={}, after=after)
    else:
        hooks = ImportHooks(aliases=ALIASES, single=_single(after), absent=ABSENT, after=after)
    after["hvd_trainer.training.trainer"] = functools.partial(_hand_over_to_trainer, script=script, hooks=hooks)
    return hooks


def _both(one: Callable[[ModuleType], None], other: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        one(module)
        other(module)

    return change


def _single(after: dict[str, Callable[[ModuleType], None]]) -> dict[str, str]:
    """Return what stands for the package `horovod`; the launcher below it is that of an installed Horovod."""
    single = {"horovod": PACKAGE}
    if PathFinder.find_spec("horovod") is None:
        single["horovod.runner"] = PACKAGE
    else:
        after["horovod.runner"] = _start_by_own_run
    return single


def _hand_over_to_trainer(module: ModuleType, script: ScriptEngine | None, hooks: ImportHooks) -> None:
    """Let a `Trainer` have its own session, and the engines as they are."""

    def init(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if script is not None:
            script.hand_over()
        hooks.uninstall()
        original(*args, **kwargs)

    wrap("__init__", init, module.Trainer)


def _start_by_own_run(runner: ModuleType) -> None:
    """Make `horovod.runner.run` what `horovod.run` is: the launcher below it is that of the installed Horovod."""
    setattr(runner, "run", importlib.import_module(PACKAGE).run)  # noqa: B010  as above


@functools.cache
def warn_if_alone(script: ScriptEngine) -> None:
    """Log once, on rank 0, that each rank trains by itself, if none has started an engine."""
    world = detect(os.environ)
    if world.size > 1 and world.is_first and not script.has_started and not is_elastic(os.environ):
        logger.warning(
            "warning: the script has started neither horovod.torch nor torch.distributed, so each of the %d "
            "processes runs it alone",
            world.size,
        )


def _wrap_spawn(module: ModuleType, script: ScriptEngine) -> None:
    """Refuse a script that starts its ranks itself, before it has started an engine, in each of several ranks.

    A tool would see nothing of ranks that are not its own, and wait for their end.
    """

    def start_processes(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        world, starts_ranks = detect(os.environ), script.is_in_charge and not script.has_started
        if starts_ranks and Message.read(os.environ) is not None:
            raise LaunchError(
                "The script starts its ranks itself, by torch.multiprocessing, and a tool measures those that the "
                "tool has started. Let the script train in its own process, as torchrun's scripts do, or start "
                "them by hvd_trainer.run(function, num_processes=...), of which a tool takes the function"
            )
        if starts_ranks and world.size > 1:
            raise LaunchError(
                f"The script starts its ranks itself, and {world.launcher} has started it {world.size} times. "
                f"Start it once, without -np or a launcher: {COMMAND} run -- {' '.join(sys.argv)}"
            )
        return original(*args, **kwargs)

    wrap("start_processes", start_processes, module)


def _wrap_run(module: ModuleType) -> None:
    """Let `horovod.run` call its function in the ranks that a tool has started, as `hvd_trainer.run` does."""

    def run(
        original: Callable[..., Any],
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *others: Any,
        **options: Any,
    ) -> Any:
        if Message.read(os.environ) is None:
            return original(func, args, kwargs, *others, **options)
        return [func(*args, **(kwargs or {}))]

    wrap("run", run, module)


def _count_steps(module: ModuleType, script: ScriptEngine) -> None:
    def count_step(*_: object) -> None:
        warn_if_alone(script)
        if script.is_in_charge:
            script.watch.count_step()

    module.register_optimizer_step_post_hook(count_step)


def _attach_hvd(module: ModuleType, script: ScriptEngine) -> None:
    """Let the script's end be that of what `hvd.init` has begun."""
    module.take_over(script.attach_session)


def _set_buckets(module: ModuleType, bucket_mb: float) -> None:
    def init(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        from hvd_trainer.backends.ddp_layout import lay_out_once

        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments["bucket_cap_mb"] = bucket_mb
        given.arguments.pop("bucket_cap_mb_list", None)
        lay_out_once(original, given)

    wrap("__init__", init, module.DistributedDataParallel)


def _mark_waits(module: ModuleType, script: ScriptEngine) -> None:
    """Let the monitor know when Horovod waits for other ranks, and the script's stream wait for the result."""
    from hvd_trainer.backends.horovod_waiter import follow

    def synchronize(original: Callable[[Any], Any], handle: Any) -> Any:
        with script.watch.waiting():
            return follow(original(handle))

    wrap("synchronize", synchronize, module)


def _number_ranks(module: ModuleType) -> None:
    """Let horovodrun tell its ranks their numbers where it has inherited those of another rank.

    Its variables stand before those of its own environment in the command of a rank, and so lose.
    """

    def to_command(original: Callable[..., Any], run_command: str, env: Mapping[str, str]) -> Any:
        return original(run_command, without_ranks(env))

    wrap("_slot_info_to_command_fn", to_command, module)


def _hook_inner_step(module: ModuleType) -> None:
    """Let PyTorch call the hooks of a step in Horovod's step only where that calls the optimizer's own."""
    for kind in (module._DistributedOptimizer, module._DistributedAdasumOptimizer):
        kind.step.hooked = True


def _wrap_horovod(module: ModuleType, script: ScriptEngine | None) -> None:
    """Make `hvd.init` begin the session, and start Horovod among its ranks, whichever launcher started them.

    In a process that a script's own launcher has started, Horovod looks for its rank itself: see that it is right.
    """

    def init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        by_trainer = script is not None and script.has_trainer
        if self.is_initialized() or STARTED_BY_TORCH.get() or by_trainer:
            if not STARTED_BY_TORCH.get() and (context := sys.modules.get("hvd_trainer.c10d.context")):
                context.contexts.is_shared = True
            result = original(self, *args, **kwargs)
            if script is not None and script.is_in_charge:
                atexit.unregister(self.shutdown)  # others may still exchange: the session ends it
            return result
        if script is None or not script.is_in_charge:
            from hvd_trainer.rendezvous.ranks import check_world

            result = original(self, *args, **kwargs)
            check_world(detect(os.environ), "Horovod", self.rank(), self.size())
            return result
        from hvd_trainer.backends.horovod_operations import tell_monitor
        from hvd_trainer.backends.horovod_start import Meeting, start_horovod, stop_horovod
        from hvd_trainer.backends.horovod_waiter import ASYNC_COMPLETION, completes_asynchronously

        session = script.meet(uses_nccl=bool(self.nccl_built()))
        settings = ASYNC_COMPLETION if completes_asynchronously(self) else {}
        result = start_horovod(
            self,
            functools.partial(original, self, *args, **kwargs),
            Meeting.of(session),
            timeout_s=session.options.startup_timeout_s,
            settings={name: value for name, value in settings.items() if name not in os.environ},
            interface=os.environ.get("HOROVOD_GLOO_IFACE"),
        )
        tell_monitor(sys.modules["horovod.torch.mpi_ops"])
        atexit.unregister(self.shutdown)  # handlers of the script's may take their time, and exchange, after it
        script.attach_horovod(functools.partial(stop_horovod, self))
        return result

    wrap("init", init, module.HorovodBasics)
