"""Which options do not go with the launch: with the number of ranks, Slurm's queue, Horovod's elastic mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.checks import default_of
from hvd_trainer.config.options import TrainerOptions, TrainOptions
from hvd_trainer.errors import OptionError


@dataclass(frozen=True)
class Launch:
    """The job, as each rank knows it before the ranks meet."""

    num_ranks: int = 1
    is_elastic: bool = False
    """whether ranks may come and go"""
    is_queued: bool = False
    """whether it is a job in a Slurm queue"""


def launch_mistakes(options: TrainerOptions, launch: Launch) -> Iterator[str]:
    """Yield a message for each option that does not go with the launch."""
    parallel = options.parallel
    if launch.is_elastic and (parallel.stages > 1 or parallel.shard != "none"):
        yield (
            "--stages and --shard need the same ranks to the end, and horovodrun's elastic mode changes them. "
            "Start without --host-discovery-script, or leave them out"
        )
    if options.save.requeue and not launch.is_queued:
        yield (
            "--requeue is for jobs in a Slurm queue, and SLURM_JOB_ID is not set: leave it out, or submit the job "
            "by sbatch"
        )
    if launch.num_ranks % parallel.stages:
        yield _uneven_stages(parallel.stages, launch.num_ranks)
    elif options.engine.backend != "data-parallel":  # which shares a batch among GPUs that PyTorch has to count
        yield from _batch_mistakes(options, launch.num_ranks // parallel.stages)


def _uneven_stages(stages: int, num_ranks: int) -> str:
    divisors = [str(count) for count in range(1, num_ranks + 1) if num_ranks % count == 0]
    near = max(1, round(num_ranks / stages)) * stages
    return (
        f"--stages {stages} does not divide the {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}: each copy of "
        f"the model takes one rank per stage. Start {near} ranks, or give one of these: --stages "
        f"{', '.join(divisors)}"
    )


def _batch_mistakes(options: TrainerOptions, replicas: int) -> Iterator[str]:
    train, chunks = options.train, options.parallel.num_chunks
    try:
        plan = BatchPlan.of(train, replicas)
    except OptionError as error:
        yield str(error)
        return
    if train.batch_size not in (plan.batch_size, *usual_batch_sizes(options)):
        yield (
            f"--batch-size {train.batch_size} and --global-batch-size {train.global_batch_size} contradict each "
            f"other: with {plan.among} the batch size is {plan.batch_size}. Leave one out"
        )
    if options.parallel.is_staged and chunks > plan.batch_size:
        yield (
            f"--chunks {chunks} cuts a batch of {plan.batch_size} into less than one sample. Type --chunks "
            f"{plan.batch_size} or less, or a larger batch"
        )


def usual_batch_sizes(options: TrainerOptions) -> tuple[int | None, ...]:
    """Return the values of `--batch-size` by default, also a job's own: nobody has asked for them."""
    return TrainOptions.batch_size, getattr(default_of(type(options), "train"), "batch_size", None)
