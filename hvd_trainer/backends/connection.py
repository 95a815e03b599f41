"""The parameters that a gradient exchange is connected to, and whether these are still what is trained.

A user's code may freeze, unfreeze, replace or convert layers between two steps. DDP and the buckets have their
hooks on the parameters that were trained when they were connected: the gradients of others would stay on their
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from hvd_trainer.errors import BackendError

REQUIRES_GRAD = attrgetter("requires_grad")


class Connection:
    """The parameters of a module as they were when their exchange was connected.

    Args:
        module: whose gradients are exchanged.
        connect: connects the exchange to what the module has when it is called; returns the module to call in
            training, None where that is another one.
    """

    def __init__(self, module: nn.Module, connect: Callable[[], nn.Module | None]) -> None:
        self._module, self._connect = module, connect
        self._parameters: list[Tensor] = []
        self._trained: list[bool] = []
        self._places: list[Any] = []
        self._names: set[str] = set()

    def connect(self) -> nn.Module | None:
        """Connect the exchange, and remember to what; return the module to call, as the function that connects."""
        to_call = self._connect()
        self._parameters = list(self._module.parameters())
        self._trained = [p.requires_grad for p in self._parameters]
        self._places = [_place(p) for p in self._parameters]
        self._names = {name for name, _ in self._module.named_buffers()}
        return to_call

    def is_frozen_as_before(self) -> bool:
        """Return whether the same of its parameters are trained; quick enough for each step."""
        return [*map(REQUIRES_GRAD, self._parameters)] == self._trained

    @property
    def has_changed(self) -> bool:
        """Whether the module has or trains other parameters, or they have other types, shapes or devices."""
        parameters = list(self._module.parameters())
        return (
            len(parameters) != len(self._parameters)
            or any(a is not b for a, b in zip(parameters, self._parameters, strict=True))
            or not self.is_frozen_as_before()
            or any(_place(p) != place for p, place in zip(parameters, self._places, strict=True))
        )

    def lacks(self, model: nn.Module) -> list[str]:
        """Return the names of a model's parameters that the module does not have; not those of other stages."""
        own = set(self._module.parameters())
        return [name for name, p in model.named_parameters() if not (p.is_meta or p in own)]

    def why_without(self, parameter: Tensor) -> str | None:
        """Return why the exchange does not have a parameter; None if it has."""
        number = next((i for i, known in enumerate(self._parameters) if known is parameter), None)
        if number is None:
            return "it is not in the model that was given to fit, or was put in after the start"
        if not self._trained[number]:
            return "it was frozen at the start"
        if _place(parameter) != self._places[number]:
            return "it has changed its type or device"
        return None if parameter.requires_grad else "it is frozen"

    def new_tensors(self) -> list[Tensor]:
        """Return the parameters and buffers that the module did not have."""
        known = {id(p) for p in self._parameters}
        parameters = [p for p in self._module.parameters() if id(p) not in known]
        return [*parameters, *(b for name, b in self._module.named_buffers() if name not in self._names)]


def _place(parameter: Tensor) -> tuple[Any, ...]:
    """Return the type, device and shape of a parameter, and the node of autograd that stores its gradient.

    Of a trained one that is converted and back, PyTorch makes a new node, and DDP's hooks stay on the old one.
    """
    node = get_gradient_edge(parameter).node if parameter.requires_grad else None
    return parameter.dtype, parameter.device, parameter.shape, node


def parameter_names(model: nn.Module, optimizer: Optimizer, before: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return the names of a model's parameters, and see that the optimizer updates no others.

    Args:
        before: names of the parameters that the model had before.

    Raises:
        BackendError: it updates one that the model does not have.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in names:
                was = f"{before[parameter]} before, " if parameter in before else ""
                raise BackendError(
                    f"The optimizer updates a parameter that neither the model nor the loss has: {place} of its "
                    f"group {number}, {was}{list(parameter.shape)}. No rank would exchange or save it. Make it "
                    "part of the model, or of the loss as an nn.Module; or take it out: "
                    f"optimizer.param_groups[{number}]['params']"
                )
    return names
