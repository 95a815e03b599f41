"""What a comparison consists of: who takes part, on how many ranks, in which order.

Pure: nothing is started here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.runs import key_of

LAUNCHER_OF = {"horovod": "horovodrun", "ddp": "torchrun", "single": "python"}
"""What starts an engine as its own documentation does."""
OURS = ("--backend", "--log-dir", "--record-steps")
"""Options that the comparison gives to the job itself."""
# What is saved takes time that is no engine's.
NOT_SAVED = ("--save-every-epochs", "None", "--save-every-steps", "None", "--save-every-s", "None")


@dataclass(frozen=True)
class Contestant:
    """An engine under the job, or a script that is compared with it."""

    name: str
    engine: str
    words: tuple[str, ...]
    """what follows `python`"""
    is_ours: bool = True
    """whether it is built on the Trainer, and keeps its own figures"""

    @property
    def launcher(self) -> str:
        return LAUNCHER_OF[self.engine]

    def arguments(self, log: Path) -> list[str]:
        """What follows `python` in a run that is measured."""
        if not self.is_ours:
            return ["-m", "hvd_trainer.tools.probe", str(log), *self.words]
        given = {word.partition("=")[0].replace("_", "-") for word in self.words}
        pairs = zip(NOT_SAVED[::2], NOT_SAVED[1::2], strict=True)
        unsaved = [word for name, value in pairs if name not in given for word in (name, value)]
        return [*self.words, *unsaved, "--backend", self.engine, "--log-dir", str(log), "--record-steps"]


@dataclass(frozen=True)
class Point:
    """One contestant on one number of ranks."""

    contestant: Contestant
    ranks: int
    threads: int
    """of each rank, on the CPU"""
    setting: Mapping[str, Any]
    """what else decides on its figures: versions, steps that do not count"""

    @property
    def label(self) -> str:
        return f"{self.contestant.name} x {self.ranks}"

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides on its figures, in plain JSON."""
        return {
            "contestant": self.contestant.name,
            "engine": self.contestant.engine,
            "words": list(self.contestant.words),
            "ranks": self.ranks,
            "threads": self.threads,
            **self.setting,
        }

    @property
    def key(self) -> str:
        return key_of(self.identity)


def read_job(words: Sequence[str]) -> tuple[str, ...]:
    """The job, as what follows `python`.

    Raises:
        OptionError: there is none, its file is missing, or it is given what the comparison gives.
    """
    job = list(words)
    if job and Path(job[0]).name.startswith("python"):
        del job[0]
    if not job or job == ["-m"]:
        raise OptionError("Name the job behind --, such as: -- -m hvd_trainer.mnist --epochs 1")
    if job[0].startswith("-") and job[0] != "-m":
        raise OptionError(f"-- {job[0]}: begin with the job, such as: -- -m hvd_trainer.mnist --epochs 1")
    if job[0] != "-m" and not Path(job[0]).is_file():
        raise OptionError(f"-- {job[0]}: there is no such file. A module is named by -m: -- -m {job[0]}")
    taken = [word for word in job if word.partition("=")[0].replace("_", "-") in OURS]
    if taken:
        raise OptionError(f"Leave {' and '.join(taken)} out of the job: each run gets its own")
    return tuple(job)


def contestants(job: tuple[str, ...], engines: Sequence[str], baselines: Sequence[str]) -> list[Contestant]:
    """Who takes part, in the order of the table.

    Raises:
        OptionError: a name is unknown or comes twice, or a baseline does not say what starts it.
    """
    found = []
    for name in engines:
        if name not in LAUNCHER_OF:
            raise OptionError(f"--engines {name}: there are {', '.join(LAUNCHER_OF)}")
        found.append(Contestant(name, name, job))
    for text in baselines:
        engine, *words = text.split()
        if engine not in ("horovod", "ddp") or not words:
            raise OptionError(
                f"--baseline {text!r}: say what starts it, and the script with its arguments, such as "
                f"--baseline 'ddp examples/mnist/plain_ddp.py --epochs 1'"
            )
        if words[0] != "-m" and not Path(words[0]).is_file():
            raise OptionError(f"--baseline {text!r}: there is no file {words[0]}")
        script = words[1] if words[0] == "-m" and len(words) > 1 else Path(words[0]).name
        found.append(Contestant(script, engine, tuple(words), is_ours=False))
    names = [contestant.name for contestant in found]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"{name} takes part twice: leave one out, or give the file another name")
    return found


def points(
    everyone: Sequence[Contestant], numbers: Sequence[int], threads: int, setting: Mapping[str, Any]
) -> list[Point]:
    """All points, those on as many ranks side by side; `single` is on one rank only."""
    return [
        Point(contestant, ranks, threads, setting)
        for ranks in numbers
        for contestant in everyone
        if ranks == 1 or contestant.engine != "single"
    ]


def in_rounds(plan: Sequence[Point], rounds: int) -> Iterator[tuple[int, Point]]:
    """Each point once in each round, forwards in one and backwards in the next: a drift favours nobody."""
    for number in range(1, rounds + 1):
        for point in plan if number % 2 else reversed(plan):
            yield number, point
