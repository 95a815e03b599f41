"""The layout of a job, by its options."""

from __future__ import annotations

from hvd_trainer.backends import Backend
from hvd_trainer.config import TrainOptions
from hvd_trainer.parallel.layout import Layout, Whole
from hvd_trainer.parallel.staged import Staged
from hvd_trainer.parallel_options import ParallelOptions


def make_layout(
    backend: Backend, options: ParallelOptions, train: TrainOptions, *, exchange: bool = True
) -> Layout:
    """How this job's ranks share model and data. The engine must have started.

    Raises:
        OptionError: the options do not fit each other, or the ranks.
    """
    return (Staged if options.is_staged else Whole)(backend, options, train, exchange=exchange)
