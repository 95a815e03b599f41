"""Tell by a digest whether the code that a run has executed is still the same; nothing is executed.

It covers the job's file or package, what it imports from its own folder, and this package.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

DYNAMIC = {
    "import_module",
    "__import__",
    "run_path",
    "run_module",
    "exec",
    "exec_module",
    "spec_from_file_location",
}
"""Functions by which code is loaded whose name stands nowhere."""
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""
MAX_BYTES = 2**26
"""The largest file that is read; a larger one is the same as long as its size and time are."""


def digest_of_code(job: Sequence[str]) -> str:
    """Return the SHA-256 of all code of its own that a job executes, and of this package's.

    Modules are those that it imports from its own folder, from that of `-m`'s package, or from PYTHONPATH. Where
    it loads some by names that are computed, all modules of its folder count.

    Args:
        job: the words behind `python`: a file, or -m and a module, and its arguments.
    """
    return _digest([*own_files(job), *_package_files()])


def digest_of_files(words: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file that is named among words, such as `--config own.yaml`."""
    names = {name for word in words for name in (word, word.partition("=")[2])}
    return {name: _digest([Path(name)]) for name in sorted(names) if name and Path(name).is_file()}


def own_files(job: Sequence[str]) -> list[Path]:
    """Return the files of a job's own code, as `digest_of_code` describes them; none of other packages."""
    root, own = _folders_of(job)
    roots = [root, *(Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder)]
    left = list(_module_files(root, job[1])) if job[0] == "-m" else [Path(job[0])]
    seen: set[Path] = set()
    while left:
        file = left.pop().resolve()
        if file in seen or _is_foreign(file, own):
            continue
        seen.add(file)
        nodes = _nodes(file)
        names = list(_imports(nodes, file, root))
        left += [path for name in names for folder in roots for path in _module_files(folder, name)]
        if any(map(_is_dynamic, nodes)):
            left += _all_modules(own)
    return sorted(seen)


def _all_modules(folder: Path) -> Iterator[Path]:
    """Yield all files of Python below a folder, without looking into those that `_is_foreign` refuses."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in INSTALLED]
        yield from (Path(place, name) for name in names if name.endswith(".py"))


def _folders_of(job: Sequence[str]) -> tuple[Path, Path]:
    """Return the folder from which a job imports its own modules, and the one in which all are its own."""
    if job[0] != "-m":
        folder = Path(job[0]).resolve().parent
        return folder, folder
    package = job[1].partition(".")[0]
    if Path(package).is_dir() or Path(f"{package}.py").is_file():
        return Path.cwd(), Path.cwd()
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or [str(spec.origin)]
    place = Path(next(iter(places), package)).resolve()
    return place.parent, place


def _is_foreign(file: Path, own: Path) -> bool:
    """Return whether a file is of this package, of an installed one, or hidden in the job's folder."""
    parts = file.relative_to(own).parts if file.is_relative_to(own) else file.parts
    hidden = file.is_relative_to(own) and any(part.startswith(".") for part in parts)
    return hidden or bool(INSTALLED & {*parts}) or file.is_relative_to(_package_folder())


def _nodes(file: Path) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return []


def _imports(nodes: Iterable[ast.AST], file: Path, root: Path) -> Iterator[str]:
    """Yield the names that a file imports, as `package.module.name`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package: tuple[str, ...] = ()
            if node.level and node.level <= len(file.parents):
                folder = file.parents[node.level - 1]
                package = folder.relative_to(root).parts if folder.is_relative_to(root) else ("?",)
            module = ".".join(filter(None, (*package, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _is_dynamic(node: ast.AST) -> bool:
    """Return whether a call loads code by a name."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in DYNAMIC


def _module_files(root: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module below a folder, and those of the packages that it is in."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        files = (place.with_name(f"{place.name}.py"), place / "__init__.py", place / "__main__.py")
        yield from (file for file in files if file.is_file())


def _package_folder() -> Path:
    return Path(__file__).resolve().parents[1]


@cache
def _package_files() -> tuple[Path, ...]:
    return tuple(sorted(_package_folder().rglob("*.py")))


def _digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and the content of files; of large ones of their size and time."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} ".encode())
        large = status.st_size > MAX_BYTES
        digest.update(str(status.st_mtime_ns).encode() if large else file.read_bytes())
    return digest.hexdigest()
