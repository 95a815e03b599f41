"""Tell whether a known cause (causes.yaml) fits the differences between two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from hvd_trainer.config.checks import flag
from hvd_trainer.tools.parity.comparison import EXCHANGE, Pair
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


def always(case: Case, found: Finding) -> bool:
    return True


# Before the first step.


def two_paths(case: Case, found: Finding) -> Fit:
    return found.name == EXCHANGE and {"first": case.one.name, "second": case.other.name}


def step_before_training(case: Case, found: Finding) -> Fit:
    state, weights = case.get("optimizer"), case.get("parameters")
    if not case.at_start or any(its.run or two_paths(case, its) for its in case.findings):
        return False
    if state is not None and NONE in state.values:
        return {"who": case.other.name if state.values[0] == NONE else case.one.name}
    moved = weights is not None and weights.relative < MAX_WEIGHT_CHANGE
    return (moved or state is not None) and {"who": "one side"}


def weights_drawn_apart(case: Case, found: Finding) -> bool:
    """Return whether other random numbers have made other weights; a step moves them a little."""
    far = case.at_start and not found.run and found.relative >= MAX_WEIGHT_CHANGE
    return far and case.get("set-up") is None


def ranks_start_apart(case: Case, found: Finding) -> Fit:
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


same_samples_on_all_ranks = _runs_in_which(takes_same_samples)
same_order_in_each_epoch = _runs_in_which(repeats_samples)


def other_transforms(case: Case, found: Finding) -> bool:
    """Return whether targets are equal and inputs are not."""
    # A sample is traced as two checksums, of its input and of its target: `1c2f-90ab`.
    sides = [[sample.split("-") for sample in its.samples(found.when).elements()] for its in case.runs]
    inputs, targets = ([sorted(sample[place] for sample in side) for side in sides] for place in (0, 1))
    return any(targets[0]) and targets[0] == targets[1] and inputs[0] != inputs[1]


def padded(case: Case, found: Finding) -> bool:
    one, other = (trace.samples(found.when).total() for trace in case.runs)
    return case.sizes_differ and one != other


# Learning rate, loss, gradients.


def rate_by_ranks(case: Case, found: Finding) -> Fit:
    large, small, ratio = case.by_size(found)
    factors = {"its number of ranks": case.max_ranks, "the root of its number of ranks": case.max_ranks**0.5}
    name = next((name for name, factor in factors.items() if _is_near(ratio, factor)), None)
    return name is not None and not found.run and {"large": large.name, "small": small.name, "factor": name}


def rate_by_option(case: Case, found: Finding) -> bool:
    scales = case.by_size(found)[0].options["lr_scaling"] != "none"
    return case.sizes_differ and scales and bool(rate_by_ranks(case, found))


def summed_loss(case: Case, found: Finding) -> Fit:
    large, small, ratio = case.by_size(found)
    sizes = {count for line in large.lines(found.when) for count in line.get("counts", ())}
    return any(_is_near(ratio, size) for size in sizes) and {"large": large.name, "small": small.name}


def layers_by_rank(case: Case, found: Finding) -> Fit:
    kinds = {
        "dropout ({}) draws other numbers on each rank": "dropout",
        "batch norm ({}) normalises the batch of each rank by itself": "batch_norm",
    }
    texts = [text.format(_first_few(names)) for text, kind in kinds.items() if (names := case.one.start[kind])]
    sizes, virtual = f"{case.one.size} and {case.other.size}", 2 ** math.ceil(math.log2(case.max_ranks))
    fits = case.sizes_differ and bool(texts)
    return fits and {"layers": " and ".join(texts), "sizes": sizes, "virtual": virtual}


def other_forward(case: Case, found: Finding) -> Fit:
    explained = found.relative <= MAX_ROUNDING or case.differs_among_ranks("parameters")
    if explained or case.first.quantity in ("samples", "order", "skipped", "learning rate"):
        return False
    dropout = _first_few(case.one.start["dropout"])
    text = f"dropout ({dropout}) after one side has drawn random numbers more than the other; "
    return {"draws": text if dropout else ""}


def other_update(case: Case, found: Finding) -> bool:
    return not case.at_start and bool(found.run) and not case.differs_among_ranks("gradients")


def summed_gradients(case: Case, found: Finding) -> Fit:
    large, small, ratio = case.by_size(found)
    passes = len(large.lines(found.when)[0]["losses"]) if large.is_script else int(large.options["accumulate"])
    factors = {"ranks": case.max_ranks, "passes": passes}
    names = [f"{factor} {name}" for name, factor in factors.items() if _is_near(ratio, factor)]
    fits = case.get("loss") is None and bool(names)
    return fits and {"large": large.name, "small": small.name, "parts": " or ".join(names)}


# Rounding.


def compressed(case: Case, found: Finding) -> Fit:
    kinds = {str(trace.options["compression"]) for trace in case.runs} - {"none"}
    fits = case.may_be_rounding and found.quantity in ("gradients", "gradient norm")
    return fits and bool(kinds) and {"kinds": " and ".join(kinds)}


def rounding(case: Case, found: Finding) -> Fit:
    reasons = ["another number of ranks"] if case.sizes_differ else []
    reasons += ["GPUs, which add up in no fixed order"] if case.on_gpus else []
    reasons += ["another number of threads"] if case.one.facts["threads"] != case.other.facts["threads"] else []
    settings = ("num_groups", "adasum", "autotune", "sync_batch_norm")
    reasons += [flag(name) for name in settings if any(trace.options.get(name) for trace in case.runs)]
    why = f" ({', '.join(reasons)})" if reasons else ""
    return case.may_be_rounding and found.relative <= MAX_ROUNDING and {"why": why}


def adam(case: Case, found: Finding) -> Fit:
    name = str(case.one.facts["optimizer"])
    return case.may_be_rounding and found.quantity == "parameters" and "adam" in name.lower() and {"adam": name}


def grown_rounding(case: Case, found: Finding) -> bool:
    differs = case.sizes_differ or case.on_gpus
    return case.may_be_rounding and differs and found.when.step > case.one.steps[0].step


def _is_near(ratio: float, number: float) -> bool:
    """Return whether a ratio is this number, but for rounding; 1 explains nothing."""
    return number > 1 and abs(ratio / number - 1) < MAX_RATIO_ERROR


def _first_few(names: Sequence[str]) -> str:
    """Join the first three names; empty if there are none."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


# Fits that are conditions only.


def other_samples_per_epoch(case: Case, found: Finding) -> bool:
    return found.name == "samples per epoch"


def same_set_up(case: Case, found: Finding) -> bool:
    return case.get("set-up") is None


def no_gradient_averaged(case: Case, found: Finding) -> bool:
    return bool(found.run) and found.count == found.total


def some_gradients_not_averaged(case: Case, found: Finding) -> bool:
    return bool(found.run)


def batch_norm_by_rank(case: Case, found: Finding) -> bool:
    return found.quantity == "buffers" and bool(found.run)


def batch_norm_between_runs(case: Case, found: Finding) -> bool:
    return found is case.first and not (found.run or case.at_start)


def other_figures(case: Case, found: Finding) -> bool:
    return found.quantity == "evaluation"
