"""Run a job with the settings that a search asks for; runs that are in the folder already are not repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hvd_trainer.config.parser import read_yaml
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import option_of, option_values
from hvd_trainer.measure.measured import SAME_NUMBERS, MeasuredTrial, describe_speed
from hvd_trainer.measure.trials import RunRecord, TrialRunner
from hvd_trainer.tools.compare.options import CompareOptions
from hvd_trainer.tools.compare.search import Search, SearchResult, Speed
from hvd_trainer.tools.compare.settings import as_words
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

MIN_STEPS, MAX_STEPS = 20, 2000
"""Bounds of the counted steps of a run."""


@dataclass(frozen=True)
class SearchJob:
    """The job whose settings are searched, as its first run has shown it."""

    words: tuple[str, ...]
    """what follows `python`"""
    ranks: int
    work: Mapping[str, Any] = field(default_factory=dict)
    """what the run was told of it; empty before that"""

    @property
    def is_script(self) -> bool:
        """Whether it is not built on the Trainer: the settings are options of `run`."""
        return not self.work.get("on_trainer", False)

    @property
    def reads_options(self) -> bool:
        """Whether it reads settings from its command line, and not from its own code."""
        return self.is_script or self.work["reads_options"]

    @cached_property
    def own(self) -> dict[str, Any]:
        """The options of the file that a job on the Trainer is typed with.

        Raises:
            OptionError: it cannot be read.
        """
        is_read = not self.is_script and self.reads_options
        files = option_values(self.words, "--config") if is_read else ()
        return {name: value for file in files for name, value in read_yaml(Path(file)).items()}

    @property
    def fixed(self) -> set[str]:
        """The options that the job is given, by their names in YAML."""
        if self.is_script or not self.reads_options:
            return set()
        given = {option_of(word).removeprefix("--") for word in self.words if word.startswith("--")}
        return {name.removeprefix("no-").replace("-", "_") for name in given} | set(self.own)


@dataclass
class SettingsRunner:
    """Runs a job with settings on one engine."""

    backend: str
    job: SearchJob
    runner: TrialRunner
    conditions: Mapping[str, Any]
    """what the figures depend on besides, such as the machine, versions and code"""
    options: CompareOptions
    steps: int = MIN_STEPS
    used: Counter[str] = field(default_factory=Counter)
    """how often each setting was run, by its identity"""

    def search(self) -> SearchResult:
        """Run the unchanged job to see what it is and how long a step takes, and search.

        Raises:
            OptionError: it does not run.
        """
        run, options = self._run({}), self.options
        if run.state != "done" or "step_s" not in run.figures:
            raise OptionError(f"The job does not run as it is, on {self.backend}: {self._failure(run)}")
        self.job = SearchJob(self.job.words, self.job.ranks, run.figures["work"])
        self.steps = min(MAX_STEPS, max(MIN_STEPS, round(options.run_s / run.figures["step_s"])))
        length = plural(options.warmup_steps + self.steps, "step")
        print(f"{self.backend}: runs of {length}; all is kept in {self.runner.folder}", flush=True)
        facts = {**self.job.work, "cores": len(cpu_ids())}
        limits = options.rounds, options.least_gain, options.lossy
        return Search(self.backend, facts, self.job.fixed, self.measure, *limits).run()

    def _failure(self, run: RunRecord) -> str:
        """Return why a run has no figures."""
        if run.state == "done":
            return "it makes too few steps: give it more data, or smaller batches"
        return f"{run.state}, {run.why(self.runner.folder)}"

    def measure(self, label: str, settings: Mapping[str, Any]) -> Speed | None:
        """Return the speed with these settings; None if the job does not run with them."""
        run = self._run(settings)
        has_speed = "step_s" in run.figures
        said = describe_speed(run) if has_speed else self._failure(run)
        print(f"{self.backend}, run {self.used.total()}  {label}: {said}", flush=True)
        # Of a script without a DataLoader, samples are not seen.
        return Speed(run.figures.get("samples_per_s", 1 / run.figures["step_s"]), run.go) if has_speed else None

    def _run(self, settings: Mapping[str, Any]) -> RunRecord:
        job, changed, warm_up = self.job, dict(settings), self.options.warmup_steps
        left_out = changed.pop("leave_out", None)
        trial = MeasuredTrial(
            job=job.words,
            engine=self.backend,
            ranks=job.ranks,
            steps=warm_up + self.steps,
            warmup_steps=warm_up,
            leave_out=() if left_out is None else (left_out,),
            run_options=(*SAME_NUMBERS, *as_words(changed)) if job.is_script else SAME_NUMBERS,
            options={} if job.is_script else changed,
            conditions=self.conditions,
        )
        self.used[trial.key] += 1
        return self.runner.run(trial, self.used[trial.key])
