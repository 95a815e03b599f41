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

from hvd_trainer.tools.migrate.flow import Folder, NotFollowedError
from hvd_trainer.tools.migrate.launchers import plan_launchers
from hvd_trainer.tools.migrate.outside import DOCUMENTS, migrate_commands, rest_of
from hvd_trainer.tools.migrate.rewrite import Rewriter
from hvd_trainer.tools.migrate.source import API, Source, imported_words, progress
from hvd_trainer.tools.migrate.table import BY_HAND, BY_NAME, OTHERWISE, Rule
from hvd_trainer.tools.migrate.tokens import advice_on, named_in, tokens_of
from hvd_trainer.tools.migrate.wrapping import Wrapping, plan

NEEDED_BY_DDP = {"DistributedOptimizer", "broadcast_parameters"}


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

    def named(self) -> list[tuple[int, str]]:
        """Return the lines, by their numbers before, that still name Horovod and are not left."""
        if self.before == self.after or DOCUMENTS.match(self.path.name):
            return []
        lines = self.after.splitlines()
        named = [at for at, line in enumerate(lines, start=1) if "horovod" in line.lower()]
        named = sorted(named_in(self.after)) if self.path.suffix == ".py" else named
        left = {line for line, *_ in self.left}
        return [(self.before_line(at), lines[at - 1].strip()) for at in named if self.before_line(at) not in left]

    def diff(self) -> str:
        """Return the unified diff."""
        before, after = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, str(self.path), str(self.path)))

    def before_line(self, number: int) -> int:
        """Return the line before of a line after."""
        return _line(self.after, self.before, number)

    def after_line(self, number: int) -> int:
        """Return the line after of a line before."""
        return _line(self.before, self.after, number)

    def traps(self, quantity: str) -> Iterator[str]:
        """Yield the lines whose rules change a quantity of the training, as `parity` calls it."""
        lines = self.before.splitlines()
        for line, rule in sorted(self.used, key=lambda use: (use[1].special, use[0])):
            if quantity in rule.shows.split(", "):
                yield f"{self.path}:{line}: {lines[line - 1].strip()}\n    {rule.why}"


def _line(one: str, other: str, number: int) -> int:
    """Return where a line of a text is in another version of it."""
    for _, begin, end, place, stop in _blocks(one, other):
        if begin <= number - 1 < end:
            return max(1, min(place + number - 1 - begin, stop - 1) + 1)
    return number


@lru_cache(maxsize=8)
def _blocks(one: str, other: str) -> Sequence[tuple[str, int, int, int, int]]:
    return difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), autojunk=False).get_opcodes()


def migrate(texts: Mapping[Path, str]) -> list[Migrated]:
    """Migrate Python files and the commands of other files.

    Raises:
        libcst.ParserSyntaxError: a file does not parse.
    """
    python = {path: text.replace("\r\n", "\n") for path, text in texts.items() if path.suffix == ".py"}
    results: list[Migrated] = []
    for program in _programs(python):
        if not any(re.search("(?i)horovod", text) for text in program.values()):
            others = [(path, text, tokens_of(text, ())) for path, text in program.items()]
            results += [Migrated(path, text, text, left=left) for path, text, left in others]
            continue
        results += _migrate_all(program)
    results.sort(key=lambda result: [*python].index(result.path))
    for result in results:
        ends = "\r\n" if "\r\n" in texts[result.path] else "\n"
        result.before, result.after = texts[result.path], result.after.replace("\n", ends)
    scripts = {path.name for path, text in python.items() if "horovod" in text}
    is_left = any("hvd_trainer" in result.after for result in results)
    for path, text in texts.items():
        if path.suffix != ".py":
            result = Migrated(path, text, text)
            if "horovodrun" in BY_NAME:
                result.after = migrate_commands(path, text, scripts, is_left=is_left)
                blocks = _blocks(text, result.after)
                result.used = [(row[1] + 1, BY_NAME["horovodrun"]) for row in blocks if row[0] != "equal"]
            rows = rest_of(path, result.after, scripts)
            result.left = [(result.before_line(line), what, advice) for line, what, advice in rows]
            results.append(result)
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
    return _module(other) in imported_words(text) or _module(path) in imported_words(other_text)


def _module(path: Path) -> str:
    return path.stem if path.stem != "__init__" else path.resolve().parent.name


def _migrate_all(
    texts: Mapping[Path, str],
    keep: Mapping[Path, set[str]] | None = None,
    reasons: Mapping[tuple[Path, int], str] | None = None,
    whole: str = "",
) -> list[Migrated]:
    """Return the files.

    Args:
        keep: the names in each that must still refer to Horovod.
        reasons: why optimizers are left, by their places: all are, as `synchronize` and the like are for each.
        whole: the name in Horovod's API for which all is left.
    """
    folder, plans = Folder(texts, keep, whole), list[Wrapping]()
    calls = folder.calls("DistributedOptimizer")
    if reasons is None and calls:
        plans, reasons = _plan(folder)
        if reasons:
            return _migrate_all(texts, keep, reasons, whole)
    reasons = reasons or {}
    if not folder.whole and not all(_join(folder, plans, *call) for call in folder.calls("join")):
        return _migrate_all(texts, keep, reasons, "join")
    for made in plans:
        made.apply(folder)
    folder.is_sure = bool(plans)
    launched = [plan_launchers(source) for source in folder.sources if not folder.whole]
    folder.is_started = any(launched)
    _end(folder, plans)
    rewriters = [Rewriter(source, folder) for source in folder.sources]
    for rewriter in progress(rewriters, "rewrite"):
        rewriter.rewrite()
    names, kept = _kept(folder, rewriters), keep or {}
    if any(names[path] - kept.get(path, set()) for path in names):  # what is left in a file keeps calls of others
        kept = {path: kept.get(path, set()) | names[path] for path in names}
        return _migrate_all(texts, kept, reasons or None, folder.whole)
    results, defined = list[Migrated](), {*folder.definitions}
    for rewriter in rewriters:
        source = rewriter.source
        result = Migrated(source.path, source.text, rewriter.code(), rewriter.used)
        left = [(node, name) for node, name in rewriter.left.items() if not rewriter.is_inner(node)]
        rows = [_advice(rewriter, node, name, reasons) for node, name in left]
        rows += [(line, what, advice) for made in plans for at, line, what, advice in made.notes if at is source]
        prefix = f"hvd.{folder.whole}"
        rows = [row for row in rows if not folder.whole or row[1].startswith(prefix)]
        lines = {row[0] for row in rows} | {source.line(node) for node in rewriter.left if folder.whole}
        named = [(result.before_line(at), what, how) for at, what, how in tokens_of(result.after, defined)]
        is_used = any(row[1].startswith("horovod.") for row in rows)  # by more than its import
        rows += [row for row in named if row[0] not in lines and not (is_used and row[1] == "horovod")]
        result.left = sorted({*rows})
        results.append(result)
    return results


def _kept(folder: Folder, rewriters: Sequence[Rewriter]) -> dict[Path, set[str]]:
    """Return the names in each file by which it still refers to Horovod; none if no file does."""
    names: dict[Path, set[str]] = {source.path: set() for source in folder.sources}
    for rewriter in rewriters:
        source = rewriter.source
        for first, *inner in (source.code(node).split(".") for node in rewriter.left):
            names[source.path].add(first)
            for other in filter(source.imports, folder.sources) if inner and first != "self" else ():
                names[other.path].update(inner[:-1])  # `module.hvd.rank`
    if any(name.startswith(API) for rewriter in rewriters for name in rewriter.left.values()):
        for rewriter in rewriters:
            names[rewriter.source.path] |= rewriter.starts
    return names if any(names.values()) else {}


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
    rewriter: Rewriter, node: cst.CSTNode, name: str, reasons: Mapping[tuple[Path, int], str]
) -> tuple[int, str, str]:
    """Return a row of what is left: line, what it is, and what to do by hand."""
    source, why = rewriter.source, rewriter.why
    what, line = re.sub(rf"^{API}\.?", "hvd.", name).rstrip("."), source.line(node)
    called = what.partition(".")[2]
    advice = why.get(node, BY_HAND.get(called.split(".")[0], OTHERWISE))
    if what.startswith("horovod.") and called not in BY_HAND:
        advice = next(advice_on(what))[1]
    if reasons and called.startswith(("broadcast_optimizer_state", "Compression")):
        advice = "it is left with its optimizer"
    return line, what, reasons.get((source.path, line), advice) if called == "DistributedOptimizer" else advice


def _join(folder: Folder, plans: Sequence[Wrapping], source: Source, call: cst.Call) -> bool:
    """Put a loop under Join where `join` follows it; return whether it is seen to have no other collectives."""
    own = source.own_line(call) if "join" in folder.rules else None
    block = source.body(own)
    loop: Any = block[block.index(own) - 1] if own in block[1:] else None
    calls = [call for made in plans for call in made.training.calls if call[0] is source]
    names = [*dict.fromkeys(name for _, inner, name in calls if loop in source.ancestors(inner))]
    reached = folder.reached(source.find(cst.Call, loop)) if names else ()
    inside = [(source, loop), *(place for name in reached for place in folder.definitions.get(name, ()))]
    others = [
        at.horovod(inner.func) for at, node in inside if node is not None for inner in at.find(cst.Call, node)
    ]
    if len(names) != 1 or any(name in BY_NAME and BY_NAME[name].lines for name in others):
        return False
    source.under[loop] = loop, f"Join([{names[0]}])"
    if own is not None and isinstance(source.parents[call], cst.Expr):
        source.gone.add(own)
    return True


def _end(folder: Folder, plans: Sequence[Wrapping]) -> None:
    """Put the end of the process group where it began, in each script that has no other end."""
    for files in folder.scripts if {"init", "shutdown"} <= {*folder.rules} and not folder.is_started else ():
        ends = [at for at, _ in folder.calls("shutdown") if at in files]
        if ends or any("destroy_process_group" in source.text for source in files):
            continue
        calls = [(source, call) for source, call in folder.calls("init") if source in files]
        jobs = {job[1][-1]: job[0] for source, call in calls if (job := _job(folder, plans, source, call))}
        for last, source in jobs.items() if len(jobs) == 1 else ():
            source.end[last] = f"{source.aliases['dist']}.destroy_process_group()"


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
