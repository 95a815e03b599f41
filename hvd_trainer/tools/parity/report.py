"""Print the comparison, a table of the steps and the verdicts with their causes, and write parity.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_trainer.observe.checksums import SMALL
from hvd_trainer.tools.parity.pair import Pair
from hvd_trainer.tools.parity.traced_runs import TRACES_FOLDER, TracedRun
from hvd_trainer.tools.parity.traces import Moment, Trace

REPORT_FILE = "parity.json"
MAX_ROWS = 24


def print_report(traced: Sequence[TracedRun], pairs: Sequence[Pair], folder: Path) -> None:
    """Print the table and the conclusions, and write all of it as JSON."""
    traces = [its.trace for its in traced if its.trace is not None]
    for line in [*table(traces, pairs), *conclusions(traced, pairs, folder)]:
        print(line)
    file = folder / REPORT_FILE
    file.write_text(json.dumps(_to_json(as_json(traced, pairs)), indent=1) + "\n")
    print(f"written: {file}", flush=True)


def conclusions(traced: Sequence[TracedRun], pairs: Sequence[Pair], folder: Path) -> list[str]:
    """Return the lines with the verdicts, their details, failed runs and notes."""
    lines: list[str] = []
    for pair in pairs:
        lines += [pair.verdict() + "." * (not pair.same), *(f"  {line}" for line in pair.details())]
    same = [pair for pair in pairs if pair.equal_bits]
    traces = [its.trace for its in traced if its.trace is not None]
    if same and len(traces) > 2 and len(pairs) < 3:
        lines.append(f"What is said of {same[0].one.name} holds for {same[0].other.name}, too.")
    lines += [its.failure_message(folder) for its in traced if not its.done]
    stride = max([trace.start["stride"] for trace in traces], default=1)
    if stride > 1 and any(not pair.same or not pair.allowed.exact for pair in pairs):
        lines.append(
            f"The model is large: of tensors of more than {SMALL:,} elements every {stride}th was kept, and is "
            "in the differences; equal bits are of all elements."
        )
    if any(not pair.same for pair in pairs):
        lines.append(f"All values, by rank and step, are in {folder / TRACES_FOLDER}/*/trace")
    return lines


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
    for pair in pairs:
        names = f"{pair.one.name}, {pair.other.name}"
        columns.append(["parameters apart", names, *(_gap(pair.gaps.get(when.step)) for when in selected)])
    left = len(whens) - len(selected)
    return [*_align(columns), *([f"{left} more steps are in {REPORT_FILE}"] if left else []), ""]


def _align(columns: Sequence[Sequence[str]]) -> list[str]:
    """Align columns of cells into rows; a title that comes again is left out."""
    groups = [column[0] for column in columns]
    titles = [group if group not in groups[:place] else "" for place, group in enumerate(groups)]
    cells = [[title, *column[1:]] for title, column in zip(titles, columns, strict=True)]
    padded_samples = [[cell.rjust(max(map(len, column))) for cell in column] for column in cells]
    return ["  ".join(row) for row in zip(*padded_samples, strict=True)]


def _format_figure(trace: Trace, when: Moment, value_of: Callable[[Trace, Moment], float | None]) -> str:
    value = value_of(trace, when) if when in trace.moments else None
    return "-" if value is None else f"{value:.7g}"


def select_steps(whens: Sequence[Moment], pairs: Sequence[Pair]) -> list[Moment]:
    """Return all steps; of many the first ones, the last ones, and those around where runs part."""
    if len(whens) <= MAX_ROWS:
        return list(whens)
    parting = {step + n for pair in pairs if (step := pair.step) is not None for n in range(-3, 4)}
    ends = {when.step for when in [*whens[:8], *whens[-4:]]}
    return [when for when in whens if when.step in parting | ends]


def _gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "same bits"


def _to_json(value: Any) -> Any:
    """Convert a value to what JSON can hold: NaN, infinities and unknown types become text."""
    if isinstance(value, dict):
        return {key: _to_json(its) for key, its in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(its) for its in value]
    known = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def as_json(traced: Sequence[TracedRun], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the runs, the verdicts with their findings, and all steps."""
    traces = [its.trace for its in traced if its.trace is not None]
    whens = sorted({when for trace in traces for when in trace.steps})
    return {
        "same": all(its.done for its in traced) and all(pair.same for pair in pairs),
        "runs": [asdict(its.run) for its in traced],
        "pairs": [
            {
                "one": pair.one.name,
                "other": pair.other.name,
                "same": pair.same,
                "verdict": pair.verdict(),
                "tolerance": pair.allowed._asdict(),
                "findings": [
                    {**asdict(its), "when": str(its.when), "step": its.when.step} for its in pair.findings
                ],
                "causes": [cause._asdict() for cause in pair.causes],
                "parameters": pair.gaps,
            }
            for pair in pairs
        ],
        "steps": [
            {
                "step": when.step,
                "loss": {trace.name: trace.loss(when) for trace in traces if when in trace.moments},
                "grad_norm": {trace.name: trace.grad_norm(when) for trace in traces if when in trace.moments},
                "lr": {trace.name: trace.lines(when)[0]["lr"] for trace in traces if when in trace.moments},
            }
            for when in whens
        ],
    }
