"""`python -m hvd_trainer diagnose`: find out where a step's time goes, and what to change.

python -m hvd_trainer diagnose --np 2 --backend ddp -- -m hvd_trainer.mnist

The job is started a few times for a few seconds each: as it is, without fetching data, without exchanging
gradients, without both, and on one rank alone with the same batch and with twice of it. The differences tell what
each part costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Gt

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.diagnose.actions import Action, find_actions
from hvd_trainer.tools.diagnose.causes import (
    ALONE,
    NEITHER,
    NO_DATA,
    NO_EXCHANGE,
    NORMAL,
    ONE_THREAD,
    TWICE,
    Line,
    compute_shares,
)
from hvd_trainer.tools.diagnose.report import Report, as_json, show, show_tried
from hvd_trainer.tools.doctor import all_reduce_job
from hvd_trainer.tools.runner.command import (
    LAUNCHER_OF,
    NOT_SAVED,
    command_for,
    measured_job,
    read_command,
    with_steps,
)
from hvd_trainer.tools.runner.formats import check_installed
from hvd_trainer.tools.runner.machine import warn_if_busy
from hvd_trainer.tools.runner.runs import RunRecord, in_rounds, locked_folder, log_dir, run_once
from hvd_trainer.tools.runner.step_stats import medians, read_figures
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

WARMUP_STEPS = 5
"""Steps at the beginning of each run that do not count."""
MIN_STEPS, MAX_STEPS = 10, 2000
"""Bounds of the counted steps of a run."""
EXCHANGE_BYTES = tuple(2**10 * 4**step for step in range(8))
"""Sizes of the exchanges that are timed: 1 kB to 16 MB."""
BYTES = {"none": 4, "fp16": 2, "bf16": 2, "powersgd": 4}
"""Bytes of a gradient's element on the wire; of PowerSGD, which sends far fewer, an upper bound."""


@dataclass(frozen=True)
class Options:
    """Find out what a step's time goes to, by leaving things out, and what to do about it.

    The job stands behind --, as it would stand behind `python`.
    """

    np: Annotated[int, Ge(2)] = 2
    """ranks"""
    backend: Literal["horovod", "ddp"] = "horovod"
    """the engine"""
    seconds: Annotated[float, Gt(0)] = 4.0
    """how long each run trains, about; starting it takes longer"""
    rounds: Annotated[int, Ge(1)] = 3
    """how often each is run"""
    threads: Annotated[int | None, Ge(1)] = None
    """CPU threads of each rank; None: as the launcher and OMP_NUM_THREADS say"""
    attempt: Annotated[bool, tyro.conf.arg(name="try")] = False
    """run what is advised, too, beside the job as it is"""
    out: Path = Path("runs/diagnose")
    """folder for diagnosis.json"""
    timeout_s: Annotated[float, Gt(0)] = 600.0
    """after so many seconds a run is killed"""


@dataclass(frozen=True)
class Trial:
    """A way to run the job."""

    name: str
    ranks: int
    words: tuple[str, ...]
    """further options of the job"""
    threads: int | None


class TrialRunner:
    """Runs the trials of a job, one after the other, and keeps their figures.

    Raises:
        OptionError: the job failed.
    """

    def __init__(self, job: tuple[str, ...], options: Options, folder: Path) -> None:
        self._job, self._options, self._folder = job, options, folder
        self.figures: dict[str, list[dict[str, Any]]] = {}

    def run(self, trial: Trial, steps: int) -> Mapping[str, Any]:
        """Run a trial once, and return its figures, which are also kept under its name."""
        engine = self._options.backend if trial.ranks > 1 else "single"
        words = with_steps(self._job, WARMUP_STEPS + steps, [*NOT_SAVED, *trial.words])
        read = partial(read_figures, ranks=trial.ranks, warmup_steps=WARMUP_STEPS)
        run = self._run_once(engine, trial, measured_job(words, engine, log_dir(self._folder)), read)
        figures = {**run.figures, **run.figures["typical"]}
        self.figures.setdefault(trial.name, []).append(figures)
        return figures

    def measure_exchanges(self, threads: int | None) -> Line:
        """Measure how long exchanges take by their size."""
        job = ["-m", all_reduce_job.__name__, "--backend", self._options.backend]
        trial = Trial("exchanges", self._options.np, (), threads)
        job += ["--log-dir", str(log_dir(self._folder)), "--sizes", *map(str, EXCHANGE_BYTES)]
        run = self._run_once(self._options.backend, trial, job, all_reduce_job.read_result)
        return Line.through(run.figures["seconds"])

    def _run_once(self, engine: str, trial: Trial, words: Sequence[str], read: Any) -> RunRecord:
        run = run_once(
            command_for(LAUNCHER_OF[engine], trial.ranks, words),
            self._folder,
            {"trial": trial.name},
            1,
            threads=trial.threads,
            limit_s=self._options.timeout_s,
            read=read,
        )
        if run.state != "done":
            raise OptionError(f"The job failed when it was run {trial.name}: {run.why(self._folder)}")
        return run


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0.

    Raises:
        OptionError: an option is out of its range, or the job failed.
    """
    options, job = read_command("diagnose", Options, argv)
    check_installed()
    folder = options.out.expanduser().resolve()
    with locked_folder(folder):
        diagnose(TrialRunner(job, options, folder), options, folder)
    return 0


def diagnose(runner: TrialRunner, options: Options, folder: Path) -> None:
    """Measure the trials, print the report, and write diagnosis.json."""
    warn_if_busy()
    print(f"a first look: {plural(options.np, 'rank')} on {options.backend}", flush=True)
    first = runner.run(Trial("to see how long a step takes", options.np, (), options.threads), MIN_STEPS)
    facts = first["work"] | {"cores": len(cpu_ids())}
    steps = min(MAX_STEPS, max(MIN_STEPS, round(options.seconds / first["step_s"])))
    trials = plan_trials(options, facts)
    count = options.rounds * len(trials)
    length = plural(WARMUP_STEPS + steps, "step")
    rounds = plural(options.rounds, "round")
    print(f"{plural(count, 'run')} of {length} each ({rounds}), about {options.seconds:g} s and a start each")
    for place, (_, trial) in enumerate(in_rounds(trials, options.rounds), 1):
        figures = runner.run(trial, steps)
        print(f"{place}/{count}  {trial.name}: {1000 * figures['step_s']:.2f} ms per step", flush=True)
    line = runner.measure_exchanges(options.threads)
    runs = {trial.name: medians(runner.figures[trial.name]) for trial in trials}
    gradient_bytes = facts["parameters"] * BYTES[facts["compression"]]
    pieces = max(1, -(-gradient_bytes // int(facts["bucket_mb"] * 2**20)))
    found = compute_shares(runs, line, gradient_bytes, pieces)
    advice = find_actions(found, runs, facts, options.np)
    report = Report(found, line, runs, facts, advice, options.np, options.backend)
    show(report)
    tried = try_actions(runner, options, steps, advice) if options.attempt else []
    show_tried(tried)
    file = folder / "diagnosis.json"
    file.write_text(json.dumps(as_json(report, tried), indent=1) + "\n")
    print(f"written: {file}")


def plan_trials(options: Options, facts: Mapping[str, Any]) -> list[Trial]:
    """Return the trials of each round."""
    batch, threads = facts["batch_size"], options.threads
    # Alone, a rank gets no more than its share of the cores: else it would be slowed down by its own threads, too.
    share = max(1, facts["cores"] // options.np)
    alone = min(facts["threads"], share) if facts["device"] == "cpu" else threads
    whole = ("--global-batch-size", "None", "--batch-size")
    trials = [
        Trial(NORMAL, options.np, (), threads),
        Trial(NO_DATA, options.np, ("--leave-out", "data"), threads),
        Trial(NO_EXCHANGE, options.np, ("--leave-out", "exchange"), threads),
        Trial(NEITHER, options.np, ("--leave-out", "data", "exchange"), threads),
        Trial(ALONE, 1, (*whole, str(batch)), alone),
        Trial(TWICE, 1, (*whole, str(2 * batch)), alone),
    ]
    if facts["device"] == "cpu" and facts["threads"] > 1:
        trials.append(Trial(ONE_THREAD, options.np, (), 1))
    return trials


def try_actions(
    runner: TrialRunner, options: Options, steps: int, advice: Sequence[Action]
) -> list[tuple[Action, float, float]]:
    """Run each action beside the unchanged job, and return it with the samples per second before and after."""
    tried = []
    for action in (action for action in advice if action.can_be_tried):
        threads = action.threads or options.threads
        before = Trial("before", options.np, (), options.threads)
        after = Trial(f"after: {action.text.partition(':')[0]}", options.np, action.words, threads)
        runner.figures.pop("before", None)
        for _, trial in in_rounds((before, after), options.rounds):
            runner.run(trial, max(MIN_STEPS, steps // action.batch_factor) if trial is after else steps)
        rates = [medians(runner.figures[trial.name])["samples_per_s"] for trial in (before, after)]
        tried.append((action, rates[0], rates[1]))
    return tried
