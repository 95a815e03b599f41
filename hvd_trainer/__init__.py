"""One PyTorch training job on two interchangeable engines: Horovod and native torch.distributed.

    from hvd_trainer import Trainer

    with Trainer() as trainer:
        trainer.fit(model, optimizer, loss, train_data, val_data)

The names below are loaded when they are first used: a tool that installs Horovod must not wait for PyTorch, and
importing this package never imports Horovod.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "hvd_trainer.backends": ("Backend", "EngineOptions", "StepResult"),
    "hvd_trainer.observe.callback": ("Callback", "RunView"),
    "hvd_trainer.config.options": (
        *("LogOptions", "MeasureOptions", "ParallelOptions", "SaveOptions", "TrainOptions", "TrainerOptions"),
    ),
    "hvd_trainer.config.parser": ("parse",),
    "hvd_trainer.data": ("BatchSource", "DataShard", "TensorData", "once_per_node"),
    "hvd_trainer.errors": (
        *("BackendError", "CheckpointError", "DataError", "LaunchError", "NonFiniteError", "OptionError"),
        *("PeerError", "PreemptedError", "ReplicasDifferError", "UserError"),
    ),
    "hvd_trainer.training.job": ("run_job",),
    "hvd_trainer.launch.world": ("World", "detect"),
    "hvd_trainer.observe.metrics": ("accuracy",),
    "hvd_trainer.observe.trackers": ("MLflowTracker", "WandbTracker"),
    "hvd_trainer.training.spawn": ("run",),
    "hvd_trainer.training.trainer": ("History", "Trainer"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "__version__",
    *_HOME_OF,
]

if TYPE_CHECKING:
    from hvd_trainer.backends import Backend, EngineOptions, StepResult
    from hvd_trainer.config.options import (
        LogOptions,
        MeasureOptions,
        ParallelOptions,
        SaveOptions,
        TrainerOptions,
        TrainOptions,
    )
    from hvd_trainer.config.parser import parse
    from hvd_trainer.data import BatchSource, DataShard, TensorData, once_per_node
    from hvd_trainer.errors import (
        BackendError,
        CheckpointError,
        DataError,
        LaunchError,
        NonFiniteError,
        OptionError,
        PeerError,
        PreemptedError,
        ReplicasDifferError,
        UserError,
    )
    from hvd_trainer.launch.world import World, detect
    from hvd_trainer.observe.callback import Callback, RunView
    from hvd_trainer.observe.metrics import accuracy
    from hvd_trainer.observe.trackers import MLflowTracker, WandbTracker
    from hvd_trainer.training.job import run_job
    from hvd_trainer.training.spawn import run
    from hvd_trainer.training.trainer import History, Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
