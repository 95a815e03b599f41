"""The report of a comparison step by step: verdicts with their causes, and a table of the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_trainer.measure.chart import draw_lines
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.report import Picture, Report, Table, Verdict
from hvd_trainer.measure.trace_format import SMALL
from hvd_trainer.tools.parity.causes import find_causes, takes_same_samples
from hvd_trainer.tools.parity.comparison import SETUP, Pair
from hvd_trainer.tools.parity.tensors import Finding
from hvd_trainer.tools.parity.traced_runs import TracedRun
from hvd_trainer.tools.parity.traces import Moment, Trace
from hvd_trainer.utils.text import plural

QUANTITY_NAMES = {
    "skipped": "whether the step is left out",
    "optimizer": "the optimizer's state",
    "evaluation": "the validation figures",
    "steps": "the number of steps",
}
"""Quantities in words; one that is not listed, such as loss, is called `the loss`."""
FIGURES: Mapping[str, Callable[[Trace, Moment], float | None]] = {
    "loss": Trace.loss,
    "gradient norm": Trace.grad_norm,
}
"""Figures of a step, by their titles."""
INPUTS = (SETUP, "samples", "learning rate")
"""Quantities of which each difference has a cause of its own."""
TENSORS = ("gradients", "parameters", "optimizer", "buffers")


def conclude(
    runs: Sequence[TracedRun], pairs: Sequence[Pair], folder: Path, warnings: Sequence[str], ran: Ran
) -> Report:
    """Return all that the traces show.

    Args:
        folder: of the runs.
        warnings: of the runs.
        ran: when and by which command.
    """
    traces = [run.trace for run in runs if run.trace is not None]
    failed = [f"{run.name} {run.record.state}: {run.record.why(folder)}" for run in runs if not run.done]
    suspect = [text for pair in pairs if pair.same for text in _suspect(pair.one)]
    return Report(
        ran=ran,
        verdicts=[
            *(Verdict(text, "failed", badge=f"FAILED {len(failed)} OF {len(runs)}") for text in failed),
            *map(verdict, pairs),
        ],
        pictures=[*_pictures(pairs)],
        warnings=[*warnings, *dict.fromkeys(suspect)],
        tables=[*_tables(traces, pairs)],
        notes=[*_notes(traces, pairs, folder)],
        data=_data(runs, pairs),
    )


def _notes(traces: Sequence[Trace], pairs: Sequence[Pair], folder: Path) -> Iterator[str]:
    stride = max([trace.start["stride"] for trace in traces], default=1)
    if stride > 1 and not all(pair.same and pair.allowed.exact for pair in pairs):
        yield (
            f"The model is large: of tensors of more than {SMALL:,} elements every {stride}th was kept, and is "
            "in the differences; equal bits are of all elements."
        )
    if traces:
        ranks = ", ".join(f"{trace.name} on {plural(trace.size, 'rank')}" for trace in traces)
        count = plural(len(traces[0].steps), "step")
        tensors = plural(len(traces[0].ranks[0][traces[0].moments[0]].checksums("parameters")), "tensor")
        yield (
            f"Compared: {ranks}. Before the first step and in each of {count}: set-up, "
            f"samples, learning rate, loss, and every bit of gradients, weights ({tensors}), optimizer state and "
            f"buffers; after an epoch the validation figures"
        )
    if not all(pair.same for pair in pairs):
        yield f"All values, by rank and step, are in {folder}/*/trace"


# The verdict on two runs.


def verdict(pair: Pair) -> Verdict:
    """Return the verdict in one sentence, with its details."""
    steps, gap = plural(len(pair.gaps), "step"), max(pair.gaps.values(), default=0.0)
    if pair.same and pair.unlike_bits:
        apart = f"Parameters are up to {gap:.1e} apart; allowed are {pair.allowed}"
        unlike = pair.unlike_bits[0]
        differs = f"The first bits that differ, {unlike.when}, are those of {_subject(unlike)}."
        return Verdict(f"{pair.name}: alike through {steps}. {apart}", "sure", [differs], badge="ALIKE")
    if pair.same:
        text = f"{pair.name}: the same bits through {steps}"
        text += "" if pair.allowed.exact else ", though they need not be"
        return Verdict(text, "sure", badge="THE SAME BITS")
    first = pair.findings[0].when
    before = len([step for step in pair.gaps if step < first.step + (first.name == "evaluation")])
    same = "the same bits" if pair.allowed.exact else "alike"
    both = {finding.run for finding in pair.findings} == {run.name for run in pair.runs}
    who = f"the ranks of {pair.name} differ among each other" if both else f"{pair.name} differ"
    text = f"{who} {first}" + (f", after {plural(before, 'step')} of {same}." if before else ".")
    return Verdict(text, "failed", [*details(pair)], badge=f"DIFFERENT {first}".upper())


def details(pair: Pair) -> Iterator[str]:
    """Yield sentences on what differs, its causes, and what to do."""
    first, *others = pair.findings
    yield f"First: {describe(first)}."
    yield from (f"Also: {describe(other)}." for other in others if other.quantity in INPUTS)
    followed = dict.fromkeys(_subject(other) for other in others if other.quantity not in INPUTS)
    if followed:
        yield f"Also different: {', '.join(followed)}."
    if not pair.allowed.exact:
        yield f"Allowed: {pair.allowed}."
    causes = find_causes(pair)
    if not causes:
        yield "None of the known causes fits."
    for text, advice in causes:
        yield f"A known cause fits: {text}."
        yield f"To do: {advice}."


def _suspect(trace: Trace) -> Iterator[str]:
    """Yield what is the same in both runs, and yet is a mistake in most jobs."""
    steps = trace.steps
    if steps and all(takes_same_samples(trace, when) for when in steps):
        yield "Both train on the same samples on all ranks: is there no DistributedSampler?"
    elif trace.repeats:
        yield "Both go through the data in the same order in each epoch: is there no sampler.set_epoch(epoch)?"


def describe(finding: Finding) -> str:
    """Describe a finding with its values: `the learning rate: 0.2 on horovod, 0.1 on ddp`."""
    quantity, name, relative, text = finding.quantity, finding.name, finding.relative, _subject(finding)
    sides = list(zip(map(_format_value, finding.values), finding.sides, strict=True))
    if quantity == "samples":
        return f"{text}: " + "; ".join(f"{side} takes {value}" for value, side in sides)
    values = ", ".join(f"{value} {'with' if quantity == 'set-up' else 'on'} {side}" for value, side in sides)
    if math.isfinite(relative) and quantity in TENSORS:
        return (
            f"{text}. Of {name} the elements that are farthest apart are {values}; the whole tensor's relative "
            f"difference is {relative:.1e}"
        )
    text += f": {name} is {values}" if name else f": {values}"
    is_relative = math.isfinite(relative) and quantity in ("loss", "gradient norm")
    return text + (f", a relative difference of {relative:.1e}" if is_relative else "")


def _subject(finding: Finding) -> str:
    """Name what differs: `the gradients among the ranks of horovod (8 of 8 differ)`."""
    among = f" among the ranks of {finding.run}" if finding.run else ""
    count = f" ({finding.count:,} of {finding.total:,} differ)" if finding.total > 1 else ""
    return QUANTITY_NAMES.get(finding.quantity, f"the {finding.quantity}") + among + count


def _format_value(value: Any) -> str:
    """Format a value; floats get the nine digits that tell any two float32 apart."""
    if isinstance(value, tuple | list):
        return ", ".join(map(_format_value, value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# The steps, and all in plain JSON.


def _tables(traces: Sequence[Trace], pairs: Sequence[Pair]) -> Iterator[Table]:
    """Yield a row per step: losses, gradient norms, and how far the parameters are apart."""
    steps = sorted({when for trace in traces for when in trace.steps})
    if not steps or not pairs:
        return
    figures = [(title, trace, get) for title, get in FIGURES.items() for trace in traces]
    columns = ["step", *(f"{title}, {trace.name}" for title, trace, _ in figures)]
    columns += [f"apart: {pair.name}" for pair in pairs]
    rows = []
    for when in steps:
        values = (get(trace, when) if when in trace.steps else None for _, trace, get in figures)
        cells = ["-" if value is None else f"{value:.7g}" for value in values]
        for pair in pairs:
            gap = pair.gaps.get(when.step)
            is_same = when.step in pair.steps_of_same_parameters
            cells.append("-" if gap is None else "same bits" if is_same else f"{gap:.1e}")
        rows.append([str(when.step), *cells])
    yield Table("Step by step, and how far the parameters are apart", columns, rows, words=())


def _pictures(pairs: Sequence[Pair]) -> Iterator[Picture]:
    """Yield the losses of each pair."""
    for pair in pairs:
        losses = {
            run.name: [(when.step, loss) for when in pair.steps if not math.isnan(loss := run.loss(when))]
            for run in pair.runs
        }
        marks = [(pair.findings[0].when.step, "first difference")] if pair.findings else []
        yield from draw_lines(f"Loss: {pair.name}", "By optimizer steps.", losses, across="step", marks=marks)


def _data(runs: Sequence[TracedRun], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the runs, and the verdicts with their findings and causes."""
    return {
        "same": all(run.done for run in runs) and all(pair.same for pair in pairs),
        "runs": [asdict(run.record) for run in runs],
        "pairs": [
            {
                "runs": [run.name for run in pair.runs],
                "same": pair.same,
                "verdict": verdict(pair).text,
                "tolerance": pair.allowed._asdict(),
                "findings": [
                    asdict(finding) | {"when": str(finding.when), "step": finding.when.step}
                    for finding in pair.findings
                ],
                "causes": [cause._asdict() for cause in find_causes(pair)],
                "losses": {when.step: [run.loss(when) for run in pair.runs] for when in pair.steps},
                "parameters": pair.gaps,
            }
            for pair in pairs
        ],
    }
