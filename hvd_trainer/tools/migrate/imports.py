"""Change the imports of a rewritten file to what it uses now, and find out what is left of Horovod in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.source import API, Source

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP"
ADDED = (
    (r"\bos\.environ\b", "import os"),
    (r"\bcontextlib\.nullcontext\b", "import contextlib"),
    (r"\btorch\.(cat|empty_like|nn\.SyncBatchNorm|utils\.data\.Distrib)", "import torch"),
    (r"\bdist\.\w", "import torch.distributed as dist"),
    (r"\btorch\.distributed\.\w", "import torch.distributed"),
    (r"\bdefault_hooks\.", "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks"),
    (r"\bJoin\(\[", "from torch.distributed.algorithms.join import Join"),
    (r"\bDDP\(", DDP),
)
"""What a rewritten file uses, and the import that it needs."""
STANDS_IN = {"horovod.torch": "hvd_trainer.hvd", "horovod": "hvd_trainer.tools.run.horovod_package"}


def name_of_distributed(text: str) -> str:
    """Return by which name a file calls torch.distributed, or may."""
    alias = re.search(r"import torch\.distributed as (\w+)|from torch import distributed as (\w+)", text)
    if alias:
        return alias[1] or alias[2]
    return "torch.distributed" if re.search(r"(?<!\.)\bdist\b", text) else "dist"


def left_over(source: Source) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yield what still refers to Horovod, with its qualified name."""
    for node in [*source.find(source.module, cst.Name), *source.find(source.module, cst.Attribute)]:
        parent = source.parents.get(node)
        if isinstance(parent, cst.AssignTarget):
            continue
        if (
            source.around(node, cst.Import)
            or source.around(node, cst.ImportFrom)
            or isinstance(parent, (cst.Attribute, cst.NameItem, cst.Param))
        ):
            continue
        names = [it for it in source.qualified(node) if re.match(r"horovod(\.|$)", it)]
        if names:
            yield node, names[0]


class Importer(cst.CSTTransformer):
    """Replaces a file's imports of Horovod."""

    def __init__(self, source: Source, before: str) -> None:
        code = re.sub(r"#.*|^\s*(from|import) .*", "", source.text, flags=re.MULTILINE)
        needed = [line for pattern, line in ADDED if re.search(pattern, code)]
        self.lines = [it for it in needed if not self._has(it, before)]
        self.used = {source.code(node).split(".")[0] for node, name in left_over(source) if name != "horovod.run"}
        self.source, self.depth = source, 0
        self.added: list[Any] = []

    def _has(self, line: str, before: str) -> bool:
        """Return whether a file has an import that binds the same name."""
        name = re.escape(line.split()[-1])
        pattern = rf"^\s*(from|import) .*\b{name}\b"
        if line.startswith("import ") and " as " not in line:
            pattern = rf"^import ([^\n]*, )?{name}(\.[\w.]+)?(,|\s*$)"
        return re.search(pattern, before, re.MULTILINE) is not None

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:  # noqa: D102, N802
        self.depth += 1

    def leave_IndentedBlock(self, original: cst.IndentedBlock, updated: cst.IndentedBlock) -> cst.IndentedBlock:  # noqa: D102, N802
        self.depth -= 1
        return updated

    def leave_Attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:  # noqa: D102, N802
        return (
            cst.parse_expression(STANDS_IN["horovod.torch"])
            if m.matches(original, m.Attribute(m.Name("horovod"), m.Name("torch")))
            else updated
        )

    def leave_Try(self, original: cst.Try, updated: cst.Try) -> cst.BaseStatement | cst.RemovalSentinel:  # noqa: D102, N802
        return updated if updated.body.body else cst.RemoveFromParent()

    def leave_SimpleStatementLine(  # noqa: D102, N802
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> Any:
        small = original.body[0]
        if "horovod" not in self.used and re.search(r"\bhorovod\.run\(", self.source.code(original)):
            package, _, last = STANDS_IN["horovod"].rpartition(".")
            start = cst.parse_statement(f"from {package} import {last} as horovod")
            moved = start.with_changes(leading_lines=updated.leading_lines)
            return cst.FlattenSentinel([moved, updated.with_changes(leading_lines=())])
        if not isinstance(small, (cst.Import, cst.ImportFrom)) or isinstance(small.names, cst.ImportStar):
            return updated
        module = small.module if isinstance(small, cst.ImportFrom) else small.names[0].name
        name = cst.Module([]).code_for_node(module) if module is not None else ""
        if name not in STANDS_IN:
            return updated
        kept = [it for it in small.names if self._bound(it) in self.used]
        new: list[Any] = []
        if kept and isinstance(small, cst.ImportFrom):
            target = cst.parse_expression(STANDS_IN[name])
            kept = [*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
            new = [updated.with_changes(body=[small.with_changes(module=target, names=kept)])]
        elif kept:
            alias = self._bound(small.names[0])
            package, _, last = STANDS_IN[name].rpartition(".")
            line = (
                f"import {STANDS_IN[name]}"
                if "." in name and alias == "horovod"
                else f"from {package} import {last}" + (f" as {alias}" if alias != last else "")
            )
            new = [cst.parse_statement(line)]
        if self.depth == 0:
            new += [cst.parse_statement(line) for line in self.lines if not _is_standard(line)]
            self.lines = [line for line in self.lines if _is_standard(line)]
        if not new:
            return cst.RemoveFromParent()
        new[0] = new[0].with_changes(leading_lines=updated.leading_lines)
        if self.depth == 0:
            self.added = self.added or new
        return cst.FlattenSentinel(new)

    def _bound(self, alias: cst.ImportAlias) -> str:
        return alias.asname.name.value if alias.asname else cst.Module([]).code_for_node(alias.name).split(".")[0]  # type: ignore

    def leave_Module(self, original: cst.Module, updated: cst.Module) -> cst.Module:  # noqa: D102, N802
        body = list(updated.body)
        place = body.index(self.added[0]) if self.added else 0
        after = place + len(self.added)
        torch = m.SimpleStatementLine(body=[m.Import([m.ImportAlias(m.Name("torch"))])])
        if self.added and after < len(body) and m.matches(body[after], torch):  # first torch, and then its parts
            first, moved = body[place], body.pop(after)
            body[place] = first.with_changes(leading_lines=moved.leading_lines)
            body.insert(place, moved.with_changes(leading_lines=first.leading_lines))
        for line in self.lines:
            body = _insert(body, line)
        return updated.with_changes(body=body)


def _is_standard(line: str) -> bool:
    return line.split()[1].split(".")[0] in sys.stdlib_module_names


def _insert(body: list[Any], line: str) -> list[Any]:
    """Put an import among a file's, before the first that comes after it by its name."""
    places = [
        place
        for place, it in enumerate(body)
        if m.matches(it, m.SimpleStatementLine(body=[m.Import() | m.ImportFrom()]))
    ]
    places = [
        place
        for place in places
        if not m.matches(body[place], m.SimpleStatementLine(body=[m.ImportFrom(module=m.Name("__future__"))]))
    ]
    words = [cst.Module([]).code_for_node(body[place]).split() for place in places]
    key = line.split()[1]
    new: Any = cst.parse_statement(line)
    if not places:
        return (
            [*body[:1], new, *body[1:]]
            if body and m.matches(body[0], m.SimpleStatementLine(body=[m.Expr(m.SimpleString())]))
            else [new, *body]
        )
    if not _is_standard(line):
        place = places[-1] + 1
    else:
        before = [
            place
            for place, word in zip(places, words, strict=True)
            if word[0] == "import" and _is_standard(" ".join(word[:2])) and word[1] < key
        ]
        place = before[-1] + 1 if before else places[0]
    if place == places[0]:
        new = new.with_changes(leading_lines=body[place].leading_lines)
        body[place] = body[place].with_changes(leading_lines=())
    return [*body[:place], new, *body[place:]]


def describe(name: str) -> str:
    """Return a left-over name as Horovod's documentation has it: `Adasum`, `run`."""
    return name.removeprefix(API).removeprefix("horovod.")
