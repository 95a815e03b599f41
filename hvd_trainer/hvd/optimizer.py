"""`DistributedOptimizer`: an optimizer whose gradients are combined over ranks while `backward` runs."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends.backward_passes import BackwardPasses, WatchedGradient
from hvd_trainer.backends.buckets import Bucket, GradientBuckets
from hvd_trainer.backends.sparse_gradients import as_sparse, sparse_dims, start_sum
from hvd_trainer.hvd.collective import Collective, controller_of
from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.process_sets import ProcessSet, global_process_set
from hvd_trainer.hvd.common.request import REDUCIBLE, Kind, Op
from hvd_trainer.hvd.common.util import split_list
from hvd_trainer.hvd.compression import Compression, Compressor
from hvd_trainer.hvd.gradient_buckets import Reduction, agree
from hvd_trainer.hvd.mpi_ops import allreduce_async_, synchronize
from hvd_trainer.utils.tensors import parameters_of

NOT_TUPLES = "named_parameters must be a sequence of tuples (name, parameter), such as model.named_parameters()."
TOO_MANY_PASSES = (
    "A gradient was computed more than {passes} times since the last optimizer.step(). To add up gradients of "
    "several backward passes, set backward_passes_per_step to their number."
)
GRAD_HAS_GRAPH = "The gradient of {name} requires a gradient itself: create_graph=True is not supported."
ZERO_GRAD_RACE = (
    "The gradients are being reduced: after loss.backward(), call optimizer.step() or optimizer.synchronize() "
    "before optimizer.zero_grad()."
)
REDUCED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): it reduces the "
    "gradients a second time. Call it in a block `with optimizer.skip_synchronize():`."
)
BUILT_IN = (Compression.none, Compression.fp16, Compression.bf16)
"""Compressors that change a tensor's type alone, so that they may compress a bucket at once."""
NO_SKIPPING = (
    "skip_synchronize() cannot be used with Adasum, which reduces updates in step() instead of gradients."
)


def _names(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the parameters' names.

    Raises:
        ValueError: not pairs, a name comes twice, or one of the optimizer's parameters has no name.
    """
    if named_parameters is None:
        return dict(_numbered(optimizer))
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(NOT_TUPLES)
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has several parameters of the same name: {', '.join(twice)}")
    # Sorted: of the names of a shared parameter all ranks take the same.
    result = {parameter: name for name, parameter in sorted(pairs, key=lambda pair: pair[0])}
    missing = [name for parameter, name in _numbered(optimizer) if parameter not in result]
    if missing:
        places = ", ".join(name.removeprefix("allreduce.noname.") for name in missing)
        raise ValueError(
            f"named_parameters was given, but {len(missing)} of the optimizer's parameters are not named: "
            f"(parameter group.number) {places}"
        )
    return result


def _numbered(optimizer: Optimizer) -> Iterator[tuple[Tensor, str]]:
    """Yield an optimizer's parameters with names made of their group's number and their own."""
    for i, param_group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(param_group["params"]):
            yield parameter, f"allreduce.noname.{i}.{j}"


def _check_groups(groups: int | list[list[Tensor]] | None) -> None:
    if groups is None:
        return
    if not isinstance(groups, list):
        if groups <= 0:
            raise ValueError("groups must be a positive integer or a list of lists of torch.Tensor.")
        return
    seen: set[Tensor] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not isinstance(parameter, Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if parameter in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(parameter)


@dataclass(slots=True, eq=False)
class _Gradient(WatchedGradient):
    """A gradient, and the bucket that ranks have agreed on for it."""

    bucket: Bucket | None = None


class _BackwardPasses(BackwardPasses[_Gradient]):
    """Counts the gradients of an optimizer, to which parameters may be added.

    Args:
        names: of the parameters.
        per_step: as in `BackwardPasses`.
    """

    def __init__(self, names: dict[Tensor, str], per_step: int) -> None:
        super().__init__(per_step)
        self.names = names
        self._optimizer: Callable[[], Optimizer | None] = lambda: None

    def of(self, optimizer: Optimizer) -> None:
        """Count the gradients of an optimizer, which has this object."""
        self._optimizer = weakref.ref(optimizer)
        self.watch_all()

    @property
    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters that require a gradient, or did."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return [p for p in parameters_of(optimizer) if p.requires_grad or p in self.gradients]

    def watch_all(self) -> bool:
        """Count the gradients of all parameters that require one; return whether there are further ones."""
        added = [parameter for parameter in self.parameters if parameter not in self.gradients]
        for parameter in added:
            self.watch(_Gradient(parameter))
        optimizer = self._optimizer()
        if optimizer is not None and any(parameter not in self.names for parameter in added):
            for parameter, name in _numbered(optimizer):  # added to the optimizer since it was wrapped
                self.names.setdefault(parameter, name)
        return bool(added)

    @property
    def is_counting(self) -> bool:  # noqa: D102
        return basics.is_initialized() and basics.size() > 1

    def complete(self, gradient: _Gradient) -> None:  # noqa: D102
        grad = gradient.parameter.grad
        if grad is not None and grad.requires_grad:
            raise AssertionError(GRAD_HAS_GRAPH.format(name=self.names[gradient.parameter]))

    def too_many(self, gradient: _Gradient) -> AssertionError:  # noqa: D102
        return AssertionError(TOO_MANY_PASSES.format(passes=self.per_step))


class _GradientReducer(_BackwardPasses):
    """Reduces the gradients of one optimizer over ranks, in buckets as far as ranks agree on them.

    Args:
        names, per_step: as in `_BackwardPasses`.
        compression: type on the wire.
        op: Average, Sum, or others of `hvd`.
        predivide: of an average, divided by before the sum instead of after it.
        groups: how many buckets of parameters, or which; None: as many as their sizes need.
        sparse_as_dense: whether sparse gradients travel as dense ones.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        per_step: int,
        *,
        compression: type[Compressor],
        op: int,
        predivide: float,
        groups: int | list[list[Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        super().__init__(names, per_step)
        self.compression, self.op, self.predivide = compression, op, predivide
        self.groups, self.sparse_as_dense, self.process_set = groups, sparse_as_dense, process_set
        self._started: dict[Tensor, Callable[[], None]] = {}
        """what waits for the reduction of a gradient by its name, and stores the result"""
        self._buckets: GradientBuckets | None = None
        self._sparse: dict[Tensor, int] = {}
        """in how many dimensions gradients are sparse on some rank"""
        self._number = 0
        """of the last agreement, by which ranks tell apart gradients of several optimizers that have one name"""
        self._is_in_step = False
        self._lock = threading.Lock()

    def reset(self) -> None:  # noqa: D102
        if self._buckets is not None:
            with suppress(HorovodInternalError):  # operations have ended: no rank waits for the rest of the step
                self._buckets.abandon()
        self._clear()

    def _clear(self) -> None:
        super().reset()
        self._started, self._is_in_step = {}, False

    def complete(self, gradient: _Gradient) -> None:
        """Start to reduce a gradient, unless ranks have yet to agree on buckets."""
        super().complete(gradient)
        # On several devices gradients are finished by several threads.
        with self._lock:
            if not self._is_in_step:
                self._begin_step()
        if self._buckets is None:
            return
        if gradient.bucket is None:
            self._start(gradient.parameter)
        else:
            self._buckets.add(gradient.bucket)

    def _begin_step(self) -> None:
        """Leave the buckets if they are over, or there are further parameters, on all ranks in the same step."""
        self._is_in_step = True
        if self.watch_all() or (self._buckets is not None and self._buckets.exchange.is_over):
            self._buckets = None
            for gradient in self.gradients.values():
                gradient.bucket = None

    def finish(self) -> None:
        """Reduce what is not being reduced yet, and store all results in the parameters' gradients.

        A gradient that is missing counts as zeros: on other ranks it may be there.
        """
        if basics.size() == 1:
            return
        if not self._is_in_step:
            self._begin_step()
        if self._buckets is None:
            self._agree_on_buckets()
        for parameter, gradient in self.gradients.items():
            if gradient.bucket is None and parameter not in self._started:
                self._start(parameter)
        if self._buckets is not None:
            self._buckets.launch_rest()
        waits = self._started.values()
        self._clear()
        for wait in waits:
            wait()
        if self._buckets is not None:
            self._buckets.wait(_store_all)

    def _agree_on_buckets(self) -> None:
        """Agree on which gradients are sparse, and on buckets of the others in the parameters' reverse order."""
        parameters = [parameter for parameter in self.parameters if parameter in self.gradients]
        self._sparse = {p: dims for p in parameters if (dims := sparse_dims(p.grad)) and not self.sparse_as_dense}
        controller = controller_of(self.process_set)
        if not parameters or len(controller.ranks) == 1:
            return
        # Another compressor may want each gradient by itself.
        buckets = parameters[::-1] if self.compression in BUILT_IN else []
        dense = [p for p in buckets if p.dtype in REDUCIBLE and p not in self._sparse]
        reduction = Reduction(
            op=self.op,
            factor_before=1.0 / self.predivide,
            factor_after=self.predivide / (len(controller.ranks) if self.op == Op.AVERAGE else 1),
            compression=self.compression,
        )
        names = {parameter: self.names[parameter] for parameter in parameters}
        self._buckets, self._sparse, self._number = agree(
            self.process_set, controller, self._grouped(dense), self._sparse, names, reduction
        )
        for bucket in [] if self._buckets is None else self._buckets.buckets:
            for parameter in bucket.parameters:
                self.gradients[parameter].bucket = bucket

    def _grouped(self, parameters: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Return the parameters that may share a bucket, in the given order."""
        if self.groups is None:
            return [parameters]
        if isinstance(self.groups, int):
            return [part for part in split_list(parameters, self.groups) if part]
        number = {parameter: i for i, group in enumerate(self.groups) for parameter in group}
        parts: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            parts.setdefault(number.get(parameter, -1), []).append(parameter)
        return [*parts.values()]

    def _start(self, parameter: Tensor) -> None:
        """Start to reduce a gradient by its name."""
        name, dims = self.names[parameter], self._sparse.get(parameter)
        if dims is not None:
            sparse = as_sparse(parameter.grad, parameter, dims)
            divisor = (self.process_set.size() or 1) if self.op == Op.AVERAGE else 1
            wait = start_sum(sparse, name, self._gather, divisor)
            self._started[parameter] = lambda: setattr(parameter, "grad", wait())
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        dense = grad.to_dense() if grad.is_sparse else grad
        wire, context = self.compression.compress(dense.contiguous())
        operation = Collective(
            Kind.ALLREDUCE,
            [wire],
            name,
            self.process_set,
            number=self._number,
            op=self.op,
            prescale=1.0 / self.predivide,
            postscale=self.predivide,
        ).submit(in_place=True)
        self._started[parameter] = lambda: _store(
            parameter, self.compression.decompress(operation.result(), context)
        )

    def _gather(self, rows: Tensor, name: str) -> Callable[[], Tensor]:
        return Collective(Kind.ALLGATHER, [rows], name, self.process_set, number=self._number).submit().result


def _store(parameter: Tensor, reduced: Tensor) -> None:
    """Make a dense tensor the parameter's gradient, in the layout of the one that is there."""
    grad = parameter.grad
    if grad is None:
        parameter.grad = torch.empty_like(parameter).copy_(reduced)
    elif grad.is_sparse:
        parameter.grad = reduced.to_sparse()
    elif reduced is not grad:
        grad.copy_(reduced)


def _store_all(bucket: Bucket) -> None:
    """Make a bucket's parts the gradients of its parameters, those that have dense ones in one operation."""
    grads, values = [], []
    for parameter, value in zip(bucket.parameters, bucket.views, strict=True):
        if parameter.grad is None or parameter.grad.is_sparse:
            _store(parameter, value)
        else:
            grads.append(parameter.grad)
            values.append(value)
    if grads:
        torch._foreach_copy_(grads, values)


class _DistributedOptimizer(Optimizer):
    """Mixin by which `DistributedOptimizer` extends the class of an optimizer.

    It takes over the attributes of that optimizer, its state and parameter groups among them, and shares them.
    """

    def __init__(self, optimizer: Optimizer, passes: _BackwardPasses) -> None:
        # `step` is an attribute if a learning-rate scheduler has wrapped it: that of the optimizer without ranks.
        vars(self).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        self._without_ranks = optimizer
        if basics.runtime().settings.exactly_horovod:
            self.state = defaultdict(dict)  # Horovod makes a new optimizer of the parameter groups
        self._passes = passes
        self._parameter_names = passes.names
        self._is_synchronized = False

    @property
    def backward_passes_per_step(self) -> int:
        """How often `backward` runs before `step`."""
        return self._passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how often `backward` runs before `step`."""
        self._passes.per_step = passes
        self._passes.reset()

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        """Step as the optimizer without ranks does, of which a scheduler that was made for it wants to know."""
        self._without_ranks._opt_called = True  # type: ignore[attr-defined]  # PyTorch's mark of a step
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and forget gradients that no step has used."""
        self._is_synchronized = False
        self._passes.reset()
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients.

        Args:
            set_to_none: make them None instead of zeros.

        Raises:
            AssertionError: they are being reduced.
        """
        if self._passes.have_begun:
            raise AssertionError(ZERO_GRAD_RACE)
        super().zero_grad(set_to_none)


class _ReducingOptimizer(_DistributedOptimizer):
    """An optimizer that steps on reduced gradients."""

    def __init__(self, optimizer: Optimizer, reducer: _GradientReducer) -> None:
        super().__init__(optimizer, reducer)
        self.op = reducer.op
        self.gradient_predivide_factor = reducer.predivide
        self.sparse_as_dense = reducer.sparse_as_dense
        self.process_set = reducer.process_set
        self._reducer = reducer
        self._is_member = reducer.process_set.included()
        self._synchronizes = True
        if self._is_member:
            reducer.of(self)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for example to clip them before `step`.

        Raises:
            HorovodInternalError: ranks have different gradients under one name, or a rank is gone.
        """
        if self._is_member:
            self._reducer.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` not reduce gradients inside the block, because `synchronize` has."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, and update the parameters.

        Args:
            closure: computes the loss and the gradients, which are reduced each time.
        """
        if not self._synchronizes:
            self._is_synchronized = False
            return self._update(closure)
        if self._is_synchronized:
            warnings.warn(REDUCED_TWICE, stacklevel=2)
        if closure is None or self._passes.have_begun:
            self.synchronize()
        self._is_synchronized = False
        return self._update(None if closure is None else self._reduced(closure))

    step.hooked = True  # type: ignore[attr-defined]  # PyTorch calls the hooks of steps in the optimizer's own step

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def compute() -> Any:
            loss = closure()
            if self._is_member:
                self._reducer.finish()
            return loss

        return compute


class _AdasumOptimizer(_DistributedOptimizer):
    """An optimizer that steps on this rank's gradients; the updates are combined by Adasum."""

    def __init__(self, optimizer: Optimizer, passes: _BackwardPasses, compression: type[Compressor]) -> None:
        super().__init__(optimizer, passes)
        self._compression = compression
        passes.of(self)

    def synchronize(self) -> None:
        """Do nothing: gradients stay on their rank."""

    def skip_synchronize(self) -> None:
        """Refuse.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(NO_SKIPPING)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by the ranks' combined updates.

        Args:
            closure: computes the loss and the gradients.
        """
        self._passes.watch_all()
        parameters = [parameter for parameter in self._passes.parameters if parameter.requires_grad]
        starts = [parameter.detach().clone() for parameter in parameters]
        loss = self._update(closure)
        self._passes.reset()
        sent = []
        for parameter, start in zip(parameters, starts, strict=True):
            update = (parameter.detach() - start).contiguous()
            wire, context = self._compression.compress(update)
            handle = allreduce_async_(wire, name=self._parameter_names[parameter], op=Op.ADASUM)
            sent.append((handle, context))
        for parameter, start, (handle, context) in zip(parameters, starts, sent, strict=True):
            update = self._compression.decompress(synchronize(handle), context)
            parameter.detach().copy_(start.add_(update))
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # as above


def step_on_zeros(optimizer: Optimizer, model: nn.Module | None) -> None:
    """Take the step on gradients of zero by which Horovod creates an optimizer's state, on this rank alone.

    Args:
        model: whose embeddings may have sparse gradients.
    """
    tables = (
        [module for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse]
        if model
        else []
    )
    sparse = {table.weight for table in tables} if isinstance(optimizer, torch.optim.SGD) else set()
    for parameter in parameters_of(optimizer):
        if parameter.requires_grad:
            zeros = torch.zeros_like(parameter)
            is_sparse = parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = zeros.to_sparse() if is_sparse else zeros
    # Of a wrapped optimizer the step without ranks.
    own: Any = (
        super(_DistributedOptimizer, optimizer) if isinstance(optimizer, _DistributedOptimizer) else optimizer
    )
    own.step()


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class and state, whose gradients are combined over ranks.

    Gradients are sent in buckets while `backward` computes others, but for the first step, in which ranks agree on
    the buckets; `step` waits for all of them. To clip:

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Args:
        optimizer: computes the updates; its state and parameter groups are shared.
        named_parameters: `model.named_parameters()`; None: named by their numbers.
        compression: type on the wire.
        backward_passes_per_step: how many gradients are added up on each rank before a step.
        op: Average, Sum, or Adasum, which combines updates instead of gradients.
        gradient_predivide_factor: an average divides by it before the sum, and by the rest after it.
        num_groups: deprecated, use `groups`.
        groups: how many buckets of gradients there are, or lists of their parameters.
        sparse_as_dense: whether sparse gradients travel as dense ones.
        process_set: the ranks that take part.

    Raises:
        ValueError: it is wrapped already, names are missing or come twice, or an argument is out of range.
        NotImplementedError: Adasum on a process set.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("This optimizer is a DistributedOptimizer already.")
    if gradient_predivide_factor != 1.0 and op != Op.AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    names = _names(optimizer, named_parameters)
    own = type(optimizer)
    if op == Op.ADASUM and basics.size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        adasum_class = type(own.__name__, (_AdasumOptimizer, own), {})
        return adasum_class(optimizer, _BackwardPasses(names, backward_passes_per_step), compression)
    _check_groups(groups)
    reducer = _GradientReducer(
        names,
        backward_passes_per_step,
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    reducing_class = type(own.__name__, (_ReducingOptimizer, own), {})
    return reducing_class(optimizer, reducer)
