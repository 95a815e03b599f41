"""`python -m hvd_trainer grid`: measures a job in all configurations of a grid, such as ranks x stages x chunks.

python -m hvd_trainer grid --job imdb --ranks 1,2,4 --stages 1,2 --chunks 1,2,4,8 --batch-size 32,64

Every configuration is started as a job of its own, in rounds: all of them once, then all of them again. A run that
has ended is written down at once, so that the same command goes on where a killed one has stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge, Gt

from hvd_trainer.config.checks import check_ranges, flag
from hvd_trainer.errors import OptionError
from hvd_trainer.tools.grid import heat_map, report
from hvd_trainer.tools.grid.configurations import Axis, Configuration, configurations, in_rounds, label, read_axis
from hvd_trainer.tools.grid.job_options import Job, find_job
from hvd_trainer.tools.grid.results import are_figures, read_figures
from hvd_trainer.tools.grid.rows import Row, make_rows
from hvd_trainer.tools.runner import formats
from hvd_trainer.tools.runner.command import command_for
from hvd_trainer.tools.runner.formats import check_installed
from hvd_trainer.tools.runner.runs import Run, append_run, locked_folder, log_dir, read_runs, run_once, split
from hvd_trainer.utils.text import COMMAND, plural

Values = Annotated[str | None, tyro.conf.arg(metavar="V,V,...")]


@dataclass(frozen=True)
class Axes:
    """Axes of the grid: one value, or several with commas between them. Without an axis: the job's default."""

    ranks: Annotated[str, tyro.conf.arg(metavar="N,N,...")] = "1"
    """processes of the job, such as 1,2,4"""
    threads: Annotated[str, tyro.conf.arg(metavar="N,N,...")] = "1"
    """CPU threads of each process"""
    stages: Values = None
    """this and all that follow: see --help of the job"""
    devices_per_rank: Values = None
    chunks: Values = None
    batch_size: Values = None
    schedule: Values = None
    backend: Values = "ddp"
    precision: Values = None
    activation_checkpointing: Values = None
    shard: Values = None
    axis: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=V,V,...")] = ()
    """any other option of the job, such as --axis seed=1,2; may be given again and again"""


@dataclass(frozen=True)
class Options:
    """Measure a job in all configurations of a grid. What follows -- is given to the job in each of them."""

    axes: tyro.conf.OmitArgPrefixes[Axes]

    job: str = "imdb"
    """imdb, mnist, or the module of a job of yours, such as my_package.my_job"""
    out: Path = Path("runs/grid")
    """folder for runs.jsonl, grid.csv and the pictures; the same command again goes on with what is there"""
    rounds: Annotated[int, Ge(0)] = 3
    """how often all configurations are run; 0: only show what there is"""
    steps: Annotated[int, Ge(1)] = 10
    """optimizer steps in each of the two epochs of a run, the last of which counts (imdb's synthetic reviews only;
    data of a fixed size is gone through whole)"""
    timeout_s: Annotated[float, Gt(0)] = 600.0
    """after so many seconds a run is killed; it is tried again when the same command is typed again"""
    retry_failed: bool = False
    """start again what has failed, too"""


@dataclass(frozen=True)
class Grid:
    """What is to be measured, and where it is written down."""

    job: Job
    axes: Sequence[Axis]
    configurations: Sequence[Configuration]
    heading: str
    """what they have in common"""
    folder: Path

    @property
    def possible(self) -> list[Configuration]:
        return [configuration for configuration in self.configurations if configuration.reason is None]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 if all that is possible has been measured, else 1; 130 after Ctrl-C.

    Raises:
        OptionError: an option is out of its range, or the job does not know it; the folder cannot be used.
    """
    own, further = split(argv)
    options = tyro.cli(Options, prog=f"{COMMAND} grid", args=own)
    check_ranges(options)
    check_installed()
    job, axes = find_job(options.job), read_axes(options.axes)
    folder = options.out.expanduser().resolve()
    cells = configurations(job, axes, further, options.steps)
    grid = Grid(job, axes, cells, heading(job, axes, further), folder)
    with locked_folder(folder):
        interrupted = False
        try:
            measure(grid, options)
        except KeyboardInterrupt:
            interrupted = True
        rows = make_rows(grid.configurations, read_runs(folder, are_figures), job.samples)
        show(grid, rows)
    if interrupted:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return int(any(row.state not in ("done", "impossible") for row in rows))


def read_axes(options: Axes) -> list[Axis]:
    """The axes that were given, in the order of `--help`.

    Raises:
        OptionError: one has no values, or was given twice.
    """
    given = [(entry.name, getattr(options, entry.name)) for entry in fields(Axes) if entry.name != "axis"]
    for text in options.axis:
        name, equals, values = text.partition("=")
        if not equals:
            raise OptionError(f"--axis {text}: type the option's name and its values, such as --axis seed=1,2")
        given.append((name.strip().lstrip("-").replace("-", "_"), values))
    axes = [read_axis(name, values) for name, values in given if values is not None]
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"{flag(name)} is given twice: put all its values into one list")
    return axes


def measure(grid: Grid, options: Options) -> None:
    """Runs what has not been run yet, and writes down each run as it ends."""
    ends = {(run.key, run.round): run.state for run in read_runs(grid.folder, are_figures)}
    done = {place for place, state in ends.items() if state == "done"}
    # What failed will fail again, and take as long to do so.
    given_up = set() if options.retry_failed else {key for (key, _), state in ends.items() if state == "failed"}
    plan = list(in_rounds(grid.possible, options.rounds))
    open_ones = [(n, c) for n, c in plan if (c.key, n) not in done and c.key not in given_up]
    impossible = len(grid.configurations) - len(grid.possible)
    print(
        f"{plural(len(grid.configurations), 'configuration')}, {impossible} of them impossible; "
        f"{plural(len(plan), 'run')} in {plural(options.rounds, 'round')}, {len(open_ones)} to do; all is kept in "
        f"{grid.folder}",
        flush=True,
    )
    for count, (number, configuration) in enumerate(open_ones, 1):
        if configuration.key not in given_up:
            run = start(grid, configuration, number, options.timeout_s)
            append_run(grid.folder, run)
            if run.state != "done":
                given_up.add(configuration.key)
            print(f"{count}/{len(open_ones)}  {line_of(run, configuration, grid.axes)}", flush=True)


def start(grid: Grid, configuration: Configuration, number: int, limit_s: float) -> Run:
    """One run of one configuration, from its start to its end."""
    job = ["-m", grid.job.module, *configuration.arguments, "--log-dir", str(log_dir(grid.folder))]
    command = command_for("torchrun", configuration.ranks, job)
    return run_once(
        command,
        grid.folder,
        configuration.identity,
        number,
        threads=configuration.threads,
        limit_s=limit_s,
        read=read_figures,
    )


def line_of(run: Run, configuration: Configuration, axes: Sequence[Axis]) -> str:
    """`round 1, ranks 2, stages 2: 310 samples/s (12 s)`."""
    rate = run.figures.get("samples_per_s")
    result = f"{run.state}: {run.note}" if rate is None else f"{formats.number(rate)} samples/s"
    return f"round {run.round}, {configuration.named(axes)}: {result} ({run.seconds:.0f} s)"


def show(grid: Grid, rows: Sequence[Row]) -> None:
    """Writes grid.csv and the pictures, and prints the table."""
    report.write_csv(rows, grid.axes, grid.folder / "grid.csv")
    report.print_table(rows, grid.axes)
    report.print_differences(rows, grid.axes)
    files = [grid.folder / "grid.csv"]
    for quantity in heat_map.QUANTITIES:
        files += heat_map.draw(rows, grid.axes, quantity, grid.heading, grid.folder)
    print("written: " + ", ".join(map(str, files)), flush=True)


def heading(job: Job, axes: Sequence[Axis], further: Sequence[str]) -> str:
    """What all configurations have in common: `imdb --preset small, ranks 2, backend ddp`."""
    single = [f"{label(axis.name)} {axis.values[0]}" for axis in axes if len(axis.values) == 1]
    return ", ".join([" ".join([job.name, *further]), *single])
