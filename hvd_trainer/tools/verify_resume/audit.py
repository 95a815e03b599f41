"""Kill the audit job in every phase, and compare it with an undisturbed run by bits and samples."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from hvd_trainer.checkpoint import storage
from hvd_trainer.errors import LaunchError
from hvd_trainer.tools.runner.command import LAUNCHER_OF, command_for
from hvd_trainer.tools.runner.processes import Start
from hvd_trainer.tools.verify_resume.audit_job import STEPS_PER_EPOCH
from hvd_trainer.tools.verify_resume.injector import END_S, JOB, FaultInjector, Kill, running_job
from hvd_trainer.utils.serialization import flatten

STEPS_PER_KILL = 2 * STEPS_PER_EPOCH
PLACES = ("start", "data", "forward", "backward", "reduce", "step", "evaluate", "save", "write", "launcher")
"""The phases of training, the background write of a checkpoint, and the launcher."""
BATCH, SAVE_EVERY = 16, 4


def verify_audit_job(
    launcher: str | None, *, engine: str, ranks: int, kills: int, draw: random.Random, folder: Path
) -> int:
    """Run the job undisturbed and with kills, print what happened, compare, and return 0 if nothing was lost.

    Raises:
        LaunchError: the job does not run, killed or not.
    """
    launcher = launcher or LAUNCHER_OF[engine]
    epochs = (kills + 4) * STEPS_PER_KILL // STEPS_PER_EPOCH
    job = ["-m", JOB, "--backend", engine, "--batch-size", str(BATCH), "--epochs", str(epochs)]
    job += ["--save-every-steps", str(SAVE_EVERY), "--log-every", "1000000"]

    def start(name: str, *more: str) -> Start:
        return Start(command_for(launcher, ranks, [*job, "--log-dir", str(folder / name), *more]))

    print(f"{epochs * STEPS_PER_EPOCH} steps of {ranks} ranks on {engine}, by {launcher}")
    with running_job(start("undisturbed"), folder / "undisturbed") as whole:
        whole.finish(END_S)
    done: list[Kill] = []
    for planned in [*plan_kills(kills, ranks, draw), None]:
        with running_job(start("disturbed", "--resume", "auto"), folder / "disturbed") as disturbed:
            injector = FaultInjector(disturbed, ranks)
            if planned is None or planned.place != "start":
                recovered = injector.wait_for_a_step()
                for kill in done:
                    kill.recovery_s = kill.recovery_s or recovered - kill.at
            if planned is None:
                disturbed.finish(END_S)
            else:
                injector.inject(planned)
                done.append(planned)
                at_rank = f"rank {planned.rank}, {planned.place}"
                who = "the launcher" if planned.place == "launcher" else at_rank
                print(f"kill {len(done)}: in step {planned.step + 1}, {who}", flush=True)
    return _report(done, folder, epochs, ranks)


def plan_kills(kills: int, size: int, draw: random.Random) -> list[Kill]:
    """Return kills at all places, equally often and in random order, each with a random rank and moment."""
    places: list[str] = []
    while len(places) < kills:
        places += draw.sample(PLACES, len(PLACES))
    planned: list[Kill] = []
    for number, place in enumerate(places[:kills]):
        step = number * STEPS_PER_KILL + draw.randrange(2, STEPS_PER_KILL)
        # Only rank 0 writes.
        rank = 0 if place in ("save", "write") else draw.randrange(size)
        planned.append(Kill(place, rank, step, draw.random()))
    return planned


def _report(kills: Sequence[Kill], folder: Path, epochs: int, size: int) -> int:
    """Print the table, and return the exit code."""
    seconds = [kill.recovery_s for kill in kills]
    lost = count_lost_samples(folder / "disturbed" / "audit", epochs, size)
    bits = count_different_bits(*(folder / name / "checkpoints" for name in ("undisturbed", "disturbed")))
    left = sum(kill.left_behind for kill in kills)
    places = Counter(kill.place for kill in kills)
    rows: dict[str, object] = {
        **{f"kills in {place}": count for place, count in sorted(places.items())},
        "kills": len(kills),
        "recovery, s, p50": f"{median(seconds):.1f}",
        "recovery, s, p95": f"{np.percentile(seconds, 95):.1f}",
        "samples lost or repeated": lost,
        "bits different": bits,
        "processes left behind": left,
    }
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {value:>6}" for name, value in rows.items()))
    return int(bool(lost or bits or left))


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
    seen = Counter((epoch, number) for epoch, numbers in steps.values() for number in numbers)
    wanted = {(epoch, number) for epoch in range(epochs) for number in range(STEPS_PER_EPOCH * BATCH * size)}
    return sum(seen[place] != 1 for place in wanted) + len(seen.keys() - wanted)


def count_different_bits(first: Path, second: Path) -> int:
    """Count the bits that differ in the tensors of two runs' last checkpoints: weights, statistics, optimizer."""
    states = []
    for folder in (first, second):
        (_, path), *_ = storage.find_checkpoints(folder)[0]
        state = storage.load(path)
        tensors = flatten([state["model"], state["optimizer"]])[1]
        states.append({place: t.contiguous().view(-1).view(torch.uint8).numpy() for place, t in tensors.items()})
    ours, theirs = states
    if {place: len(its) for place, its in ours.items()} != {place: len(its) for place, its in theirs.items()}:
        raise LaunchError("The two runs' last checkpoints do not hold the same tensors.")
    return sum(int(np.unpackbits(ours[place] ^ theirs[place]).sum()) for place in ours)
