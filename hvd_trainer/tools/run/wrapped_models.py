"""Compare what a script has wrapped for several ranks: are the parameters still the same on all of them?

A `no_sync` in the wrong pass, a call of `.module` instead of the wrapper, or an update that one rank leaves out
make ranks differ, and the script ends with exit code 0. Ranks post digests to the job's store, and wait for
nobody: the one that posts last compares. So nothing hangs where ranks take different numbers of steps.
"""

from __future__ import annotations

import json
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hvd_trainer.backends.script_engine import ScriptEngine
from hvd_trainer.utils.digest import digest
from hvd_trainer.utils.import_hooks import wrap
from hvd_trainer.utils.text import COMMAND

logger = logging.getLogger(__name__)


@dataclass
class _Wrapped:
    """The parameters of one wrapper."""

    names: list[str]
    parameters: Sequence[Tensor]
    """empty once the script has dropped the wrapper"""
    ranks: Sequence[int]
    last: Tensor | None = None
    """the digests of the time when it was dropped"""

    def drop(self) -> None:
        """Keep the digests, and let go of the parameters: the script has dropped the wrapper."""
        with suppress(RuntimeError):  # such as of a device that is gone at the end of the process
            self.last = _digests(self.parameters)
        self.parameters = ()


class WrappedModels:
    """Knows the wrappers of a script, and compares their parameters.

    Args:
        script: has the ranks' session.
        every: compare after so many steps of its optimizers; None: at its end only.
    """

    def __init__(self, script: ScriptEngine, every: int | None) -> None:
        self._script, self._every = script, every
        self._wrapped: list[_Wrapped] = []
        self._steps = 0

    def hooks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what is to be called with modules once they are imported, by their names."""
        return {
            "torch.nn.parallel.distributed": self._watch_ddp,
            "horovod.torch.optimizer": self._watch_horovod,
            "hvd_trainer.hvd.optimizer": self._watch_horovod,
            "torch.optim.optimizer": self._watch_steps,
        }

    def _watch_ddp(self, module: ModuleType) -> None:
        def init(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            named = {n: p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore}
            self._add(ddp, named, dist.get_process_group_ranks(ddp.process_group))

        wrap("__init__", init, module.DistributedDataParallel)

    def _watch_horovod(self, module: ModuleType) -> None:
        def make(original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if args:  # an iterator could be read once only
                args = (args[0] and list(args[0]), *args[1:])
            elif kwargs.get("named_parameters") is not None:
                kwargs["named_parameters"] = list(kwargs["named_parameters"])
            distributed = original(optimizer, *args, **kwargs)
            named = dict((args[0] if args else kwargs.get("named_parameters")) or ())
            known: dict[Any, str] = {p: name for name, p in named.items()}
            own = [p for group in distributed.param_groups for p in group["params"]]
            names = {known.get(p, f"parameter {number}"): p for number, p in enumerate(own)}
            ranks = getattr(kwargs.get("process_set"), "ranks", None)
            self._add(distributed, names, range(self._size) if ranks is None else ranks)
            return distributed

        wrap("DistributedOptimizer", make, module)

    def _watch_steps(self, module: ModuleType) -> None:
        if (every := self._every) is not None:
            # Before a step, not after the last: a wrapper may still send what its inner optimizer has updated.
            module.register_optimizer_step_pre_hook(lambda *_: self._count_step(every))

    @property
    def _size(self) -> int:
        session = self._script.session
        return 1 if session is None else session.world.size

    def _add(self, owner: object, named: Mapping[str, Tensor], ranks: Sequence[int]) -> None:
        if not self._script.is_in_charge or len(ranks) < 2:
            return
        wrapped = _Wrapped(list(named), list(named.values()), list(ranks))
        self._wrapped.append(wrapped)
        # The parameters live as long as the wrapper, not longer: they may be large.
        weakref.finalize(owner, wrapped.drop).atexit = False

    def _count_step(self, every: int) -> None:
        if self._steps and self._steps % every == 0:
            # A rank may be one comparison ahead of the others, not more: they wait for each other in each step.
            self._compare(f"after step {self._steps}", place=str(self._steps // every % 2))
        self._steps += 1

    def compare_at_end(self) -> None:
        """Compare all that the script has wrapped; call it when the script is done, before its session ends."""
        self._compare("at the end", place="end")

    def _compare(self, when: str, place: str) -> None:
        """Post this rank's digests; compare those of all ranks if it is the last one to post.

        Args:
            when: for the message.
            place: in the store, which earlier comparisons may have used.
        """
        session = self._script.session
        if session is None or not self._script.is_in_charge:  # but a fork, such as a process of a loader that ends
            return
        store, rank = session.store, session.world.rank
        for number, wrapped in enumerate(self._wrapped):
            numbers = _digests(wrapped.parameters) if wrapped.parameters else wrapped.last
            if numbers is None or rank not in wrapped.ranks:
                continue
            key = f"wrapped/{place}/{number}/{'-'.join(map(str, wrapped.ranks))}"
            # The store is gone where the job ends without this rank.
            with suppress(RuntimeError):
                store.set(f"{key}/{rank}", f"{when}/{numbers.tolist()}")
                if store.add(f"{key}/posted", 1) % len(wrapped.ranks) == 0:
                    posted = [store.get(f"{key}/{one}").decode().split("/", 1) for one in wrapped.ranks]
                    if all(moment == when for moment, _ in posted):
                        self._report(wrapped, [json.loads(text) for _, text in posted], when, store)

    def _report(self, wrapped: _Wrapped, posted: Sequence[list[Any]], when: str, store: dist.Store) -> None:
        """Log the first parameter that differs from the first rank's, once for the job.

        Args:
            posted: the digests of each of the ranks.
        """
        first, *others = posted
        for number, name in enumerate(wrapped.names):
            pairs = zip(wrapped.ranks[1:], others, strict=True)
            differ = [str(rank) for rank, digests in pairs if digests[number] != first[number]]
            if not differ:
                continue
            if store.add("wrapped/told", 1) == 1:
                logger.warning(
                    "warning: the ranks no longer train one model: %s of rank %s is not that of rank %s %s. The "
                    "step, the line and the cause are what this looks for: %s parity -- %s",
                    name,
                    ", ".join(differ),
                    wrapped.ranks[0],
                    when,
                    COMMAND,
                    " ".join(sys.argv),
                )
            return


def _digests(parameters: Sequence[Tensor]) -> Tensor:
    """Return the digest of each parameter in host memory: int64, shape (parameters, 2)."""
    return torch.stack([digest([parameter.detach()]).cpu() for parameter in parameters])
