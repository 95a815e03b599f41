"""Average gradients in buckets that are laid out as DDP's, for an engine that has none of its own.

Floating-point sums depend on their order, and a ring all-reduce adds the parts of a buffer in different orders.
Two engines give the same bits only if they lay the gradients out alike. So the layout here is DDP's: one flat
buffer per bucket, assigned by the same PyTorch function, at first in the order of the parameters and from the
second exchange on in the order in which backward finished them.

    backward    fc2  fc1  conv2 | conv1          gradients are written into their places, times 1/n
    buckets     [fc2 fc1 conv2]   [conv1]        a full bucket is sent while backward goes on
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvd_trainer.errors import BackendError
from hvd_trainer.utils import accelerator


class Reducer(ABC):
    """Average the gradients of one model, or of one stage, over the ranks that have it."""

    @abstractmethod
    def set_enabled(self, enabled: bool) -> None:
        """Choose whether the next backward passes lead to an exchange; without one, gradients add up locally."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every gradient is the mean over ranks."""

    @abstractmethod
    def close(self) -> None:
        """Stop taking part in backward."""


@dataclass
class Bucket:
    """Some parameters and their gradients, which are views of one flat buffer."""

    parameters: list[Tensor]
    flat: Tensor
    """shape (elements,)"""
    views: list[Tensor]
    """of `flat`, one per parameter, in its shape"""
    missing: int
    """how many gradients of the step are not there yet"""
    number: int
    """among the buckets, the same on all ranks"""
    sent: bool = False

    @classmethod
    def of(cls, parameters: Sequence[Tensor], number: int, dtype: torch.dtype | None = None) -> Bucket:
        """Return a bucket of zeros for parameters, in a type of its own if one is given."""
        first, sizes = parameters[0], [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=dtype or first.dtype, device=first.device)
        views = [_shaped_like(part, p) for part, p in zip(flat.split(sizes), parameters, strict=True)]
        return cls(list(parameters), flat, views, missing=len(parameters), number=number)


@dataclass(slots=True)
class _Gradient:
    """One parameter's gradient in a step. A step of 10,000 tensors looks up nothing by tensor, which is slow."""

    parameter: nn.Parameter
    bucket: Bucket
    view: Tensor
    """its place in the bucket"""
    passes_left: int
    """backward passes until it is complete"""
    is_complete: bool = False


class BucketExchange(ABC):
    """The sum of buckets over ranks, as an engine computes it."""

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Start the exchange of a bucket, which is full."""

    @abstractmethod
    def receive(self) -> None:
        """Wait until every bucket that was sent holds the sum over ranks."""


class BucketReducer(Reducer):
    """Collect gradients during backward and exchange each bucket as soon as it is full.

    Args:
        module: whose gradients are averaged.
        exchange: sums the buckets.
        num_ranks: how many ranks have the module. Gradients are multiplied by 1/num_ranks, so that their sum over
            ranks is the mean.
        limit_bytes: a bucket is closed when it has reached this size.
        reorder: lay the buckets out anew after the first exchange, in the order that backward showed. (DDP does
            not where parameters may go unused, and neither may we then.)
        passes: how many backward passes add to a gradient before it is sent.
        apart: parameters that are left to others.

    Raises:
        BackendError: inside backward, if it adds more often to a gradient: it may be on its way already.
    """

    def __init__(
        self,
        module: nn.Module,
        exchange: BucketExchange,
        *,
        num_ranks: int,
        limit_bytes: int,
        reorder: bool = True,
        passes: int = 1,
        apart: Iterable[Tensor] = (),
    ) -> None:
        self._module, self._exchange, self._factor = module, exchange, 1.0 / num_ranks
        self._limit_bytes, self._passes = limit_bytes, passes
        others = set(apart)
        self._parameters = [p for p in module.parameters() if p.requires_grad and p not in others]
        # A CPU has a gradient that is just finished in its cache. On an accelerator, starting an operation costs
        # more than most of them take: there a full bucket is written by two.
        self._writes_at_once = all(accelerator.is_host(p.device) for p in self._parameters)
        self._backward_order: list[nn.Parameter] | None = [] if reorder else None
        self._enabled = True
        self.buckets: list[Bucket] = []
        self._gradients: dict[Tensor, _Gradient] = {}
        first_limit = sys.maxsize if reorder else limit_bytes
        assignment = assign(self._parameters, [first_limit])
        self._lay_out([[self._parameters[i] for i in bucket] for bucket in reversed(assignment)])
        self._hooks = [
            gradient.parameter.register_post_accumulate_grad_hook(partial(self._collect, gradient))
            for gradient in self._gradients.values()
        ]

    def _lay_out(self, groups: list[list[nn.Parameter]]) -> None:
        self.buckets = [Bucket.of(group, number) for number, group in enumerate(groups)]
        for bucket, group in zip(self.buckets, groups, strict=True):
            for parameter, view in zip(group, bucket.views, strict=True):
                gradient = self._gradients.setdefault(parameter, _Gradient(parameter, bucket, view, self._passes))
                gradient.bucket, gradient.view = bucket, view

    def set_enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    def _collect(self, gradient: _Gradient, parameter: Tensor) -> None:
        """Take a parameter's gradient, which backward has just finished."""
        if not self._enabled:
            return
        if gradient.is_complete:
            raise self._finished_twice(gradient)
        gradient.passes_left -= 1
        if gradient.passes_left > 0:
            return
        if self._backward_order is not None:
            self._backward_order.append(gradient.parameter)
        bucket = gradient.bucket
        gradient.is_complete = True
        bucket.missing -= 1
        if self._writes_at_once:
            self._write(parameter, gradient.view)
        if not bucket.missing:
            self._dispatch(bucket)

    def _finished_twice(self, gradient: _Gradient) -> BackendError:
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        return BackendError(
            f"Backward computed the gradient of {names[gradient.parameter]} twice in one pass, and it is sent to "
            f"the other ranks after the first time. Checkpointing of a layer that is used twice does so: give it "
            f"use_reentrant=False; and so does a backward() inside of backward."
        )

    def _write(self, parameter: Tensor, view: Tensor) -> None:
        """Write one gradient into its place in the bucket; None counts as zero."""
        if parameter.grad is None:
            view.zero_()
        else:
            torch.mul(parameter.grad, self._factor, out=view)
        parameter.grad = view

    def _write_all(self, bucket: Bucket) -> None:
        """Write all gradients of a bucket: the same products as by `_write`, parameter by parameter."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
        torch._foreach_copy_(bucket.views, grads)
        bucket.flat.mul_(self._factor)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            parameter.grad = view

    def _dispatch(self, bucket: Bucket) -> None:
        if not self._writes_at_once:
            self._write_all(bucket)
        elif bucket.missing:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if not self._gradients[parameter].is_complete:
                    self._write(parameter, view)
        bucket.sent = True
        self._exchange.send(bucket)

    def finish(self) -> None:
        # Those of which backward left some parameter out; a gradient that is None counts as zero.
        for bucket in self.buckets:
            if not bucket.sent:
                self._dispatch(bucket)
        self._exchange.receive()
        for bucket in self.buckets:
            bucket.missing, bucket.sent = len(bucket.parameters), False
        for gradient in self._gradients.values():
            gradient.passes_left, gradient.is_complete = self._passes, False
        if self._backward_order is not None:
            order, self._backward_order = self._backward_order, None
            if len(order) == len(self._parameters):
                self._lay_out_anew(order)

    def _lay_out_anew(self, order: list[nn.Parameter]) -> None:
        """Lay the buckets out in the order in which backward finished the gradients."""
        numbers = {p: i for i, p in enumerate(self._parameters)}
        assignment = assign(order, [self._limit_bytes], [numbers[p] for p in order])
        self._lay_out([[self._parameters[i] for i in bucket] for bucket in assignment])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters of embeddings, and the like, whose gradients are sparse."""
    sparse = {p for m in model.modules() if getattr(m, "sparse", False) for p in m.parameters(recurse=False)}
    return {name: p for name, p in model.named_parameters() if p in sparse and p.requires_grad}


def assign(
    parameters: Sequence[Tensor], limits_bytes: Sequence[int], indices: Sequence[int] = ()
) -> list[list[int]]:
    """Assign parameters to buckets as DDP does; return the positions, or the `indices`, in each bucket.

    Args:
        limits_bytes: a bucket is closed when it has reached its limit. The last one holds for all further buckets.
    """
    if not parameters:
        return []
    assignment, _ = dist._compute_bucket_assignment_by_size(
        list(parameters), list(limits_bytes), [], list(indices)
    )
    return assignment


def _shaped_like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of a flat part in the parameter's shape and, if dense, memory order (channels last)."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(order).is_contiguous():
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)
