"""Prove that a migrated script trains the same: run it beside the original by `hvd-trainer parity`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.start import locked_folder
from hvd_trainer.tools.migrate.migration import Migrated

AT_START = ("optimizer", "parameters")
"""What a step before the training changes."""


def prove(
    migrated: Sequence[Migrated], script: Path, job: Sequence[str], ranks: int, steps: int, out: Path
) -> int:
    """Run the original and the result, print what parity says, and the lines behind a difference.

    Args:
        script: the file that is run.
        job: its arguments.
        out: folder for the copy of the script's folder, and for parity's results.

    Returns:
        Parity's exit code: 0 the same, 1 different, 2 a run has failed.

    Raises:
        OptionError: `out` is in use.
    """
    engine = "ddp" if PathFinder.find_spec("horovod") is None else "horovod"
    with locked_folder(out.expanduser().resolve() / "migrate-run") as folder:
        copy = _copied(script, migrated, folder)
        words = ["-np", str(ranks), "--steps", str(steps), "--out", str(folder), "--new", str(copy / script.name)]
        code, finding = _parity([*words, "--backend", f"{engine},ddp"], [str(script), *job], folder)
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
            _, rest = _parity(trained, [str(script), *job], folder)
            if rest is not None:
                print("Behind that:", *_lines(migrated, rest["quantity"]), sep="\n", flush=True)
        return code


def _lines(migrated: Sequence[Migrated], quantity: str) -> list[str]:
    """Return the lines of the files whose rules change a quantity of the training."""
    return [line for file in migrated for line in file.traps(quantity)]


def _copied(script: Path, migrated: Sequence[Migrated], folder: Path) -> Path:
    """Copy the Python files of the script's folder, migrated, link to the rest of it, and return the copy."""
    source = script.parent.resolve()
    copy = folder / "new"
    shutil.rmtree(copy, ignore_errors=True)
    texts = {file.path.resolve(): file.after.encode() for file in migrated}
    for path in sorted(source.rglob("*.py")):
        inner = path.relative_to(source)
        is_ours = not any(part.startswith((".", "venv", "runs")) for part in inner.parts)
        if is_ours and not path.is_relative_to(folder):
            (copy / inner).parent.mkdir(parents=True, exist_ok=True)
            (copy / inner).write_bytes(texts.get(path) or path.read_bytes())
    for beside in source.iterdir():  # such as the data and settings of the script
        is_hidden = beside.name.startswith(".")
        if not is_hidden and not (copy / beside.name).exists() and not folder.is_relative_to(beside):
            (copy / beside.name).symlink_to(beside)
    return copy


def _parity(words: Sequence[str], job: Sequence[str], folder: Path) -> tuple[int, dict[str, Any] | None]:
    """Return parity's exit code, and what differs first."""
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
