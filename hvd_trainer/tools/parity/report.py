"""Print the comparison, a table of the steps and the verdicts with their causes, and write parity.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_trainer.measure.formats import to_json
from hvd_trainer.observe.trace_format import SMALL
from hvd_trainer.tools.parity.causes import find_causes
from hvd_trainer.tools.parity.comparison import Pair
from hvd_trainer.tools.parity.fits import repeats_samples, takes_same_samples
from hvd_trainer.tools.parity.tensors import Finding
from hvd_trainer.tools.parity.traced_runs import TRACES_FOLDER, TracedRun
from hvd_trainer.tools.parity.traces import Moment, Trace
from hvd_trainer.utils.text import plural

REPORT_FILE = "parity.json"
MAX_ROWS = 24
QUANTITY_NAMES = {
    "settings": "the optimizer's settings",
    "order": "the order of the samples",
    "skipped": "whether the step is left out",
    "optimizer": "the optimizer's state",
    "evaluation": "the test figures",
    "steps": "the number of steps",
}
"""Quantities in words; one that is not listed, such as loss, is called `the loss`."""
TENSORS = ("gradients", "parameters", "optimizer", "buffers")


def print_report(traced: Sequence[TracedRun], pairs: Sequence[Pair], folder: Path) -> None:
    """Print the table and the conclusions, and write all of it as JSON."""
    traces = [its.trace for its in traced if its.trace is not None]
    for line in [*table(traces, pairs), *conclusions(traced, pairs, folder)]:
        print(line)
    file = folder / REPORT_FILE
    file.write_text(to_json(as_json(traced, pairs)))
    print(f"written: {file}", flush=True)


def conclusions(traced: Sequence[TracedRun], pairs: Sequence[Pair], folder: Path) -> list[str]:
    """Return the lines with the verdicts, their details, failed runs and notes."""
    lines: list[str] = []
    for pair in pairs:
        lines += [verdict(pair), *(f"  {line}" for line in details(pair))]
    same = [pair for pair in pairs if pair.equal_bits]
    traces = [its.trace for its in traced if its.trace is not None]
    if same and len(traces) > 2 and len(pairs) < 3:
        lines.append(f"What is said of {same[0].one.name} holds for {same[0].other.name}, too.")
    lines += [f"{its.engine} {its.run.state}: {its.run.why(folder)}" for its in traced if not its.done]
    stride = max([trace.start["stride"] for trace in traces], default=1)
    if stride > 1 and any(not pair.equal_bits for pair in pairs):
        lines.append(
            f"The model is large: of tensors of more than {SMALL:,} elements every {stride}th was kept, and is "
            "in the differences; equal bits are of all elements."
        )
    if any(not pair.same for pair in pairs):
        lines.append(f"All values, by rank and step, are in {folder / TRACES_FOLDER}/*/trace")
    return lines


# The verdict on two runs.


def verdict(pair: Pair) -> str:
    """Return the verdict as one sentence."""
    if pair.same:
        return f"{pair.name}: {_agreement(pair)}"
    first = pair.findings[0].when
    before = len([step for step in pair.gaps if step < first.step + (first.name == "evaluation")])
    same = "the same bits" if pair.allowed.exact else "alike"
    both = {finding.run for finding in pair.findings} == {pair.one.name, pair.other.name}
    who = f"the ranks of {pair.name} differ among each other" if both else f"{pair.name} differ"
    return f"{who} {first}" + (f", after {plural(before, 'step')} of {same}." if before else ".")


def _agreement(pair: Pair) -> str:
    allowed, steps = pair.allowed, plural(len(pair.gaps), "step")
    most, step = max(((gap, step) for step, gap in pair.gaps.items()), default=(0.0, 0))
    if allowed.exact or not most:
        return f"the same bits through {steps}" + ("" if allowed.exact else ", though they need not be")
    later = "" if allowed.everywhere else f" in the first step, {allowed.later:g} later"
    return (
        f"alike through {steps}. Parameters are up to {most:.1e} apart (step {step}); allowed are "
        f"{allowed.tensors:g}{later} ({allowed.why})"
    )


def details(pair: Pair) -> Iterator[str]:
    """Yield the lines on what differs, its causes, and what to do; of equal runs on what is suspect."""
    if pair.same:
        yield from _warnings(pair.one)
        return
    first, *others = pair.findings
    yield f"First: {describe(first)}."
    if others:
        yield f"Also different there: {', '.join(dict.fromkeys(map(_summarize, others)))}."
    causes = find_causes(pair)
    heads = ("None of the known causes fits.", "A known cause fits:", "Known causes that fit:")
    yield heads[min(len(causes), 2)]
    for text, advice in causes:
        yield f"- {text}."
        yield f"  To do: {advice}."


def _warnings(trace: Trace) -> Iterator[str]:
    """Yield what is the same in both runs, and yet is a mistake in most jobs."""
    steps = trace.steps
    if steps and all(takes_same_samples(trace, when) for when in steps):
        yield "Both train on the same samples on all ranks: is there no DistributedSampler?"
    elif any(repeats_samples(trace, when) for when in steps):
        yield "Both go through the data in the same order in each epoch: is there no sampler.set_epoch(epoch)?"


def describe(its: Finding) -> str:
    """Describe a finding with its values: `the learning rate: 0.2 on horovod, 0.1 on ddp`."""
    text = _name(its.quantity)
    if its.run:
        text += f", which the ranks of {its.run} should have in common"
    if its.quantity == "order":
        return f"{text}, on {its.name} and {its.total - 1} others" if its.count > 1 else f"{text}, on {its.name}"
    if its.total > 1:
        text += f" ({its.count:,} of {its.total:,} differ)"
    sides = list(zip(map(_format_value, its.values), its.sides, strict=True))
    where = "with" if its.quantity in ("set-up", "settings") else "on"
    values = ", ".join(f"{value} {where} {side}" for value, side in sides)
    if its.quantity == "samples":
        values = "; ".join(f"{side} takes {value}" for value, side in sides)
    if not math.isfinite(its.relative) or its.quantity not in (*TENSORS, "loss", "gradient norm"):
        return f"{text}: {its.name} is {values}" if its.name else f"{text}: {values}"
    if its.quantity not in TENSORS:
        return f"{text}: {values}, a relative difference of {its.relative:.1e}"
    return (
        f"{text}. Of {its.name} the elements that are farthest apart are {values}; the whole tensor's relative "
        f"difference is {its.relative:.1e}"
    )


def _summarize(its: Finding) -> str:
    """Describe a finding in a few words: `the gradients (8 of 8)`."""
    among = f" among the ranks of {its.run}" if its.run else ""
    return _name(its.quantity) + among + (f" ({its.count:,} of {its.total:,})" if its.total > 1 else "")


def _name(quantity: str) -> str:
    return QUANTITY_NAMES.get(quantity, f"the {quantity}")


def _format_value(value: Any) -> str:
    """Format a value; floats get the nine digits that tell any two float32 apart."""
    if isinstance(value, tuple | list):
        return ", ".join(map(_format_value, value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# The steps.


def table(traces: Sequence[Trace], pairs: Sequence[Pair]) -> list[str]:
    """Return one line per step: losses, gradient norms, and how far the parameters are apart."""
    whens = sorted({when for trace in traces for when in trace.steps})
    if not whens or not pairs:
        return []
    selected = select_steps(whens, pairs)
    columns = [["", "step", *(str(when.step) for when in selected)]]
    for title, value_of in (("loss", Trace.loss), ("gradient norm", Trace.grad_norm)):
        for trace in traces:
            columns.append([title, trace.name, *(_format_figure(trace, when, value_of) for when in selected)])
            title = ""
    title = "parameters apart"
    for pair in pairs:
        names = f"{pair.one.name}, {pair.other.name}"
        columns.append([title, names, *(_format_gap(pair.gaps.get(when.step)) for when in selected)])
        title = ""
    padded = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    rows = ["  ".join(row) for row in zip(*padded, strict=True)]
    left = len(whens) - len(selected)
    return [*rows, *([f"{left} more steps are in {REPORT_FILE}"] if left else []), ""]


def select_steps(whens: Sequence[Moment], pairs: Sequence[Pair]) -> list[Moment]:
    """Select the steps to print: all if they are few, else the first, the last, and those where runs part."""
    if len(whens) <= MAX_ROWS:
        return list(whens)
    parting = {step + n for pair in pairs if (step := pair.step) is not None for n in range(-3, 4)}
    ends = {when.step for when in [*whens[:8], *whens[-4:]]}
    return [when for when in whens if when.step in parting | ends]


def _format_figure(trace: Trace, when: Moment, value_of: Callable[[Trace, Moment], float | None]) -> str:
    value = value_of(trace, when) if when in trace.moments else None
    return "-" if value is None else f"{value:.7g}"


def _format_gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "same bits"


# parity.json.


def as_json(traced: Sequence[TracedRun], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the runs, the verdicts with their findings, and all steps."""
    traces = [its.trace for its in traced if its.trace is not None]
    steps = []
    for when in sorted({when for trace in traces for when in trace.steps}):
        there = [trace for trace in traces if when in trace.moments]
        steps.append(
            {
                "step": when.step,
                "loss": {trace.name: trace.loss(when) for trace in there},
                "grad_norm": {trace.name: trace.grad_norm(when) for trace in there},
                "lr": {trace.name: trace.lines(when)[0]["lr"] for trace in there},
            }
        )
    return {
        "same": all(its.done for its in traced) and all(pair.same for pair in pairs),
        "runs": [asdict(its.run) for its in traced],
        "pairs": [
            {
                "one": pair.one.name,
                "other": pair.other.name,
                "same": pair.same,
                "verdict": verdict(pair),
                "tolerance": pair.allowed._asdict(),
                "findings": [
                    asdict(its) | {"when": str(its.when), "step": its.when.step} for its in pair.findings
                ],
                "causes": [cause._asdict() for cause in find_causes(pair)],
                "parameters": pair.gaps,
            }
            for pair in pairs
        ],
        "steps": steps,
    }
