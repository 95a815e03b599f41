"""A step captured as a graph of the device (CUDA graph): one launch in place of some hundred.

    step       1 ... 11       12                     13   14 ...
    each is    as usual       captured, launched     launched, with its batch copied to where the first one was

An exchange in the device's queue, such as that of DDP, is part of the graph, and so is the update. Horovod
exchanges in a thread of its own: then only forward and backward are captured. A batch of another shape, such as an
epoch's last one, is trained on without the graph.
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
from hvd_trainer.optim.weights import Share
from hvd_trainer.utils import accelerator

WARM_UP_STEPS = 11
"""Steps in which libraries choose algorithms and allocate buffers; DDP measures its first ten."""


class CapturedStep(TrainStep):
    """A step whose batch and learning rate change, and nothing else.

    Args:
        parts: as of any step.
        stream: the stream on which the parts were prepared and the graph is captured (`accelerator.side_stream`):
            nothing captured may wait for the default stream.
        is_uniform: whether in each step all ranks' batches have one shape. Otherwise the ranks compare shapes
            before each step, because an exchange in a graph cannot meet one outside.

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
        self._compares_shapes = self._is_whole and self.backend.world.size > 1 and not is_uniform
        self._settings = self._other_settings()
        self._set = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._rates = [torch.tensor(rate, dtype=torch.float32, device=device) for rate in self._set]
        self._done = 0
        self._form: Any = None
        self._batch: Batch = (None, None)
        self._share = Share(1)
        self._forward_result: ForwardResult | None = None
        self._result = StepResult()
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._launch: Callable[[], None] | None = None

    def __call__(self, batches: list[Batch], meter: Meter, prefetch: Callable[[], None]) -> StepResult:
        (batch,) = batches
        if not self._fits(batch) or self._done < WARM_UP_STEPS:
            self._done += 1
            return super().__call__(batches, meter, prefetch)
        (share,) = self.shares(batches)
        self.backend.activity.enter("forward")
        if self._settings != self._other_settings():
            self._launch = None  # the graph has the former settings
        self._copy_in(batch, share)
        if self._launch is None:
            self._settings = self._other_settings()
            with self.backend.pause_observers():
                self._launch = accelerator.capture(
                    self._capture_step if self._is_whole else self._capture_passes, self._stream
                )
        self._launch()
        assert self._forward_result is not None
        loss, outputs = self._forward_result.loss.clone(), self._forward_result.outputs
        if meter.keeps_outputs:
            outputs = tree_map_only(Tensor, Tensor.clone, outputs)  # the next launch overwrites them
        meter.add(loss, outputs, batch[1], samples_in(batch), share.weight)
        self._losses.append(loss)
        self.backend.activity.enter("data")
        prefetch()
        return self._finish_whole(loss) if self._is_whole else self._update_after(meter)

    def close(self) -> None:
        self._launch = None  # the graph holds the engine's communicators

    def _fits(self, batch: Batch) -> bool:
        """Return whether the batches of all ranks have the shape of the graph."""
        form = _form(batch)
        fits = self._form is not None and form == self._form
        if self._compares_shapes:
            fits = self.backend.collectives.all_reduce_numbers([fits], "min") == [1]
        if not fits and self._launch is None:
            self._form, self._done = form, 0
        return fits

    def _other_settings(self) -> list[dict[str, Any]]:
        """Return the optimizer's settings besides the learning rates: numbers that become part of the graph."""
        return [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in self.optimizer.param_groups
        ]

    def _copy_in(self, batch: Batch, share: Share) -> None:
        """Copy batch, share and learning rates to where the graph reads them."""
        if self._launch is None:
            self._batch, self._share = tree_map_only(Tensor, Tensor.clone, (batch, share))
        else:
            targets, sources = tree_flatten((self._batch, self._share))[0], tree_flatten((batch, share))[0]
            for target, source in zip(targets, sources, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source, non_blocking=True)
        for number, (rate, group) in enumerate(zip(self._rates, self.optimizer.param_groups, strict=True)):
            if self._set[number] != group["lr"]:
                self._set[number] = group["lr"]
                rate.fill_(group["lr"])

    # Captured code.

    def _capture_step(self) -> None:
        with self.backend.gradient_sync(self.model, enabled=True):
            self._forward_result = self._detach(self.forward_backward(self._batch, self._share))
        with self._rates_on_device():
            self._result = self.backend.step(
                self.optimizer, max_norm=self.max_norm, norm=self.needs_norm, total_norm=self.total_norm
            )
        self.optimizer.zero_grad(set_to_none=True)

    def _capture_passes(self) -> None:
        with self.backend.gradient_sync(self.model, enabled=False):
            self._forward_result = self._detach(self.forward_backward(self._batch, self._share))
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]

    def _detach(self, result: ForwardResult) -> ForwardResult:
        """Return the result without its autograd graph, whose memory would stay allocated between launches."""
        return result._replace(outputs=tree_map_only(Tensor, Tensor.detach, result.outputs))

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Give the optimizer its learning rates as tensors inside; float32, the type in its kernels."""
        groups = self.optimizer.param_groups
        before: list[dict[str, Any]] = [
            {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
        ]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    # After a launch.

    def _finish_whole(self, loss: Tensor) -> StepResult:
        """Return the result of a launch that has also updated the parameters."""
        self.backend.mark_exchange()
        norm = self._result.grad_norm
        norm = None if norm is None else norm.clone()
        result = replace(self._result, grad_norm=norm, losses=(loss,), weights=self._weights)
        self._losses = []
        self.guard.note(self.progress.step + 1, result.losses, result.grad_norm)
        return result

    def _update_after(self, meter: Meter) -> StepResult:
        """Update the parameters after a launch of forward and backward alone."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self.update(meter, [])


def _form(batch: Batch) -> Any:
    """Return what batches of one graph have in common: structure, shapes, types, and all that is no tensor."""
    leaves, structure = tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
