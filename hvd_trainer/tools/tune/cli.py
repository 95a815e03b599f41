"""`python -m hvd_trainer tune`: find the settings with which each engine is the fastest for a job.

python -m hvd_trainer tune --np 2 -- -m hvd_trainer.mnist
horovodrun -np 2 python -m hvd_trainer.mnist --config runs/tune/horovod.yaml

A setting that certainly gains nothing is not run again, and a group that cannot gain anything is not run at all. A
run that has ended is recorded at once, so that the same command goes on where a stopped one was.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from annotated_types import Ge, Gt

from hvd_trainer.config.parser import read_yaml
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.formats import check_installed, to_json
from hvd_trainer.tools.runner.command import (
    NOT_SAVED,
    option_of,
    option_values,
    read_command,
    read_engines,
    script_checksum,
)
from hvd_trainer.tools.runner.folder import locked_folder
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.runner.machine import describe_machine, versions, warn_if_busy
from hvd_trainer.tools.runner.measured import MeasuredTrial, describe_speed
from hvd_trainer.tools.runner.records import RunRecord, key_of
from hvd_trainer.tools.runner.step_stats import are_figures
from hvd_trainer.tools.runner.trial_runner import TrialRunner
from hvd_trainer.tools.tune import report
from hvd_trainer.tools.tune.search import Found, Search
from hvd_trainer.tools.tune.settings import as_words, settling_steps
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import COMMAND, plural

WARMUP_STEPS = 5
"""Steps at the beginning of each run that do not count."""
MIN_STEPS, MAX_STEPS = 20, 2000
"""Bounds of the counted steps of a run."""


FACTS: Mapping[str, Any] = {
    **dict.fromkeys(("world_size", "threads", "workers", "parameters", "parameter_tensors"), int),
    **{"device": str, "compression": str, "in_memory": bool, "has_own_loader": bool, "bucket_mb": int | float},
}
"""The facts in the job's run.json that the search needs, and their types."""

SCRIPT_FACTS: Mapping[str, Any] = {
    **dict.fromkeys(("world_size", "threads", "parameters", "parameter_tensors"), int),
    **{"device": str, "uses_hvd": bool},
}
"""The facts that the probe of a script records and that the search needs, and their types."""


@dataclass(frozen=True)
class Options:
    """Search the fastest settings of each engine for a job, and write them as YAML for its --config.

    For a script that is not built on the Trainer, these are options of `run`.
    The job stands behind --, as it would stand behind `python`. What it is typed with stays as it is.
    """

    np: Annotated[int, Ge(1)] = 2
    """ranks"""
    engines: Annotated[str, tyro.conf.arg(metavar="NAME,NAME")] = "horovod,ddp"
    """whose settings: horovod, ddp"""
    seconds: Annotated[float, Gt(0)] = 4.0
    """how long each run trains, about; starting it takes longer"""
    rounds: Annotated[int, Ge(3)] = 5
    """how often a setting is run at most, and how often what was found is run to prove it"""
    least_gain: Annotated[float, Ge(0)] = 0.02
    """gains below this are not searched for, as a fraction"""
    lossy: bool = False
    """also adopt what rounds the gradients: --compression"""
    out: Path = Path("runs/tune")
    """folder for horovod.yaml, ddp.yaml and tune.json; the same command again goes on with what is there"""
    timeout_s: Annotated[float, Gt(0)] = 600.0
    """after so many seconds a run is killed"""


@dataclass(frozen=True)
class Job:
    """The job, and the options of its own file."""

    words: tuple[str, ...]
    """what follows `python`"""
    own: Mapping[str, Any]
    """the options of its `--config`"""
    is_script: bool = False
    """whether it is not built on the Trainer: what is tuned are options of `run`"""

    @classmethod
    def read(cls, words: Sequence[str]) -> Job:
        """Read the file of options that the job is typed with, if there is one.

        Raises:
            OptionError: it cannot be read.
        """
        own: dict[str, Any] = {}
        is_script = not is_trainer_job(words)
        for file in () if is_script else option_values(words, "--config"):
            own |= read_yaml(Path(file))
        return cls(tuple(words), own, is_script)

    @property
    def fixed(self) -> set[str]:
        """The options that the job is given, by their names in YAML."""
        if self.is_script:
            return set()
        given = {option_of(word).removeprefix("--") for word in self.words if word.startswith("--")}
        return {name.removeprefix("no-").replace("-", "_") for name in given} | set(self.own)


@dataclass
class SettingsRunner:
    """Runs a job with settings on one engine; runs that are in the folder already are not repeated."""

    backend: str
    job: Job
    options: Options
    runner: TrialRunner
    conditions: Mapping[str, Any]
    """what the figures depend on besides, such as versions"""
    steps: int = MIN_STEPS
    used: Counter[str] = field(default_factory=Counter)
    """how often each setting was run, by its identity"""

    def run_unchanged(self) -> Mapping[str, Any]:
        """Run the unchanged job to see how long a step takes, and return its facts from run.json.

        Raises:
            OptionError: it does not run.
        """
        run = self._run({})
        if run.state != "done" or "step_s" not in run.figures:
            raise OptionError(f"The job does not run as it is, on {self.backend}: {self._failure(run)}")
        self.steps = min(MAX_STEPS, max(MIN_STEPS, round(self.options.seconds / run.figures["step_s"])))
        return {**run.figures["work"], "cores": len(cpu_ids())}

    def _failure(self, run: RunRecord) -> str:
        """Return why a run has no figures."""
        if run.state == "done":
            return "it makes too few steps: give it more data, or smaller batches"
        return f"{run.state}, {run.why(self.runner.folder)}"

    def measure(self, label: str, settings: Mapping[str, Any]) -> float | None:
        """Return the samples per second with these settings; None if the job does not run with them."""
        run = self._run(settings)
        has_speed = "step_s" in run.figures
        said = describe_speed(run) if has_speed else self._failure(run)
        print(f"{self.backend}, run {self.used.total()}  {label}: {said}", flush=True)
        # Of a script without a DataLoader, samples are not seen.
        return float(run.figures.get("samples_per_s", 1 / run.figures["step_s"])) if has_speed else None

    def _run(self, settings: Mapping[str, Any]) -> RunRecord:
        warm_up, options = WARMUP_STEPS + settling_steps(settings), self.options
        words, steps = self.job.words, warm_up + self.steps
        identity = {
            **{"backend": self.backend, "words": words, "settings": dict(settings), "steps": steps},
            **{"ranks": options.np, **self.conditions},
        }
        self.used[key_of(identity)] += 1
        left_out = settings.get("leave_out")
        changed = as_words({name: value for name, value in settings.items() if name != "leave_out"})
        trial = MeasuredTrial(
            identity=identity,
            job=words,
            engine=self.backend,
            ranks=options.np,
            steps=steps,
            warmup_steps=warm_up,
            leave_out=() if left_out is None else (left_out,),
            options=changed if self.job.is_script else [*NOT_SAVED, *changed],
        )
        return self.runner.run(trial, self.used[key_of(identity)])


def _are_figures(figures: Mapping[str, Any]) -> bool:
    work = figures.get("work", {})
    facts = SCRIPT_FACTS if "uses_hvd" in work else FACTS
    return are_figures(figures) and all(isinstance(work.get(name), kind) for name, kind in facts.items())


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0, or 130 after Ctrl-C.

    Raises:
        OptionError: an option is out of its range, or the job does not run.
    """
    options, words = read_command("tune", Options, argv)
    check_installed()
    job, backends = Job.read(words), read_engines(options.engines, ("horovod", "ddp"))
    with locked_folder(options.out) as folder:
        try:
            tune(job, backends, options, folder, shlex.join(argv))
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from here", file=sys.stderr)
            return 130
    return 0


def script_line(job: Sequence[str], backend: str, ranks: int, settings: Mapping[str, Any]) -> str:
    """Return the command line that starts a script with settings."""
    run = [*COMMAND.split(), "run", "--np", str(ranks), "--backend", backend, *as_words(settings)]
    return shlex.join([*run, "--", *job])


def tune(job: Job, backends: Sequence[str], options: Options, folder: Path, arguments: str) -> None:
    """Search on each engine, and write the settings that were found."""
    warn_if_busy()
    machine, runner = describe_machine(), TrialRunner(folder, limit_s=options.timeout_s, are_figures=_are_figures)
    conditions = {"script": script_checksum(job.words), **versions(machine)}
    everything: dict[str, Found] = {}
    files = []
    for backend in backends:
        settings_runner = SettingsRunner(backend, job, options, runner, conditions)
        facts = settings_runner.run_unchanged()
        length = plural(WARMUP_STEPS + settings_runner.steps, "step")
        print(f"{backend}: runs of {length}; all is kept in {folder}", flush=True)
        found = everything[backend] = Search(
            backend,
            facts,
            job.fixed,
            settings_runner.measure,
            rounds=options.rounds,
            least_gain=options.least_gain,
            lossy=options.lossy,
        ).run()
        report.show(backend, found)
        if job.is_script:
            print(f"Type: {script_line(job.words, backend, options.np, found.settings)}")
            continue
        files.append(folder / f"{backend}.yaml")
        command = f"{COMMAND} tune {arguments}"
        files[-1].write_text(report.as_yaml(backend, found, job.own, command, machine))
    files.append(folder / "tune.json")
    files[-1].write_text(to_json(report.as_json(everything, machine, job.words)))
    print("written: " + ", ".join(map(str, files)))
