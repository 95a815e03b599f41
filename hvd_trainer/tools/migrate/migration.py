"""Migrate the files of a folder together: plan, rewrite, and say what is left."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst

from hvd_trainer.tools.migrate.flow import OF_DDP, NotFollowedError
from hvd_trainer.tools.migrate.imports import DDP, Importer, describe, left_over, name_of_distributed
from hvd_trainer.tools.migrate.passes import find_passes
from hvd_trainer.tools.migrate.rewrite import Edits, Rewriter
from hvd_trainer.tools.migrate.shell import migrate_commands
from hvd_trainer.tools.migrate.source import API, Folder, Source
from hvd_trainer.tools.migrate.table import BY_NAME, NOT_PLAIN, OTHERWISE, TABLE, Rule
from hvd_trainer.tools.migrate.wrapping import HOOKS, Wrapping, optimizer_names, plan, statement_of


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


def migrate(texts: Mapping[Path, str]) -> list[Migrated]:
    """Migrate Python files and the commands of other files.

    Raises:
        libcst.ParserSyntaxError: a file does not parse.
    """
    folder = Folder({path: text for path, text in texts.items() if path.suffix == ".py"})
    is_elastic = any(re.match(r"elastic\.(?!ElasticSampler)", it) for it in _names(folder))
    results = [_keep(source) for source in folder.sources] if is_elastic else _migrate_all(folder, keep=False)
    if not is_elastic and any(what.startswith("hvd.") for it in results for _, what, _ in it.left):
        results = _migrate_all(folder, keep=True)
    for path, text in texts.items():
        if path.suffix != ".py" and "horovodrun" in BY_NAME:
            after, left = migrate_commands(text)
            advice = "name each host's torchrun: --nnodes, --node-rank, --rdzv-endpoint"
            rows = [(line, "horovodrun", advice) for line in left]
            results.append(Migrated(path, text, after, left=rows))
    return results


def _migrate_all(folder: Folder, keep: bool) -> list[Migrated]:
    calls = folder.calls("DistributedOptimizer")
    plans: list[Wrapping] = []
    reasons: dict[tuple[Path, int], str] = {}
    for source, call in calls:
        try:
            if not {"DistributedOptimizer", "broadcast_parameters"} <= {*BY_NAME}:
                raise NotFollowedError("it has no rule")
            plans.append(plan(folder, source, call, only=len(calls) == 1))
        except NotFollowedError as error:
            reasons[source.path, source.line(call)] = str(error)
    optimizers = optimizer_names(folder)
    loads = {name.split(".")[-1] for name in folder.owners("load_state_dict")}
    edits = {source.path: Edits() for source in folder.sources}
    for it in list(plans):
        if not _apply(it, edits, optimizers):
            plans.remove(it)
            reasons[it.source.path, it.source.line(it.optimizer)] = "its sums of several passes are not seen"
    _end(folder, edits, plans)
    results = []
    for source in folder.sources:
        dist, is_sure = name_of_distributed(source.text), bool(calls) and not reasons
        without = functools.partial(_is_passed, folder, source)
        rewriter = Rewriter(source, edits[source.path], plans, dist, keep, is_sure, optimizers, loads, without)
        text = source.module.visit(rewriter).code
        if "DDP" in source.text and DDP not in source.text:
            text = re.sub(r"= DDP\(", "= torch.nn.parallel.DistributedDataParallel(", text)
        results.append(_finish(source, text, rewriter.used, rewriter.notes, reasons, keep))
    return results


def _names(folder: Folder) -> set[str]:
    """Return all names of Horovod's API that are used."""
    names = (name for source in folder.sources for _, name in left_over(source))
    return {describe(name) for name in names}


def _keep(source: Source) -> Migrated:
    """Leave a file of an elastic training, whose ranks change, to `hvd_trainer.hvd`."""
    result = _finish(source, source.text, [], [], {}, keep=True)
    result.left = [row for row in result.left if row[1].startswith("hvd.elastic.")]
    return result


def _is_passed(folder: Folder, source: Source, arg: cst.Arg) -> bool:
    """Return whether an argument is `hvd` itself, for a parameter that is not needed any more."""
    place = folder.parameter(source, arg) if API[:-1] in source.qualified(arg.value) else None
    return place is not None and place[0].key(place[1].name) in place[0].passed


def _apply(plan: Wrapping, edits: Mapping[Path, Edits], optimizers: set[str]) -> bool:
    """Note the changes of a plan; False if its passes must be seen and are not."""
    own = edits[plan.source.path]
    changes: list[tuple[Path, dict[cst.CSTNode, str]]] = []
    passes = []
    for holder in plan.holder.all():
        is_root, source = holder is plan.holder, holder.source
        renamed: dict[cst.CSTNode, str] = {}
        if not (is_root or holder.trains):
            continue
        for call in holder.calls:
            name = plan.name if is_root else source.code(call.func).removesuffix(".forward")
            renamed[call.func] = name
            planned = (
                find_passes(source, call, optimizers) if plan.passes is not None and plan.guard is None else None
            )
            if planned is not None:
                passes.append((source.path, planned.statements, planned.header(name)))
                renamed |= planned.renamed
        for node, to in holder.passed:
            if to.trains and is_root:
                renamed[node] = plan.name
            elif not to.trains and not is_root:
                renamed[node] = f"{source.code(node)}.module"
        for attribute in holder.attributes if not is_root else []:
            if attribute.attr.value not in OF_DDP:
                renamed[attribute.value] = f"{source.code(attribute.value)}.module"
        changes.append((source.path, renamed))
    if plan.passes is not None and not passes:
        if plan.hook == "sum_gradients":
            return False
        advice = (
            f"put all passes but the last under `with {plan.name}.no_sync():`: it is right without, and slower"
        )
        plan.notes.append((plan.source.line(plan.optimizer), "backward_passes_per_step", advice))
    for path, renamed in changes:
        edits[path].renamed |= renamed
    for path, statements, header in passes:
        if all(statements[0] is not held[0] for held, _ in edits[path].within):
            edits[path].within.append((statements, header))
    own.removed |= {*plan.unused}
    own.hooks += [HOOKS[it] for it in (plan.hook,) if it is not None and HOOKS[it] not in own.hooks]
    if plan.before is not None:
        own.before.setdefault(plan.before[0], []).extend(plan.before[1])
    if plan.guard is not None:
        own.before.setdefault(plan.guard, []).append(f"{plan.name} = {plan.model}")
    return True


def _end(folder: Folder, edits: Mapping[Path, Edits], plans: list[Wrapping]) -> None:
    """Put a loop under Join where `join` follows it, and the end of the process group where it began."""
    holders = [(made, holder) for made in plans for holder in made.holder.all()]
    for source, call in folder.calls("join") if "join" in BY_NAME else ():
        statement = statement_of(source, call)
        body = list(getattr(source.parents.get(statement), "body", ())) if statement else []
        loop: Any = body[body.index(statement) - 1] if isinstance(source.parents[call], cst.Expr) else None
        for made, holder in holders:
            if holder.source is source and any(loop in source.ancestors(it) for it in holder.calls):
                name = made.name if holder is made.holder else source.code(holder.calls[0].func)
                edits[source.path].within.append(([loop], f"Join([{name}])"))
    ends = folder.calls("shutdown") or any("destroy_process_group" in it.text for it in folder.sources)
    for source, call in folder.calls("init") if not ends and {"init", "shutdown"} <= {*BY_NAME} else ():
        function = source.function(call)
        conditions = [it for it in source.ancestors(call) if isinstance(it, cst.If)]
        by_name = [it for it in conditions if "__name__" in source.code(it.test)]
        if function is None or any(function in it.source.ancestors(it.place) for it in plans):
            text = "dist.destroy_process_group()"
            text = text if conditions in (by_name, []) else f"if dist.is_initialized():\n    {text}"
            edits[source.path].at_end[function or (by_name[0] if by_name else source.module)] = text


def _finish(
    source: Source,
    text: str,
    used: list[tuple[int, Rule]],
    notes: Sequence[tuple[int, str, str]],
    reasons: Mapping[tuple[Path, int], str],
    keep: bool,
) -> Migrated:
    """Change the imports, and list what is left."""
    if text == source.text and "horovod" not in text:
        return Migrated(source.path, text, text)
    changed = Source(source.path, text)
    changed.passed = source.passed
    after = changed.module.visit(Importer(changed, source.text)).code
    result = Migrated(source.path, source.text, after, used)
    lines = _old_lines(source.text, text)
    for node, name in left_over(changed):
        what = describe(name)
        is_part = any(
            isinstance(it, cst.Call) and changed.horovod(it.func) and it.func is not node
            for it in changed.ancestors(node)
        )
        around = changed.parents.get(node)
        is_start = keep and what in ("init", "shutdown") and isinstance(around, cst.Call) and not around.args
        if is_start or is_part:
            continue
        line = lines.get(changed.line(node), changed.line(node))
        advice = (NOT_PLAIN if what in BY_NAME else "") + OTHERWISE
        advice = TABLE.by_hand.get(what.split(".")[0], advice)
        if what == "DistributedOptimizer":
            advice = next(
                (why for (path, at), why in reasons.items() if path == source.path and abs(at - line) < 2), advice
            )
        result.left.append((line, "horovod.run" if name == "horovod.run" else f"hvd.{what}", advice))
    result.left = sorted({*result.left, *notes})
    return result


def _old_lines(before: str, after: str) -> Mapping[int, int]:
    """Return the line before of each line after that is the same."""
    blocks = difflib.SequenceMatcher(
        None, before.splitlines(), after.splitlines(), autojunk=False
    ).get_matching_blocks()
    return {block.b + at + 1: block.a + at + 1 for block in blocks for at in range(block.size)}


def trap_lines(result: Migrated, quantity: str) -> Iterator[str]:
    """Yield the lines whose rules change a quantity of the training, as `parity` calls it."""
    lines = result.before.splitlines()
    for line, rule in sorted(result.used, key=lambda it: it[0]):
        if rule.shows == quantity:
            yield f"{result.path}:{line}: {lines[line - 1].strip()}\n    {rule.why}"
