"""Evaluate a model on a whole data set, without changing a bit of its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from hvd_trainer.backends import Backend
from hvd_trainer.data import Batch, Loader
from hvd_trainer.observe.metric_objects import MetricObject
from hvd_trainer.observe.metrics import Meter, Metric
from hvd_trainer.optim.loss_module import modules_of
from hvd_trainer.optim.step import EvaluationStep
from hvd_trainer.parallel.placement import ModelPlacement
from hvd_trainer.utils.rng import isolated_rng

Batches = Iterator[Batch | None]


class Evaluation:
    """Evaluates a model on one data set, whenever it is called.

    Args:
        model: the bare module.
        step: evaluates a batch; it has the loss.
        metrics: by name. Objects are copied, as the training may be gathering in the same ones.
    """

    def __init__(
        self,
        backend: Backend,
        placement: ModelPlacement,
        model: nn.Module,
        step: EvaluationStep,
        loader: Loader,
        metrics: Mapping[str, Metric],
    ) -> None:
        self._backend, self._placement = backend, placement
        self._model, self._step, self._loader = model, step, loader
        self._metrics = {
            name: deepcopy(metric) if isinstance(metric, MetricObject) else metric
            for name, metric in metrics.items()
        }

    @torch.no_grad()
    def __call__(self, between: Callable[[Batches], Batches] = iter) -> dict[str, float]:
        """Return loss and metrics over all samples, each counted once, and their number. A collective.

        Args:
            between: yields the batches that it is given, and acts between two of them.
        """
        backend, modules = self._backend, modules_of(self._model, self._step.loss)
        activity = backend.activity
        activity.enter("epoch")
        with unchanged(modules, backend.device):
            for module in modules:
                backend.synchronize_buffers(module)
                module.eval()
            meter = Meter(self._metrics, backend)
            for batch in between(self._placement.evaluation(self._loader)):
                self._step.evaluate(batch, meter)
                activity.enter("evaluate")
            activity.enter("epoch")
            self._loader.check_evaluation()
            return meter.compute()


@contextmanager
def unchanged(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore random state, buffers and training modes of modules at the end of the context."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    roots = [(module, module.training) for module in modules]
    buffers = [
        (part, name, buffer.clone())
        for part, _ in modes
        for name, buffer in part._buffers.items()
        if buffer is not None and _is_writable(buffer)
    ]
    try:
        with isolated_rng(device):
            yield
    finally:
        for module, mode in roots:
            module.train(mode)  # a user's own may do more than set the mode
        for part, mode in modes:
            part.training = mode
        for part, name, value in buffers:
            buffer = part._buffers.get(name)
            # A table that the forward pass has replaced by a longer one stays, as its module counts on that.
            if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                buffer.copy_(value)


def _is_writable(buffer: Tensor) -> bool:
    """Return whether a tensor has values of its own: not one of another stage, or an expanded one."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return not (buffer.is_meta or is_expanded)
