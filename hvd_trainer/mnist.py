"""Train MNIST on all ranks: `horovodrun -np 4 python -m hvd_trainer.mnist --help`."""

from __future__ import annotations

from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.training.job import run_job

__all__ = ["MnistOptions", "train"]


def train(options: MnistOptions) -> None:
    """Run the job in this process, as one rank of however many there are."""
    # PyTorch takes seconds to import: --help and a mistyped option must not wait for it.
    from hvd_trainer.jobs.mnist import train

    train(options)


if __name__ == "__main__":
    run_job(MnistOptions, train)
