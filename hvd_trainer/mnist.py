"""Train MNIST on all ranks: `horovodrun -np 4 python -m hvd_trainer.mnist --help`."""

from __future__ import annotations

from hvd_trainer.jobs.mnist import MnistOptions, train
from hvd_trainer.training.job import run_job

__all__ = ["MnistOptions", "train"]

if __name__ == "__main__":
    run_job(MnistOptions, train)
