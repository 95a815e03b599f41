"""Find the known causes that fit the differences between two runs: one table, in the order in which they act."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_trainer.config.checks import flag
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

EQUAL: tuple[Any, Any] = (1.0, 1.0)

Fit = Mapping[str, object] | bool
"""Whether a cause fits; if it does, what its text and advice are completed with."""


class Cause(NamedTuple):
    """A possible cause, and what to do about it."""

    text: str
    advice: str


class Known(NamedTuple):
    """A row of the table."""

    when: Callable[[Case], Fit]
    text: str
    advice: str
    in_script: str = ""
    """advice for a script that is not built on the Trainer, where it is another"""


@dataclass(frozen=True)
class Case:
    """Two runs, and all that differs at the first moment at which anything does."""

    findings: Sequence[Finding]
    one: Trace
    other: Trace

    def get(self, quantity: str, *, among_ranks: bool = False) -> Finding | None:
        """Return the finding about a quantity, between the two runs or among the ranks of one; None if there is
        none.
        """
        return next((f for f in self.findings if f.quantity == quantity and bool(f.run) == among_ranks), None)

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def at_start(self) -> bool:
        return self.first.when.name == "start"

    @property
    def runs(self) -> tuple[Trace, Trace]:
        return self.one, self.other

    @property
    def sizes_differ(self) -> bool:
        return self.one.size != self.other.size

    @property
    def max_ranks(self) -> int:
        return max(self.one.size, self.other.size)

    def by_size(self, quantity: str) -> tuple[Trace, Trace, float]:
        """Return the run with the larger number, the other run, and how many times as large the number is; of a
        tuple of numbers the first that differ. Without a finding the ratio is 1.
        """
        found = self.get(quantity)
        left, right = EQUAL if found is None else found.values
        if isinstance(left, tuple | list):
            left, right = next((pair for pair in zip(left, right, strict=False) if pair[0] != pair[1]), EQUAL)
        if abs(left) >= abs(right):
            return self.one, self.other, _ratio(left, right)
        return self.other, self.one, _ratio(right, left)


def _ratio(large: float, small: float) -> float:
    return (1.0 if large == 0 else math.inf) if small == 0 else large / small


def find_causes(case: Case) -> list[Cause]:
    """Return the known causes that fit, in the order in which they would act; empty if none does."""
    found = []
    for known in CAUSES:
        fit = known.when(case)
        if fit is not False:
            values = {} if fit is True else fit
            advice = known.in_script if case.one.is_script and known.in_script else known.advice
            found.append(Cause(known.text.format(**values), advice.format(**values)))
    return found


# Before the first step.


def _other_set_up(case: Case) -> Fit:
    found = case.get("set-up")
    return found is not None and found.name != "samples per epoch" and {"name": found.name}


def _other_optimizer(case: Case) -> Fit:
    found = case.get("settings")
    fits = found is not None and case.get("set-up") is None
    return fits and found is not None and {"name": found.name, "one": found.values[0], "other": found.values[1]}


def _redrawn(case: Case) -> bool:
    """Return whether other random numbers have made other weights; a step moves them a little."""
    weights = case.get("parameters")
    return case.at_start and weights is not None and weights.relative >= MAX_WEIGHT_CHANGE


def _step_before_training(case: Case) -> Fit:
    state, weights = case.get("optimizer"), case.get("parameters")
    moved = weights is not None and not _redrawn(case) and case.get("parameters", among_ranks=True) is None
    if not case.at_start or (state is None and not moved):
        return False
    if state is None or NONE not in state.values:
        return {"who": "one side"}
    return {"who": case.other.name if state.values[0] == NONE else case.one.name}


def _unequal_start(case: Case) -> Fit:
    found = [case.get(kind, among_ranks=True) for kind in ("parameters", "buffers", "optimizer")]
    run = next((its.run for its in found if its is not None), None)
    return case.at_start and run is not None and {"run": run}


# Samples.


def _unshared_data(case: Case) -> Fit:
    names = [its.name for its in case.runs if case.get("samples") and takes_same_samples(its, case.first.when)]
    return bool(names) and {"names": " and ".join(names)}


def _unshuffled_epoch(case: Case) -> Fit:
    names = [its.name for its in case.runs if case.get("samples") and repeats_samples(its, case.first.when)]
    return bool(names) and {"names": " and ".join(names)}


def takes_same_samples(trace: Trace, step: Moment) -> bool:
    """Return whether all replicas take the same samples in a step."""
    taken, copies = trace.samples(step), trace.start["copies"]
    return copies > 1 and bool(taken) and all(count % copies == 0 for count in taken.values())


def repeats_samples(trace: Trace, step: Moment) -> bool:
    """Return whether a step has the samples that an earlier one had, as the same step of an earlier epoch."""
    taken = trace.samples(step)
    return bool(taken) and any(trace.samples(when) == taken for when in trace.steps if when < step)


def _other_transforms(case: Case) -> bool:
    """Return whether targets are equal and inputs are not."""
    if case.get("samples") is None or _unshared_data(case) or _unshuffled_epoch(case):
        return False
    # A sample is traced as two checksums, of its input and of its target: `1c2f-90ab`.
    sides = [[sample.split("-") for sample in its.samples(case.first.when).elements()] for its in case.runs]
    inputs, targets = ([sorted(sample[place] for sample in side) for side in sides] for place in (0, 1))
    return any(targets[0]) and targets[0] == targets[1] and inputs[0] != inputs[1]


def _padded(case: Case) -> bool:
    if case.get("samples") is None or not case.sizes_differ:
        return False
    one, other = (sum(trace.samples(case.first.when).values()) for trace in case.runs)
    return one != other


def _other_data(case: Case) -> bool:
    others = (_unshared_data, _unshuffled_epoch, _other_transforms, _padded)
    return case.get("samples") is not None and not any(other(case) for other in others)


# Learning rate, loss, gradients.


def _rate_by_ranks(case: Case) -> Fit:
    large, small, ratio = case.by_size("learning rate")
    factors = {"its number of ranks": case.max_ranks, "the root of its number of ranks": case.max_ranks**0.5}
    name = next((name for name, factor in factors.items() if factor > 1 and _is_near(ratio, factor)), None)
    return name is not None and {"large": large.name, "small": small.name, "factor": name}


def _rate_by_option(case: Case) -> bool:
    scales = case.by_size("learning rate")[0].options["lr_scaling"] != "none"
    return bool(_rate_by_ranks(case)) and case.sizes_differ and scales


def _other_rate(case: Case) -> bool:
    found = case.get("learning rate") or case.get("learning rate", among_ranks=True)
    return found is not None and not _rate_by_ranks(case)


def _summed_loss(case: Case) -> Fit:
    large, small, ratio = case.by_size("loss")
    sizes = {count for line in large.lines(case.first.when) for count in line.get("counts", ()) if count > 1}
    return any(_is_near(ratio, size) for size in sizes) and {"large": large.name, "small": small.name}


def _no_exchange(case: Case) -> Fit:
    found = case.get("gradients", among_ranks=True)
    return found is not None and found.count == found.total and {"run": found.run}


def _partial_exchange(case: Case) -> Fit:
    found = case.get("gradients", among_ranks=True)
    return found is not None and found.count < found.total and {"run": found.run, "name": found.name}


def _other_update(case: Case) -> Fit:
    found = case.get("parameters", among_ranks=True)
    fits = not case.at_start and case.get("gradients", among_ranks=True) is None
    return fits and found is not None and {"run": found.run}


def _gradient_factor(case: Case, factor: int) -> Fit:
    large, small, ratio = case.by_size("gradient norm")
    fits = case.get("loss") is None and factor > 1 and _is_near(ratio, factor)
    return fits and {"large": large.name, "small": small.name, "count": factor}


def _summed_passes(case: Case) -> Fit:
    found, large = case.get("gradient norm"), case.by_size("gradient norm")[0]
    passes = 0 if found is None else len(large.lines(found.when)[0]["losses"])
    return _gradient_factor(case, passes if large.is_script else int(large.options["accumulate"]))


def _drawing_layers(case: Case, kind: str) -> Fit:
    names, sizes = _first_few(case.one.start[kind]), f"{case.one.size} and {case.other.size}"
    virtual = 2 ** math.ceil(math.log2(case.max_ranks))
    reproducible = f"with --reproducible {virtual} in the job, which gives the same bits on any number of ranks"
    fits = case.get("loss") is not None and case.sizes_differ and bool(names)
    return fits and {"names": names, "sizes": sizes, "reproducible": reproducible}


def _other_forward(case: Case) -> Fit:
    found, dropout = case.get("loss"), _first_few(case.one.start["dropout"])
    explained = _summed_loss(case) or any(_drawing_layers(case, kind) for kind in ("dropout", "batch_norm"))
    explained = explained or case.get("parameters", among_ranks=True) is not None
    before = ("samples", "order", "skipped", "learning rate")
    if found is None or explained or found.relative <= MAX_ROUNDING or case.first.quantity in before:
        return False
    text = f"dropout ({dropout}) after one side has drawn random numbers more than the other; "
    return {"draws": text if dropout else ""}


def _buffers_first(case: Case) -> bool:
    return case.first.quantity == "buffers" and not case.at_start


# Rounding.


def _may_be_rounding(case: Case) -> bool:
    return not case.first.run and not case.at_start and case.first.quantity in ROUNDED_QUANTITIES


def _compressed(case: Case) -> Fit:
    kinds = {str(trace.options["compression"]) for trace in case.runs} - {"none"}
    fits = _may_be_rounding(case) and case.first.quantity in ("gradients", "gradient norm")
    return fits and bool(kinds) and {"kinds": " and ".join(kinds)}


def _is_inexact(case: Case) -> bool:
    return case.sizes_differ or case.one.facts["device"] != "cpu"


def _rounding(case: Case) -> Fit:
    reasons = ["another number of ranks"] if case.sizes_differ else []
    reasons += ["GPUs, which add up in no fixed order"] if case.one.facts["device"] != "cpu" else []
    reasons += ["another number of threads"] if case.one.facts["threads"] != case.other.facts["threads"] else []
    settings = ("num_groups", "adasum", "autotune", "sync_batch_norm")
    reasons += [flag(name) for name in settings if any(trace.options.get(name) for trace in case.runs)]
    why = f" ({', '.join(reasons)})" if reasons else ""
    return _may_be_rounding(case) and case.first.relative <= MAX_ROUNDING and {"why": why}


def _grown_rounding(case: Case) -> bool:
    return _may_be_rounding(case) and _is_inexact(case) and case.first.when.step > case.one.steps[0].step


def _adam(case: Case) -> Fit:
    name = str(case.one.facts["optimizer"])
    fits = _may_be_rounding(case) and case.first.quantity == "parameters" and "adam" in name.lower()
    return fits and {"name": name}


def _is_near(ratio: float, number: float) -> bool:
    """Return whether a ratio is this number, but for rounding."""
    return number > 0 and abs(ratio / number - 1) < MAX_RATIO_ERROR


def _first_few(names: Sequence[str]) -> str:
    """Join the first three names; empty if there are none."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


CAUSES = (
    Known(
        lambda case: (found := case.get("set-up")) is not None and found.name == "samples per epoch",
        "the job gives the Trainer other data on each side, such as a part that it has cut out by itself",
        "give the Trainer the whole data set on every rank: it shares the samples out, alike on each engine",
    ),
    Known(
        _other_set_up,
        "the job sets itself up by the engine, the launcher or the number of ranks",
        "make it the same on both sides: {name}",
    ),
    Known(
        _other_optimizer,
        "the job makes another optimizer on each side",
        "make it the same on both: {name} is {one} and {other}",
    ),
    Known(
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
        lambda case: _redrawn(case) and case.get("set-up") is None,
        "the weights were drawn from other random numbers",
        "build the model inside `with Trainer(options) as trainer:`, which seeds all ranks by --seed, and let "
        "neither side draw more than the other before",
        "call torch.manual_seed with the same number on each engine before the model is built, and let neither "
        "side draw more than the other before",
    ),
    Known(
        _unequal_start,
        "nothing has made the ranks of {run} start alike",
        "leave that to trainer.fit(), which sends what rank 0 has to all, and change nothing after it has begun",
        "send what rank 0 has to all before the first step: hvd.broadcast_parameters(model.state_dict(), "
        "root_rank=0), or DistributedDataParallel, which does so when it is made",
    ),
    Known(
        _unshared_data,
        "all ranks of {names} train on the same samples: its data are not shared out",
        "give the Trainer the data set itself, which must give sample i for index i; in a loop of your own, use a "
        "DistributedSampler",
        "give the DataLoader a DistributedSampler(data, num_replicas, rank)",
    ),
    Known(
        _unshuffled_epoch,
        "{names} goes through its data in the same order in each epoch",
        "in a loop of your own call sampler.set_epoch(epoch)",
        "call sampler.set_epoch(epoch) before each epoch",
    ),
    Known(
        _other_transforms,
        "the samples are the same ones, but come otherwise transformed: random transforms draw other numbers",
        "draw from the global generators of Python, NumPy and PyTorch, which the Trainer seeds for each sample, "
        "and not from one of your own",
        "seed the generators that they draw from alike on each engine, and let neither side draw more before",
    ),
    Known(
        _padded,
        "the samples of the epoch do not divide among the ranks, and some come twice in its last step, so that no "
        "rank runs out of steps before another",
        "nothing is wrong: stop before with --steps, or compare with data whose number divides",
    ),
    Known(
        _other_data,
        "the data come in another order, or are other data",
        "look for a seed, a shuffle, a list of files or a rank that the job takes from engine or launcher",
    ),
    Known(
        lambda case: case.get("order") is not None,
        "each step has the same samples, but on other ranks or in another order, so that sums round otherwise",
        "have both sides share out alike, or allow for it with --tolerance 1e-5",
    ),
    Known(
        _rate_by_option,
        "--lr-scaling counts ranks and passes, and one process that takes the global batch in one piece (for "
        "--sync-batch-norm) has one of both",
        "compare without --lr-scaling, with the --lr that it gives",
    ),
    Known(
        lambda case: not _rate_by_option(case) and _rate_by_ranks(case),
        "{large} multiplies the learning rate by {factor}, as many examples of Horovod do (lr * hvd.size()), and "
        "{small} does not",
        "give the optimizer the same rate on every engine; to scale it, use --lr-scaling linear or sqrt, one rule "
        "for all",
        "give the optimizer the same rate on every engine",
    ),
    Known(
        _other_rate,
        "the learning rate, or its schedule, depends on the engine, the launcher or the rank",
        "look for what the job computes it from",
    ),
    Known(
        lambda case: bool(case.get("skipped") or case.get("skipped", among_ranks=True)),
        "a gradient was not finite, and one side leaves this step out: while fp16's loss scale is being found, a "
        "value at the edge may overflow on one side only",
        "compare in fp32 or bf16",
    ),
    Known(
        _summed_loss,
        "the loss of {large} is the sum over its batch, and that of {small} the mean",
        "let the loss function give the mean",
    ),
    Known(
        _no_exchange,
        "{run} does not average its gradients: each rank updates by its own, and trains a model of its own",
        "look for what turns the exchange off: no_sync() or gradient_sync(enabled=False) around a step's last "
        "pass, a forward around the Trainer's module, an hvd.DistributedOptimizer without the parameters",
        "put hvd.DistributedOptimizer(optimizer, named_parameters=...) around the optimizer, or "
        "DistributedDataParallel around the model; call that and not its .module, and leave a step's last pass "
        "out of no_sync()",
    ),
    Known(
        _partial_exchange,
        "{run} does not average the gradients of some parameters, such as {name}",
        "look for parameters that are replaced, or gradients that are changed, after the exchange was set up",
    ),
    Known(
        _other_update,
        "the ranks of {run} have the same gradients, and other weights after the update",
        "look for what changes weights on one rank only: a callback, a hook, other settings of the optimizer",
    ),
    Known(
        lambda case: _gradient_factor(case, case.max_ranks),
        "{large} adds up the gradients of {count} ranks, and {small} takes their mean",
        "divide by the number of ranks, once: the exchange does it (hvd.Average, not hvd.Sum), or the loss",
    ),
    Known(
        _summed_passes,
        "{large} adds up the gradients of {count} passes, and {small} takes their mean",
        "divide the loss by the number of passes, once",
    ),
    Known(
        lambda case: _drawing_layers(case, "dropout"),
        "dropout ({names}) draws other numbers: each rank has its own, and there are {sizes}",
        "compare without dropout, or {reproducible}",
    ),
    Known(
        lambda case: _drawing_layers(case, "batch_norm"),
        "batch norm ({names}) normalises the batch of each rank by itself, and on {sizes} ranks the batches are "
        "not the same",
        "compare {reproducible}",
    ),
    Known(
        _other_forward,
        "the same weights give another loss for the same samples: {draws}train() or eval(); a branch on engine or "
        "rank in the model or the loss",
        "look for what forward and the loss take from outside",
    ),
    Known(
        lambda case: _buffers_first(case) and bool(case.first.run) and {"run": case.first.run},
        "{run} does not average the statistics of batch norm over its ranks before they are used: each evaluates "
        "with those of its own share, and rank 0's are saved. Horovod never sends buffers",
        "leave that to the Trainer (Backend.average_buffers); in a loop of your own, average the buffers before "
        "each evaluation, or use --sync-batch-norm",
    ),
    Known(
        lambda case: _buffers_first(case) and not case.first.run,
        "the statistics of batch norm are treated unlike: one side sends them round while it trains (as DDP does "
        "with broadcast_buffers, and Horovod never), or does not learn them (eval())",
        "leave buffers to the Trainer: while it trains each rank keeps its own, and they are averaged before use",
        "do the same on both sides: DistributedDataParallel(..., broadcast_buffers=False), and the mean of the "
        "buffers over the ranks before they are used; or SyncBatchNorm",
    ),
    Known(
        _compressed,
        "gradients are sent as {kinds}, and the engines round at other places",
        "compare without --compression, or allow for it with --tolerance",
    ),
    Known(
        _rounding,
        "sums are taken in another order{why}: the difference is as small as rounding",
        "allow for it with --tolerance 1e-5, or train with --reproducible N, which has one order for all",
        "allow for it with --tolerance 1e-5",
    ),
    Known(
        _grown_rounding,
        "rounding that has grown: training is chaotic, and makes a small difference a large one after a while",
        "look at the table: rounding grows from step to step, and what is wrong jumps. Take fewer --steps, or "
        "train with --reproducible N",
        "look at the table: rounding grows from step to step, and what is wrong jumps. Take fewer --steps",
    ),
    Known(
        _adam,
        "{name} divides a gradient by its size, and so takes a whole step where there is nothing but rounding, as "
        "with a bias in front of batch norm",
        "compare with SGD, or allow for it with --tolerance",
    ),
    Known(
        lambda case: case.first.quantity == "evaluation",
        "the weights are the same and the test figures are not: other test data, samples that count twice, or a "
        "metric that is reduced over the ranks by itself",
        "give the Trainer the whole test set on every rank, and metrics of one batch: it adds them up",
    ),
    Known(
        lambda case: case.first.quantity == "steps",
        "all steps that both have made are the same, and one side has made fewer",
        "look for what ends it: its data, a callback, an error",
    ),
)
