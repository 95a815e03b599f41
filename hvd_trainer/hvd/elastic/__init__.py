"""`horovod.torch.elastic`: training that goes on while ranks come and go."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.elastic import State, run_fn
from hvd_trainer.hvd.elastic.sampler import ElasticSampler
from hvd_trainer.hvd.elastic.state import TorchState
from hvd_trainer.hvd.functions import allgather_object, broadcast_object
from hvd_trainer.hvd.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "run"]
T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Make a training elastic: it is called again, with the state that all ranks share, when ranks come or go.

    Under horovodrun with `--host-discovery-script`, the ranks that stay go on in their processes. Under torchrun,
    which starts all ranks anew, these go on from the last commit. Elsewhere a lost rank ends the job.

    Args:
        func: trains. Its first argument is a `State`; the caller makes no collective before it.
    """
    train = run_fn(func, _reset)

    @functools.wraps(func)
    def recover_and_train(state: State, *args: Any, **kwargs: Any) -> T:
        _recover(state)
        return train(state, *args, **kwargs)

    return recover_and_train


def _reset() -> None:
    shutdown()
    init()


def _recover(state: State) -> None:
    """Take over the newest commit of ranks before this start by torchrun, if there is one. A collective."""
    commits = basics.commits()
    if commits is None:
        return
    number, content = commits.read(state._number)
    numbers = allgather_object(number)
    newest = max(numbers)
    if newest > 0:
        commits.count_from(newest)
        state._load_committed(broadcast_object(content, numbers.index(newest)))
        state.restore()
        state.on_reset()
