"""A file: what its expressions refer to, by LibCST's scopes, and the changes that are made to its text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import libcst as cst
from libcst import matchers as m
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedName,
    QualifiedNameSource,
    ScopeProvider,
    WhitespaceInclusivePositionProvider,
)

T = TypeVar("T", bound=cst.CSTNode)
API = "horovod.torch"
CONDITIONAL = (cst.Lambda, cst.BaseComp, cst.IfExp, cst.BooleanOperation, cst.SimpleStatementSuite)


class Source:
    """A parsed file.

    Attributes:
        nodes: all of its nodes, those inside another before it.
        passed: its function parameters that stand for `horovod.torch`, by their keys.
        changes: texts that replace what stands between two places, or are inserted where these are the same.
        shifts: places between which lines are indented more (1) or less (-1).
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.module = wrapper.module
        self._scopes = wrapper.resolve(ScopeProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self._ranges = wrapper.resolve(PositionProvider)
        self._wide_ranges = wrapper.resolve(WhitespaceInclusivePositionProvider)
        self._lines = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
        self._below: dict[cst.CSTNode, list[cst.CSTNode]] = {}
        self.nodes = self._all(self.module)
        self.passed: set[str] = set()
        self.changes: dict[tuple[int, int], str] = {}
        self.shifts: list[tuple[int, int, int]] = []

    # What is where.

    def _all(self, root: cst.CSTNode) -> list[cst.CSTNode]:
        if root not in self._below:
            self._below[root] = [*(node for child in root.children for node in self._all(child)), root]
        return self._below[root]

    def find(self, kind: type[T], root: cst.CSTNode | None = None) -> list[T]:
        """Return all nodes of a kind, or those below a node, those inside another before it."""
        return [node for node in self._all(root or self.module) if isinstance(node, kind)]

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, from its parent on."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def around(self, node: cst.CSTNode, kind: type[T]) -> T | None:
        """Return the innermost node of a kind around a node."""
        return next((ancestor for ancestor in self.ancestors(node) if isinstance(ancestor, kind)), None)

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the function around a node."""
        return self.around(node, cst.FunctionDef)

    def body(self, statement: cst.CSTNode | None) -> list[Any]:
        """Return the statements of the block that a statement stands in."""
        return list(getattr(self.parents.get(statement), "body", ())) if statement else []

    def own_line(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the statement around an expression; None if it may be run less often than what is before it."""
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, cst.SimpleStatementLine):
                return ancestor if len(ancestor.body) == 1 else None
            if isinstance(ancestor, cst.If):
                return None if isinstance(self.parents.get(ancestor), cst.If) else ancestor
            if isinstance(ancestor, (*CONDITIONAL, cst.BaseCompoundStatement)):
                return None
        return None

    def target(self, call: cst.CSTNode) -> str | None:
        """Return the variable that a call's result is assigned to."""
        simple = m.Assign([m.AssignTarget(m.Name() | m.Attribute(value=m.Name()))])
        parent: Any = self.parents[call]
        return self.code(parent.targets[0].target) if m.matches(parent, simple) else None

    def span(self, node: cst.CSTNode, wide: bool = False) -> tuple[int, int]:
        """Return where a node begins and ends; `wide`: with the comments before it and the end of its line."""
        place = (self._wide_ranges if wide else self._ranges)[node]
        start, end = (self._lines[position.line - 1] + position.column for position in (place.start, place.end))
        return start, end

    def line(self, node: cst.CSTNode) -> int:
        """Return the line where a node begins."""
        return self._ranges[node].start.line

    # What it refers to.

    def _qualified_names(self, node: cst.CSTNode) -> Collection[QualifiedName]:
        scope = self._scopes.get(node)
        return scope.get_qualified_names_for(node) if scope is not None else ()

    def qualified(self, node: cst.CSTNode) -> set[str]:
        """Return what a name or an attribute may refer to: `horovod.torch.rank`, `main.<locals>.model`."""
        is_name = isinstance(node, (cst.Name, cst.Attribute))
        names = {name.name for name in self._qualified_names(node)} if is_name else set()
        stand_in = {
            API + name[len(own) :] for own in self.passed for name in names if f"{name}.".startswith(f"{own}.")
        }
        return names | stand_in

    def modules(self, node: cst.CSTNode) -> set[str]:
        """Return the last names of the modules that a name or an attribute may be imported from."""
        names = (name for name in self._qualified_names(node) if name.source is QualifiedNameSource.IMPORT)
        return {name.name.rpartition(".")[0].rpartition(".")[2] for name in names}

    def horovod(self, node: cst.CSTNode) -> str | None:
        """Return the name in Horovod's API that a name or an attribute refers to, such as `Compression.fp16`."""
        names = (name for name in sorted(self.qualified(node)) if name.startswith(f"{API}."))
        return next((name[len(API) + 1 :] for name in names), None)

    def key(self, node: cst.CSTNode) -> str | None:
        """Return what identifies a variable in this file: `main.<locals>.model`, or `Class.self.model`."""
        if isinstance(node, cst.Name):
            return min((name.name for name in self._qualified_names(node)), default=None)
        owner = self.around(node, cst.ClassDef) if m.matches(node, m.Attribute(m.Name("self"))) else None
        return f"{owner.name.value}.self.{node.attr.value}" if owner else None  # type: ignore[attr-defined]

    @cached_property
    def uses(self) -> dict[str | None, list[Any]]:
        """All places of each variable, by its key."""
        result: dict[str | None, list[Any]] = defaultdict(list)
        for node in self.nodes:
            parent: Any = self.parents.get(node)
            is_name = node in (getattr(parent, "attr", None), getattr(parent, "keyword", None))
            if isinstance(node, (cst.Name, cst.Attribute)) and not is_name and (key := self.key(node)):
                result[key].append(node)
        return result

    def assigned(self, node: cst.CSTNode) -> bool:
        """Return whether a variable is assigned here."""
        parent = self.parents.get(node)
        parent = self.parents.get(self.parents[parent]) if isinstance(parent, cst.Element) else parent
        return isinstance(parent, cst.AssignTarget)

    @cached_property
    def words(self) -> set[str]:
        """All names in the file."""
        return {name.value for name in self.find(cst.Name)}

    # Its text, and changes of it.

    def code(self, node: cst.CSTNode) -> str:
        """Return a node's text as it was."""
        start, end = self.span(node)
        return self.text[start:end]

    def new(self, node: cst.CSTNode) -> str:
        """Return an expression's text with the changes inside it."""
        start, end = self.span(node)
        return self._apply(
            start, end, lambda first, last: start < last and first < end
        )  # what is of the statement

    def result(self) -> str:
        """Return the changed text."""
        return self._apply(0, len(self.text))

    def _applied(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the places of the changes between two, without those that are part of another."""
        for first, last in sorted(self.changes, key=lambda span: (span[0], span[1] > span[0], -span[1])):
            if start <= first and last <= end:
                yield first, last
                start = last

    def _apply(self, start: int, end: int, takes: Callable[[int, int], bool] = lambda first, last: True) -> str:
        parts, at = [], start
        for first, last in self._applied(start, end):
            if takes(first, last):
                parts += [self.text[at:first], self.changes[first, last]]
                at = last
        return "".join([*parts, self.text[at:end]])

    def old_line(self, place: int) -> int:
        """Return the line in which a place of the changed text was."""
        more = 0
        for first, last in self._applied(0, len(self.text)):
            size = len(self.changes[first, last])
            if place < first + more + size:
                place = min(place, first + more)
                break
            more += size - (last - first)
        return self.text.count("\n", 0, place - more) + 1

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Put a text in the place of an expression."""
        self.changes[self.span(node)] = text

    def insert(self, place: int, text: str) -> None:
        """Put a text behind what has been inserted at a place."""
        self.changes[place, place] = self.changes.get((place, place), "") + text

    def keep(self, items: Sequence[cst.CSTNode], kept: Sequence[cst.CSTNode]) -> None:
        """Keep some of a call's arguments, or of a function's parameters."""
        if len(kept) == len(items):
            return
        ends = self.span(items[0])[0], self.span(items[-1])[1]
        self.changes[ends] = ", ".join(self.new(item) for item in kept)

    def indent(self, statement: cst.CSTNode) -> str:
        """Return what stands before a statement in its line."""
        start = self.span(statement)[0]
        depth = sum(by for first, last, by in self.shifts if first <= start < last)
        own = self.text[self.text.rfind("\n", 0, start) + 1 : start]
        return own[len(self.module.default_indent) :] if depth < 0 else own + self.module.default_indent * depth

    def shift(self, start: int, end: int, by: int) -> None:
        """Indent the lines that begin between two places, but for those of a text."""
        unit = self.module.default_indent
        texts = [self.span(string) for string in (*self.find(cst.SimpleString), *self.find(cst.FormattedString))]
        for line in (place for place in self._lines if start < place < end and self.text[place] != "\n"):
            is_text = any(first < line < last for first, last in texts)
            if not is_text and (by > 0 or self.text.startswith(unit, line)):
                self.changes[line, line + len(unit) * (by < 0)] = unit * (by > 0)
        self.shifts.append((start, end, by))

    def remove(self, statements: Sequence[cst.CSTNode]) -> None:
        """Take statements out, with conditions and blocks that would be empty."""
        removed = set(statements)
        for block in self.find(cst.IndentedBlock):  # the inner ones first
            gone = [statement for statement in block.body if statement in removed]
            if len(gone) < len(block.body):
                continue
            around = self.parents[block]
            is_whole = isinstance(around, (cst.If, cst.Try)) and not getattr(around, "orelse", None)
            if is_whole and not isinstance(self.parents.get(around), cst.If):
                removed.add(around)
            else:
                removed.discard(gone[-1])
                self.changes[self.span(gone[-1])] = "pass"
        for statement in removed:
            start, end = self.span(statement, wide=True)
            # The line that sets apart what is taken out sets apart what follows it at once, too.
            start += self.text.startswith("\n", start) and not self.text.startswith("\n", end)
            if not self.changes.get((start, start), "x").strip():  # it only indents what is taken out
                del self.changes[start, start]
            self.changes[start, end] = ""
