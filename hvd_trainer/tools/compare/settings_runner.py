"""Run a job with the settings that a search asks for; runs that are in the folder already are not repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvd_trainer.config.parser import read_yaml
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import option_of, option_values
from hvd_trainer.measure.figures import are_figures
from hvd_trainer.measure.machine import busy_warning
from hvd_trainer.measure.measured import SAME_NUMBERS, MeasuredTrial, describe_speed
from hvd_trainer.measure.stale import digest_of_files
from hvd_trainer.measure.trials import RunRecord, TrialRunner, key_of
from hvd_trainer.tools.compare.options import CompareOptions
from hvd_trainer.tools.compare.search import Search, SearchResult, Speed
from hvd_trainer.tools.compare.settings import as_words
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

MIN_STEPS, MAX_STEPS = 20, 2000
"""Bounds of the counted steps of a run."""


@dataclass(frozen=True)
class SearchJob:
    """The job whose settings are searched, and the options of its own file."""

    words: tuple[str, ...]
    """what follows `python`"""
    ranks: int
    own: Mapping[str, Any] = field(default_factory=dict)
    """the options of its `--config`"""
    is_script: bool = True
    """whether it is not built on the Trainer: the settings are options of `run`"""
    reads_options: bool = True
    """whether a job on the Trainer reads its options from its command line, and not from its own code"""

    def on_trainer(self, *, reads_options: bool) -> SearchJob:
        """Return the job, which is built on the Trainer, with the options of the file that it is typed with.

        Raises:
            OptionError: the file cannot be read.
        """
        own: dict[str, Any] = {}
        for file in option_values(self.words, "--config") if reads_options else ():
            own |= read_yaml(Path(file))
        return replace(self, own=own, is_script=False, reads_options=reads_options)

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

    def run_unchanged(self) -> Mapping[str, Any]:
        """Run the unchanged job to see how long a step takes, and return its facts.

        Raises:
            OptionError: it does not run.
        """
        run = self._run({})
        if run.state != "done" or "step_s" not in run.figures:
            raise OptionError(f"The job does not run as it is, on {self.backend}: {self._failure(run)}")
        if run.figures["work"]["on_trainer"]:
            self.job = self.job.on_trainer(reads_options=run.figures["work"]["reads_options"])
        self.steps = min(MAX_STEPS, max(MIN_STEPS, round(self.options.run_s / run.figures["step_s"])))
        return {**run.figures["work"], "cores": len(cpu_ids())}

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
        warm_up, job = self.options.warmup_steps, self.job
        left_out = settings.get("leave_out")
        changed = {name: value for name, value in settings.items() if name != "leave_out"}
        trial = MeasuredTrial(
            identity={
                **{"backend": self.backend, "words": job.words, "settings": dict(settings)},
                **{"steps": warm_up + self.steps, "warmup_steps": warm_up, "ranks": job.ranks, **self.conditions},
            },
            job=job.words,
            engine=self.backend,
            ranks=job.ranks,
            steps=warm_up + self.steps,
            warmup_steps=warm_up,
            leave_out=() if left_out is None else (left_out,),
            run_options=(*SAME_NUMBERS, *as_words(changed)) if job.is_script else SAME_NUMBERS,
            options={} if job.is_script else changed,
        )
        key = key_of(trial.identity)
        self.used[key] += 1
        return self.runner.run(trial, self.used[key])


def search_all(
    job: SearchJob,
    backends: Sequence[str],
    folder: Path,
    conditions: Mapping[str, Any],
    options: CompareOptions,
) -> tuple[SearchJob, dict[str, SearchResult], list[str]]:
    """Search on each engine; return the job, of which more is known then, the results and what was warned of.

    Raises:
        OptionError: the job does not run.
    """
    runner = TrialRunner(folder, limit_s=options.timeout_s, are_figures=are_figures)
    if text := busy_warning():
        runner.warn(text)
    known = {**conditions, "files": digest_of_files(job.words)}
    results = {}
    for backend in backends:
        settings_runner = SettingsRunner(backend, job, runner, known, options)
        facts = settings_runner.run_unchanged()
        length = plural(options.warmup_steps + settings_runner.steps, "step")
        print(f"{backend}: runs of {length}; all is kept in {folder}", flush=True)
        results[backend] = Search(
            backend,
            facts,
            settings_runner.job.fixed,
            settings_runner.measure,
            rounds=options.rounds,
            least_gain=options.least_gain,
            lossy=options.lossy,
        ).run()
        job = settings_runner.job
    recorded = (text for run in runner.last.values() for text in run.warnings)
    return job, results, list(dict.fromkeys([*recorded, *runner.warnings]))
