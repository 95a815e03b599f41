"""Time the comparison of ranks (`ReplicaGuard`) against an epoch of the MNIST job, in the same run.

    python -m benchmarks.rank_check --ranks 2 --data-dir ../shared/data/mnist

A check is at each epoch's end; the ratio is of the seconds in it to those of the epoch's training, on rank 0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import hvd_trainer
from benchmarks import prepare_environment
from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.mnist import train
from hvd_trainer.optim.replica_guard import ReplicaGuard
from hvd_trainer.training.loop import TrainingLoop


def time_job(options: MnistOptions) -> list[float]:
    """Train as a rank; return the ratio of each epoch."""
    checks: list[float] = []
    epochs: list[float] = []
    check, train_epoch = ReplicaGuard.check, TrainingLoop._train_epoch

    def timed_check(guard: ReplicaGuard) -> None:
        began = time.perf_counter()
        check(guard)
        checks.append(time.perf_counter() - began)

    def timed_epoch(loop: TrainingLoop) -> object:
        began = time.perf_counter()
        result = train_epoch(loop)
        epochs.append(time.perf_counter() - began)
        return result

    ReplicaGuard.check = timed_check  # type: ignore[method-assign]
    TrainingLoop._train_epoch = timed_epoch  # type: ignore[assignment, method-assign]
    train(options)
    return [a / b for a, b in zip(checks, epochs, strict=True)]


def main() -> None:
    """Print the ratios of both engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--data-dir", help="folder of MNIST; the embedded digits without")
    chosen = parser.parse_args()
    prepare_environment()
    for backend in ("ddp", "horovod"):
        options = MnistOptions()
        options = replace(
            options,
            engine=replace(options.engine, backend=backend, threads=1),
            train=replace(options.train, epochs=chosen.epochs),
            log=replace(options.log, quiet=True),
            data=replace(options.data, data_dir=chosen.data_dir, dataset="mnist" if chosen.data_dir else "digits"),
        )
        ratios = hvd_trainer.run(time_job, num_processes=chosen.ranks, args=(options,))[0]
        print(f"{backend}: {statistics.median(ratios):.3%} of an epoch (of each: {[f'{r:.3%}' for r in ratios]})")


if __name__ == "__main__":
    main()
