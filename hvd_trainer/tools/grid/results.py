"""What a grid reads of a run that has ended."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hvd_trainer.observe.run_folder import METRICS

OF_EPOCH = ("samples_per_s", "train_loss", "bubble", "global_batch_size")
OF_END = ("peak_memory_mb", "base_memory_mb")


def are_figures(figures: Mapping[str, Any]) -> bool:
    """Whether these are as `read_figures` gives them; those in a file may be anything."""
    finite = all(isinstance(figure, int | float) and math.isfinite(figure) for figure in figures.values())
    return finite and (
        not figures or min(figures.get(name, 0) for name in ("samples_per_s", "global_batch_size")) > 0
    )


def read_figures(log: Path) -> dict[str, float] | None:
    """The figures of a run's last epoch and of its end; None if it did not come to its end."""
    records = []
    with suppress(FileNotFoundError, ValueError):
        records = [json.loads(line) for line in (log / METRICS).read_text().splitlines()]
    epochs = [record for record in records if record["event"] == "epoch"]
    if not epochs or records[-1]["event"] != "end":
        return None
    wanted = {name: epochs[-1].get(name) for name in OF_EPOCH} | {name: records[-1].get(name) for name in OF_END}
    figures = {name: float(value) for name, value in wanted.items() if isinstance(value, int | float)}
    length = yaml.safe_load((log / "config.yaml").read_text()).get("sequence_length")
    if isinstance(length, int) and "samples_per_s" in figures:
        # Padding counts: it is computed like any other token.
        figures["tokens_per_s"] = figures["samples_per_s"] * length
    return figures
