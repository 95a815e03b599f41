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
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvd_trainer.measure.listener import End, Listener, Step
from hvd_trainer.measure.message import NO_STEPS
from hvd_trainer.measure.script_facts import batch_size, digest, facts_of
from hvd_trainer.utils.import_hooks import ImportHooks, wrap
from hvd_trainer.utils.tensors import parameters_of

FORWARD = "forward"
MAX_LOSSES = 1024
"""Losses that are kept of a step: of a script that makes no step, the last ones."""
BY_HAND = (
    "its backward() was seen, and no step() of a torch.optim.Optimizer after it: a tool sees no update by hand"
)
NO_BACKWARD = (
    "its steps were seen, and no backward() before them: a tool counts those after one, as of torch.optim"
)
NOTHING = (
    "neither a backward() nor a step() was seen in its process: is it asked to train, and in this process? A tool "
    "sees nothing of ranks that the script starts itself"
)


class ScriptEvents:
    """Calls listeners for what the script of this process does, and says at its end why none of its steps counts.

    An optimizer step counts if a backward pass came before it: Horovod's `broadcast_optimizer_state` takes a step
    before the training begins.

    Args:
        log: the folder of the recordings.
        listeners: are called in this order.
    """

    def __init__(self, log: Path, *listeners: Listener) -> None:
        self._log = log
        self._listeners: tuple[Listener, ...] = listeners
        self._stepping: list[Optimizer] = []
        self._phases = [FORWARD]
        self._is_in_backward = False
        self._thread = threading.local()
        self._fetched, self._samples, self._passes = 0, 0, 0
        self._losses: deque[Tensor] = deque(maxlen=MAX_LOSSES)
        self._parameters: list[Tensor] = []
        self._facts: dict[str, Any] = {}
        self._sees_exchange = False
        self._missing = NOTHING
        self._undo = ExitStack()

    def install(self) -> None:
        """Add hooks to every optimizer and loader that this process will make, and to `backward`."""
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.callback(handle.remove)
        wrap("backward", self._backward, torch.autograd, self._undo)  # Tensor.backward calls it, too
        wrap("__next__", self._fetch, _BaseDataLoaderIter, self._undo)
        after = {
            "accelerate.data_loader": self._observe_accelerate,
            "horovod.torch.optimizer": lambda module: self._observe_synchronize(module._DistributedOptimizer),
            "hvd_trainer.hvd.optimizer": lambda module: self._observe_synchronize(module._ReducingOptimizer),
        }
        hooks = ImportHooks(aliases={}, absent={}, after=after)
        hooks.install()
        self._undo.callback(hooks.uninstall)
        self._undo.callback(atexit.unregister, self._end)
        atexit.register(self._end)

    def _backward(self, backward: Any, *args: Any, **kwargs: Any) -> None:
        # Of a part that is computed again, as by torch.utils.checkpoint; on a GPU in another thread.
        if self._is_in_backward:
            backward(*args, **kwargs)
            return
        self._before_backward(args[0] if args else kwargs["tensors"])
        self._is_in_backward = True
        try:
            with self._phase("backward"):
                backward(*args, **kwargs)
        finally:
            self._is_in_backward = False

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
        if not self._parameters:
            self._log.mkdir(parents=True, exist_ok=True)
            (self._log / NO_STEPS).write_text(self._missing)
            return
        # DistributedDataParallel waits within the backward pass.
        facts = self._facts | {"sees_exchange": self._sees_exchange}
        end = End(facts, {}, digest(self._parameters))
        for listener in self._listeners:
            listener.on_end(end)

    def _fetch(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        if getattr(self._thread, "is_fetching", False):  # of a loader within another one
            return fetch(iterator)
        self._thread.is_fetching = True
        try:
            with self._phase("data"):
                batch = fetch(iterator)
        finally:
            self._thread.is_fetching = False
        self._fetched = batch_size(batch)
        for listener in self._listeners:
            listener.on_batch(batch, iterator)
        return batch

    def _before_backward(self, loss: Any) -> None:
        # A batch that is not trained on, such as one of an evaluation, does not count.
        self._samples += self._fetched
        self._fetched = 0
        self._passes += 1
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().clone())  # the script may change it, or hold much memory by it
        if self._missing == NOTHING:
            self._missing = BY_HAND
        for listener in self._listeners:
            listener.on_pass()

    def _observe_accelerate(self, module: ModuleType) -> None:
        """See the batches that Accelerate's loaders return: they fetch one ahead."""
        for kind in (module.DataLoaderShard, module.DataLoaderDispatcher):
            wrap("__iter__", self._iterate, kind)

    def _observe_synchronize(self, kind: Any) -> None:
        """See how long an optimizer of Horovod's API waits for the exchange of gradients."""

        def synchronize(function: Any, *args: Any, **kwargs: Any) -> Any:
            with self._phase("collective"):
                return function(*args, **kwargs)

        wrap("synchronize", synchronize, kind)

    def _iterate(self, iterate: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        iterator = iterate(loader)
        with suppress(StopIteration):
            while True:
                yield self._fetch(next, iterator)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        self._enter(phase)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, phase: str) -> None:
        self._phases.append(phase)
        self._sees_exchange |= phase == "collective"
        for listener in self._listeners:
            listener.on_phase(phase)

    def _leave(self) -> None:
        self._phases.pop()
        for listener in self._listeners:
            listener.on_phase(self._phases[-1])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        # Horovod's optimizer, as those of Accelerate and Lightning, is a subclass whose step() calls the one below
        # it, and both are hooked: only the outer one's begin and end are the step's.
        self._stepping.append(optimizer)
        is_inner = len(self._stepping) > 1
        if not is_inner:
            self._enter("step")
        if self._missing == NOTHING:
            self._missing = NO_BACKWARD
        self._before_update(again=is_inner)
        # A closure, as Lightning's, computes the loss within the step.
        first, *rest = args
        named = {name: self._in_forward(value) for name, value in kwargs.items()}
        return (first, *map(self._in_forward, rest)), named

    def _before_update(self, *, again: bool) -> None:
        for listener in self._listeners:
            listener.before_update(self._stepping[0], again=again)

    def _in_forward(self, value: Any) -> Any:
        """Return a closure that enters the phase of forward; a value of another kind as it is."""
        if not callable(value) or len(self._stepping) > 1:
            return value

        @functools.wraps(value)
        def closure() -> Any:
            with self._phase(FORWARD):
                result = value()
            self._before_update(again=True)
            return result

        return closure

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping.pop()
        if self._stepping:
            return
        self._leave()
        if not self._passes:
            return
        if not self._parameters:
            self._start(optimizer)
        rate = optimizer.param_groups[0]["lr"]
        rate = rate.detach().clone() if isinstance(rate, Tensor) else float(rate)
        overflow = getattr(optimizer, "found_inf", None)  # a GradScaler leaves it to a fused optimizer to skip
        skipped = overflow.detach() > 0 if isinstance(overflow, Tensor) else False
        step = Step(self._samples, rate, tuple(self._losses), skipped)
        self._losses.clear()
        self._samples = self._passes = 0
        for listener in self._listeners:
            listener.on_step_end(step)

    def _start(self, optimizer: Optimizer) -> None:
        self._parameters, self._facts = list(parameters_of(optimizer)), facts_of(optimizer)
        for listener in self._listeners:
            listener.on_start(self._parameters[0].device, on_trainer=False)
        # Again, so that it is called before what the script's own libraries do at the end, which may fail.
        atexit.unregister(self._end)
        atexit.register(self._end)
