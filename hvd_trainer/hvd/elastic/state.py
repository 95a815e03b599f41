"""The state of a training in PyTorch: models, optimizers, samplers, schedulers, and any Python objects."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hvd_trainer.hvd.common.basics import rank
from hvd_trainer.hvd.common.elastic import ObjectState
from hvd_trainer.hvd.elastic.sampler import ElasticSampler
from hvd_trainer.hvd.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hvd_trainer.utils.optimizer_state import load_in_place


class StateHandler:
    """Saves, restores and shares one value by its `state_dict`.

    Args:
        value: has `state_dict` and `load_state_dict`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Save the value's state in memory."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Return to the state of the last `save`."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over rank 0's state. A collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handles a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)

    def sync(self) -> None:
        """Take over rank 0's parameters and buffers. A collective."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Handles an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)

    def restore(self) -> None:
        """Return to the state of the last `save`, in the objects that others hold."""
        load_in_place(self.value, copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over rank 0's state and settings. A collective."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Handles a sampler."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)


_handler_registry: Sequence[tuple[type, type[StateHandler]]] = [
    (nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    # As plain objects they would be sent with the optimizer that they hold, and hold a copy of it from then on.
    (LRScheduler, StateHandler),
    (torch.amp.GradScaler, StateHandler),
]


def get_handler_registry() -> Sequence[tuple[type, type[StateHandler]]]:
    """Return types of values, each with its handler's class."""
    return _handler_registry


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers' classes by type."""
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _handler_registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """Models, optimizers and objects that all ranks share; they are attributes of the state.

    Args:
        model, optimizer: of the training, if there is one only.
        kwargs: further models, optimizers, samplers, schedulers, and objects as in `ObjectState`.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler_of(value) for name, value in values.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name in self._handlers:
            super().__setattr__(name, values.pop(name))
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **values)

    def save(self) -> None:
        """Save all parts in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the last `save`."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take over all parts from rank 0, and save them. A collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()  # which saves all

    def _committed(self) -> dict[str, Any]:
        """Return what was saved of all parts."""
        handlers = {
            name: {key: value for key, value in vars(handler).items() if key != "value"}
            for name, handler in self._handlers.items()
        }
        return {**super()._committed(), "handlers": handlers}

    def _load_committed(self, saved: dict[str, Any]) -> None:
        """Make this the saved state of all parts."""
        super()._load_committed(saved)
        for name, fields in saved["handlers"].items():
            vars(self._handlers[name]).update(fields)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
