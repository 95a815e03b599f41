"""`hvd-trainer migrate train.py`: from `horovod.torch` to torch.distributed and DDP, as a diff."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge
from tyro.conf import Positional, arg

from hvd_trainer.config.checks import range_errors, refuse
from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import OptionError
from hvd_trainer.utils.text import COMMAND, plural

if TYPE_CHECKING:
    from hvd_trainer.tools.migrate.migration import Migrated

SKIPPED = {"build", "dist", "node_modules", "site-packages"}
LEFT = 3
"""Exit code: something is left to do by hand."""
COLOURS = {"+": "32", "-": "31", "@": "36"}


@dataclass(frozen=True)
class Options:
    """Rewrite scripts for horovod.torch into ones for torch.distributed and DistributedDataParallel.

    Prints a diff. With --prove the first file is run, with the words behind --, as it is and as the diff has it.
    Exit codes: 0 all is migrated, 3 something is left, which is listed, 1 the two train otherwise, 2 a mistake.
    """

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE")]
    """Python files, or folders with them and with scripts that start them"""
    write: bool = False
    """change the files"""
    force: bool = False
    """change files with changes that git does not have, too"""
    prove: bool = False
    """train both, step by step alike, and say by parity whether they are the same"""
    np: Annotated[int, Ge(1)] = 2
    """ranks, for --prove"""
    steps: Annotated[int, Ge(1)] = 20
    """optimizer steps, for --prove"""
    out: Path = Path("runs/migrate")
    """folder for what --prove writes"""


def main(argv: Sequence[str]) -> int:
    """Migrate; return the exit code.

    Raises:
        OptionError: a file cannot be migrated, or must not be changed.
    """
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    own = ["--np" if word == "-np" else word for word in words[:place]]
    options = read_words(Options, own, program=f"{COMMAND} migrate")
    refuse(range_errors(options))
    scripts = [path for path in options.files if path.suffix == ".py"]
    if not options.files or (options.prove and (options.write or not scripts)):
        raise OptionError(
            f"Name files or folders, such as: {COMMAND} migrate train.py. With --prove the first is a script, "
            f"which is run as it is and as the diff has it, and --write comes later"
        )
    if importlib.util.find_spec("libcst") is None:
        raise OptionError("migrate needs libcst, and there is none here. Type: pip install 'hvd_trainer[migrate]'")
    import libcst

    from hvd_trainer.tools.migrate.migration import migrate

    texts = {path: _read(path) for path in _files(options.files)}
    for path, text in list(texts.items()):
        try:
            libcst.parse_module(text if path.suffix == ".py" else "")
        except libcst.ParserSyntaxError as error:
            if "horovod" not in text:
                del texts[path]  # another file of a folder
                continue
            raise OptionError(f"{path} is not Python 3, in line {error.raw_line}: {error.message}") from None
    migrated = migrate(texts)
    if options.write:
        _check_clean([it.path for it in migrated if it.before != it.after], options.force)
    for it in migrated:
        sys.stdout.write(_coloured(it.diff()) if sys.stdout.isatty() else it.diff())
        if options.write:
            with it.path.open("w", newline="") as file:
                file.write(it.after)
    left = [f"{it.path}:{line}: {what}: {advice}" for it in migrated for line, what, advice in it.left]
    mentions = {it.path: _mentions(it) for it in migrated if it.before != it.after}
    if left:
        print("\n".join(["", f"Left as {'it is' if len(left) == 1 else 'they are'}, to do by hand:", *left]))
    spoken = [
        f"{path}: line{'s' * (len(lines) > 1)} {', '.join(lines)}" for path, lines in mentions.items() if lines
    ]
    if spoken:
        print("\n".join(["", "These lines of the result still speak of Horovod; read them again:", *spoken]))
    changed = sum(it.before != it.after for it in migrated)
    print(f"\n{plural(changed, 'file')} {'changed' if options.write else 'to change: add --write'}", flush=True)
    if options.prove:
        from hvd_trainer.tools.migrate.prove import prove

        code = prove(migrated, scripts[0], words[place + 1 :], options.np, options.steps, options.out)
        return code or (LEFT if left else 0)
    return LEFT if left else 0


def _files(given: Sequence[Path]) -> Iterator[Path]:
    """Yield the files to migrate: those that are given, those of folders, and scripts beside them.

    Raises:
        OptionError: one is not there, or not for horovod.torch.
    """
    python: list[Path] = []
    for path in given:
        if not path.exists():
            raise OptionError(f"{path}: there is no such file or folder")
        inside = sorted(it for it in path.rglob("*.py") if not SKIPPED & {*it.parts}) if path.is_dir() else [path]
        texts = {it: it.read_text(errors="replace") for it in inside}
        others = [
            it
            for it, text in texts.items()
            if re.search(r"horovod\.(tensorflow|keras|mxnet)|horovod import (tensorflow|keras)", text)
        ]
        if others and not path.is_dir():
            raise OptionError(
                f"{others[0]} uses Horovod's API for TensorFlow, Keras or MXNet: only horovod.torch is migrated"
            )
        if not any("horovod" in text and it not in others for it, text in texts.items()):
            raise OptionError(f"{path} does not use horovod.torch: there is nothing to migrate")
        python += [
            it for it in inside if it not in others and not any(part.startswith(".") for part in it.parts[1:])
        ]
    yield from dict.fromkeys(python)
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in given)
    beside = [
        it
        for folder in folders
        for it in sorted(folder.iterdir())
        if it.suffix == ".sh" or it.name.startswith("README")
    ]
    yield from (
        it for it in dict.fromkeys(beside) if it.is_file() and "horovodrun" in it.read_text(errors="replace")
    )


def _read(path: Path) -> str:
    """Return a file's text with the line ends that it has."""
    with path.open(newline="") as file:
        return file.read()


def _mentions(migrated: Migrated) -> list[str]:
    """Return the lines that name Horovod in comments and texts."""
    lines = migrated.after.splitlines()
    left = {migrated.before.splitlines()[line - 1] for line, *_ in migrated.left}
    spoken = re.compile(r"horovod|[#\"'].*\bhvd\b", re.IGNORECASE)
    return [
        str(at)
        for at, it in enumerate(lines, 1)
        if spoken.search(it) and it not in left and "hvd_trainer" not in it
    ]


def _check_clean(paths: Sequence[Path], force: bool) -> None:
    """See that git has what is to be changed.

    Raises:
        OptionError: it does not.
    """
    for path in paths if not force else ():
        words = ["git", "-C", str(path.parent), "status", "--porcelain", "--", path.name]
        status = subprocess.run(words, capture_output=True, text=True)
        if status.returncode == 0 and status.stdout.strip():
            raise OptionError(f"{path} has changes that git does not have. Commit them, or type --force")


def _coloured(diff: str) -> str:
    lines = diff.splitlines(keepends=True)
    return "".join(
        f"\x1b[{COLOURS[line[0]]}m{line[:-1]}\x1b[0m\n" if line[0] in COLOURS else line for line in lines
    )
