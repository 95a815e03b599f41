"""Tell listeners of a script's batches, backward passes and optimizer steps, by PyTorch's hooks.

next(loader)    data
backward()      backward
synchronize()   reduce, of Horovod's optimizer, by itself or in its step()
step()          step
else            forward
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvd_trainer.measure.listener import End, Listener, Step
from hvd_trainer.measure.script_facts import batch_size, digest, facts_of
from hvd_trainer.utils.import_hooks import ImportHooks
from hvd_trainer.utils.tensors import parameters_of

FORWARD = "forward"


class ScriptEvents:
    """Calls listeners for what the script of this process does.

    An optimizer step counts if a backward pass came before it: Horovod's `broadcast_optimizer_state` takes a step
    before the training begins.
    """

    def __init__(self, *listeners: Listener) -> None:
        self._listeners: tuple[Listener, ...] = listeners
        self._depth = 0
        self._phases = [FORWARD]
        self._has_gradients, self._is_fetching = False, False
        self._fetched, self._samples = 0, 0
        self._loss: Tensor | None = None
        self._parameters: list[Tensor] = []
        self._facts: dict[str, Any] = {}
        self._sees_exchange = False
        self._undo = ExitStack()

    def install(self) -> None:
        """Add hooks to every optimizer and loader that this process will make, and to `backward`."""
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.callback(handle.remove)
        # Tensor.backward calls it, too.
        backward: Any = torch.autograd.backward
        fetch: Any = _BaseDataLoaderIter.__next__

        @functools.wraps(backward)
        def observed_backward(*args: Any, **kwargs: Any) -> None:
            self._before_backward(args[0] if args else kwargs["tensors"])
            with self._phase("backward"):
                backward(*args, **kwargs)

        @functools.wraps(fetch)
        def observed_fetch(iterator: Any) -> Any:
            return self._fetch(fetch, iterator)

        self._replace(torch.autograd, "backward", observed_backward)
        self._replace(_BaseDataLoaderIter, "__next__", observed_fetch)
        after = {
            "accelerate.data_loader": self._observe_accelerate,
            "horovod.torch.optimizer": lambda module: self._observe_synchronize(module._DistributedOptimizer),
            "hvd_trainer.hvd.optimizer": lambda module: self._observe_synchronize(module._ReducingOptimizer),
        }
        ImportHooks(aliases={}, absent={}, after=after).install()

    def uninstall(self) -> None:
        """Remove the hooks, and stop the listeners."""
        self._undo.close()
        self._stop()
        self._listeners = ()

    def _stop(self) -> None:
        for listener in self._listeners:
            listener.stop()

    def _end(self) -> None:
        self._stop()
        # DistributedDataParallel waits within the backward pass.
        facts = self._facts | {"sees_exchange": self._sees_exchange}
        end = End(facts, {}, digest(self._parameters))
        for listener in self._listeners:
            listener.on_end(end)

    def _replace(self, holder: Any, name: str, function: Any) -> None:
        self._undo.callback(setattr, holder, name, getattr(holder, name))
        setattr(holder, name, function)

    def _fetch(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        if self._is_fetching:
            return fetch(iterator)
        self._is_fetching = True
        try:
            with self._phase("data"):
                batch = fetch(iterator)
        finally:
            self._is_fetching = False
        self._fetched = batch_size(batch)
        for listener in self._listeners:
            listener.on_batch(batch, iterator)
        return batch

    def _before_backward(self, loss: Any) -> None:
        self._has_gradients = True
        # A batch that is not trained on, such as one of an evaluation, does not count.
        self._samples += self._fetched
        self._fetched = 0
        self._loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        for listener in self._listeners:
            listener.on_backward(loss)

    def _observe_accelerate(self, module: ModuleType) -> None:
        """See the batches that Accelerate's loaders return: they fetch one ahead."""
        for kind in (module.DataLoaderShard, module.DataLoaderDispatcher):
            kind.__iter__ = self._observing(kind.__iter__)

    def _observe_synchronize(self, kind: Any) -> None:
        """See how long an optimizer of Horovod's API waits for the exchange of gradients."""
        synchronize = kind.synchronize

        @functools.wraps(synchronize)
        def observed(optimizer: Any) -> None:
            with self._phase("reduce"):
                synchronize(optimizer)

        kind.synchronize = observed

    def _observing(self, iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(iterate)
        def observed(loader: Any) -> Iterator[Any]:
            iterator = iterate(loader)
            with suppress(StopIteration):
                while True:
                    yield self._fetch(next, iterator)

        return observed

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        self._enter(phase)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, phase: str) -> None:
        self._phases.append(phase)
        self._sees_exchange |= phase == "reduce"
        for listener in self._listeners:
            listener.on_phase(phase)

    def _leave(self) -> None:
        self._phases.pop()
        for listener in self._listeners:
            listener.on_phase(self._phases[-1])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        # Horovod's optimizer, as those of Accelerate and Lightning, is a subclass whose step() calls the one below
        # it, and both are hooked: only the outer one's begin and end are the step's.
        self._depth += 1
        if self._depth == 1:
            self._enter("step")
            for listener in self._listeners:
                listener.before_step(optimizer)
        # A closure, as Lightning's, computes the loss within the step.
        first, *rest = args
        named = {name: self._in_forward(value) for name, value in kwargs.items()}
        return (first, *map(self._in_forward, rest)), named

    def _in_forward(self, value: Any) -> Any:
        """Return a function that enters the phase of forward; a value of another kind as it is."""
        if not callable(value) or self._depth > 1:
            return value

        @functools.wraps(value)
        def call() -> Any:
            with self._phase(FORWARD):
                return value()

        return call

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._leave()
        if not self._has_gradients:
            return
        self._has_gradients = False
        if not self._parameters:
            self._start(optimizer)
        losses = () if self._loss is None else (self._loss,)
        step = Step(self._samples, float(optimizer.param_groups[0]["lr"]), losses)
        self._loss, self._samples = None, 0
        for listener in self._listeners:
            listener.on_step_end(step)

    def _start(self, optimizer: Optimizer) -> None:
        self._parameters, self._facts = list(parameters_of(optimizer)), facts_of(optimizer)
        for listener in self._listeners:
            listener.on_start(self._parameters[0].device, on_trainer=False)
        # Now, so that it is called before what the script's own libraries do at the end, which may fail.
        atexit.register(self._end)
        self._undo.callback(atexit.unregister, self._end)
