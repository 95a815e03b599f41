"""Find the known causes that fit the differences between two runs.

Each function knows the causes of what differs in one quantity, in the order in which one follows from another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hvd_trainer.config.checks import flag
from hvd_trainer.tools.parity.case import Case, Cause
from hvd_trainer.tools.parity.distance import NONE
from hvd_trainer.tools.parity.traces import Moment, Trace

MAX_RATIO_ERROR = 1e-3
"""The relative difference between a ratio and the number that explains it."""
MAX_ROUNDING = 1e-5
"""The relative difference up to which rounding in fp32 explains it."""
MAX_WEIGHT_CHANGE = 0.1
"""The relative difference up to which weights were equal before something changed them."""
ROUNDED_QUANTITIES = ("loss", "gradients", "gradient norm", "parameters", "optimizer", "buffers")
"""Quantities that rounding can change."""


def find_causes(case: Case) -> list[Cause]:
    """Return the known causes that fit, in the order in which they would act; empty if none does."""
    rules = (
        *(
            match_set_up,
            match_start,
            match_samples,
            match_rate,
            match_loss,
            match_exchange,
            match_gradients,
            match_forward,
        ),
        *(match_buffers, match_rounding, match_end),
    )
    return list(dict.fromkeys(cause for rule in rules for cause in rule(case)))


def match_set_up(case: Case) -> Iterator[Cause]:
    """Match other data, another model, other options, or other settings of the optimizer."""
    found, settings = case.get("set-up"), case.get("settings")
    if found is not None and found.name == "samples per epoch":
        yield Cause(
            "the job gives the Trainer other data on each side, such as a part that it has cut out by itself",
            "give the Trainer the whole data set on every rank: it shares the samples out, alike on each engine",
        )
    elif found is not None:
        yield Cause(
            "the job sets itself up by the engine, the launcher or the number of ranks",
            f"make it the same on both sides: {found.name}",
        )
    elif settings is not None:
        yield Cause(
            "the job makes another optimizer on each side",
            f"make it the same on both: {settings.name} is {settings.values[0]} and {settings.values[1]}",
        )


def match_start(case: Case) -> Iterator[Cause]:
    """Match weights, buffers or optimizer state that differ before the first step, between runs or among ranks."""
    if not case.at_start:
        return
    state, weights = case.get("optimizer"), case.get("parameters")
    kinds = ("parameters", "buffers", "optimizer")
    unequal = [found for kind in kinds if (found := case.get(kind, among_ranks=True)) is not None]
    # A step moves weights a little; other random numbers make others of them.
    redrawn = weights is not None and weights.relative >= MAX_WEIGHT_CHANGE
    moved = weights is not None and not redrawn and case.get("parameters", among_ranks=True) is None
    if state is not None or moved:
        who = "one side"
        if state is not None and NONE in state.values:
            who = case.other.name if state.values[0] == NONE else case.one.name
        yield Cause(
            f"{who} has made a step before training. Horovod's broadcast_optimizer_state does so with a new "
            "optimizer: a step on zero gradients, after which Adam's first update is 0.744 of what it should be, "
            "and weight decay and momentum have moved the weights",
            "leave optimizer.step() and hvd.broadcast_optimizer_state out: the Trainer gives all ranks the same "
            "optimizer",
        )
    if redrawn and case.get("set-up") is None:
        yield Cause(
            "the weights were drawn from other random numbers",
            "build the model inside `with Trainer(options) as trainer:`, which seeds all ranks by --seed, and let "
            "neither side draw more than the other before",
        )
    for found in unequal[:1]:
        yield Cause(
            f"nothing has made the ranks of {found.run} start alike",
            "leave that to trainer.fit(), which sends what rank 0 has to all, and change nothing after it has "
            "begun",
        )


def match_samples(case: Case) -> Iterator[Cause]:
    """Match steps that take other samples, or the same ones in another order."""
    if case.get("samples") is not None:
        step = case.first.when
        shared = [cause for trace in case.runs for cause in _match_sharing(trace, step)]
        yield from [*(shared or _match_transforms(case, step)), *_match_padding(case, step)] or [
            Cause(
                "the data come in another order, or are other data",
                "look for a seed, a shuffle, a list of files or a rank that the job takes from engine or launcher",
            )
        ]
    if case.get("order") is not None:
        yield Cause(
            "each step has the same samples, but on other ranks or in another order, so that sums round otherwise",
            "have both sides share out alike, or allow for it with --tolerance 1e-5",
        )


def _match_sharing(trace: Trace, step: Moment) -> Iterator[Cause]:
    """Match replicas that all take the same samples, and samples that were those of a step in an earlier epoch."""
    taken, copies, epoch = trace.samples(step), trace.start["copies"], trace.lines(step)[0]["epoch"]
    if copies > 1 and taken and all(count % copies == 0 for count in taken.values()):
        yield Cause(
            f"all ranks of {trace.name} train on the same samples: its data are not shared out",
            "give the Trainer the data set itself, which must give sample i for index i; in a loop of your "
            "own, use a DistributedSampler",
        )
    earlier = [when for when in trace.steps if when < step and trace.lines(when)[0]["epoch"] < epoch]
    if any(trace.samples(when) == taken for when in earlier):
        yield Cause(
            f"{trace.name} goes through its data in the same order in each epoch",
            "in a loop of your own call sampler.set_epoch(epoch)",
        )


def _match_transforms(case: Case, step: Moment) -> Iterator[Cause]:
    """Match equal targets with different inputs."""
    # A sample is traced as two checksums, of its input and of its target: `1c2f-90ab`.
    sides = [[sample.split("-") for sample in trace.samples(step).elements()] for trace in case.runs]
    inputs, targets = ([sorted(sample[place] for sample in side) for side in sides] for place in (0, 1))
    if targets[0] == targets[1] and inputs[0] != inputs[1]:
        yield Cause(
            "the samples are the same ones, but come otherwise transformed: random transforms draw other numbers",
            "draw from the global generators of Python, NumPy and PyTorch, which the Trainer seeds for each "
            "sample, and not from one of your own",
        )


def _match_padding(case: Case, step: Moment) -> Iterator[Cause]:
    """Match runs on unequal numbers of ranks that take unequal numbers of samples."""
    one, other = (sum(trace.samples(step).values()) for trace in case.runs)
    if case.sizes_differ and one != other:
        yield Cause(
            "the samples of the epoch do not divide among the ranks, and some come twice in its last step, so "
            "that no rank runs out of steps before another",
            "nothing is wrong: stop before with --steps, or compare with data whose number divides",
        )


def match_rate(case: Case) -> Iterator[Cause]:
    """Match rates whose ratio is the number of ranks, or its root, and others; and a step that one side skips."""
    found = case.get("learning rate")
    pairs = [] if found is None else zip(*found.values, strict=False)
    large, small, ratio = case.by_size(*next((pair for pair in pairs if pair[0] != pair[1]), (0.0, 0.0)))
    factors = {"its number of ranks": case.max_ranks, "the root of its number of ranks": case.max_ranks**0.5}
    name = next((name for name, factor in factors.items() if factor > 1 and _is_near(ratio, factor)), None)
    if name and case.sizes_differ and large.options["lr_scaling"] != "none":
        yield Cause(
            "--lr-scaling counts ranks and passes, and one process that takes the global batch in one piece "
            "(for --sync-batch-norm) has one of both",
            "compare without --lr-scaling, with the --lr that it gives",
        )
    elif name:
        yield Cause(
            f"{large.name} multiplies the learning rate by {name}, as many examples of Horovod do (lr * "
            f"hvd.size()), and {small.name} does not",
            "give the optimizer the same rate on every engine; to scale it, use --lr-scaling linear or "
            "sqrt, one rule for all",
        )
    elif found is not None or case.get("learning rate", among_ranks=True) is not None:
        yield Cause(
            "the learning rate, or its schedule, depends on the engine, the launcher or the rank",
            "look for what the job computes it from",
        )
    if case.get("skipped") or case.get("skipped", among_ranks=True):
        yield Cause(
            "a gradient was not finite, and one side leaves this step out: while fp16's loss scale is being "
            "found, a value at the edge may overflow on one side only",
            "compare in fp32 or bf16",
        )


def match_loss(case: Case) -> Iterator[Cause]:
    """Match losses whose ratio is the size of a batch."""
    found = case.get("loss")
    if found is None:
        return
    large, small, ratio = case.by_size(*found.values)
    sizes = {count for line in large.lines(found.when) for count in line["counts"]}
    if any(size > 1 and _is_near(ratio, size) for size in sizes):
        yield Cause(
            f"the loss of {large.name} is the sum over its batch, and that of {small.name} the mean",
            "let the loss function give the mean",
        )


def match_exchange(case: Case) -> Iterator[Cause]:
    """Match ranks of one run whose gradients or weights differ after the exchange or the update."""
    found, weights = case.get("gradients", among_ranks=True), case.get("parameters", among_ranks=True)
    if found is not None and found.count == found.total:
        yield Cause(
            f"{found.run} does not average its gradients: each rank updates by its own, and trains a model of its "
            f"own",
            "look for what turns the exchange off: no_sync() or gradient_sync(enabled=False) around a step's last "
            "pass, a forward around the Trainer's module, an hvd.DistributedOptimizer without the parameters",
        )
    elif found is not None:
        yield Cause(
            f"{found.run} does not average the gradients of some parameters, such as {found.name}",
            "look for parameters that are replaced, or gradients that are changed, after the exchange was set up",
        )
    elif weights is not None and not case.at_start:
        yield Cause(
            f"the ranks of {weights.run} have the same gradients, and other weights after the update",
            "look for what changes weights on one rank only: a callback, a hook, other settings of the optimizer",
        )


def match_gradients(case: Case) -> Iterator[Cause]:
    """Match gradient norms whose ratio is the number of ranks or of passes, with equal losses."""
    found = case.get("gradient norm")
    if found is None or case.get("loss") is not None:
        return
    large, small, ratio = case.by_size(*found.values)
    passes = int(large.options["accumulate"])
    if case.max_ranks > 1 and _is_near(ratio, case.max_ranks):
        yield Cause(
            f"{large.name} adds up the gradients of {case.max_ranks} ranks, and {small.name} takes their mean",
            "divide by the number of ranks, once: the exchange does it (hvd.Average, not hvd.Sum), or the loss",
        )
    if passes > 1 and _is_near(ratio, passes):
        yield Cause(
            f"{large.name} adds up the gradients of {passes} passes, and {small.name} takes their mean",
            "divide the loss by the number of passes, once",
        )


def match_forward(case: Case) -> Iterator[Cause]:
    """Match other losses: of layers that depend on the number of ranks, or of the same weights and samples."""
    found, summed = case.get("loss"), [*match_loss(case)]
    if found is None:
        return
    sizes = f"{case.one.size} and {case.other.size}"
    dropout, norms = (_first_few(case.one.start[kind]) for kind in ("dropout", "batch_norm"))
    virtual = 2 ** math.ceil(math.log2(case.max_ranks))
    reproducible = f"with --reproducible {virtual} in the job, which gives the same bits on any number of ranks"
    if case.sizes_differ and dropout:
        yield Cause(
            f"dropout ({dropout}) draws other numbers: each rank has its own, and there are {sizes}",
            f"compare without dropout, or {reproducible}",
        )
    if case.sizes_differ and norms:
        yield Cause(
            f"batch norm ({norms}) normalises the batch of each rank by itself, and on {sizes} ranks the batches "
            f"are not the same",
            f"compare {reproducible}",
        )
    explained = summed or (case.sizes_differ and (dropout or norms)) or found.relative <= MAX_ROUNDING
    if not explained and case.first.quantity not in ("samples", "order", "skipped", "learning rate"):
        draws = f"dropout ({dropout}) after one side has drawn random numbers more than the other; "
        yield Cause(
            f"the same weights give another loss for the same samples: {draws if dropout else ''}train() or "
            "eval(); a branch on engine or rank in the model or the loss",
            "look for what forward and the loss take from outside",
        )


def match_buffers(case: Case) -> Iterator[Cause]:
    """Match buffers that differ first: among ranks that evaluate, or between runs in training."""
    first = case.first
    if first.quantity != "buffers" or case.at_start:
        return
    if first.run:
        yield Cause(
            f"{first.run} does not average the statistics of batch norm over its ranks before they are used: each "
            f"evaluates with those of its own share, and rank 0's are saved. Horovod never sends buffers",
            "leave that to the Trainer (Backend.average_buffers); in a loop of your own, average the buffers "
            "before each evaluation, or use --sync-batch-norm",
        )
    else:
        yield Cause(
            "the statistics of batch norm are treated unlike: one side sends them round while it trains (as DDP "
            "does with broadcast_buffers, and Horovod never), or does not learn them (eval())",
            "leave buffers to the Trainer: while it trains each rank keeps its own, and they are averaged "
            "before use",
        )


def match_rounding(case: Case) -> Iterator[Cause]:
    """Match differences between two runs that rounding can make, at once or after a while."""
    first, kinds = case.first, {str(trace.options["compression"]) for trace in case.runs} - {"none"}
    if first.run or case.at_start or first.quantity not in ROUNDED_QUANTITIES:
        return
    if first.quantity in ("gradients", "gradient norm") and kinds:
        yield Cause(
            f"gradients are sent as {' and '.join(kinds)}, and the engines round at other places",
            "compare without --compression, or allow for it with --tolerance",
        )
    if first.relative <= MAX_ROUNDING:
        reasons = _other_orders(case)
        why = f" ({', '.join(reasons)})" if reasons else ""
        yield Cause(
            f"sums are taken in another order{why}: the difference is as small as rounding",
            "allow for it with --tolerance 1e-5, or train with --reproducible N, which has one order for all",
        )
    inexact = case.sizes_differ or case.one.facts["device"] != "cpu"
    if inexact and first.when.step > case.one.steps[0].step:
        yield Cause(
            "rounding that has grown: training is chaotic, and makes a small difference a large one after a while",
            "look at the table: rounding grows from step to step, and what is wrong jumps. Take fewer --steps, or "
            "train with --reproducible N",
        )
    optimizer = str(case.one.facts["optimizer"])
    if first.quantity == "parameters" and "adam" in optimizer.lower():
        yield Cause(
            f"{optimizer} divides a gradient by its size, and so takes a whole step where there is nothing but "
            f"rounding, as with a bias in front of batch norm",
            "compare with SGD, or allow for it with --tolerance",
        )


def _other_orders(case: Case) -> list[str]:
    """Return what makes the two runs add up in another order."""
    reasons = ["another number of ranks"] if case.sizes_differ else []
    reasons += ["GPUs, which add up in no fixed order"] if case.one.facts["device"] != "cpu" else []
    reasons += ["another number of threads"] if case.one.facts["threads"] != case.other.facts["threads"] else []
    settings = ("num_groups", "adasum", "autotune", "sync_batch_norm")
    return reasons + [flag(name) for name in settings if any(trace.options.get(name) for trace in case.runs)]


def match_end(case: Case) -> Iterator[Cause]:
    """Match equal weights with different test figures, and a run that made fewer steps than the other."""
    if case.first.quantity == "evaluation":
        yield Cause(
            "the weights are the same and the test figures are not: other test data, samples that count twice, "
            "or a metric that is reduced over the ranks by itself",
            "give the Trainer the whole test set on every rank, and metrics of one batch: it adds them up",
        )
    if case.first.quantity == "steps":
        yield Cause(
            "all steps that both have made are the same, and one side has made fewer",
            "look for what ends it: its data, a callback, an error",
        )


def _is_near(ratio: float, number: float) -> bool:
    """Return whether a ratio is this number, but for rounding."""
    return number > 0 and abs(ratio / number - 1) < MAX_RATIO_ERROR


def _first_few(names: Sequence[str]) -> str:
    """Join the first three names; empty if there are none."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
