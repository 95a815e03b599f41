"""Find the known causes that fit the differences between two runs: one table, in the order in which they act."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvd_trainer.config.checks import flag
from hvd_trainer.tools.parity.comparison import Pair
from hvd_trainer.tools.parity.tensors import NONE, Finding
from hvd_trainer.tools.parity.traces import Moment, Trace

MAX_RATIO_ERROR = 1e-3
"""The relative difference between a ratio and the number that explains it."""
MAX_ROUNDING = 1e-5
"""The relative difference up to which rounding in fp32 explains it."""
MAX_WEIGHT_CHANGE = 0.1
"""The relative difference up to which weights were equal before something changed them."""
ROUNDED_QUANTITIES = ("loss", "gradients", "gradient norm", "parameters", "optimizer", "buffers")
"""Quantities that rounding can change."""

Fit = Mapping[str, object] | bool
"""Whether a cause fits; if it does, what completes its text, besides run, name and values of the finding."""


class Cause(NamedTuple):
    """A possible cause, and what to do about it."""

    text: str
    advice: str


class Known(NamedTuple):
    """A row of the table. Of the rows about one quantity the first that fits is a cause."""

    quantity: str
    """what must differ, `first` standing for whatever is the first finding"""
    when: Callable[[Case, Finding], Fit]
    """whether it fits the first finding about that quantity, which is one among ranks if there is any"""
    text: str
    advice: str
    in_script: str = ""
    """advice for a script that is not built on the Trainer, where it is another"""


class Case:
    """Two runs, and all that differs at the first moment at which anything does."""

    def __init__(self, pair: Pair) -> None:
        self.findings, self.one, self.other = pair.findings, pair.one, pair.other
        self.runs = pair.one, pair.other
        self.first = first = pair.findings[0]
        self.at_start = first.when.name == "start"
        self.sizes_differ = self.one.size != self.other.size
        self.max_ranks = max(self.one.size, self.other.size)
        self.on_gpus = self.one.facts["device"] != "cpu"
        among_ranks = any(found.run for found in self.findings)
        self.may_be_rounding = not (among_ranks or self.at_start) and first.quantity in ROUNDED_QUANTITIES

    def get(self, quantity: str) -> Finding | None:
        return next((found for found in self.findings if quantity in (found.quantity, "first")), None)

    def differs_among_ranks(self, quantity: str) -> bool:
        found = self.get(quantity)
        return found is not None and bool(found.run)

    def by_size(self, found: Finding) -> tuple[Trace, Trace, float]:
        """Return the run with the larger number, the other run, and how many times as large the number is; of a
        tuple of numbers the first that differ.
        """
        left, right = found.values
        if isinstance(left, tuple):
            pairs = zip(left, right, strict=False)
            left, right = next((pair for pair in pairs if pair[0] != pair[1]), (1.0, 1.0))
        one, other = self.runs if abs(left) >= abs(right) else self.runs[::-1]
        large, small = max(abs(left), abs(right)), min(abs(left), abs(right))
        return one, other, large / small if small else math.inf


def find_causes(pair: Pair) -> list[Cause]:
    """Return the known causes of what differs, in the order in which they would act; empty if none fits."""
    if pair.same:
        return []
    case, causes = Case(pair), {}
    for known in CAUSES:
        found = case.get(known.quantity)
        if found is None or known.quantity in causes:
            continue
        if (fit := known.when(case, found)) is not False:
            values = {"run": found.run, "name": found.name, "one": found.values[0], "other": found.values[1]}
            values |= {} if fit is True else fit
            advice = known.in_script if pair.one.is_script and known.in_script else known.advice
            causes[known.quantity] = Cause(known.text.format(**values), advice.format(**values))
    return list(causes.values())


def _always(case: Case, found: Finding) -> bool:
    return True


# Before the first step.


def _step_before_training(case: Case, found: Finding) -> Fit:
    state, weights = case.get("optimizer"), case.get("parameters")
    if not case.at_start or any(its.run for its in case.findings):
        return False
    if state is not None and NONE in state.values:
        return {"who": case.other.name if state.values[0] == NONE else case.one.name}
    moved = weights is not None and weights.relative < MAX_WEIGHT_CHANGE
    return (moved or state is not None) and {"who": "one side"}


def _weights_drawn_apart(case: Case, found: Finding) -> bool:
    """Return whether other random numbers have made other weights; a step moves them a little."""
    far = case.at_start and not found.run and found.relative >= MAX_WEIGHT_CHANGE
    return far and case.get("set-up") is None


def _ranks_start_apart(case: Case, found: Finding) -> Fit:
    run = next((its.run for its in case.findings if its.run), None)
    return case.at_start and run is not None and {"run": run}


# Samples.


def takes_same_samples(trace: Trace, step: Moment) -> bool:
    """Return whether all replicas take the same samples in a step."""
    taken, copies = trace.samples(step), trace.start["copies"]
    return copies > 1 and bool(taken) and all(count % copies == 0 for count in taken.values())


def repeats_samples(trace: Trace, step: Moment) -> bool:
    """Return whether a step has the samples that an earlier one had, as the same step of an earlier epoch."""
    taken = trace.samples(step)
    return bool(taken) and any(trace.samples(when) == taken for when in trace.steps if when < step)


def _runs_in_which(is_so: Callable[[Trace, Moment], bool]) -> Callable[[Case, Finding], Fit]:
    def fit(case: Case, found: Finding) -> Fit:
        names = [trace.name for trace in case.runs if is_so(trace, found.when)]
        return bool(names) and {"names": " and ".join(names)}

    return fit


def _other_transforms(case: Case, found: Finding) -> bool:
    """Return whether targets are equal and inputs are not."""
    # A sample is traced as two checksums, of its input and of its target: `1c2f-90ab`.
    sides = [[sample.split("-") for sample in its.samples(found.when).elements()] for its in case.runs]
    inputs, targets = ([sorted(sample[place] for sample in side) for side in sides] for place in (0, 1))
    return any(targets[0]) and targets[0] == targets[1] and inputs[0] != inputs[1]


def _padded(case: Case, found: Finding) -> bool:
    one, other = (trace.samples(found.when).total() for trace in case.runs)
    return case.sizes_differ and one != other


# Learning rate, loss, gradients.


def _rate_by_ranks(case: Case, found: Finding) -> Fit:
    large, small, ratio = case.by_size(found)
    factors = {"its number of ranks": case.max_ranks, "the root of its number of ranks": case.max_ranks**0.5}
    name = next((name for name, factor in factors.items() if _is_near(ratio, factor)), None)
    return name is not None and not found.run and {"large": large.name, "small": small.name, "factor": name}


def _rate_by_option(case: Case, found: Finding) -> bool:
    scales = case.by_size(found)[0].options["lr_scaling"] != "none"
    return case.sizes_differ and scales and bool(_rate_by_ranks(case, found))


def _summed_loss(case: Case, found: Finding) -> Fit:
    large, small, ratio = case.by_size(found)
    sizes = {count for line in large.lines(found.when) for count in line.get("counts", ())}
    return any(_is_near(ratio, size) for size in sizes) and {"large": large.name, "small": small.name}


def _layers_by_rank(case: Case, found: Finding) -> Fit:
    kinds = {
        "dropout ({}) draws other numbers on each rank": "dropout",
        "batch norm ({}) normalises the batch of each rank by itself": "batch_norm",
    }
    texts = [text.format(_first_few(names)) for text, kind in kinds.items() if (names := case.one.start[kind])]
    sizes, virtual = f"{case.one.size} and {case.other.size}", 2 ** math.ceil(math.log2(case.max_ranks))
    fits = case.sizes_differ and bool(texts)
    return fits and {"layers": " and ".join(texts), "sizes": sizes, "virtual": virtual}


def _other_forward(case: Case, found: Finding) -> Fit:
    explained = found.relative <= MAX_ROUNDING or case.differs_among_ranks("parameters")
    if explained or case.first.quantity in ("samples", "order", "skipped", "learning rate"):
        return False
    dropout = _first_few(case.one.start["dropout"])
    text = f"dropout ({dropout}) after one side has drawn random numbers more than the other; "
    return {"draws": text if dropout else ""}


def _other_update(case: Case, found: Finding) -> bool:
    return not case.at_start and bool(found.run) and not case.differs_among_ranks("gradients")


def _summed_gradients(case: Case, found: Finding) -> Fit:
    large, small, ratio = case.by_size(found)
    passes = len(large.lines(found.when)[0]["losses"]) if large.is_script else int(large.options["accumulate"])
    factors = {"ranks": case.max_ranks, "passes": passes}
    names = [f"{factor} {name}" for name, factor in factors.items() if _is_near(ratio, factor)]
    fits = case.get("loss") is None and bool(names)
    return fits and {"large": large.name, "small": small.name, "parts": " or ".join(names)}


# Rounding.


def _compressed(case: Case, found: Finding) -> Fit:
    kinds = {str(trace.options["compression"]) for trace in case.runs} - {"none"}
    fits = case.may_be_rounding and found.quantity in ("gradients", "gradient norm")
    return fits and bool(kinds) and {"kinds": " and ".join(kinds)}


def _rounding(case: Case, found: Finding) -> Fit:
    reasons = ["another number of ranks"] if case.sizes_differ else []
    reasons += ["GPUs, which add up in no fixed order"] if case.on_gpus else []
    reasons += ["another number of threads"] if case.one.facts["threads"] != case.other.facts["threads"] else []
    settings = ("num_groups", "adasum", "autotune", "sync_batch_norm")
    reasons += [flag(name) for name in settings if any(trace.options.get(name) for trace in case.runs)]
    why = f" ({', '.join(reasons)})" if reasons else ""
    return case.may_be_rounding and found.relative <= MAX_ROUNDING and {"why": why}


def _adam(case: Case, found: Finding) -> Fit:
    name = str(case.one.facts["optimizer"])
    return case.may_be_rounding and found.quantity == "parameters" and "adam" in name.lower() and {"adam": name}


def _grown_rounding(case: Case, found: Finding) -> bool:
    differs = case.sizes_differ or case.on_gpus
    return case.may_be_rounding and differs and found.when.step > case.one.steps[0].step


def _is_near(ratio: float, number: float) -> bool:
    """Return whether a ratio is this number, but for rounding; 1 explains nothing."""
    return number > 1 and abs(ratio / number - 1) < MAX_RATIO_ERROR


def _first_few(names: Sequence[str]) -> str:
    """Join the first three names; empty if there are none."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


CAUSES = (
    Known(
        "set-up",
        lambda case, found: found.name == "samples per epoch",
        "the job gives the Trainer other data on each side, such as a part that it has cut out by itself",
        "give the Trainer the whole data set on every rank: it shares the samples out, alike on each engine",
    ),
    Known(
        "set-up",
        _always,
        "the job sets itself up by the engine, the launcher or the number of ranks",
        "make it the same on both sides: {name}",
    ),
    Known(
        "settings",
        lambda case, found: case.get("set-up") is None,
        "the job makes another optimizer on each side",
        "make it the same on both: {name} is {one} and {other}",
    ),
    Known(
        "first",
        _step_before_training,
        "{who} has made a step before training. Horovod's broadcast_optimizer_state does so with a new optimizer: "
        "a step on zero gradients, after which Adam's first update is 0.744 of what it should be, and weight "
        "decay and momentum have moved the weights",
        "leave optimizer.step() and hvd.broadcast_optimizer_state out: the Trainer gives all ranks the same "
        "optimizer",
        "call hvd.broadcast_optimizer_state on both sides, or only after a checkpoint was loaded: a new optimizer "
        "is the same on all ranks",
    ),
    Known(
        "parameters",
        _weights_drawn_apart,
        "the weights were drawn from other random numbers",
        "build the model inside `with Trainer(options) as trainer:`, which seeds all ranks by --seed, and let "
        "neither side draw more than the other before",
        "call torch.manual_seed with the same number on each engine before the model is built, and let neither "
        "side draw more than the other before",
    ),
    Known(
        "first",
        _ranks_start_apart,
        "nothing has made the ranks of {run} start alike",
        "leave that to trainer.fit(), which sends what rank 0 has to all, and change nothing after it has begun",
        "send what rank 0 has to all before the first step: hvd.broadcast_parameters(model.state_dict(), "
        "root_rank=0), or DistributedDataParallel, which does so when it is made",
    ),
    Known(
        "samples",
        _runs_in_which(takes_same_samples),
        "all ranks of {names} train on the same samples: its data are not shared out",
        "give the Trainer the data set itself, which must give sample i for index i; in a loop of your own, use a "
        "DistributedSampler",
        "give the DataLoader a DistributedSampler(data, num_replicas, rank)",
    ),
    Known(
        "samples",
        _runs_in_which(repeats_samples),
        "{names} goes through its data in the same order in each epoch",
        "in a loop of your own call sampler.set_epoch(epoch)",
        "call sampler.set_epoch(epoch) before each epoch",
    ),
    Known(
        "samples",
        _other_transforms,
        "the samples are the same ones, but come otherwise transformed: random transforms draw other numbers",
        "draw from the global generators of Python, NumPy and PyTorch, which the Trainer seeds for each sample, "
        "and not from one of your own",
        "seed the generators that they draw from alike on each engine, and let neither side draw more before",
    ),
    Known(
        "samples",
        _padded,
        "the samples of the epoch do not divide among the ranks, and some come twice in its last step, so that no "
        "rank runs out of steps before another",
        "nothing is wrong: stop before with --steps, or compare with data whose number divides",
    ),
    Known(
        "samples",
        _always,
        "the data come in another order, or are other data",
        "look for a seed, a shuffle, a list of files or a rank that the job takes from engine or launcher",
    ),
    Known(
        "order",
        _always,
        "each step has the same samples, but on other ranks or in another order, so that sums round otherwise",
        "have both sides share out alike, or allow for it with --tolerance 1e-5",
    ),
    Known(
        "learning rate",
        _rate_by_option,
        "--lr-scaling counts ranks and passes, and one process that takes the global batch in one piece (for "
        "--sync-batch-norm) has one of both",
        "compare without --lr-scaling, with the --lr that it gives",
    ),
    Known(
        "learning rate",
        _rate_by_ranks,
        "{large} multiplies the learning rate by {factor}, as many examples of Horovod do (lr * hvd.size()), and "
        "{small} does not",
        "give the optimizer the same rate on every engine; to scale it, use --lr-scaling linear or sqrt, one rule "
        "for all",
        "give the optimizer the same rate on every engine",
    ),
    Known(
        "learning rate",
        _always,
        "the learning rate, or its schedule, depends on the engine, the launcher or the rank",
        "look for what the job computes it from",
    ),
    Known(
        "skipped",
        _always,
        "a gradient was not finite, and one side leaves this step out: while fp16's loss scale is being found, a "
        "value at the edge may overflow on one side only",
        "compare in fp32 or bf16",
    ),
    Known(
        "loss",
        _summed_loss,
        "the loss of {large} is the sum over its batch, and that of {small} the mean",
        "let the loss function give the mean",
    ),
    Known(
        "gradients",
        lambda case, found: bool(found.run) and found.count == found.total,
        "{run} does not average its gradients: each rank updates by its own, and trains a model of its own",
        "look for what turns the exchange off: no_sync() or gradient_sync(enabled=False) around a step's last "
        "pass, a forward around the Trainer's module, an hvd.DistributedOptimizer without the parameters",
        "put hvd.DistributedOptimizer(optimizer, named_parameters=...) around the optimizer, or "
        "DistributedDataParallel around the model; call that and not its .module, and leave a step's last pass "
        "out of no_sync()",
    ),
    Known(
        "gradients",
        lambda case, found: bool(found.run),
        "{run} does not average the gradients of some parameters, such as {name}",
        "look for parameters that are replaced, or gradients that are changed, after the exchange was set up",
    ),
    Known(
        "parameters",
        _other_update,
        "the ranks of {run} have the same gradients, and other weights after the update",
        "look for what changes weights on one rank only: a callback, a hook, other settings of the optimizer",
    ),
    Known(
        "gradient norm",
        _summed_gradients,
        "{large} adds up the gradients of {parts}, and {small} takes their mean",
        "divide by that number, once: for ranks the exchange does it (hvd.Average, not hvd.Sum), or the loss; for "
        "passes the loss",
    ),
    Known(
        "loss",
        _layers_by_rank,
        "{layers}, and there are {sizes} ranks",
        "compare with --reproducible {virtual} in the job, which gives the same bits on any number of ranks",
    ),
    Known(
        "loss",
        _other_forward,
        "the same weights give another loss for the same samples: {draws}train() or eval(); a branch on engine or "
        "rank in the model or the loss",
        "look for what forward and the loss take from outside",
    ),
    Known(
        "first",
        lambda case, found: found.quantity == "buffers" and bool(found.run),
        "{run} does not average the statistics of batch norm over its ranks before they are used: each evaluates "
        "with those of its own share, and rank 0's are saved. Horovod never sends buffers",
        "leave that to the Trainer (Backend.average_buffers); in a loop of your own, average the buffers before "
        "each evaluation, or use --sync-batch-norm",
    ),
    Known(
        "buffers",
        lambda case, found: found is case.first and not (found.run or case.at_start),
        "the statistics of batch norm are treated unlike: one side sends them round while it trains (as DDP does "
        "with broadcast_buffers, and Horovod never), or does not learn them (eval())",
        "leave buffers to the Trainer: while it trains each rank keeps its own, and they are averaged before use",
        "do the same on both sides: DistributedDataParallel(..., broadcast_buffers=False), and the mean of the "
        "buffers over the ranks before they are used; or SyncBatchNorm",
    ),
    Known(
        "first",
        _compressed,
        "gradients are sent as {kinds}, and the engines round at other places",
        "compare without --compression, or allow for it with --tolerance",
    ),
    Known(
        "first",
        _rounding,
        "sums are taken in another order{why}: the difference is as small as rounding",
        "allow for it with --tolerance 1e-5, or train with --reproducible N, which has one order for all",
        "allow for it with --tolerance 1e-5",
    ),
    Known(
        "first",
        _adam,
        "{adam} divides a gradient by its size, and so takes a whole step where there is nothing but rounding, as "
        "with a bias in front of batch norm",
        "compare with SGD, or allow for it with --tolerance",
    ),
    Known(
        "first",
        _grown_rounding,
        "rounding that has grown: training is chaotic, and makes a small difference a large one after a while",
        "look at the table: rounding grows from step to step, and what is wrong jumps. Take fewer --steps, or "
        "train with --reproducible N",
        "look at the table: rounding grows from step to step, and what is wrong jumps. Take fewer --steps",
    ),
    Known(
        "first",
        lambda case, found: found.quantity == "evaluation",
        "the weights are the same and the test figures are not: other test data, samples that count twice, or a "
        "metric that is reduced over the ranks by itself",
        "give the Trainer the whole test set on every rank, and metrics of one batch: it adds them up",
    ),
    Known(
        "steps",
        _always,
        "all steps that both have made are the same, and one side has made fewer",
        "look for what ends it: its data, a callback, an error",
    ),
)
