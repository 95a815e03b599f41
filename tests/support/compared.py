"""Trials of `compare` and runs that are made up for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.trials import RunRecord
from hvd_trainer.tools.compare.choice import write_settings
from hvd_trainer.tools.compare.options import CompareOptions
from hvd_trainer.tools.compare.plan import Axis, CompareTrial, plan, read_axes
from hvd_trainer.tools.compare.report import conclude
from hvd_trainer.tools.compare.result import Comparison

JOB = ("-m", "hvd_trainer.mnist")
WORK = {
    "on_trainer": True,
    "train_data": "MNIST",
    "train_samples": 60000,
    "steps": 235,
    "global_batch_size": 256,
    "rates": [[0.002, 235]],
    "precision": "fp32",
    "tf32": False,
    "channels_last": False,
    "skipped_steps": 0,
    "parameters": 21840,
    "threads": 1,
}
RAN = Ran("python -m hvd_trainer compare --rounds 2 -- -m hvd_trainer.mnist", "2026-11-26 17:20", "vm", 2, 0.3)
FIGURES = {"work": WORK, "step_s": 0.1, "first_step_at": 1.0}
PARTS = ("data", "forward", "backward", "exchange", "straggler", "update", "other")


def varied(**values: str) -> list[Axis]:
    return read_axes([f"{name}={text}" for name, text in values.items()])


def trials_of(
    *arguments: str,
    ranks: str = "1",
    backends: str = "ddp",
    job: Sequence[str] = JOB,
    baselines: Sequence[str] = (),
    **values: str,
) -> list[CompareTrial]:
    options = CompareOptions(np=ranks, backend=backends, baseline=tuple(baselines), threads=1)
    return plan((*job, *arguments), varied(**values), options, {})


def only(*arguments: str, **values: Any) -> CompareTrial:
    (trial,) = trials_of(*arguments, **values)
    return trial


def run_of(
    trial: CompareTrial, number: int = 1, rate: float = 100.0, batch: int = 256, **figures: Any
) -> RunRecord:
    """Return a run whose steps take 6 ms, and the rest of their time the exchange."""
    step_s = batch / rate
    known = {
        "work": {**WORK, "global_batch_size": batch},
        "samples_per_s": rate,
        **{"step_s": step_s, "step_p50_s": step_s, "step_p95_s": 1.2 * step_s},
        "parts": {**dict.fromkeys(PARTS, 0.001), "exchange": step_s - 0.006},
        "first_step_at": 103.5,
        "train_loss": 0.5,
        "weights": "abc",
    }
    return RunRecord(trial.identity, number, "done", 9.0, figures={**known, **figures}, began_at=100.0)


def unseen(trial: CompareTrial) -> RunRecord:
    """Return a run of a script that tells no samples."""
    return RunRecord(trial.identity, 1, "done", 9.0, figures={"work": {"steps": 235}, "step_s": 0.512})


def compared(
    trials: Sequence[CompareTrial], runs: Sequence[RunRecord], *, least: float = 0.0, **values: str
) -> Comparison:
    given = {"job": JOB, "machine": {"cores": 2}, "options": ["--rounds", "2"], "varied": varied(**values)}
    return Comparison.of(trials, runs, **given, ran=RAN, least=least)


def publish(comparison: Comparison, folder: Path) -> None:
    """Print the report of a comparison, and write its files."""
    report = conclude(comparison)
    report.show()
    report.write(folder, "comparison", write_settings(comparison, folder))
