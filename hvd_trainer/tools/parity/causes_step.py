"""Match causes of differences that arise within a step: rate, loss, gradients and their exchange."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hvd_trainer.tools.parity.case import MAX_ROUNDING, Case, Cause, Rule, first_few, is_near


def scaled_rate(case: Case) -> Iterator[Cause]:
    """Match rates whose ratio is the number of ranks, or its root."""
    found = case.get("learning rate")
    if found is None:
        return
    left, right = next((pair for pair in zip(*found.values, strict=False) if pair[0] != pair[1]), (0.0, 0.0))
    large, small, ratio = case.by_size(left, right)
    factors = {"its number of ranks": case.max_ranks, "the root of its number of ranks": case.max_ranks**0.5}
    for name, factor in factors.items():
        if factor > 1 and is_near(ratio, factor) and case.sizes_differ and large.options["lr_scaling"] != "none":
            yield Cause(
                "--lr-scaling counts ranks and passes, and one process that takes the global batch in one piece "
                "(for --sync-batch-norm) has one of both",
                "compare without --lr-scaling, with the --lr that it gives",
            )
            return
        if factor > 1 and is_near(ratio, factor):
            yield Cause(
                f"{large.name} multiplies the learning rate by {name}, as many examples of Horovod do (lr * "
                f"hvd.size()), and {small.name} does not",
                "give the optimizer the same rate on every engine; to scale it, use --lr-scaling linear or "
                "sqrt, one rule for all",
            )
            return


def other_rate(case: Case) -> Iterator[Cause]:
    """Match any other ratio of rates, or rates that differ by rank."""
    found = case.get("learning rate") or case.get("learning rate", among_ranks=True)
    if found is not None and not list(scaled_rate(case)):
        yield Cause(
            "the learning rate, or its schedule, depends on the engine, the launcher or the rank",
            "look for what the job computes it from",
        )


def skipped_step(case: Case) -> Iterator[Cause]:
    """Match a step that only one side makes."""
    if case.get("skipped") or case.get("skipped", among_ranks=True):
        yield Cause(
            "a gradient was not finite, and one side leaves this step out: while fp16's loss scale is being "
            "found, a value at the edge may overflow on one side only",
            "compare in fp32 or bf16",
        )


def summed_loss(case: Case) -> Iterator[Cause]:
    """Match losses whose ratio is the size of a batch."""
    found = case.get("loss")
    if found is None:
        return
    large, small, ratio = case.by_size(*found.values)
    sizes = {count for line in large.lines(found.when) for count in line["counts"]}
    if any(size > 1 and is_near(ratio, size) for size in sizes):
        yield Cause(
            f"the loss of {large.name} is the sum over its batch, and that of {small.name} the mean",
            "let the loss function give the mean",
        )


def missing_exchange(case: Case) -> Iterator[Cause]:
    """Match ranks of one run whose gradients differ after the exchange."""
    found = case.get("gradients", among_ranks=True)
    if found is None:
        return
    if found.count == found.total:
        yield Cause(
            f"{found.run} does not average its gradients: each rank updates by its own, and trains a model of its "
            f"own",
            "look for what turns the exchange off: no_sync() or gradient_sync(enabled=False) around a step's last "
            "pass, a forward around the Trainer's module, an hvd.DistributedOptimizer without the parameters",
        )
    else:
        yield Cause(
            f"{found.run} does not average the gradients of some parameters, such as {found.name}",
            "look for parameters that are replaced, or gradients that are changed, after the exchange was set up",
        )


def summed_gradients(case: Case) -> Iterator[Cause]:
    """Match gradient norms whose ratio is the number of ranks or of passes, with equal losses."""
    found = case.get("gradient norm")
    if found is None or case.get("loss") is not None:
        return
    large, small, ratio = case.by_size(*found.values)
    passes = int(large.options["accumulate"])
    if case.max_ranks > 1 and is_near(ratio, case.max_ranks):
        yield Cause(
            f"{large.name} adds up the gradients of {case.max_ranks} ranks, and {small.name} takes their mean",
            "divide by the number of ranks, once: the exchange does it (hvd.Average, not hvd.Sum), or the loss",
        )
    if passes > 1 and is_near(ratio, passes):
        yield Cause(
            f"{large.name} adds up the gradients of {passes} passes, and {small.name} takes their mean",
            "divide the loss by the number of passes, once",
        )


def other_update(case: Case) -> Iterator[Cause]:
    """Match ranks of one run with equal gradients and other weights."""
    found = case.get("parameters", among_ranks=True)
    if found is not None and not case.at_start and case.get("gradients", among_ranks=True) is None:
        yield Cause(
            f"the ranks of {found.run} have the same gradients, and other weights after the update",
            "look for what changes weights on one rank only: a callback, a hook, other settings of the optimizer",
        )


def other_random_numbers(case: Case) -> Iterator[Cause]:
    """Match other losses of a model with dropout on another number of ranks."""
    dropout = case.one.start["dropout"]
    if case.get("loss") is not None and case.sizes_differ and dropout:
        yield Cause(
            f"dropout ({first_few(dropout)}) draws other numbers: each rank has its own, and there are "
            f"{case.one.size} and {case.other.size}",
            _reproducible(case, "compare without dropout, or"),
        )


def other_normalisation(case: Case) -> Iterator[Cause]:
    """Match other losses of a model with batch norm on another number of ranks."""
    norms = case.one.start["batch_norm"]
    if case.get("loss") is not None and case.sizes_differ and norms:
        yield Cause(
            f"batch norm ({first_few(norms)}) normalises the batch of each rank by itself, and on "
            f"{case.one.size} and {case.other.size} ranks the batches are not the same",
            _reproducible(case, "compare"),
        )


def _reproducible(case: Case, before: str) -> str:
    ranks = 2 ** math.ceil(math.log2(case.max_ranks))
    return f"{before} with --reproducible {ranks} in the job, which gives the same bits on any number of ranks"


def other_forward(case: Case) -> Iterator[Cause]:
    """Match another loss of the same weights and samples."""
    found = case.get("loss")
    explained = (summed_loss, other_random_numbers, other_normalisation)
    if found is None or found.relative <= MAX_ROUNDING or any(list(rule(case)) for rule in explained):
        return
    if case.first.quantity not in ("samples", "order", "skipped", "learning rate"):
        dropout = case.one.start["dropout"]
        draws = f"dropout ({first_few(dropout)}) after one side has drawn random numbers more than the other; "
        yield Cause(
            f"the same weights give another loss for the same samples: {draws if dropout else ''}train() or "
            "eval(); a branch on engine or rank in the model or the loss",
            "look for what forward and the loss take from outside",
        )


STEP_RULES: tuple[Rule, ...] = (
    *(scaled_rate, other_rate, skipped_step, summed_loss, missing_exchange, summed_gradients, other_update),
    *(other_random_numbers, other_normalisation, other_forward),
)
