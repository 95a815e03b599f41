"""`python -m hvd_trainer verify-resume`: kill a training again and again, and prove that nothing was lost.

A small job runs once undisturbed. Then it runs again, and its ranks and its launcher are killed at random moments
of every phase, also while a checkpoint is being written; after each the same command goes on with --resume auto.
In the end the two must agree: each bit of weights and optimizer, and each sample trained on once in every epoch.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from hvd_trainer.checkpoint import storage
from hvd_trainer.errors import LaunchError, OptionError
from hvd_trainer.tools.runner.command import command_for, read_job
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.verify_resume.audit_job import STEPS_PER_EPOCH
from hvd_trainer.tools.verify_resume.injector import FaultInjector, Kill, PlannedKill
from hvd_trainer.tools.verify_resume.script import check_script, verify_script
from hvd_trainer.utils.serialization import flatten
from hvd_trainer.utils.text import COMMAND

JOB = "hvd_trainer.tools.verify_resume.audit_job"
STEPS_PER_KILL = 2 * STEPS_PER_EPOCH
PLACES = ("start", "data", "forward", "backward", "reduce", "step", "evaluate", "save", "write", "launcher")
"""The phases of training, the background write of a checkpoint, and the launcher."""
BATCH, SAVE_EVERY = 16, 4


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0 if nothing was lost, else 1.

    Raises:
        OptionError: an option is out of its range.
        LaunchError: the job does not run, killed or not.
    """
    parser = argparse.ArgumentParser(
        prog=f"{COMMAND} verify-resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=12, metavar="N", help="how many (default: 12)")
    parser.add_argument("--backend", choices=["horovod", "ddp"], default="horovod")
    parser.add_argument("-np", "--num-processes", type=int, default=2, metavar="P", help="ranks (default: 2)")
    parser.add_argument("--launcher", choices=["horovodrun", "torchrun"], help="default: the backend's own")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument("--keep", action="store_true", help="keep the folder of both runs")
    parser.epilog = (
        "With -- SCRIPT ..., your script is killed and started again. Write {folder} where it is told its "
        "checkpoint: each run gets its own."
    )
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:place])
    job = read_job(words[place + 1 :]) if place < len(words) else None
    if job is not None:
        if is_trainer_job(job):
            raise OptionError(
                "A job that is built on the Trainer resumes as the job of this command does: leave out -- and all "
                "behind it"
            )
        check_script(job)
    if options.kills < 1 or options.num_processes < 1:
        raise OptionError("--kills and -np must be 1 or more")
    folder = Path(tempfile.mkdtemp(prefix="hvd_trainer-verify-"))
    try:
        if job is not None:
            return verify_script(
                job,
                engine=options.backend,
                ranks=options.num_processes,
                kills=options.kills,
                draw=random.Random(options.seed),
                folder=folder,
            )
        return verify(options, folder)
    finally:
        if options.keep:
            print(f"both runs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def verify(options: argparse.Namespace, folder: Path) -> int:
    """Run the job undisturbed and with kills, print what happened, and compare the two runs."""
    epochs = (options.kills + 4) * STEPS_PER_KILL // STEPS_PER_EPOCH
    launcher = options.launcher or {"horovod": "horovodrun", "ddp": "torchrun"}[options.backend]
    job = [
        "-m",
        JOB,
        "--backend",
        options.backend,
        "--batch-size",
        str(BATCH),
    ]
    job += ["--epochs", str(epochs), "--save-every-steps", str(SAVE_EVERY), "--log-every", "1000000"]

    def start(name: str, *more: str) -> FaultInjector:
        command = command_for(launcher, options.num_processes, [*job, "--log-dir", str(folder / name), *more])
        return FaultInjector(command, folder / name, options.num_processes)

    print(f"{epochs * STEPS_PER_EPOCH} steps of {options.num_processes} ranks on {options.backend}, by {launcher}")
    with start("undisturbed") as whole:
        whole.finish()
    kills: list[Kill] = []
    draw = random.Random(options.seed)
    planned = plan_kills(options.kills, options.num_processes, draw)
    while True:
        with start("disturbed", "--resume", "auto") as injector:
            if len(kills) == options.kills or planned[len(kills)].place != "start":
                recovered = injector.wait_for_a_step()
                for kill in kills:
                    kill.recovery_s = kill.recovery_s or recovered - kill.at
            if len(kills) == options.kills:
                injector.finish()
                break
            latest = injector.inject(planned[len(kills)])
            if latest is None:
                raise LaunchError(f"The job ended before kill {len(kills) + 1}:\n{injector.output()[-2000:]}")
            kills.append(latest)
            print_kill(len(kills), latest)
    return report(kills, folder, epochs, options.num_processes)


def plan_kills(kills: int, size: int, draw: random.Random) -> list[PlannedKill]:
    """Return kills at all places, equally often and in random order, each with a random rank and moment."""
    places = [PLACES[number % len(PLACES)] for number in range(kills)]
    draw.shuffle(places)
    planned: list[PlannedKill] = []
    for number, place in enumerate(places):
        step = number * STEPS_PER_KILL + draw.randrange(2, STEPS_PER_KILL)
        # Only rank 0 writes.
        rank = 0 if place in ("save", "write") else draw.randrange(size)
        planned.append(PlannedKill(place, rank, step, draw.random()))
    return planned


def print_kill(number: int, kill: Kill) -> None:
    """Print a line about a kill."""
    who = "the launcher" if kill.rank is None else f"rank {kill.rank}, {kill.place}"
    print(f"kill {number}: in step {kill.step + 1}, {who}", flush=True)


def report(kills: Sequence[Kill], folder: Path, epochs: int, size: int) -> int:
    """Print the table, and return the exit code."""
    seconds = sorted(kill.recovery_s for kill in kills)
    lost = count_lost_samples(folder / "disturbed" / "audit", epochs, size)
    bits = count_different_bits(*(folder / name / "checkpoints" for name in ("undisturbed", "disturbed")))
    left = sum(kill.left_behind for kill in kills)
    rows: list[tuple[str, object]] = [
        (f"kills in {place}", count) for place, count in sorted(Counter(kill.place for kill in kills).items())
    ]
    rows += [
        ("kills", len(kills)),
        ("recovery, s, p50", f"{percentile(seconds, 0.5):.1f}"),
        ("recovery, s, p95", f"{percentile(seconds, 0.95):.1f}"),
        ("samples lost or repeated", lost),
        ("bits different", bits),
        ("processes left behind", left),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value:>6}" for name, value in rows))
    return int(bool(lost or bits or left))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below or at which this share of the sorted values lies."""
    return values[min(len(values) - 1, int(share * len(values)))]


def count_lost_samples(folder: Path, epochs: int, size: int) -> int:
    """Return how many samples of all epochs were not trained on exactly once, in the history that led to the end.

    A step that a kill has undone is recorded again when it is repeated; the last record of a step counts.
    """
    steps: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for rank in range(size):
        for line in (folder / f"rank-{rank}").read_text().splitlines():
            step, epoch, *numbers = map(int, (line or "0 0").split())
            if len(numbers) == BATCH:
                steps[rank, step] = epoch, numbers
    seen: Counter[tuple[int, int]] = Counter()
    for epoch, numbers in steps.values():
        seen.update((epoch, number) for number in numbers)
    wanted = {(epoch, number) for epoch in range(epochs) for number in range(STEPS_PER_EPOCH * BATCH * size)}
    return sum(seen[place] != 1 for place in wanted) + len(seen.keys() - wanted)


def count_different_bits(first: Path, second: Path) -> int:
    """Count the bits that differ in the tensors of two runs' last checkpoints: weights, statistics, optimizer."""
    states = []
    for folder in (first, second):
        (_, path), *_ = storage.find_checkpoints(folder)[0]
        states.append(storage.load(path))
    ours, theirs = (flatten([state["model"], state["optimizer"]])[1] for state in states)
    if ours.keys() != theirs.keys():
        raise LaunchError("The two runs' last checkpoints do not hold the same tensors.")
    return sum(different_bits(ours[place], theirs[place]) for place in ours)


def different_bits(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Return how many bits of two tensors of one type differ."""
    left, right = (tensor.contiguous().view(-1).view(torch.uint8).numpy() for tensor in (ours, theirs))
    if len(left) != len(right):
        return 8 * max(len(left), len(right))
    return sum(int(byte).bit_count() for byte in left ^ right)
