"""Train a Transformer on movie reviews: `horovodrun -np 4 python -m hvd_trainer.imdb --help`."""

from __future__ import annotations

from hvd_trainer.jobs.imdb import ImdbOptions, train
from hvd_trainer.training.job import run_job

__all__ = ["ImdbOptions", "train"]

if __name__ == "__main__":
    run_job(ImdbOptions, train)
