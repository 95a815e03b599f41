"""The engines, by name. Each one's module is imported only when it is chosen, so that neither needs the other."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from hvd_trainer.backends.base import Backend, ReplicaGrouping, StepResult
from hvd_trainer.backends.collectives import ReduceOp
from hvd_trainer.backends.session import Session
from hvd_trainer.config.options import EngineOptions, TrainerOptions
from hvd_trainer.config.rules import check
from hvd_trainer.launch.engine import choose_engine

__all__ = ["BACKENDS", "Backend", "ReplicaGrouping", "EngineOptions", "ReduceOp", "StepResult", "create"]

BACKENDS = {
    "horovod": "hvd_trainer.backends.horovod:HorovodBackend",
    "ddp": "hvd_trainer.backends.ddp:DDPBackend",
    "single": "hvd_trainer.backends.single:SingleBackend",
    "data-parallel": "hvd_trainer.backends.data_parallel:DataParallelBackend",
}


def create(
    options: EngineOptions | None = None,
    environ: MutableMapping[str, str] | None = None,
    grouping: ReplicaGrouping | None = None,
    devices: int = 1,
    ddp_kwargs: Mapping[str, Any] | None = None,
) -> Backend:
    """Make the engine that `options.backend` names, not yet started.

    Args:
        environ: `os.environ` if None.
        grouping: as for `Backend`.
        devices: as for `Session`.
        ddp_kwargs: as for `DDPBackend`; other engines leave them out.

    Raises:
        OptionError: there is no such engine, or an option or argument is not for it.
        LaunchError: as for `Session`.
    """
    options = options or EngineOptions()
    engine: Any = choose_engine(options.backend, os.environ if environ is None else environ)
    options = replace(options, backend=engine)
    check(TrainerOptions(engine=options))
    module, _, attribute = BACKENDS[options.backend].partition(":")
    kind: type[Backend] = getattr(importlib.import_module(module), attribute)
    if ddp_kwargs:
        # On each engine, or a mistake would wait for the day on which the engine is another.
        from hvd_trainer.backends.ddp import check_ddp_kwargs

        check_ddp_kwargs(ddp_kwargs)
    own: dict[str, Any] = {"ddp_kwargs": ddp_kwargs} if kind.takes_ddp_kwargs else {}
    return kind(Session(options, environ, devices), grouping=grouping, **own)
