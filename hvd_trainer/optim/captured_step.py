"""A step captured as a graph of the device: one launch in place of some hundred.

    step       1 ... 11       12         13   14 ...
    each is    as always      captured   launched again, with its batch copied to where the first one was
                              (and then launched)

What an engine exchanges within the device's queue is part of the graph, and so is the update. Where an engine
exchanges by itself, as Horovod does, forward and backward alone are captured. A batch of another shape, such as an
epoch's last one, takes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from hvd_trainer.backends import StepResult
from hvd_trainer.data import Batch, samples_in
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.optim.step import ForwardResult, StepParts, TrainStep
from hvd_trainer.utils import accelerator

WARM_UP_STEPS = 11
"""In which libraries choose how to compute and buffers are made; DDP measures its first ten."""


class CapturedStep(TrainStep):
    """A step that is the same each time but for its batch and its learning rate.

    Args:
        parts: as of any step.
        stream: on which they were prepared, and the graph is captured (`accelerator.apart`): nothing that is
            captured may wait for the default one.
        is_uniform: whether all ranks' batches have one shape in each step. Else they ask each other before each,
            because exchanges in a graph and others must not meet.

    Raises:
        OptionError: the optimizer reads its learning rate on the host.
    """

    def __init__(self, parts: StepParts, stream: Any, *, is_uniform: bool) -> None:
        super().__init__(parts)
        self._stream = stream
        device = self.backend.device
        self._is_whole = self.backend.exchanges_in_graph
        if self._is_whole and not all(group.get("fused") for group in self.optimizer.param_groups):
            raise OptionError(
                f"--capture-step needs an optimizer that reads its learning rate on the device, and this "
                f"{type(self.optimizer).__name__} does not: make it with fused=True, or leave --capture-step out"
            )
        self._asks = self._is_whole and self.backend.world.size > 1 and not is_uniform
        self._settings = self._other_settings()
        self._set = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._rates = [torch.tensor(rate, dtype=torch.float32, device=device) for rate in self._set]
        self._done = 0
        self._form: Any = None
        self._batch: Batch = (None, None)
        self._passed: ForwardResult | None = None
        self._result = StepResult()
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._launch: Callable[[], None] | None = None

    def __call__(self, window: list[Batch], meter: Meter, meanwhile: Callable[[], None]) -> StepResult:
        (batch,) = window
        if not self._fits(batch) or self._done < WARM_UP_STEPS:
            self._done += 1
            return super().__call__(window, meter, meanwhile)
        self.backend.activity.enter("forward")
        if self._settings != self._other_settings():
            self._launch = None  # it has the former ones
        self._take(batch)
        if self._launch is None:
            self._settings = self._other_settings()
            with self.backend.pause_observers():
                self._launch = accelerator.capture(self._step if self._is_whole else self._passes, self._stream)
        self._launch()
        assert self._passed is not None
        loss, outputs = self._passed.loss.clone(), self._passed.outputs
        if meter.keeps_outputs:
            outputs = tree_map_only(Tensor, Tensor.clone, outputs)  # the next launch writes over them
        meter.add(loss, outputs, batch[1], samples_in(batch))
        self._losses.append(loss)
        self.backend.activity.enter("data")
        meanwhile()
        return self._noted(loss) if self._is_whole else self._updated(meter)

    def close(self) -> None:
        self._launch = None  # which holds the engine's communicators

    def _fits(self, batch: Batch) -> bool:
        """Return whether the batches of all ranks have the shape that is captured, or is to be."""
        form = _form(batch)
        fits = self._form is not None and form == self._form
        if self._asks:
            fits = self.backend.all_reduce_numbers([fits], "min") == [1]
        if not fits and self._launch is None:
            self._form, self._done = form, 0
        return fits

    def _other_settings(self) -> list[dict[str, Any]]:
        """Return what the optimizer was told besides the learning rates: numbers that become part of the graph."""
        return [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in self.optimizer.param_groups
        ]

    def _take(self, batch: Batch) -> None:
        """Bring what changes from step to step to where the graph reads it."""
        if self._launch is None:
            self._batch = tree_map_only(Tensor, Tensor.clone, batch)
        else:
            for here, its in zip(tree_flatten(self._batch)[0], tree_flatten(batch)[0], strict=True):
                if isinstance(here, Tensor):
                    here.copy_(its, non_blocking=True)
        for number, (rate, group) in enumerate(zip(self._rates, self.optimizer.param_groups, strict=True)):
            if self._set[number] != group["lr"]:
                self._set[number] = group["lr"]
                rate.fill_(group["lr"])

    # What is captured.

    def _step(self) -> None:
        with self.backend.gradient_sync(self.model, enabled=True):
            self._passed = self._kept(self.passes(self._batch, 1))
        with self._rates_on_device():
            self._result = self.backend.step(
                self.optimizer, max_norm=self.max_norm, norm=self.norm, total_norm=self.total_norm
            )
        self.optimizer.zero_grad(set_to_none=True)

    def _passes(self) -> None:
        with self.backend.gradient_sync(self.model, enabled=False):
            self._passed = self._kept(self.passes(self._batch, 1))
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]

    def _kept(self, passed: ForwardResult) -> ForwardResult:
        """Return it without what autograd knows of it, which would live on between the launches."""
        return passed._replace(outputs=tree_map_only(Tensor, Tensor.detach, passed.outputs))

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Inside, the optimizer takes its learning rates from tensors; float32, as its kernels have them."""
        groups = self.optimizer.param_groups
        own: list[dict[str, Any]] = [
            {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
        ]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, its in zip(groups, own, strict=True):
                group.update(its)

    # What follows it.

    def _noted(self, loss: Tensor) -> StepResult:
        self.backend.mark_exchange()
        norm = self._result.grad_norm
        result = replace(self._result, grad_norm=None if norm is None else norm.clone(), losses=(loss,))
        self._losses = []
        self.guard.note(self.progress.step + 1, result.losses, result.grad_norm)
        return result

    def _updated(self, meter: Meter) -> StepResult:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self.update(meter, [])


def _form(batch: Batch) -> Any:
    """Return what batches must have in common to use one graph: structure, shapes, types, what is no tensor."""
    leaves, structure = tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
