"""Train a Transformer on movie reviews: `horovodrun -np 4 python -m hvd_trainer.imdb --help`."""

from __future__ import annotations

from hvd_trainer.jobs.options import ImdbOptions
from hvd_trainer.training.job import run_job

__all__ = ["ImdbOptions", "train"]


def train(options: ImdbOptions) -> None:
    """Run the job in this process, as one rank of however many there are."""
    # PyTorch takes seconds to import: --help and a mistyped option must not wait for it.
    from hvd_trainer.jobs.imdb import train

    train(options)


if __name__ == "__main__":
    run_job(ImdbOptions, train)
