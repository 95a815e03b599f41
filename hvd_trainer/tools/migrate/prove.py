"""Prove that a migrated script trains the same: run it beside the original by `hvd-trainer parity`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.tool_folder import locked_folder, make_inner, remove_inner
from hvd_trainer.tools.migrate.migration import Migrated

PROJECT = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""Files by which the top folder of a project is recognised."""
AT_START = ("optimizer", "parameters")
"""What a step before the training changes."""


def prove(
    migrated: Sequence[Migrated], script: Path, job: Sequence[str], ranks: int, steps: int, out: Path
) -> int:
    """Run the original and the result, print what parity says, and the lines behind a difference.

    Args:
        script: the file that is run.
        job: its arguments.
        out: folder for the copy of the script's project, and for parity's results.

    Returns:
        Parity's exit code: 0 the same, 1 different, 2 a run has failed.

    Raises:
        OptionError: `out` is in use, or not this tool's.
    """
    engine = "ddp" if PathFinder.find_spec("horovod") is None else "horovod"
    with locked_folder(out, "migrate") as folder:
        root = root_of(script, [file.path for file in migrated])
        copy = _copied(root, migrated, folder)
        own, new = folder / "parity", _start(copy / script.resolve().relative_to(root), root, copy)
        words = ["-np", str(ranks), "--steps", str(steps), "--out", str(own), "--new", str(new)]
        code, finding = _parity([*words, "--backend", f"{engine},ddp"], [str(script), *job], own)
        if finding is None:
            return code
        # What is allowed to gradients in fp16 may hide at the start that a step has moved the weights.
        is_early = finding["step"] == 1 or (finding["step"] == 0 and finding["quantity"] in AT_START)
        trap = _lines(migrated, "optimizer") if is_early else []
        lines = trap or _lines(migrated, finding["quantity"])
        head = "Behind it:" if lines else "No line of the diff is known to be behind it."
        print(head, *lines, sep="\n", flush=True)
        if trap:
            print("Without that trap of Horovod:", flush=True)
            trained = [*words, "--backend", "ddp,ddp", "--no-exactly-horovod"]
            code, rest = _parity(trained, [str(script), *job], own)
            if rest is not None:
                print("Behind that:", *_lines(migrated, rest["quantity"]), sep="\n", flush=True)
            elif code == 0:
                print("It trains the same but for that trap, which is meant to be gone.", flush=True)
        return code


def _lines(migrated: Sequence[Migrated], quantity: str) -> list[str]:
    """Return the lines of the files whose rules change a quantity of the training, the most special ones first."""
    return [line for file in migrated for line in file.traps(quantity)]


def root_of(script: Path, others: Sequence[Path]) -> Path:
    """Return the folder that has all that a script may import or read: its project, or what all files are in."""
    script = script.resolve()
    for folder in script.parents:
        if any((folder / name).exists() for name in PROJECT):
            return folder
    return Path(os.path.commonpath([script.parent, *(path.resolve().parent for path in others)]))


def _copied(root: Path, migrated: Sequence[Migrated], folder: Path) -> Path:
    """Copy the Python files of a project, migrated, link to the rest of it, and return the copy."""
    copy = folder / "new"
    remove_inner(copy)
    texts = {file.path.resolve(): file.after.encode() for file in migrated}
    _mirror(root, make_inner(copy), folder, texts)
    return copy


def _start(script: Path, root: Path, copy: Path) -> Path:
    """Return what runs a script of the copy: itself, or what lets it import the copy and not the original.

    That is so for folders of PYTHONPATH and of packages that are installed as links.
    """
    paths = [Path(path).resolve() for path in sys.path if path]
    inside = [path for path in paths if path.is_relative_to(root) and not (path / "hvd_trainer/tools").exists()]
    if not inside:
        return script
    start = script.with_name(f"start_{script.name}")
    folders = [str(script.parent), *(str(copy / path.relative_to(root)) for path in inside)]
    run = f"sys.argv[0] = {str(script)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    start.write_text(f"import runpy\nimport sys\n\nsys.path[:1] = {folders!r}\n{run}")
    return start


def _mirror(source: Path, target: Path, out: Path, texts: Mapping[Path, bytes]) -> None:
    """Make a folder like `source`: Python files are copied, and all else, such as data and settings, is a link.

    Args:
        out: the tool's folder, which is left out.
        texts: of the files that are migrated.
    """
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        inner = target / path.name
        if path.is_dir() and not path.is_symlink() and (out.is_relative_to(path) or _has_code(path)):
            if path != out:
                _mirror(path, inner, out, texts)
        elif path.suffix == ".py":
            inner.write_bytes(texts.get(path) or path.read_bytes())
        else:
            inner.symlink_to(path)


def _has_code(folder: Path) -> bool:
    """Return whether a folder has Python files of its user's, in it or below, which import one another."""
    is_of_a_program = folder.name.startswith((".", "venv", "runs"))
    return not is_of_a_program and next(folder.rglob("*.py"), None) is not None


def _parity(words: Sequence[str], job: Sequence[str], folder: Path) -> tuple[int, dict[str, Any] | None]:
    """Return parity's exit code, and what differs first; its folder is `folder`."""
    report = folder / "parity.json"
    report.unlink(missing_ok=True)
    code = subprocess.run([sys.executable, "-m", "hvd_trainer", "parity", *words, "--", *job]).returncode
    if not report.exists():
        if code == 0:
            raise OptionError(f"parity has left no {report}")
        return code, None
    pairs = json.loads(report.read_text())["pairs"]
    findings = [finding for pair in pairs for finding in pair["findings"]]
    return code, findings[0] if findings else None
