"""Find the known causes that fit the differences between two runs."""

from __future__ import annotations

from collections.abc import Iterator

from hvd_trainer.config.checks import flag
from hvd_trainer.tools.parity.case import MAX_ROUNDING, Case, Cause, Rule
from hvd_trainer.tools.parity.causes_start import START_RULES
from hvd_trainer.tools.parity.causes_step import STEP_RULES

ROUNDED_QUANTITIES = ("loss", "gradients", "gradient norm", "parameters", "optimizer", "buffers")
"""Quantities that rounding can change."""


def find_causes(case: Case) -> list[Cause]:
    """Return the known causes that fit, in the order in which they would act; empty if none does."""
    return list(dict.fromkeys(cause for rule in (*START_RULES, *STEP_RULES, *LATE_RULES) for cause in rule(case)))


def unaveraged_statistics(case: Case) -> Iterator[Cause]:
    """Match ranks of one run that still have different buffers after an evaluation."""
    found = case.get("buffers", among_ranks=True)
    if found is not None and case.first is found and not case.at_start:
        yield Cause(
            f"{found.run} does not average the statistics of batch norm over its ranks before they are used: each "
            f"evaluates with those of its own share, and rank 0's are saved. Horovod never sends buffers",
            "leave that to the Trainer (Backend.average_buffers); in a loop of your own, average the buffers "
            "before each evaluation, or use --sync-batch-norm",
        )


def exchanged_statistics(case: Case) -> Iterator[Cause]:
    """Match buffers that differ before anything else does in training."""
    found = case.get("buffers")
    if found is not None and case.first is found and not case.at_start:
        yield Cause(
            "the statistics of batch norm are treated unlike: one side sends them round while it trains (as DDP "
            "does with broadcast_buffers, and Horovod never), or does not learn them (eval())",
            "leave buffers to the Trainer: while it trains each rank keeps its own, and they are averaged "
            "before use",
        )


def compressed_gradients(case: Case) -> Iterator[Cause]:
    """Match gradients that are rounded for their transfer."""
    kinds = {str(trace.options["compression"]) for trace in case.runs} - {"none"}
    if case.first.quantity in ("gradients", "gradient norm") and not case.first.run and kinds:
        yield Cause(
            f"gradients are sent as {' and '.join(kinds)}, and the engines round at other places",
            "compare without --compression, or allow for it with --tolerance",
        )


def rounding(case: Case) -> Iterator[Cause]:
    """Match differences that are as small as rounding."""
    first = case.first
    if first.quantity not in ROUNDED_QUANTITIES or first.run or case.at_start or first.relative > MAX_ROUNDING:
        return
    reasons = ["another number of ranks"] if case.sizes_differ else []
    reasons += ["GPUs, which add up in no fixed order"] if case.one.facts["device"] != "cpu" else []
    reasons += ["another number of threads"] if case.one.facts["threads"] != case.other.facts["threads"] else []
    options = [trace.options for trace in case.runs]
    settings = ("num_groups", "adasum", "autotune", "sync_batch_norm")
    reasons += [flag(name) for name in settings if any(its.get(name) for its in options)]
    why = f" ({', '.join(reasons)})" if reasons else ""
    yield Cause(
        f"sums are taken in another order{why}: the difference is as small as rounding",
        "allow for it with --tolerance 1e-5, or train with --reproducible N, which has one order for all",
    )


def grown_rounding(case: Case) -> Iterator[Cause]:
    """Match differences in later steps of runs that round differently."""
    first, steps = case.first, case.one.steps
    inexact = case.sizes_differ or case.one.facts["device"] != "cpu"
    if inexact and first.quantity in ROUNDED_QUANTITIES and first.when.step > steps[0].step and not first.run:
        yield Cause(
            "rounding that has grown: training is chaotic, and makes a small difference a large one after a while",
            "look at the table: rounding grows from step to step, and what is wrong jumps. Take fewer --steps, or "
            "train with --reproducible N",
        )


def amplified_rounding(case: Case) -> Iterator[Cause]:
    """Match weights that differ after equal gradients, by an optimizer that divides by the gradient's size."""
    optimizer = str(case.one.facts["optimizer"])
    if case.first is case.get("parameters") and not case.at_start and "adam" in optimizer.lower():
        yield Cause(
            f"{optimizer} divides a gradient by its size, and so takes a whole step where there is nothing but "
            f"rounding, as with a bias in front of batch norm",
            "compare with SGD, or allow for it with --tolerance",
        )


def other_evaluation(case: Case) -> Iterator[Cause]:
    """Match equal weights with different test figures."""
    if case.first.quantity == "evaluation":
        yield Cause(
            "the weights are the same and the test figures are not: other test data, samples that count twice, "
            "or a metric that is reduced over the ranks by itself",
            "give the Trainer the whole test set on every rank, and metrics of one batch: it adds them up",
        )


def ended_early(case: Case) -> Iterator[Cause]:
    """Match a run that made fewer steps than the other."""
    if case.first.quantity == "steps":
        yield Cause(
            "all steps that both have made are the same, and one side has made fewer",
            "look for what ends it: its data, a callback, an error",
        )


LATE_RULES: tuple[Rule, ...] = (
    *(
        unaveraged_statistics,
        exchanged_statistics,
        compressed_gradients,
        rounding,
        grown_rounding,
        amplified_rounding,
    ),
    *(other_evaluation, ended_early),
)
