"""Tell a job that is built on the Trainer from any other script, by its imports; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = "hvd_trainer"
FOR_SCRIPTS = ("hvd_trainer.hvd", "hvd_trainer.c10d", "hvd_trainer.tools.run")
"""Modules of this package that other scripts use, too, or that run them."""


def is_trainer_job(job: Sequence[str]) -> bool:
    """Return whether a job is built on this package's Trainer, and so takes its options, such as `--log-dir`.

    It is if its file, or one beside it that it imports, imports something of this package other than `hvd` and
    `c10d`.

    Args:
        job: the words behind `python`: a file, or -m and a module, and its arguments.
    """
    if job[0] == "-m" and _is_of_trainer(job[1]):
        return True
    root = Path.cwd() if job[0] == "-m" else Path(job[0]).resolve().parent
    left = list(_module_files(root, job[1])) if job[0] == "-m" else [Path(job[0])]
    seen: set[Path] = set()
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in _imports(file, root):
            if _is_of_trainer(name):
                return True
            left += _module_files(root, name)
    return False


def _is_of_trainer(name: str) -> bool:
    return _is_in(name, PACKAGE) and not any(_is_in(name, other) for other in FOR_SCRIPTS)


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _imports(file: Path, root: Path) -> Iterator[str]:
    """Yield the names that a file imports, as `package.module.name`."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_text())))
    except (OSError, SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ""
            if node.level:
                folder = file.resolve().parents[node.level - 1]
                package = ".".join(folder.relative_to(root).parts) if folder.is_relative_to(root) else "?"
            module = ".".join(filter(None, (package, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _module_files(root: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module below a folder, and those of the packages that it is in."""
    parts = name.split(".")
    if not (root / parts[0]).is_dir() and not (root / f"{parts[0]}.py").is_file():
        return
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        files = (place.with_suffix(".py"), place / "__init__.py", place / "__main__.py")
        yield from (file for file in files if file.is_file())
