"""Migrate the files of a folder together: plan, rewrite, and say what is left."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import libcst as cst

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.migrate.flow import Folder, NotFollowedError
from hvd_trainer.tools.migrate.imports import names_of
from hvd_trainer.tools.migrate.rewrite import Rewriter
from hvd_trainer.tools.migrate.shell import migrate_commands
from hvd_trainer.tools.migrate.source import API, Source
from hvd_trainer.tools.migrate.table import BY_NAME, NOT_PLAIN, OTHERWISE, TABLE, Rule
from hvd_trainer.tools.migrate.wrapping import Wrapping, plan

NEEDED_BY_DDP = {"DistributedOptimizer", "broadcast_parameters"}
IMPORTS = re.compile(r"^[ \t]*((?:from\s+[\w.]+\s+)?import\s+(?:\([^)]*\)|.*))", re.MULTILINE)
NAMES = {"dist": "torch.distributed", "DDP": "torch.nn.parallel.DistributedDataParallel"}


@dataclass
class Migrated:
    """A file, before and after."""

    path: Path
    before: str
    after: str
    used: list[tuple[int, Rule]] = field(default_factory=list)
    """line before, and rule"""
    left: list[tuple[int, str, str]] = field(default_factory=list)
    """line before, what it is, and what to do by hand"""

    def diff(self) -> str:
        """Return the unified diff."""
        before, after = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, str(self.path), str(self.path)))

    def traps(self, quantity: str) -> Iterator[str]:
        """Yield the lines whose rules change a quantity of the training, as `parity` calls it."""
        lines = self.before.splitlines()
        for line, rule in sorted(self.used, key=lambda use: use[0]):
            if rule.shows == quantity:
                yield f"{self.path}:{line}: {lines[line - 1].strip()}\n    {rule.why}"


def migrate(texts: Mapping[Path, str]) -> list[Migrated]:
    """Migrate Python files and the commands of other files.

    Raises:
        libcst.ParserSyntaxError: a file does not parse.
    """
    python = {path: text.replace("\r\n", "\n") for path, text in texts.items() if path.suffix == ".py"}
    results: list[Migrated] = []
    for program in _programs(python):
        if not any("horovod" in text for text in program.values()):
            results += [Migrated(path, text, text) for path, text in program.items()]
            continue
        parts, names = _migrate_all(program)
        keep: dict[Path, set[str]] = {}
        while any(
            names[path] - keep.get(path, set()) for path in names
        ):  # what is left in a file keeps calls of others
            keep = {path: keep.get(path, set()) | names[path] for path in names}
            parts, names = _migrate_all(program, keep)
        results += parts
    results.sort(key=lambda result: [*python].index(result.path))
    for result in results:
        ends = "\r\n" if "\r\n" in texts[result.path] else "\n"
        result.before, result.after = texts[result.path], result.after.replace("\n", ends)
    for path, text in texts.items():
        if path.suffix != ".py" and "horovodrun" in BY_NAME:
            after, left = migrate_commands(text)
            advice = "name each host's torchrun: --nnodes, --node-rank, --rdzv-endpoint"
            results.append(Migrated(path, text, after, left=[(line, "horovodrun", advice) for line in left]))
    return results


def _programs(texts: Mapping[Path, str]) -> list[dict[Path, str]]:
    """Return the files in groups that import each other: each decides for itself."""
    groups: list[dict[Path, str]] = []
    for path, text in texts.items():
        near = [group for group in groups if any(_is_imported(path, text, *other) for other in group.items())]
        groups = [group for group in groups if group not in near]
        groups.append({key: value for group in [*near, {path: text}] for key, value in group.items()})
    return groups


def _is_imported(path: Path, text: str, other: Path, other_text: str) -> bool:
    """Return whether one of two files may import the other."""
    return _module(other) in _imported(text) or _module(path) in _imported(other_text)


def _module(path: Path) -> str:
    return path.stem if path.stem != "__init__" else path.resolve().parent.name


@lru_cache(maxsize=4096)
def _imported(text: str) -> set[str]:
    """Return all names in the imports of a file."""
    return {word for line in IMPORTS.findall(text) for word in re.findall(r"\w+", line)}


def _migrate_all(
    texts: Mapping[Path, str],
    keep: Mapping[Path, set[str]] | None = None,
    reasons: Mapping[tuple[Path, int], str] | None = None,
) -> tuple[list[Migrated], dict[Path, set[str]]]:
    """Return the files, and the names in each that must still refer to Horovod.

    Args:
        reasons: why optimizers are left, by their places: all are, as `synchronize` and the like are for each.
    """
    folder, plans = Folder(texts, keep), list[Wrapping]()
    calls = folder.calls("DistributedOptimizer")
    if reasons is None and calls:
        plans, reasons = _plan(folder)
        if reasons:
            return _migrate_all(texts, keep, reasons)
    reasons = reasons or {}
    for made in plans:
        made.apply(folder)
    folder.is_sure = bool(plans)
    _end(folder, plans)
    needs_start = False
    results, names, starts = list[Migrated](), dict[Path, set[str]](), dict[Path, set[str]]()
    for source in folder.sources:
        rewriter = Rewriter(source, folder)
        result = Migrated(source.path, source.text, source.module.visit(rewriter).code, rewriter.used)
        _check_names(source, result.after)
        left = [(node, name) for node, name in rewriter.left.items() if not rewriter.is_inner(node)]
        rows = [_advice(source, node, name, reasons) for node, name in left]
        rows += [(line, what, advice) for made in plans for at, line, what, advice in made.notes if at is source]
        result.left = sorted({row for row in rows if not folder.is_elastic or row[1].startswith("hvd.elastic.")})
        results.append(result)
        needs_start |= any(name.startswith(API) for name in rewriter.left.values())
        names[source.path] = {source.code(node).split(".")[0] for node in rewriter.left}
        starts[source.path] = rewriter.starts
    is_left = any(names.values())
    return results, {path: names[path] | (starts[path] if needs_start else set()) for path in names if is_left}


def _plan(folder: Folder) -> tuple[list[Wrapping], dict[tuple[Path, int], str]]:
    """Return how the models of all optimizers are wrapped, and why others cannot be, by their places."""
    plans: list[Wrapping] = []
    reasons: dict[tuple[Path, int], str] = {}
    calls = folder.calls("DistributedOptimizer")
    for source, call in calls:
        try:
            if not {*folder.rules} >= NEEDED_BY_DDP:
                raise NotFollowedError("it has no rule")
            made = plan(folder, source, call)
            if any((made.source, made.key) == (other.source, other.key) for other in plans):
                raise NotFollowedError(f"`{made.model}` has another optimizer, too")
            plans.append(made)
        except NotFollowedError as error:
            reasons[source.path, source.line(call)] = str(error)
    for source, call in calls if reasons else ():
        reasons.setdefault((source.path, source.line(call)), "another optimizer of these files is left")
    return plans, reasons


def _advice(
    source: Source, node: cst.CSTNode, name: str, reasons: Mapping[tuple[Path, int], str]
) -> tuple[int, str, str]:
    """Return a row of what is left: line, what it is, and what to do by hand."""
    what, line = re.sub(rf"^{API}\.?", "hvd.", name).rstrip("."), source.line(node)
    called = what.partition(".")[2]
    advice = TABLE.by_hand.get(called.split(".")[0], (NOT_PLAIN if called in BY_NAME else "") + OTHERWISE)
    return line, what, reasons.get((source.path, line), advice) if called == "DistributedOptimizer" else advice


def _check_names(source: Source, after: str) -> None:
    """See that a file has no other things by the names that its result has for PyTorch's.

    Raises:
        OptionError: it has.
    """
    for name, whole in NAMES.items():
        before, now = (len(re.findall(rf"\b{name}[.(]", text)) for text in (source.text, after))
        imports: list[Any] = [*source.find(cst.Import), *source.find(cst.ImportFrom)]
        others = {whole for node in imports for known, whole, _ in names_of(node) if known == name} - {whole}
        is_variable = any(str(key).rpartition("<locals>.")[2] == name for key in source.uses)
        if now > before and (others or is_variable):
            raise OptionError(f"{source.path} has a `{name}` that is not {whole}: give it another name first")


def _end(folder: Folder, plans: Sequence[Wrapping]) -> None:
    """Put a loop under Join where `join` follows it, and the end of the process group where it began."""
    for source, call in folder.calls("join") if "join" in folder.rules else ():
        own = source.own_line(call)
        block = source.body(own)
        loop: Any = block[block.index(own) - 1] if own in block[1:] else None
        calls = [call for made in plans for call in made.training.calls if call[0] is source]
        for name in dict.fromkeys(name for _, inner, name in calls if loop in source.ancestors(inner)):
            source.under[loop] = loop, f"Join([{name}])"
            if own is not None and isinstance(source.parents[call], cst.Expr):
                source.gone.add(own)
    ends = folder.calls("shutdown") or any("destroy_process_group" in source.text for source in folder.sources)
    starts = folder.calls("init") if not ends and {"init", "shutdown"} <= {*folder.rules} else ()
    jobs = {job[1][-1]: job[0] for source, call in starts if (job := _job(folder, plans, source, call))}
    for last, source in jobs.items() if len(jobs) == 1 else ():
        source.behind[last] = "dist.destroy_process_group()"


def _job(folder: Folder, plans: Sequence[Wrapping], source: Source, call: cst.Call) -> Any:
    """Return a file and statements in it, at whose end the process group that a call starts has done its work.

    They are those of the function that trains, or of the file. None if the call is under a condition, or the file
    is a module of others.
    """
    statement, parents = source.own_line(call), source.parents
    while isinstance(around := parents.get(parents[statement]) if statement else None, cst.Try):
        statement = around
    if isinstance(around, cst.FunctionDef):
        if any(wrapping.is_inside(folder, around) for wrapping in plans):
            return source, around.body.body
        calls = [(at, inner) for at, inner in folder.calls_of(source, around) if around not in at.ancestors(inner)]
        return _job(folder, plans, *calls[0]) if len(calls) == 1 else None
    stem = rf"(?m)^\s*(from|import)\b.*\b{source.path.stem}\b"
    is_module = any(re.search(stem, other.text) for other in folder.sources if other is not source)
    if statement is None or (is_module if around is None else not source.is_main(around)):
        return None
    last: Any = [part for part in source.module.body if not isinstance(part, (cst.FunctionDef, cst.ClassDef))][-1]
    return source, (last.body if source.is_main(last) else source.module).body
