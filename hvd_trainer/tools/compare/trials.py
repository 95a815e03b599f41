"""What a comparison consists of: who takes part, on how many ranks, in which order.

Pure: nothing is started here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.runner.command import LAUNCHER_OF, NOT_SAVED, option_of, script_checksum
from hvd_trainer.tools.runner.runs import key_of


@dataclass(frozen=True)
class Entry:
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
            return ["-m", "hvd_trainer.tools.runner.step_probe", str(log), *self.words]
        given = {option_of(word) for word in self.words}
        pairs = zip(NOT_SAVED[::2], NOT_SAVED[1::2], strict=True)
        unsaved = [word for name, value in pairs if name not in given for word in (name, value)]
        return [*self.words, *unsaved, "--backend", self.engine, "--log-dir", str(log), "--record-steps"]


@dataclass(frozen=True)
class Point:
    """One contestant on one number of ranks."""

    contestant: Entry
    ranks: int
    threads: int
    """of each rank, on the CPU"""
    setting: Mapping[str, Any]
    """what else decides on its figures: versions, steps that do not count"""

    @property
    def label(self) -> str:
        return f"{self.contestant.name} x {self.ranks}"

    @property
    def processes(self) -> int:
        """All that it is made of; DataParallel's ranks are GPUs of one."""
        return 1 if self.contestant.engine == "data-parallel" else self.ranks

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides on its figures, in plain JSON."""
        return {
            "contestant": self.contestant.name,
            "engine": self.contestant.engine,
            "words": list(self.contestant.words),
            "script": script_checksum(self.contestant.words),
            "ranks": self.ranks,
            "threads": self.threads,
            **self.setting,
        }

    @property
    def key(self) -> str:
        return key_of(self.identity)


def entries(
    job: tuple[str, ...], engines: Sequence[str], baselines: Sequence[str], *, most: int = 1, gpus: int = 0
) -> list[Entry]:
    """Who takes part, in the order of the table.

    Args:
        most: ranks at most.
        gpus: that are visible.

    Raises:
        OptionError: a name is unknown or comes twice, a baseline does not say what starts it, or there are too few
            GPUs.
    """
    found = []
    for name in engines:
        if name not in LAUNCHER_OF:
            raise OptionError(f"--engines {name}: there are {', '.join(LAUNCHER_OF)}")
        if name == "data-parallel" and not 2 <= most <= gpus:
            raise OptionError(
                f"--engines data-parallel needs as many GPUs as ranks, two at least (here: {gpus}, and --np "
                f"{most}): leave it out"
            )
        found.append(Entry(name, name, job))
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
        found.append(Entry(script, engine, tuple(words), is_ours=False))
    names = [contestant.name for contestant in found]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"{name} takes part twice: leave one out, or give the file another name")
    return found


def points(
    everyone: Sequence[Entry], numbers: Sequence[int], threads: int, setting: Mapping[str, Any]
) -> list[Point]:
    """All points, those on as many ranks side by side; `single` is on one rank only, `data-parallel` never is."""
    return [
        Point(contestant, ranks, threads, setting)
        for ranks in numbers
        for contestant in everyone
        if contestant.engine != ("data-parallel" if ranks == 1 else "single")
    ]


def in_rounds(plan: Sequence[Point], rounds: int) -> Iterator[tuple[int, Point]]:
    """Each point once in each round, forwards in one and backwards in the next: a drift favours nobody."""
    for number in range(1, rounds + 1):
        for point in plan if number % 2 else reversed(plan):
            yield number, point
