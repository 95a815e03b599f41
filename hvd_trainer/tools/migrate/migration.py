"""Migrate the files of a folder together: plan, rewrite, and say what is left."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.flow import Folder, NotFollowedError
from hvd_trainer.tools.migrate.imports import change_imports, check_names, left_over
from hvd_trainer.tools.migrate.rewrite import Job, Rewriter
from hvd_trainer.tools.migrate.shell import migrate_commands
from hvd_trainer.tools.migrate.source import API, Source
from hvd_trainer.tools.migrate.table import BY_NAME, NOT_PLAIN, OTHERWISE, TABLE, Rule
from hvd_trainer.tools.migrate.wrapping import Wrapping, find_passes, plan

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
    results = _migrate_all(Folder(python), keep=False)
    if any(what.startswith("hvd") for result in results for _, what, _ in result.left):
        results = _migrate_all(Folder(python), keep=True)
    for result in results:
        ends = "\r\n" if "\r\n" in texts[result.path] else "\n"
        result.before, result.after = texts[result.path], result.after.replace("\n", ends)
    for path, text in texts.items():
        if path.suffix != ".py" and "horovodrun" in BY_NAME:
            after, left = migrate_commands(text)
            advice = "name each host's torchrun: --nnodes, --node-rank, --rdzv-endpoint"
            results.append(Migrated(path, text, after, left=[(line, "horovodrun", advice) for line in left]))
    return results


def _migrate_all(folder: Folder, keep: bool) -> list[Migrated]:
    names = {name for source in folder.sources for _, name in left_over(source)}
    if any(re.match(rf"{API}\.elastic\.(?!ElasticSampler)", name) for name in names):
        # The ranks of such a training change: `hvd_trainer.hvd` takes all of it.
        results = [_finish(source, [], {}, keep=True) for source in folder.sources]
        for result in results:
            result.left = [row for row in result.left if row[1].startswith("hvd.elastic.")]
        return results
    calls = folder.calls("DistributedOptimizer")
    targets = (source.target(call) for source, call in calls)
    optimizers = {target.split(".")[-1] for target in targets if target} | folder.owners("skip_synchronize")
    plans: list[Wrapping] = []
    reasons: dict[tuple[Path, int], str] = {}
    for source, call in calls:
        try:
            if not {*BY_NAME} >= NEEDED_BY_DDP:
                raise NotFollowedError("it has no rule")
            plans.append(plan(folder, source, call))
            _apply(plans[-1], optimizers)
        except NotFollowedError as error:
            reasons[source.path, source.line(call)] = str(error)
    _end(folder, plans)
    job = Job(plans, optimizers, folder.owners("load_state_dict"), bool(calls) and not reasons, keep)
    results = []
    for source in folder.sources:
        rewriter = Rewriter(source, job)
        rewriter.rewrite()
        result = _finish(source, rewriter.used, reasons, keep)
        result.left = sorted(
            {*result.left, *(row for made in plans if made.source is source for row in made.notes)}
        )
        results.append(result)
    return results


def _apply(plan: Wrapping, optimizers: set[str]) -> None:
    """Note the changes of a plan."""
    calls = plan.training.calls if plan.has_passes and plan.guard is None else []
    passes = {(call[0], made[0][0]): made for call in calls if (made := find_passes(*call, optimizers))}
    if plan.has_passes and not passes:
        advice = (
            f"put all passes but the last under `with {plan.name}.no_sync():`: it is right without, and slower"
        )
        plan.notes.append((plan.source.line(plan.optimizer), "backward_passes_per_step", advice))
    for (source, _), (statements, header) in passes.items():
        _put_under(source, statements, header)
    for source, node, text in plan.training.edits:
        source.replace(node, text)
    if plan.hook is not None:
        _add_hook(plan.source, TABLE.hooks[plan.hook])
    if plan.guard is not None:
        text = f"{plan.name} = {plan.model}\n{plan.source.indent(plan.guard)}"
        plan.source.insert(plan.source.span(plan.guard)[0], text)


def _put_under(source: Source, statements: list[Any], header: str) -> None:
    """Put statements under a `with`."""
    start, end = source.span(statements[0])[0], source.span(statements[-1], wide=True)[1]
    indent = source.indent(statements[0])
    source.insert(start, f"with {header}:\n{indent}{source.module.default_indent}")
    source.shift(start, end, 1)


def _add_hook(source: Source, text: str) -> None:
    """Put a function behind the imports."""
    head = m.SimpleStatementLine([m.Import() | m.ImportFrom() | m.Expr(m.SimpleString() | m.ConcatenatedString())])
    first: Any = next(statement for statement in source.module.body if not m.matches(statement, head))
    blank = next((at for at, line in enumerate(first.leading_lines) if line.comment), len(first.leading_lines))
    place = source.span(first, wide=True)[0]
    if text not in source.changes.get((place, place), ""):
        source.insert(place, "\n\n" + text + "\n" * max(0, 2 - blank))


def _end(folder: Folder, plans: list[Wrapping]) -> None:
    """Put a loop under Join where `join` follows it, and the end of the process group where it began."""
    for source, call in folder.calls("join") if "join" in BY_NAME else ():
        own = source.own_line(call)
        block = source.body(own)
        loop: Any = block[block.index(own) - 1] if own in block[1:] else None
        calls = [call for made in plans for call in made.training.calls if call[0] is source]
        for name in dict.fromkeys(name for _, call, name in calls if loop in source.ancestors(call)):
            _put_under(source, [loop], f"Join([{name}])")
    ends = folder.calls("shutdown") or any("destroy_process_group" in source.text for source in folder.sources)
    for source, call in folder.calls("init") if not ends and {"init", "shutdown"} <= {*BY_NAME} else ():
        block = source.body(source.own_line(call))
        around = source.parents.get(source.parents[block[0]]) if block else None
        is_main = isinstance(around, cst.If) and "__name__" in source.code(around.test)
        trains = isinstance(around, cst.FunctionDef) and any(
            around in wrapping.source.ancestors(wrapping.place) for wrapping in plans
        )
        if block and (around is None or is_main or trains):
            is_return = m.matches(block[-1], m.SimpleStatementLine([m.Return()]))
            place = source.span(block[-1], wide=True)[not is_return]
            source.insert(place, f"\n{source.indent(block[0])}dist.destroy_process_group()\n")


def _finish(
    source: Source, used: list[tuple[int, Rule]], reasons: Mapping[tuple[Path, int], str], keep: bool
) -> Migrated:
    """Change the imports, and list what is left."""
    result = Migrated(source.path, source.text, source.result(), used)
    if result.after == source.text and "horovod" not in source.text:
        return result
    check_names(source, result.after)
    changed = Source(source.path, result.after)
    changed.passed = source.passed
    for node, name in left_over(changed):
        what, around = re.sub(rf"^{API}\.?", "hvd.", name).rstrip("."), changed.parents.get(node)
        is_start = (
            keep and what in ("hvd.init", "hvd.shutdown") and isinstance(around, cst.Call) and not around.args
        )
        outer = (call for call in changed.ancestors(node) if isinstance(call, cst.Call) and call.func is not node)
        if is_start or any(changed.horovod(call.func) for call in outer):
            continue
        line = source.old_line(changed.span(node)[0])
        called = what.partition(".")[2]
        advice = TABLE.by_hand.get(called.split(".")[0], (NOT_PLAIN if called in BY_NAME else "") + OTHERWISE)
        advice = reasons.get((source.path, line), advice) if called == "DistributedOptimizer" else advice
        result.left.append((line, what, advice))
    change_imports(changed)
    result.after = changed.result()
    return result
