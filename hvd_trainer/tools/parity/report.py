"""The comparison to read: a table of the steps, the verdicts with their causes, and parity.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_trainer.observe.checksums import SMALL
from hvd_trainer.tools.parity.pair import Pair
from hvd_trainer.tools.parity.traced_runs import TRACED, Traced
from hvd_trainer.tools.parity.traces import Trace, When

NAME = "parity.json"
MOST_ROWS = 24


def show(traced: Sequence[Traced], pairs: Sequence[Pair], folder: Path) -> None:
    """Prints all, and writes it as JSON."""
    traces = [its.trace for its in traced if its.trace is not None]
    for line in [*table(traces, pairs), *conclusions(traced, pairs, folder)]:
        print(line)
    file = folder / NAME
    file.write_text(json.dumps(_finite(as_json(traced, pairs)), indent=1) + "\n")
    print(f"written: {file}", flush=True)


def conclusions(traced: Sequence[Traced], pairs: Sequence[Pair], folder: Path) -> list[str]:
    """The verdicts, and what there is to say to them."""
    lines: list[str] = []
    for pair in pairs:
        lines += [pair.verdict() + "." * (not pair.same), *(f"  {line}" for line in pair.details())]
    same = [pair for pair in pairs if pair.equal_bits]
    traces = [its.trace for its in traced if its.trace is not None]
    if same and len(traces) > 2 and len(pairs) < 3:
        lines.append(f"What is said of {same[0].one.name} holds for {same[0].other.name}, too.")
    lines += [its.trouble(folder) for its in traced if not its.done]
    stride = max([trace.start["stride"] for trace in traces], default=1)
    if stride > 1 and any(not pair.same or not pair.allowed.exact for pair in pairs):
        lines.append(
            f"The model is large: of tensors of more than {SMALL:,} elements every {stride}th was kept, and is "
            "in the differences; equal bits are of all elements."
        )
    if any(not pair.same for pair in pairs):
        lines.append(f"All values, by rank and step, are in {folder / TRACED}/*/trace")
    return lines


def table(traces: Sequence[Trace], pairs: Sequence[Pair]) -> list[str]:
    """A line per step: losses, gradient norms, and how far the parameters are apart."""
    whens = sorted({when for trace in traces for when in trace.steps})
    if not whens or not pairs:
        return []
    shown = shown_steps(whens, pairs)
    columns = [["", "step", *(str(when.step) for when in shown)]]
    for title, of in (("loss", Trace.loss), ("gradient norm", Trace.grad_norm)):
        for trace in traces:
            columns.append([title, trace.name, *(_figure(trace, when, of) for when in shown)])
    for pair in pairs:
        names = f"{pair.one.name}, {pair.other.name}"
        columns.append(["parameters apart", names, *(_gap(pair.gaps.get(when.step)) for when in shown)])
    left = len(whens) - len(shown)
    return [*_lines(columns), *([f"{left} more steps are in {NAME}"] if left else []), ""]


def _lines(columns: Sequence[Sequence[str]]) -> list[str]:
    """Rows of columns of cells; a title that comes again is left out."""
    groups = [column[0] for column in columns]
    titles = [group if group not in groups[:place] else "" for place, group in enumerate(groups)]
    cells = [[title, *column[1:]] for title, column in zip(titles, columns, strict=True)]
    padded = [[cell.rjust(max(map(len, column))) for cell in column] for column in cells]
    return ["  ".join(row) for row in zip(*padded, strict=True)]


def _figure(trace: Trace, when: When, of: Callable[[Trace, When], float | None]) -> str:
    value = of(trace, when) if when in trace.moments else None
    return "-" if value is None else f"{value:.7g}"


def shown_steps(whens: Sequence[When], pairs: Sequence[Pair]) -> list[When]:
    """All steps; of many the first ones, the last ones, and those where runs part."""
    if len(whens) <= MOST_ROWS:
        return list(whens)
    parting = {step + n for pair in pairs if (step := pair.step) is not None for n in range(-3, 4)}
    ends = {when.step for when in [*whens[:8], *whens[-4:]]}
    return [when for when in whens if when.step in parting | ends]


def _gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "same bits"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text, as all that it does not know."""
    if isinstance(value, dict):
        return {key: _finite(its) for key, its in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(its) for its in value]
    known = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def as_json(traced: Sequence[Traced], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Runs, verdicts with what they rest on, and all steps."""
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
