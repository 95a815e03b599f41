"""`hvd-trainer migrate train.py`: from `horovod.torch` to torch.distributed and DDP, as a diff."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from hvd_trainer.config.checks import Count, find_wrong_values, refuse
from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import NP
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.utils.text import COMMAND, install_extra, plural

SKIPPED = {"build", "dist", "node_modules", "site-packages"}
OTHER_APIS = r"horovod\.(tensorflow|keras|mxnet)|horovod import (tensorflow|keras)"
LEFT = 3
"""Exit code: something is left to do by hand."""
COLOURS = {"+": "32", "-": "31", "@": "36"}


@dataclass(frozen=True)
class Options:
    """Rewrite scripts for horovod.torch into ones for torch.distributed and DistributedDataParallel.

    Prints a diff. With --prove the first file is run, with the words behind --, as it is and as the diff has it.
    Exit codes: 0 all is migrated, 3 something is left, which is listed, 1 the two train otherwise, 2 a mistake.
    """

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE", help_behavior_hint="")]
    """Python files, or folders with them and with scripts that start them"""
    write: bool = False
    """change the files"""
    force: bool = False
    """change files with changes that git does not have, too"""
    prove: bool = False
    """train both, step by step alike, and say by parity whether they are the same"""
    np: Annotated[Count, NP] = 2
    """ranks, for --prove"""
    steps: Count = 20
    """optimizer steps, for --prove"""
    out: Path = Path("runs/migrate")
    """folder for what --prove writes"""


def main(argv: Sequence[str]) -> int:
    """Migrate; return the exit code.

    Raises:
        OptionError: a file cannot be migrated, or must not be changed.
    """
    place = [*argv, "--"].index("--")
    options = read_words(Options, argv[:place], program=f"{COMMAND} migrate", job=" [-- WORD ...]")
    refuse(find_wrong_values(options).values())
    scripts = [path for path in options.files if path.suffix == ".py"]
    if not options.files or (options.prove and (options.write or not scripts)):
        raise OptionError(
            f"Name files or folders, such as: {COMMAND} migrate train.py. With --prove the first is a script, "
            f"which is run as it is and as the diff has it, and --write comes later"
        )
    if importlib.util.find_spec("libcst") is None:
        raise OptionError(f"migrate needs libcst, and there is none here. Type: {install_extra('migrate')}")
    if options.prove:
        check_installed()
    from hvd_trainer.tools.migrate.migration import migrate

    migrated = migrate({path: path.read_bytes().decode() for path in _files(options.files)})
    if options.write and not options.force:
        _check_clean([file.path for file in migrated if file.before != file.after])
    for file in migrated:
        diff = file.diff().splitlines()
        is_coloured = sys.stdout.isatty()
        print(*(_coloured(line) if is_coloured else line for line in diff), sep="\n", end="\n" * bool(diff))
        if options.write:
            file.path.write_bytes(file.after.encode())
    left = [f"{file.path}:{line}: {what}: {advice}" for file in migrated for line, what, advice in file.left]
    if left:
        print("", "Left as it is, to do by hand:", *left, sep="\n")
    named = [
        f"{file.path}:{number}: {line.strip()}"
        for file in migrated
        for number, line in enumerate(file.after.splitlines(), start=1)
        if file.before != file.after and "horovod" in line.lower() and "hvd_trainer" not in line
    ]
    if named:
        print("", "Comments and texts that still name Horovod, by their new lines:", *named, sep="\n")
    changed = plural(sum(file.before != file.after for file in migrated), "file")
    print(f"\n{changed} {'changed' if options.write else 'to change: add --write'}", flush=True)
    if options.write and scripts:
        print(f"To start it, type: torchrun --nproc-per-node {options.np} {scripts[0]}")
    code = 0
    if options.prove:
        from hvd_trainer.tools.migrate.prove import prove

        code = prove(migrated, scripts[0], argv[place + 1 :], options.np, options.steps, options.out)
    return code or (LEFT if left else 0)


def _files(given: Sequence[Path]) -> Iterator[Path]:
    """Yield the files to migrate: those that are given, those of folders, and what starts them beside them.

    Raises:
        OptionError: one is not there, is not Python, or not for horovod.torch.
    """
    import libcst

    for path in given:
        if not path.exists():
            raise OptionError(f"{path}: there is no such file or folder")
        is_file, used = path.is_file(), False
        for file in [path] if is_file else sorted(path.rglob("*.py")):
            text = file.read_text(errors="replace")
            others = re.search(OTHER_APIS, text)
            if others and is_file:
                raise OptionError(f"{path} has {others[0]}: of Horovod's APIs only horovod.torch is migrated")
            if (
                others
                or "\ufffd" in text
                or any(part in SKIPPED or part.startswith(".") for part in file.relative_to(path).parts)
            ):
                continue
            try:
                libcst.parse_module(text)
            except libcst.ParserSyntaxError as error:
                if "horovod" in text:
                    raise OptionError(f"{file} is not Python 3: see line {error.raw_line}") from None
                continue
            used |= "horovod" in text
            yield file
        if not used:
            raise OptionError(f"{path} does not use horovod.torch: there is nothing to migrate")
    for folder in dict.fromkeys(path.parent if path.is_file() else path for path in given):
        for beside in sorted({*folder.glob("*.sh"), *folder.glob("README*")}):
            if beside.is_file() and "horovodrun" in beside.read_text(errors="replace"):
                yield beside


def _check_clean(paths: Sequence[Path]) -> None:
    """See that git has what is to be changed, where there is git.

    Raises:
        OptionError: it does not.
    """
    for path in paths if shutil.which("git") else ():
        words = ["git", "-C", str(path.parent), "status", "--porcelain", "--", path.name]
        status = subprocess.run(words, capture_output=True, text=True)
        if status.returncode == 0 and status.stdout.strip():
            raise OptionError(f"{path} has changes that git does not have. Commit them, or type --force")


def _coloured(line: str) -> str:
    return f"\x1b[{COLOURS[line[0]]}m{line}\x1b[0m" if line[:1] in COLOURS else line
