"""Average gradients in buckets that are laid out as DDP's, for an engine that has none of its own.

Floating-point sums depend on their order. A ring all-reduce adds the ranks' values in an order that depends on
where in the buffer they are, which shows from three ranks on. So two runs give the same bits only if they lay the
gradients out alike: on both engines, in each step, and before and after a resume. The layout here depends on the
parameters alone, and is final from the first step on: one flat buffer per bucket, filled from the last parameter
to the first, about as backward finishes their gradients.

    backward    fc2  fc1  conv2 | conv1          gradients are written into their places, times 1/n
    buckets     [fc2 fc1 conv2]   [conv1]        a full bucket is sent while backward goes on

(PyTorch's DDP has one bucket in its first step, and lays out others then in the order that backward has shown. A
process that resumes would begin with the one bucket again, and give other bits: `ddp_layout`.)
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvd_trainer.backends.backward_passes import BackwardPasses, WatchedGradient
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
    is_launched: bool = False

    @classmethod
    def of(cls, parameters: Sequence[Tensor], number: int, dtype: torch.dtype | None = None) -> Bucket:
        """Return a bucket of zeros for parameters, in a type of its own if one is given."""
        first, sizes = parameters[0], [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=dtype or first.dtype, device=first.device)
        views = [_shaped_like(part, p) for part, p in zip(flat.split(sizes), parameters, strict=True)]
        return cls(list(parameters), flat, views, missing=len(parameters), number=number)

    def fill(self, factor: float) -> None:
        """Write all gradients into their places, times a factor, by two operations; None counts as zero."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        torch._foreach_copy_(self.views, [grad.to_dense() if grad.is_sparse else grad for grad in grads])
        if factor != 1.0:
            self.flat.mul_(factor)


@dataclass(slots=True, eq=False, kw_only=True)
class _Gradient(WatchedGradient):
    """A gradient, and its place in a bucket."""

    bucket: Bucket
    view: Tensor


class BucketExchange(ABC):
    """The reduction of buckets over ranks, as an engine computes it."""

    in_order: ClassVar[bool] = True
    """whether ranks match buckets by the order in which they launch them, instead of by their numbers"""

    @property
    def is_over(self) -> bool:
        """Whether there is no further step, because a rank has left."""
        return False

    @abstractmethod
    def launch(self, bucket: Bucket) -> None:
        """Start to all-reduce a bucket, which is full, in place."""

    @abstractmethod
    def wait(self, bucket: Bucket) -> None:
        """Wait until a bucket is reduced. All are waited for once they are launched, by their numbers."""


class GradientBuckets:
    """Buckets that are launched in each step as soon as they, and in most engines those before them, are full.

    Args:
        buckets: by their numbers.
        factor_before: multiplied before the reduction.
        factor_after: multiplied after it.
        write: fills a bucket, of which gradients may be missing, before it is launched; None: `Bucket.fill` does.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        exchange: BucketExchange,
        *,
        factor_before: float = 1.0,
        factor_after: float = 1.0,
        write: Callable[[Bucket], None] | None = None,
    ) -> None:
        self.buckets, self.exchange = buckets, exchange
        self._factor_before, self._factor_after, self._write = factor_before, factor_after, write
        self._num_launched = 0
        # On several devices gradients are finished by several threads.
        self._lock = threading.Lock()

    def add(self, bucket: Bucket) -> None:
        """Note that one more gradient of a bucket is finished."""
        with self._lock:
            bucket.missing -= 1
            if not self.exchange.in_order:
                if not bucket.missing:
                    self._launch(bucket)
                return
            while self._num_launched < len(self.buckets) and not self.buckets[self._num_launched].missing:
                self._launch(self.buckets[self._num_launched])

    def _launch(self, bucket: Bucket) -> None:
        if self._write is None:
            bucket.fill(self._factor_before)
        else:
            self._write(bucket)
        bucket.is_launched = True
        self._num_launched += 1
        self.exchange.launch(bucket)

    def launch_rest(self) -> None:
        """Launch the buckets of which backward left some parameter out."""
        for bucket in self.buckets:
            if not bucket.is_launched:
                self._launch(bucket)

    def wait(self, store: Callable[[Bucket], None] = lambda bucket: None) -> None:
        """Wait until all are reduced, call `store` with each, and begin the next step."""
        self._num_launched = 0
        for bucket in self.buckets:
            bucket.missing, bucket.is_launched = len(bucket.parameters), False
        for bucket in self.buckets:
            self.exchange.wait(bucket)
            if self._factor_after != 1.0:
                bucket.flat.mul_(self._factor_after)
            store(bucket)

    def abandon(self) -> None:
        """Forget the gradients of a step that has begun; the other ranks are not kept waiting for them."""
        has_begun = any(bucket.missing < len(bucket.parameters) for bucket in self.buckets)
        if has_begun and not self.exchange.is_over:
            self.launch_rest()
            self.wait()


class BucketReducer(BackwardPasses[_Gradient], Reducer):
    """Collect gradients during backward, and exchange them in buckets.

    Args:
        module: whose gradients are averaged.
        exchange: sums the buckets.
        num_ranks: how many ranks have the module. Gradients are multiplied by 1/num_ranks, so that their sum over
            ranks is the mean.
        limit_bytes: a bucket is closed when it has reached this size.
        find_unused_parameters: whether parameters may get no gradient. DDP adds sizes up from the first parameter
            on then, not from the last one.
        passes: how many backward passes add to a gradient before it is sent.
        exclude: parameters whose gradients are not averaged here.

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
        find_unused_parameters: bool = False,
        passes: int = 1,
        exclude: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(per_step=passes)
        self._module, self._factor = module, 1.0 / num_ranks
        excluded = set(exclude)
        parameters = [p for p in module.parameters() if p.requires_grad and p not in excluded]
        # A CPU has a gradient that is just finished in its cache. On an accelerator, starting an operation costs
        # more than most of them take: there a full bucket is written by two.
        self._writes_at_once = all(accelerator.is_host(p.device) for p in parameters)
        self._enabled = True
        groups = _lay_out(parameters, limit_bytes, find_unused_parameters)
        buckets = [Bucket.of(group, number) for number, group in enumerate(groups)]
        self._buckets = GradientBuckets(buckets, exchange, write=self._write_rest)
        for bucket in buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                self.watch(_Gradient(parameter=parameter, bucket=bucket, view=view))

    @property
    def is_counting(self) -> bool:
        return self._enabled

    def set_enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    def complete(self, gradient: _Gradient) -> None:
        parameter = gradient.parameter
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise BackendError(
                f"The gradient of {self._name(parameter)} is sparse. A module with such parameters says so by its "
                f"attribute `sparse = True`, as nn.Embedding does; in stages (--stages) they must be dense"
            )
        if self._writes_at_once:
            self._write(parameter, gradient.view)
        self._buckets.add(gradient.bucket)

    def too_many(self, gradient: _Gradient) -> BackendError:
        return BackendError(
            f"Backward computed the gradient of {self._name(gradient.parameter)} twice in one pass, and it is "
            f"sent to the other ranks after the first time. Checkpointing of a layer that is used twice does so: "
            f"give it use_reentrant=False; and so does a backward() inside of backward."
        )

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, one in self._module.named_parameters() if one is parameter)

    def _write(self, parameter: Tensor, view: Tensor) -> None:
        """Write one gradient into its place in the bucket; None counts as zero."""
        if parameter.grad is None:
            view.zero_()
        else:
            torch.mul(parameter.grad, self._factor, out=view)
        parameter.grad = view

    def _write_rest(self, bucket: Bucket) -> None:
        if not self._writes_at_once:
            bucket.fill(self._factor)  # the same products as by `_write`
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        elif bucket.missing:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if self.gradients[parameter].num_passes < self.per_step:
                    self._write(parameter, view)

    def finish(self) -> None:
        self._buckets.launch_rest()
        self._buckets.wait()
        self.reset()

    def close(self) -> None:
        self.unhook()
        del self._buckets  # which hold this object


def _lay_out(parameters: Sequence[Tensor], limit_bytes: int, find_unused_parameters: bool) -> list[list[Tensor]]:
    """Return the parameters of each bucket, as of the DDP of `ddp_layout`."""
    if find_unused_parameters:
        return [[parameters[i] for i in bucket] for bucket in assign(parameters, [limit_bytes])[::-1]]
    order = parameters[::-1]
    return [[order[i] for i in bucket] for bucket in assign(order, [limit_bytes], range(len(order)))]


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters of modules that say so, such as embeddings, whose gradients are sparse."""
    modules = [module for module in model.modules() if getattr(module, "sparse", None) is True]
    sparse = {p for module in modules for p in module.parameters(recurse=False)}
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
