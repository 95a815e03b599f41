"""The commands around a training job: `hvd-trainer <command>`, or `python -m hvd_trainer <command>`.

A command is a module with `main(argv) -> exit code`, which is imported only when the command is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from hvd_trainer import __version__
from hvd_trainer.errors import OptionError, UserError
from hvd_trainer.measure.command import read_command
from hvd_trainer.utils.process import ending_with_reader
from hvd_trainer.utils.text import COMMAND


class Command(NamedTuple):
    """A command's module, and how the help lists it."""

    module: str
    summary: str
    options: str = ""
    """the class of its options, in a module without PyTorch: its help need not wait; empty: the module has none"""


COMMANDS: Mapping[str, Mapping[str, Command]] = {
    "Set up": {
        "doctor": Command("tools.doctor.cli", "check this machine and other hosts, and say what to type"),
        "install-horovod": Command(
            "horovod_build.installer", "build a Horovod that fits this PyTorch, and prove that it works"
        ),
    },
    "Verify": {
        "parity": Command(
            "tools.parity.cli",
            "train a job on both engines, and name the first difference and its cause",
            "tools.parity.options:ParityOptions",
        ),
        "verify-resume": Command(
            "tools.verify_resume.cli",
            "kill a training again and again, and prove that nothing was lost",
            "tools.verify_resume.options:Options",
        ),
    },
    "Measure": {
        "compare": Command(
            "tools.compare.cli",
            "time engines, ranks and values of options side by side",
            "tools.compare.options:CompareOptions",
        ),
        "diagnose": Command(
            "tools.diagnose.cli",
            "find out where a step's time goes, and what to change",
            "tools.diagnose.options:Options",
        ),
    },
    "Use": {
        "run": Command(
            "tools.run.cli", "run a script for Horovod or torch.distributed on either engine, unchanged"
        ),
        "migrate": Command(
            "tools.migrate.cli", "rewrite a Horovod script for torch.distributed and DDP, as a diff"
        ),
        "show": Command("tools.show", "draw one or several runs, by their log folders, as a page"),
        "export": Command("tools.export", "write a checkpoint's weights as model.safetensors"),
    },
}
"""By group and name; modules of this package."""
MODULES = {name: f"hvd_trainer.{command.module}" for group in COMMANDS.values() for name, command in group.items()}
OPTIONS = {
    name: command.options for group in COMMANDS.values() for name, command in group.items() if command.options
}
"""By command: the class of its options, where help need not wait for the module."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 done, 2 a user's mistake, 130 after Ctrl-C, others the command's own.
    """
    with ending_with_reader():
        return _main(list(sys.argv[1:] if argv is None else argv) or ["--help"])


def _main(words: list[str]) -> int:
    name, *rest = words
    if name == "--version":
        print(f"hvd-trainer {__version__}")
        return 0
    if name == "help":  # of a command: its own
        name, *rest = [*rest, "--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    try:
        if name not in MODULES:
            guess = "".join(f": did you mean {near}?" for near in get_close_matches(name, MODULES, 1)) or "."
            raise OptionError(f"there is no command {name!r}{guess} Type: {COMMAND} --help")
        own = rest[: [*rest, "--"].index("--")]
        if name in OPTIONS and not {"-h", "--help"}.isdisjoint(own):
            module, _, kind = OPTIONS[name].partition(":")
            read_command(name, getattr(importlib.import_module(f"hvd_trainer.{module}"), kind), ["--help"])
        return int(importlib.import_module(MODULES[name]).main(rest))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def usage() -> str:
    """Return the list of all commands, by groups."""
    width = max(map(len, MODULES))
    lines = ["usage: hvd-trainer <command> [options] [-- job]        (also: python -m hvd_trainer <command>)"]
    for group, commands in COMMANDS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    return "\n".join(
        [
            *lines,
            "",
            "A command's options: hvd-trainer <command> --help. The version: hvd-trainer --version",
            "Train a bundled job: python -m hvd_trainer.mnist --help, python -m hvd_trainer.imdb --help",
        ]
    )
