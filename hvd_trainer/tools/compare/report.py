"""The report of a comparison: its verdicts, warnings, tables and pictures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hvd_trainer.measure.command import with_options
from hvd_trainer.measure.formats import milliseconds, number, percent
from hvd_trainer.measure.machine import as_text
from hvd_trainer.measure.report import Report, Table, Verdict
from hvd_trainer.measure.stats import METHOD
from hvd_trainer.tools.compare.choice import choose, line_to_type
from hvd_trainer.tools.compare.plots import draw_heat_map, draw_speed
from hvd_trainer.tools.compare.result import Comparison, Pair, Result
from hvd_trainer.utils.text import COMMAND, plural

MAX_NAMED = 3
"""Trials that are named with a note that many have."""
GOOD_ROUNDS = 5
"""Rounds that are advised where there are too few."""
FIGURE = r"\d+(\.\d+)?"
SPEED = "Speed: medians of the rounds"
TABLES: dict[str, Sequence[tuple[str, str, Callable[[Any], str]]]] = {
    SPEED: (
        ("samples/s", "samples_per_s", number),
        ("steps/s", "steps_per_s", number),
        ("lowest", "lowest", number),
        ("highest", "highest", number),
        ("tokens/s", "tokens_per_s", number),
        ("per rank", "per_rank", number),
        ("speed-up", "speed_up", "{:.2f}".format),
        ("efficiency", "efficiency", "{:.0%}".format),
        ("state", "state", str),
    ),
    "Where a mean step's time goes, ms: exchange and straggler are what other ranks are waited for": (
        ("median step", "step_p50_s", milliseconds),
        ("p95", "step_p95_s", milliseconds),
        ("data", "data_s", milliseconds),
        ("forward", "forward_s", milliseconds),
        ("backward", "backward_s", milliseconds),
        ("exchange", "exchange_s", milliseconds),
        ("straggler", "straggler_s", milliseconds),
        ("update", "update_s", milliseconds),
        ("bubble of the last epoch", "bubble", percent),
    ),
    "What came of it": (
        ("start-up, s", "startup_s", "{:.1f}".format),
        ("peak, MB", "peak_memory_mb", number),
        ("train loss", "train_loss", "{:.6f}".format),
        ("last loss", "last_loss", "{:.6f}".format),
        ("val loss", "val_loss", "{:.6f}".format),
        ("accuracy", "val_accuracy", percent),
        ("weights", "weights", lambda text: text[:12]),
    ),
}
"""By their titles: columns of a title, a figure of `Comparison.figures`, and how it is shown."""


def conclude(comparison: Comparison) -> Report:
    """Return all that a comparison has to say."""
    few = any(pair.speed.low is None for pair in comparison.pairs) or bool(comparison.apart)
    compared = [fastest(pairs) for pairs in comparison.of_values]
    compared += [pair.verdict() for pair in comparison.pairs if not pair.is_of_values]
    compared.sort(key=lambda verdict: verdict.ratio.evidence if verdict.ratio else (0.0, 0.0), reverse=True)
    failed = failures(comparison)
    partly = [result for result in comparison.results if result.state == "done" and result.note]
    # By their words: the same warning of two commands has other figures.
    warned = {re.sub(FIGURE, "", text): text for run in comparison.runs for text in run.warnings}
    return Report(
        ran=comparison.ran,
        verdicts=[*failed, *compared] or [without_pair(comparison)],
        warnings=[*warned.values(), *_reasons(partly), *comparison.apart],
        tables=tables(comparison),
        pictures=[*draw_heat_map(comparison), *draw_speed(comparison.results)],
        notes=notes(comparison),
        advice=[
            *([command_of(comparison, "--retry-failed", "true")] if failed else []),
            *([more_rounds(comparison)] if few else []),
            *map(line_to_type, choose(comparison)),
        ],
        data=data_of(comparison),
    )


def fastest(pairs: Sequence[Pair]) -> Verdict:
    """Return the verdict on an engine's values: the fastest of those that are clearly faster, or else of all.

    Args:
        pairs: with the first values, the fastest first.
    """
    clear = [pair for pair in pairs if pair.speed.matters]
    faster = [pair for pair in clear if pair.speed.value > 1]
    counts = f"{len(faster)} faster and {len(clear) - len(faster)} slower than the first, of {len(pairs)}."
    return (faster or pairs)[0].verdict(*([counts] if len(pairs) > 1 else []))


def without_pair(comparison: Comparison) -> Verdict:
    """Return the verdict where no two entries have run in turn: which trial is the fastest."""
    done = [result for result in comparison.results if result.median("samples_per_s")]
    if comparison.apart or not done:
        return Verdict("Nothing is compared: no two trials have run in turn.", badge="NOT COMPARED")
    best = max(done, key=lambda result: result.median("samples_per_s") or 0.0)
    rate = number(best.median("samples_per_s") or 0.0)
    among = f", the most of {plural(len(done), 'trial')}" if len(done) > 1 else ""
    text = f"{best.trial.label} trains {rate} samples/s{among} ({plural(len(best.runs), 'round')})."
    return Verdict(text, badge=f"{rate} SAMPLES/S")


def failures(comparison: Comparison) -> list[Verdict]:
    """Return a verdict on the trials of which no run came to its end, if there are any."""
    failed = [result for result in comparison.results if result.state in ("failed", "killed")]
    if not failed:
        return []
    text = f"{len(failed)} of {plural(len(comparison.results), 'trial')} failed."
    printed = ", ".join([result.output for result in failed if result.output][:MAX_NAMED])
    where = [f"What they printed is beside this report: {printed}"] if printed else []
    badge = f"FAILED {len(failed)} OF {len(comparison.results)}"
    return [Verdict(text, "failed", [*_reasons(failed), *where], badge=badge)]


def more_rounds(comparison: Comparison) -> str:
    """Return the command with so many rounds that each pair has enough of them."""
    rounds = max((number for result in comparison.results for number in result.runs), default=0)
    fewest = min([pair.speed.rounds for pair in comparison.pairs] + [0 for _ in comparison.apart])
    return command_of(comparison, "--rounds", str(rounds + GOOD_ROUNDS - fewest))


def command_of(comparison: Comparison, option: str, value: str) -> str:
    """Return the command as it was typed, with a further option."""
    own = with_options(comparison.options, [(option, value)])
    return shlex.join([*COMMAND.split(), "compare", *own, "--", *comparison.job])


def tables(comparison: Comparison) -> list[Table]:
    """Return all tables; columns in which no trial has a figure are left out, and tables without columns."""
    axes = [axis for axis in comparison.varied if axis.varies]
    all_done = all(result.state == "done" for result in comparison.results)
    made = []
    for title, columns in TABLES.items():
        rows = []
        for result in comparison.results:
            trial = result.trial
            figures = {**comparison.figures[trial.key], "state": None if all_done else result.state}
            cells = ["-" if figures[name] is None else show(figures[name]) for _, name, show in columns]
            if title == SPEED or set(cells) != {"-"}:
                rows.append([trial.entry, str(trial.ranks), *(trial.values[axis.name] for axis in axes), *cells])
        titles = ["", "ranks", *(axis.label for axis in axes), *(column[0] for column in columns)]
        made.append(Table(title, titles, rows, is_open=title == SPEED).compact())
    return [*values_table(comparison), *(table for table in made if len(table.columns) > 2 + len(axes))]


def values_table(comparison: Comparison) -> list[Table]:
    """Return the table of all values beside the first ones, the fastest first."""
    axes, rows = [axis for axis in comparison.varied if axis.varies], []
    for pair in (pair for pairs in comparison.of_values for pair in pairs):
        trial, speed = pair.one.trial, pair.speed
        said = ("faster" if speed.value > 1 else "slower") if speed.matters else "no difference"
        bounds = "too few rounds" if speed.low is None else speed.interval
        values = (trial.values[axis.name] for axis in axes)
        rows.append((trial.entry, str(trial.ranks), *values, f"{speed.value:.3f}", bounds, said))
    titles = ["", "ranks", *(axis.label for axis in axes), "times", "", ""]
    words = (0, len(titles) - 2, len(titles) - 1)
    return [Table("Speed beside the first values", titles, rows, words)] if rows else []


def notes(comparison: Comparison) -> list[str]:
    """Return the conditions under which the figures hold, and what was not run, a sentence each."""
    trial, pairs = comparison.results[0].trial, comparison.pairs
    batches = ", ".join(
        f"{' or '.join(f'{size:,}' for size in sorted(sizes))} on {plural(ranks, 'rank')}"
        for ranks, sizes in sorted(comparison.batches.items())
    )
    holm = f", with Holm's correction for {len(pairs)} pairs" if len(pairs) > 1 else ""
    return [
        *([f"Global batch: {batches}."] if batches else []),
        f"{plural(trial.threads or 0, 'CPU thread')} per rank; the first "
        f"{plural(trial.warmup_steps, 'step')} of each run do not count.",
        *([f"{METHOD}{holm}. Pairs are rounds that one command ran in turn."] if pairs else []),
        *comparison.unseen,
        f"Machine: {as_text(comparison.machine)}.",
        *_reasons([result for result in comparison.results if result.state == "not run"]),
    ]


def _reasons(results: Sequence[Result]) -> list[str]:
    """Return why trials lack figures; those with the same reason in one line."""
    labels: dict[str, list[str]] = {}
    for result in results:
        labels.setdefault(result.note, []).append(result.trial.label)
    lines = []
    for note, names in labels.items():
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        lines.append(f"{'; '.join(names[:MAX_NAMED])}{more}: {note}")
    return lines


def data_of(comparison: Comparison) -> dict[str, Any]:
    """Return everything: medians of each trial, intervals, and each run."""
    trials = [
        {
            **result.trial.identity,
            "values": result.trial.values,
            "state": result.state,
            "note": result.note,
            "runs": len(result.runs),
            "global_batch_size": result.global_batch_size,
            **comparison.figures[result.trial.key],
        }
        for result in comparison.results
    ]
    pairs = [
        {
            "ranks": pair.one.trial.ranks,
            "one": pair.one.trial.values,
            "other": pair.other.trial.values,
            **asdict(pair.speed),
        }
        for pair in comparison.pairs
    ]
    return {
        "job": comparison.job,
        "varied": {axis.name: axis.values for axis in comparison.varied},
        "machine": comparison.machine,
        "trials": trials,
        "pairs": pairs,
        "runs": [asdict(run) for run in comparison.runs],
    }
