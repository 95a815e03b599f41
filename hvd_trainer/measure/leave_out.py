"""Leave the exchange of gradients out of a job on the Trainer, or of a script on an engine of this package.

DistributedDataParallel          as under its no_sync()
horovod.torch, hvd_trainer.hvd   the optimizer's hooks and `synchronize` do nothing; so do allreduce and
                                 allreduce_ of a gradient
torch.distributed.all_reduce     of a gradient does nothing
the Trainer                      its engine connects no exchange, as for `--reproducible`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hvd_trainer.backends import Backend
from hvd_trainer.errors import OptionError
from hvd_trainer.utils.import_hooks import ImportHooks, wrap
from hvd_trainer.utils.tensors import parameters_of


@cache
def leave_out_exchange() -> None:
    """Leave the exchange out of whatever this process trains from now on."""
    # As within its no_sync(); each model sets an attribute of this name.
    ignored: Any = property(lambda model: False, lambda model, value: None)
    DistributedDataParallel.require_backward_grad_sync = ignored
    gradients = _Gradients()
    wrap("all_reduce", gradients.skip_in_torch, torch.distributed)
    for name in ("prepare", "prepare_stage"):
        wrap(name, lambda prepare, *args, **kwargs: prepare(*args, **kwargs | {"exchange": False}), Backend)
    after: dict[str, Callable[[ModuleType], None]] = {
        "horovod.torch.optimizer": _stop_horovod,
        "hvd_trainer.hvd.optimizer": _stop_hvd,
        "horovod.torch": gradients.skip_in_horovod,
        "hvd_trainer.hvd": gradients.skip_in_horovod,
        "hvd_trainer.optim.step": _weigh_alone,
    }
    ImportHooks(aliases={}, absent={}, after=after).install()


class _Done:
    """The handle of an exchange that was left out."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Gradients:
    """Knows the gradients of all parameters that an optimizer has updated once."""

    def __init__(self) -> None:
        self._parameters: dict[Tensor, None] = {}
        self._places: set[int] | None = None
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._parameters.update(dict.fromkeys(parameters_of(optimizer)))
        self._places = None  # before the next step, gradients may be elsewhere

    def _has(self, tensor: Tensor) -> bool:
        if self._places is None:
            self._places = {weight.grad.data_ptr() for weight in self._parameters if weight.grad is not None}
        return tensor.data_ptr() in self._places

    def skip(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Do what a function does that exchanges a tensor and returns it, but nothing for a gradient."""
        return tensor if self._has(tensor) else function(tensor, *args, **kwargs)

    def skip_in_torch(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Do the same with such a function of torch.distributed, which returns a handle."""
        return _Done() if self._has(tensor) else function(tensor, *args, **kwargs)

    def skip_in_horovod(self, module: ModuleType) -> None:
        """Replace the functions that exchange one tensor and return it."""
        for name in ("allreduce", "allreduce_"):
            wrap(name, self.skip, module)


def _stop_horovod(module: ModuleType) -> None:
    def synchronize(_: Any, optimizer: Any) -> None:
        optimizer._synchronized = True

    wrap("_register_hooks", _nothing, module._DistributedOptimizer)
    wrap("synchronize", synchronize, module._DistributedOptimizer)
    wrap("_register_hooks", _refuse, module._DistributedAdasumOptimizer)


def _stop_hvd(module: ModuleType) -> None:
    wrap("complete", _nothing, module._GradientReducer)
    wrap("finish", lambda _, reducer: reducer.reset(), module._GradientReducer)
    wrap("__init__", _refuse, module._AdasumOptimizer)


def _weigh_alone(module: ModuleType) -> None:
    """Divide a step's gradients by this rank's own weight."""
    wrap("mean_weight", lambda _, step, weights: weights.sum(), module.TrainStep)


def _nothing(*_: Any) -> None: ...


def _refuse(*_: Any, **__: Any) -> None:
    raise OptionError("op=hvd.Adasum: its exchange is a part of the update, and cannot be left out")
