"""Read a tool's options and the job behind `--`, and build the command lines that start it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeVar

from tyro.conf import arg

from hvd_trainer.config.checks import find_wrong_values, refuse
from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import OptionError
from hvd_trainer.utils.text import COMMAND, INSTALL_HOROVOD

T = TypeVar("T")
NP = arg(aliases=["-np"])
"""Marks the option --np of a command, which horovodrun calls -np."""

LAUNCHER_OF = {"horovod": "horovodrun", "ddp": "torchrun", "single": "python", "data-parallel": "python"}
"""The program that starts an engine in the engine's own documentation."""
OPEN_MPI = {
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Variables by which Open MPI's mpirun starts ranks for root, and more of them than there are cores."""


def read_command(name: str, kind: type[T], argv: Sequence[str]) -> tuple[T, tuple[str, ...]]:
    """Return the options of a tool, and the words that follow `python` of the job behind `--`.

    Raises:
        OptionError: an option is out of its range, or there is no job.
    """
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    script = next((word for word in words if word.endswith(".py")), None)
    # A value of several words, such as --baseline "ddp train.py", is no job; nor is one, where a job follows.
    if script is not None and "--" not in words and " " not in script:
        raise OptionError(f"Put -- before the job: {COMMAND} {name} ... -- {script}")
    options = read_words(kind, words[:place], program=f"{COMMAND} {name}", job=" -- JOB")
    refuse(find_wrong_values(options).values())
    return options, read_job(words[place + 1 :])


def read_backends(text: str, known: Collection[str], *, least: int = 1) -> list[str]:
    """Return the engines of `--backend horovod,ddp`.

    Raises:
        OptionError: one is not known, or comes twice, or they are fewer than `least`.
    """
    names = [name.strip() for name in text.split(",")]
    if len(names) < least or not {*names} <= {*known} or len(names) != len({*names}):
        count = "" if least == 1 else f"{least} or more of "
        raise OptionError(
            f"--backend {text}: name {count}{', '.join(known)}, each once, with commas between them. Type: "
            f"--backend horovod,ddp"
        )
    return names


def read_job(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that follow `python`, of the job behind `--`.

    Raises:
        OptionError: there is none, its file or module is missing, or a word cannot be recorded.
    """
    job = list(words)
    if job and re.fullmatch(r"python[\d.]*(t|d|-dbg)?", Path(job[0]).name):
        del job[0]
    for word in job:
        if word != word.encode(errors="replace").decode():
            raise OptionError(f"-- {word!a}: it is not UTF-8, and cannot be recorded. Rename the file or folder")
    if not job or job == ["-m"]:
        raise OptionError("Name the job behind --, such as: -- -m hvd_trainer.mnist --epochs 1")
    if job[0].startswith("-") and job[0] != "-m":
        raise OptionError(f"-- {job[0]}: begin with the job, such as: -- -m hvd_trainer.mnist --epochs 1")
    if job[0] == "-m" and not _has_module(job[1]):
        raise OptionError(f"-- -m {job[1]}: there is no such module. A file is named without -m: -- train.py")
    if job[0] != "-m" and not Path(job[0]).is_file():
        raise OptionError(f"-- {job[0]}: there is no such file. A module is named by -m: -- -m {job[0]}")
    return tuple(job)


def _has_module(name: str) -> bool:
    """Return whether there is such a module; nothing is imported."""
    package, *parts = name.split(".")
    spec = importlib.util.find_spec(package) if package else None
    for part in parts:
        if spec is not None:
            spec = PathFinder.find_spec(part, spec.submodule_search_locations or [])
    return spec is not None


def option_of(word: str) -> str:
    """Return the option in a word of a command line, as it is usually typed: `--max-steps` for `--max_steps=5`."""
    return word.partition("=")[0].replace("_", "-")


def with_options(job: Sequence[str], options: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the job's words with options and their values, or with switches, for the values `true` and `false`.

    Each comes at the place of the one that it replaces, or at the end. An option that the job is typed with twice
    is replaced twice, since the last one counts.
    """
    words = list(job)
    for option, value in options:
        places = [place for place, word in enumerate(words) if option_of(word) == option_of(option)]
        is_switch = value in ("true", "false")
        for place in reversed(places or [len(words)]):
            old = "".join(words[place : place + 1])
            typed = old.partition("=")[0] or option
            new = ([typed] if value == "true" else []) if is_switch else [typed, value]
            words[place : place + (1 if is_switch or "=" in old else 2)] = new
    return tuple(words)


def option_values(job: Sequence[str], option: str) -> list[str]:
    """Return the values that a job's words give to an option, each time that it comes."""
    places = [place for place, word in enumerate(job) if option_of(word) == option]
    return [job[p].partition("=")[2] if "=" in job[p] else "".join(job[p + 1 : p + 2]) for p in places]


def launcher_of(engine: str, job: Sequence[str]) -> str:
    """Return the program that starts a Trainer job on an engine: mpirun for a Horovod that is to use MPI."""
    on_mpi = option_values(job, "--transport")[-1:] == ["mpi"]
    return "mpirun" if engine == "horovod" and on_mpi else LAUNCHER_OF[engine]


def command_for(launcher: str, size: int, job: Sequence[str]) -> list[str]:
    """Return the command line that a user would type to start the job.

    Args:
        launcher: horovodrun, mpirun, torchrun, or python, which starts one process whatever the size.

    Raises:
        OptionError: the launcher is not installed.
    """
    if launcher == "python":
        return [sys.executable, *job]
    if launcher == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*run, "--nproc-per-node", str(size), *job]
    beside = Path(sys.executable).with_name(launcher)
    program = str(beside) if beside.exists() else shutil.which(launcher)
    if program is None:
        remedy = "apt-get install openmpi-bin" if launcher == "mpirun" else INSTALL_HOROVOD
        raise OptionError(f"There is no {launcher} here. Type: {remedy}")
    return [program, "-np", str(size), sys.executable, *job]
