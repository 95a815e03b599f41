"""The choice of a layout."""

from __future__ import annotations

from hvd_trainer.backends import Backend
from hvd_trainer.config.options import ParallelOptions, TrainOptions
from hvd_trainer.parallel.layout import Layout, WholeModelLayout
from hvd_trainer.parallel.pipeline_layout import PipelineLayout


def make_layout(
    backend: Backend, options: ParallelOptions, train: TrainOptions, *, exchange: bool = True
) -> Layout:
    """Return how this job's ranks share model and data. The engine must have started.

    Raises:
        OptionError: the options do not fit each other, or the ranks.
    """
    return (PipelineLayout if options.is_staged else WholeModelLayout)(backend, options, train, exchange=exchange)
