"""A grid's figures to read: grid.csv, the table in the terminal, and where measured and predicted times differ."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from hvd_trainer.tools.grid.configurations import Axis, label
from hvd_trainer.tools.grid.prediction import why_off
from hvd_trainer.tools.grid.rows import DIFFERENT, Row
from hvd_trainer.tools.runner.formats import console, milliseconds, more_or_less, number, percent
from hvd_trainer.utils import accelerator


def beside_first(difference: float) -> str:
    """A relative difference of losses."""
    return "same bits" if difference == 0 else f"{difference:+.1e}"


class Column(NamedTuple):
    """A figure and how it is shown."""

    title: str
    figure: str
    show: Callable[[float], str]


COLUMNS = (
    Column("samples/s", "samples_per_s", number),
    Column("lowest", "lowest", number),
    Column("highest", "highest", number),
    Column("tokens/s", "tokens_per_s", number),
    Column("step, ms", "step_s", milliseconds),
    Column("predicted", "predicted_step_s", milliseconds),
    Column("off by", "off", more_or_less),
    Column("bubble", "bubble", percent),
    Column("by formula", "bubble_formula", percent),
    Column("peak, MB", "peak_memory_mb", number),
    Column("before, MB", "base_memory_mb", number),
    Column("loss", "train_loss", "{:.5f}".format),
    Column("to the first", "loss_to_first", beside_first),
)
SPREAD = ("lowest", "highest")
IN_CSV = ("runs", *(column.figure for column in COLUMNS), "global_batch_size")


def write_csv(rows: Sequence[Row], axes: Sequence[Axis], file: Path) -> None:
    """One line per configuration: its place on each axis, its state, all figures in full, why it failed."""
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow([*(axis.name for axis in axes), "state", *IN_CSV, "predicted_from", "note"])
        for row in rows:
            base = row.predicted_from
            writer.writerow(
                [
                    *(row.configuration.values[axis.name] for axis in axes),
                    row.state,
                    *(row.figures.get(name, "") for name in IN_CSV),
                    "" if base is None else base.named(axes),
                    row.note,
                ]
            )


def print_table(rows: Sequence[Row], axes: Sequence[Axis], out: TextIO | None = None) -> None:
    """The table, and below it why some configurations have no figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = out or sys.stdout
    several = [axis for axis in axes if len(axis.values) > 1] or [axes[0]]
    columns = [column for column in COLUMNS if _is_wanted(column, rows)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in [*(label(axis.name) for axis in several), *(column.title for column in columns)]:
        table.add_column(title, justify="right")
    table.add_column("")
    notes = notes_of(rows)
    for row in rows:
        cells = [row.configuration.values[axis.name] for axis in several]
        cells += [_cell(column, row.figures) for column in columns]
        state = "" if row.state == "done" else row.state
        note = f"({notes[row.note]})" if row.note else ""
        table.add_row(*cells, f"{state} {note}".strip())
    console(out).print(table)
    for text, place in notes.items():
        print(f"({place}) {text}", file=out)


def print_differences(rows: Sequence[Row], axes: Sequence[Axis], out: TextIO | None = None) -> None:
    """The configurations whose steps take another time than was predicted, the farthest off first."""
    out = out or sys.stdout
    predicted = [row for row in rows if "off" in row.figures]
    off = sorted((row for row in predicted if row.is_off), key=lambda row: -abs(row.figures["off"]))
    if not predicted:
        return
    print(
        f"Measured and predicted step times differ by more than {DIFFERENT:.0%} in {len(off)} of {len(predicted)}"
        + (":" if off else "."),
        file=out,
    )
    cores = None if accelerator.kind() else len(os.sched_getaffinity(0))
    for row in off:
        assert row.predicted_from is not None
        figures = row.figures
        print(
            f"  {row.configuration.named(axes)}: {milliseconds(figures['step_s'])} ms, predicted "
            f"{milliseconds(figures['predicted_step_s'])} ms ({more_or_less(figures['off'])}) from "
            f"{row.predicted_from.named(axes)}",
            file=out,
        )
        for reason in why_off(row.configuration, row.predicted_from, figures, cores):
            print(f"    {reason}", file=out)


def notes_of(rows: Sequence[Row]) -> dict[str, int]:
    """The notes of all rows, each once, numbered from 1."""
    texts = dict.fromkeys(row.note for row in rows if row.note)
    return {text: place for place, text in enumerate(texts, 1)}


def _is_wanted(column: Column, rows: Sequence[Row]) -> bool:
    if column.figure in SPREAD and max((row.figures.get("runs", 0) for row in rows), default=0) < 2:
        return False
    return any(column.figure in row.figures for row in rows)


def _cell(column: Column, figures: Mapping[str, float]) -> str:
    return column.show(figures[column.figure]) if column.figure in figures else "-"
