"""Match causes of differences that exist before anything is computed: the set-up, the start, the samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hvd_trainer.tools.parity.case import MAX_WEIGHT_CHANGE, Case, Cause, Rule
from hvd_trainer.tools.parity.distance import NONE


def other_set_up(case: Case) -> Iterator[Cause]:
    """Match other data, another model, or other options."""
    found = case.get("set-up")
    if found is None:
        return
    if found.name == "samples per epoch":
        yield Cause(
            "the job gives the Trainer other data on each side, such as a part that it has cut out by itself",
            "give the Trainer the whole data set on every rank: it shares the samples out, alike on each engine",
        )
    else:
        yield Cause(
            "the job sets itself up by the engine, the launcher or the number of ranks",
            f"make it the same on both sides: {found.name}",
        )


def other_settings(case: Case) -> Iterator[Cause]:
    """Match other settings of the optimizer, such as another weight decay."""
    found = case.get("settings")
    if found is not None and case.get("set-up") is None:
        yield Cause(
            "the job makes another optimizer on each side",
            f"make it the same on both: {found.name} is {found.values[0]} and {found.values[1]}",
        )


def step_before_training(case: Case) -> Iterator[Cause]:
    """Match optimizer state on one side only, or weights that have changed a little, before the first step."""
    state, weights = case.get("optimizer"), case.get("parameters")
    moved = (
        weights is not None
        and weights.relative < MAX_WEIGHT_CHANGE
        and case.get("parameters", among_ranks=True) is None
    )
    if not case.at_start or (state is None and not moved):
        return
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


def other_start(case: Case) -> Iterator[Cause]:
    """Match weights that are unrelated at the start."""
    weights = case.get("parameters")
    if (
        case.at_start
        and weights is not None
        and weights.relative >= MAX_WEIGHT_CHANGE
        and case.get("set-up") is None
    ):
        yield Cause(
            "the weights were drawn from other random numbers",
            "build the model inside `with Trainer(options) as trainer:`, which seeds all ranks by --seed, and let "
            "neither side draw more than the other before",
        )


def unequal_start(case: Case) -> Iterator[Cause]:
    """Match ranks of one run that begin with other weights."""
    kinds = ("parameters", "buffers", "optimizer")
    found = next((f for kind in kinds if (f := case.get(kind, among_ranks=True)) is not None), None)
    if case.at_start and found is not None:
        yield Cause(
            f"nothing has made the ranks of {found.run} start alike",
            "leave that to trainer.fit(), which sends what rank 0 has to all, and change nothing after it has "
            "begun",
        )


def same_share_on_all(case: Case) -> Iterator[Cause]:
    """Match a run whose replicas all take the same samples."""
    found = case.get("samples")
    if found is None:
        return
    for trace in case.runs:
        taken, copies = trace.samples(found.when), trace.start["copies"]
        if copies > 1 and taken and all(count % copies == 0 for count in taken.values()):
            yield Cause(
                f"all ranks of {trace.name} train on the same samples: its data are not shared out",
                "give the Trainer the data set itself, which must give sample i for index i; in a loop of your "
                "own, use a DistributedSampler",
            )


def same_order_in_each_epoch(case: Case) -> Iterator[Cause]:
    """Match a step whose samples are those of a step in an earlier epoch."""
    found = case.get("samples")
    if found is None:
        return
    for trace in case.runs:
        now, epoch = trace.samples(found.when), trace.lines(found.when)[0]["epoch"]
        earlier = [w for w in trace.steps if w < found.when and trace.lines(w)[0]["epoch"] < epoch]
        if any(trace.samples(when) == now for when in earlier):
            yield Cause(
                f"{trace.name} goes through its data in the same order in each epoch",
                "in a loop of your own call sampler.set_epoch(epoch)",
            )


def other_transforms(case: Case) -> Iterator[Cause]:
    """Match equal targets with different inputs."""
    found = case.get("samples")
    if found is None or any(list(rule(case)) for rule in (same_share_on_all, same_order_in_each_epoch)):
        return
    sides = [trace.samples(found.when).elements() for trace in case.runs]
    pairs = [[sample.split("-") for sample in its] for its in sides]
    if _column(pairs[0], 1) == _column(pairs[1], 1) and _column(pairs[0], 0) != _column(pairs[1], 0):
        yield Cause(
            "the samples are the same ones, but come otherwise transformed: random transforms draw other numbers",
            "draw from the global generators of Python, NumPy and PyTorch, which the Trainer seeds for each "
            "sample, and not from one of your own",
        )


def _column(pairs: Iterable[list[str]], place: int) -> list[str]:
    return sorted(pair[place] for pair in pairs)


def padded_samples(case: Case) -> Iterator[Cause]:
    """Match runs on unequal numbers of ranks that take unequal numbers of samples."""
    found = case.get("samples")
    if found is not None and case.sizes_differ:
        one, other = (sum(trace.samples(found.when).values()) for trace in case.runs)
        if one != other:
            yield Cause(
                "the samples of the epoch do not divide among the ranks, and some come twice in its last step, so "
                "that no rank runs out of steps before another",
                "nothing is wrong: stop before with --steps, or compare with data whose number divides",
            )


def other_samples(case: Case) -> Iterator[Cause]:
    """Match different samples that no other rule explains."""
    if case.get("samples") is not None and not any(list(rule(case)) for rule in SAMPLE_RULES):
        yield Cause(
            "the data come in another order, or are other data",
            "look for a seed, a shuffle, a list of files or a rank that the job takes from engine or launcher",
        )


def other_order(case: Case) -> Iterator[Cause]:
    """Match equal samples in another order within the step."""
    if case.get("order") is not None:
        yield Cause(
            "each step has the same samples, but on other ranks or in another order, so that sums round otherwise",
            "have both sides share out alike, or allow for it with --tolerance 1e-5",
        )


SAMPLE_RULES: tuple[Rule, ...] = (same_share_on_all, same_order_in_each_epoch, other_transforms, padded_samples)
START_RULES: tuple[Rule, ...] = (
    *(other_set_up, other_settings, step_before_training, other_start, unequal_start),
    *(*SAMPLE_RULES, other_samples, other_order),
)
