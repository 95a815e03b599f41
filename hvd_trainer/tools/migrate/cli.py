"""`hvd-trainer migrate train.py`: from `horovod.torch` to torch.distributed and DDP, as a diff."""

from __future__ import annotations

import ast
import gc
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from hvd_trainer.config.checks import Count, find_wrong_values, refuse
from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import NP
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.tools.migrate.outside import FILES
from hvd_trainer.utils.text import COMMAND, install_extra, plural

if TYPE_CHECKING:
    from hvd_trainer.tools.migrate.migration import Migrated

SKIPPED = {"build", "dist", "node_modules", "site-packages"}
OTHER_APIS = r"horovod\.(tensorflow|keras|mxnet)|horovod import (tensorflow|keras)"
LARGEST = 2**20
"""Files of more bytes are data."""
LEFT = 3
"""Exit code: something is left to do by hand."""
WRAPS = r"(?m)^ *[\w.]+ = (torch_)?DDP\("
UNUSED = """\
If a loss leaves out parameters, DDP ends in its second step: "Expected to have finished reduction in the prior
iteration". Then write DDP(model, find_unused_parameters=True), and hand out of forward only what the loss uses."""
COLOURS = {"+": "32", "-": "31", "@": "36"}


@dataclass(frozen=True)
class Options:
    """Rewrite scripts for horovod.torch into ones for torch.distributed and DistributedDataParallel.

    Prints a diff. With --prove the first file is run, with the words behind --, as it is and as the diff has it.
    Exit codes: 0 all is migrated, 3 something is left, which is listed, 1 the two train otherwise, 2 a mistake.
    With --check: 1 a file would change, 0 none.
    """

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE", help_behavior_hint="")]
    """Python files, or folders with them and with scripts that start them"""
    write: bool = False
    """change the files"""
    force: bool = False
    """change files with changes that git does not have, too"""
    check: bool = False
    """say by the exit code whether a file would change"""
    json: bool = False
    """print what is changed and left as JSON"""
    prove: bool = False
    """train both, step by step alike, and say by parity whether they are the same"""
    np: Annotated[Count, NP] = 3
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
    from hvd_trainer.tools.migrate.migration import Migrated, migrate

    gc.disable()  # syntax trees stay until the end: to look through them for garbage takes a fifth of the time
    read = Files(options.files)
    migrated = [*migrate(read.texts), *(Migrated(path, text, text, left=[row]) for path, text, row in read.left)]
    changed = [file for file in migrated if file.before != file.after]
    if options.write and not options.force:
        _check_clean([file.path for file in changed])
    if options.write:
        for file in changed:
            file.path.write_bytes(file.after.encode(read.encodings.get(file.path, "utf-8")))
    left = [file for file in migrated if file.left]
    if options.json:
        print(
            json.dumps([_facts(file, options.write) for file in migrated if file in (*changed, *left)], indent=1)
        )
    else:
        _show(changed, left, options.write)
    code = 0
    if options.prove:
        from hvd_trainer.tools.migrate.prove import prove

        code = prove(migrated, scripts[0], argv[place + 1 :], options.np, options.steps, options.out)
    elif not options.json:
        done = "changed" if options.write else "to change: add --write" if changed else "to change"
        print(f"\n{plural(len(changed), 'file')} {done}")
        if any(re.search(WRAPS, file.after) and not re.search(WRAPS, file.before) for file in changed):
            print(UNUSED)
        programs = scripts or _programs(migrated)
        if programs and changed and options.write:
            print(f"To start it, type: torchrun --nproc-per-node {options.np} {programs[0]}")
        elif programs and changed:
            print(f"Does it train the same? {COMMAND} migrate {programs[0]} --prove -- ARGUMENTS OF THE SCRIPT")
    if options.check:
        return int(bool(changed))
    return code or (LEFT if left else 0)


def _programs(migrated: Sequence[Migrated]) -> list[Path]:
    """Return the files that start a process group and are scripts, first those that train."""
    text = "\n".join(file.after for file in migrated if file.path.suffix == ".py")
    starts = [file for file in migrated if file.path.suffix == ".py" and "init_process_group" in file.after]
    tops = [file for file in starts if not re.search(rf"(?m)^\s*(from|import)\b.*\b{file.path.stem}\b", text)]
    return [file.path for file in sorted(tops, key=lambda file: "backward(" not in file.after)]


def _show(changed: Sequence[Migrated], left: Sequence[Migrated], is_written: bool) -> None:
    """Print the diffs, what is left, what still names Horovod, and a summary."""
    is_coloured = sys.stdout.isatty()
    for file in changed:
        diff = file.diff().splitlines()
        print(*(_coloured(line) if is_coloured else line for line in diff), sep="\n", end="\n" * bool(diff))
    concerned = {file.path: file for file in (*changed, *left)}
    facts = [_facts(file, is_written) for file in concerned.values()]
    heads = {"left": "Left as it is, to do by hand:", "named": "Comments and texts that still name Horovod:"}
    for kind, head in heads.items():
        rows = [f"{fact['path']}:{': '.join(map(str, row))}" for fact in facts for row in fact[kind]]
        if rows:
            print("", head, *rows, sep="\n")
    if len(facts) > 1:
        print("", "By file:", sep="\n")
        for fact in facts:
            what = "call" if fact["path"].endswith(".py") else "command"
            print(f"{fact['path']}: {plural(fact['migrated'], what)} migrated, {len(fact['left'])} left")


def _facts(file: Migrated, is_written: bool) -> dict[str, Any]:
    """Return what is said of a file, by its line numbers as it is on the disk now."""
    rows: dict[str, Sequence[Any]] = {"left": file.left, "named": file.named()}
    placed = {
        kind: [(file.after_line(line) if is_written else line, *row) for line, *row in lines]
        for kind, lines in rows.items()
    }
    is_changed = file.before != file.after
    return {"path": str(file.path), "changed": is_changed, "migrated": len(file.used), **placed}


class Files:
    """The files to migrate: those that are given, those of folders, and what starts them in and beside these.

    Attributes:
        texts: of the files to migrate.
        encodings: of those that are not UTF-8.
        left: files that are not migrated, with their texts and the line, what it is, and advice.

    Raises:
        OptionError: one is not there, is not Python, or not for horovod.torch.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        self.texts: dict[Path, str] = {}
        self.encodings: dict[Path, str] = {}
        self.left: list[tuple[Path, str, tuple[int, str, str]]] = []
        for path in given:
            if not path.exists():
                raise OptionError(f"{path}: there is no such file or folder")
            for file in [path] if path.is_file() else sorted(path.rglob("*")):
                parts = file.relative_to(path).parts
                if file.is_file() and not any(part in SKIPPED or part.startswith(".git") for part in parts):
                    self._read(file, path.is_file())
        for path in given if any("horovod" in text for text in self.texts.values()) else ():
            for beside in sorted(path.parent.iterdir()) if path.is_file() else ():
                if beside.is_file() and beside.suffix != ".py" and beside not in self.texts:
                    self._read(beside, False)

    def _read(self, path: Path, is_given: bool) -> None:
        """Read a file, or say why it is left."""
        is_python = path.suffix == ".py"
        if path.stat().st_size > LARGEST or not (is_python or FILES.match(path.name)):
            return
        raw = path.read_bytes()
        line, what, advice = 0, "", "2to3 may help; then migrate it again"
        try:
            encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0] if is_python else "utf-8"
            text = raw.decode(encoding)
            self.encodings[path] = encoding
        except (SyntaxError, UnicodeDecodeError):
            text, line, what = raw.decode(errors="replace"), 1, "is not in its encoding"
            advice = "write it as UTF-8; then migrate it again"
        uses = re.search("(?i)horovod", text)
        if is_python and not line and (others := re.search(OTHER_APIS, text)):
            line, what = text[: others.start()].count("\n") + 1, f"has {others[0]}"
            advice = "of Horovod's APIs only horovod.torch is migrated"
        elif is_python and not line:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    ast.parse(raw)
                except (SyntaxError, ValueError) as error:
                    line, what = getattr(error, "lineno", None) or 1, "is not Python 3"
        if not line:
            if is_python or re.search(r"(?i)horovod|mpirun|mpiexec|\bsrun\b|MPIJob", text):
                self.texts[path] = text
        elif uses and is_given:
            raise OptionError(f"{path} {what}: see line {line}. {advice}")
        elif uses and is_python:
            self.left.append((path, text, (line, f"{path.name} {what}", advice)))


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
