"""From the runs to one row per configuration: medians, spread, prediction, and the loss beside the first one's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hvd_trainer.tools.grid.configurations import Configuration
from hvd_trainer.tools.grid.prediction import predict
from hvd_trainer.tools.runner.runs import Run

DIFFERENT = 0.1
"""From which a measured step counts as another than the predicted one."""


@dataclass(frozen=True)
class Row:
    """One configuration and what is known of it."""

    configuration: Configuration
    state: str
    """done, failed, killed, impossible, or not run"""
    note: str = ""
    """why it is impossible, or failed"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """medians of the runs' figures, and what was worked out from them"""
    predicted_from: Configuration | None = None

    @property
    def is_off(self) -> bool:
        """Whether the step takes another time than was predicted."""
        return abs(self.figures.get("off", 0.0)) > DIFFERENT


def make_rows(configurations: Sequence[Configuration], runs: Sequence[Run], sized: str | None) -> list[Row]:
    """A row for each configuration, in their order.

    Args:
        sized: the job's option for the number of samples, if it has one.
    """
    by_key: dict[str, list[Run]] = {configuration.key: [] for configuration in configurations}
    for run in runs:
        by_key.get(run.key, []).append(run)
    medians = {key: _medians(of_it) for key, of_it in by_key.items()}
    steps = {key: figures["step_s"] for key, figures in medians.items() if "step_s" in figures}
    possible = [configuration for configuration in configurations if configuration.reason is None]
    first_losses: dict[float, float] = {}
    rows = []
    for configuration in configurations:
        if configuration.reason is not None:
            rows.append(Row(configuration, "impossible", configuration.reason))
            continue
        figures = dict(medians[configuration.key])
        if figures and configuration.bubble is not None:
            figures["bubble_formula"] = configuration.bubble
        if "train_loss" in figures:
            # Steps of another size make another training: their losses say nothing about each other.
            loss = figures["train_loss"]
            first = first_losses.setdefault(figures["global_batch_size"], loss)
            figures["loss_to_first"] = loss / first - 1 if loss != first else 0.0
        base = None
        prediction = predict(configuration, steps, possible, sized)
        if "step_s" in figures and prediction is not None:
            base = prediction.base
            figures["predicted_step_s"] = prediction.step_s
            figures["off"] = figures["step_s"] / prediction.step_s - 1
        state, note = _state(by_key[configuration.key])
        rows.append(Row(configuration, state, note, figures, base))
    return rows


def _medians(runs: Sequence[Run]) -> dict[str, float]:
    """Over the runs that gave figures, the last of each round; empty if there is none."""
    done = [*{run.round: run.figures for run in runs if run.state == "done"}.values()]
    if not done:
        return {}
    names = dict.fromkeys(name for figures in done for name in figures)
    values = {name: [figures[name] for figures in done if name in figures] for name in names}
    found = {"runs": len(done)} | {name: median(of_it) for name, of_it in values.items()}
    rates = values.get("samples_per_s", [])
    if rates and found["samples_per_s"] > 0:
        step_s = found["global_batch_size"] / found["samples_per_s"]
        found |= {"lowest": min(rates), "highest": max(rates), "step_s": step_s}
    # The loss is the first run's: between two runs there is no loss that a training has had.
    return found | {name: values[name][0] for name in ("train_loss",) if name in values}


def _state(runs: Sequence[Run]) -> tuple[str, str]:
    """What became of a configuration, and its latest trouble, unless that round went well later."""
    last = {run.round: run for run in runs}
    bad = [run for run in last.values() if run.state != "done"]
    if not last:
        return "not run", ""
    if len(bad) == len(last):
        return bad[-1].state, bad[-1].note
    return "done", f"{bad[-1].state} in round {bad[-1].round}: {bad[-1].note}" if bad else ""
