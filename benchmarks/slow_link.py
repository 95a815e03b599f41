"""What does a slow link between hosts cost, and what helps? Time per step, and the loss after the same samples.

    python -m benchmarks.slow_link --data-dir ../shared/data/mnist --output results/slow_link

Both engines, each compression that they have, one and four passes per step, on hosts made of namespaces (hosts.py)
that are joined by a fast link and by slow ones (slow_cable.py). Needs root. With --output the same command goes on
where it was stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from annotated_types import Ge, Gt

from benchmarks import NO_GPUS
from benchmarks.hosts import Host, hosts, missing
from benchmarks.results import describe_machine
from benchmarks.run import REPOSITORY
from benchmarks.slow_link_cases import BACKENDS, COMPRESSIONS, Case, Link, Plan
from benchmarks.slow_link_results import Measured, as_points, markdown
from hvd_trainer.config.checks import value_errors
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.run_folder import METRICS
from hvd_trainer.tools.runner.command import NOT_SAVED
from hvd_trainer.tools.runner.folder import locked_folder
from hvd_trainer.tools.runner.processes import Start
from hvd_trainer.tools.runner.records import RunRecord, read_runs
from hvd_trainer.tools.runner.step_stats import read_steps
from hvd_trainer.tools.runner.trial_runner import JobTrial, TrialRunner, in_rounds

JOB = ("-m", "benchmarks.ours.wide")
PORTS = itertools.count(29501)
"""Of the ranks' meetings, one for each."""


def read(case: Case, place: Path, _: Path) -> dict[str, Any] | None:
    """The figures of a training that has written to `place`; None if it has not come to its end.

    Raises:
        OptionError: it has no step that counts.
    """
    with suppress(OSError, ValueError, KeyError, IndexError):
        ranks = read_steps(place / "log")
        seconds = np.stack([rank["seconds"] for rank in ranks]).sum(axis=2).mean(axis=0)[case.warm_up :]
        end = json.loads((place / "log" / METRICS).read_text().splitlines()[-1])
        if end["event"] == "end" and len(ranks) == case.ranks:
            if len(seconds) == 0:
                hint = f"no step behind the first {case.warm_up}: raise --samples, or lower --batch-size"
                raise OptionError(f"{case}: {hint}")
            kept = {name: end[name] for name in ("samples", "train_loss", "test_loss")}
            return {"step_ms": 1000 * float(np.median(seconds)), "steps": end["step"], **kept}
    return None


def start_on(taken: Sequence[Host], ranks_per_host: int, words: Sequence[str]) -> Start:
    """How to start a job on hosts.

    No launcher starts its ranks: torchrun on each host would import PyTorch once more before it does.
    """
    meeting = f"tcp://{taken[0].address}:{next(PORTS)}"
    size, starts = len(taken) * ranks_per_host, []
    for rank in range(size):
        place, local = divmod(rank, ranks_per_host)
        world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks_per_host}
        variables = [f"{name}={value}" for name, value in world.items()]
        command = taken[place].command(["env", *variables, sys.executable, *words, "--init-method", meeting])
        starts.append(f"{shlex.join(command)} & rank{rank}=$!")
    waits = [f"wait $rank{rank} || code=$?" for rank in range(size)]
    environment = {"HOME": taken[0].environ["HOME"], "PYTHONPATH": str(REPOSITORY), **NO_GPUS}
    return Start(["sh", "-c", "\n".join([*starts, *waits, "exit ${code:-0}"])], environment, threads=1)


def measure(cases: Sequence[Case], rounds: int, data: Sequence[str], folder: Path, limit_s: float) -> None:
    """Runs what has not been run yet, forwards in one round and backwards in the next.

    Raises:
        OptionError: no such hosts can be made here, or a training has no step that counts.
    """
    runner = TrialRunner(folder, limit_s=limit_s, limit_option="--limit-s")
    to_do = [(n, case) for n, case in in_rounds(cases, rounds) if not runner.is_done(case._asdict(), n)]
    if not to_do:
        return
    if (reason := missing()) is not None:
        raise OptionError(f"Hosts of namespaces cannot be made here: {reason}")
    names = [f"host{place}" for place in range(max(case.hosts for case in cases))]
    with hosts(*names) as cluster, ExitStack() as link:

        def start(case: Case, number: int, place: Path, _: Path) -> Start:
            link.close()
            taken = cluster.hosts[: case.hosts]
            if case.mbit is not None:
                link.enter_context(cluster.slow_between(taken, mbit=case.mbit, delay_ms=case.delay_ms))
            for host in taken:
                # What the kernel remembers of another link would open TCP's windows wrongly.
                host.run(["ip", "tcp_metrics", "flush"])
            kept = ["--log-dir", str(place / "log"), "--record-steps", "--quiet", *NOT_SAVED]
            return start_on(taken, case.ranks_per_host, [*JOB, *case.arguments(number), *data, *kept])

        plan = []
        for number, case in to_do:
            # The number of the round is the seed, too.
            place = cluster.new_folder()
            functions = partial(start, case, number, place), partial(read, case, place)
            plan.append((number, JobTrial(str(case), case._asdict(), *functions)))
        for _ in runner.run_all(plan, describe=describe):
            pass


def describe(run: RunRecord) -> str:
    figures = run.figures
    return f"{figures['step_ms']:.1f} ms a step, test loss {figures['test_loss']:.4f} ({run.seconds:.0f} s)"


@contextmanager
def folder_of(output: Path | None) -> Iterator[Path]:
    """Where runs are written down; for who keeps nothing, one that is gone afterwards."""
    with ExitStack() as stack:
        if output is None:
            output = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd-slow-link-")))
        stack.enter_context(locked_folder(output))
        yield output


def data_options(data_dir: Path | None) -> list[str]:
    """How the job is told where its images are.

    Raises:
        OptionError: the hosts would not see them.
    """
    if data_dir is None:
        return []
    folder = data_dir.expanduser().resolve()
    if folder.is_relative_to("/tmp"):
        raise OptionError(f"--data-dir {data_dir}: each host has a /tmp of its own. Name a folder elsewhere")
    return ["--data-dir", str(folder)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data-dir", type=Path, help="MNIST's folder; without it: the small set of digits, to try this out")
    add("--output", type=Path, help="write DIR.md and DIR.json, and go on from what DIR/ has", metavar="DIR")
    add("--hosts", nargs="+", type=int, default=[2], metavar="N")
    add("--ranks-per-host", type=int, default=1, metavar="N")
    slow = [Link(100.0, 20.0)]
    add("--links", nargs="+", type=Link.parse, default=slow, metavar="MBIT/MS", help="rate and delay, each way")
    add("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    add("--compressions", nargs="+", choices=COMPRESSIONS, default=COMPRESSIONS)
    add("--accumulations", nargs="+", type=int, default=[1, 4], metavar="N", help="passes per step")
    add("--width", type=int, default=768, help="of the model: 768 has gradients of 4.6 MB")
    add("--batch-size", type=int, default=128, help="images per rank and pass")
    add("--samples", type=int, default=60_000, help="images of the epoch after which the loss is taken")
    add("--steps", type=int, default=12, help="that count, on slow links")
    add("--rounds", type=int, default=3, help="each with a seed of its own")
    add("--limit-s", type=float, default=300.0, help="for one run")
    add("--fit-points", action="store_true", help="measure more links, sizes and hosts, for a model of costs")
    args = parser.parse_args(argv)
    numbers = ("ranks_per_host", "width", "batch_size", "samples", "steps", "rounds")
    mistakes = [
        *value_errors("hosts", min(args.hosts), [Ge(2)]),
        *value_errors("accumulations", min(args.accumulations), [Ge(1)]),
        *(error for name in numbers for error in value_errors(name, getattr(args, name), [Ge(1)])),
        *value_errors("limit_s", args.limit_s, [Gt(0)]),
    ]
    if mistakes:
        parser.error("; ".join(mistakes))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if all was measured, else 1; 2 after a mistake; 130 after Ctrl-C."""
    args = parse(argv)
    plan = Plan(
        tuple(args.hosts),
        args.ranks_per_host,
        tuple(args.links),
        tuple(args.backends),
        tuple(args.compressions),
        tuple(args.accumulations),
        *(args.width, args.batch_size, args.samples, args.steps),
        "digits" if args.data_dir is None else "mnist",
    )
    cases, interrupted = plan.cases(fit=args.fit_points), False
    output = None if args.output is None else args.output.expanduser().resolve()
    try:
        machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
        data = data_options(args.data_dir)
        with folder_of(output) as folder:
            try:
                with redirect_stdout(sys.stderr):  # the output is the table
                    measure(cases, args.rounds, data, folder, args.limit_s)
            except KeyboardInterrupt:
                interrupted = True
            measured = Measured(read_runs(folder), args.rounds, args.steps)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = markdown(measured, plan, cases, machine)
    print(text, end="")
    if output is not None:
        Path(f"{output}.md").write_text(text)
        Path(f"{output}.json").write_text(json.dumps(as_points(measured, cases, machine), indent=1) + "\n")
    if interrupted:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return int(any(len(measured.of(case, "step_ms")) < args.rounds for case in cases))


if __name__ == "__main__":
    sys.exit(main())
