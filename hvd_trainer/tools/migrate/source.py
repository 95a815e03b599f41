"""A file: what its expressions refer to, by LibCST's scopes, and the changes that are planned for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property
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
)

T = TypeVar("T", bound=cst.CSTNode)
API = "horovod.torch"
ASSIGNMENTS = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)
CONDITIONAL = (cst.Lambda, cst.BaseComp, cst.IfExp, cst.BooleanOperation, cst.SimpleStatementSuite)


class Source:
    """A parsed file.

    Attributes:
        passed: its function parameters that stand for `horovod.torch`, by their keys.
        replaced: texts in the place of expressions.
        before, behind: texts of statements before and behind one.
        under: the last of the statements that are put under `with`, and its items, by the first.
        gone: statements of which nothing is left.
        functions: texts of functions that it gets.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.module = wrapper.module
        self._scopes = wrapper.resolve(ScopeProvider)
        self._ranges = wrapper.resolve(PositionProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self._below: dict[cst.CSTNode, list[cst.CSTNode]] = {}
        self.passed: set[str] = set()
        self.replaced: dict[cst.CSTNode, str] = {}
        self.before: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.behind: dict[cst.CSTNode, str] = {}
        self.under: dict[cst.CSTNode, tuple[cst.CSTNode, str]] = {}
        self.gone: set[cst.CSTNode] = set()
        self.functions: list[str] = []

    # What is where.

    def below(self, root: cst.CSTNode) -> list[cst.CSTNode]:
        """Return a node and all below it, those inside another before it."""
        if root not in self._below:
            self._below[root] = [*(node for child in root.children for node in self.below(child)), root]
        return self._below[root]

    def find(self, kind: type[T], root: cst.CSTNode | None = None) -> list[T]:
        """Return all nodes of a kind, or those below a node."""
        return [node for node in self.below(root or self.module) if isinstance(node, kind)]

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, from its parent on."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def around(self, node: cst.CSTNode, kind: type[T] | tuple[type[T], ...]) -> T | None:
        """Return the innermost node of a kind, or of some, around a node."""
        return next((ancestor for ancestor in self.ancestors(node) if isinstance(ancestor, kind)), None)

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the function around a node."""
        return self.around(node, cst.FunctionDef)

    def body(self, statement: cst.CSTNode | None) -> list[Any]:
        """Return the statements of the block that a statement stands in."""
        return list(getattr(self.parents.get(statement), "body", ())) if statement else []

    def is_main(self, node: cst.CSTNode) -> bool:
        """Return whether a node is the condition under which a file is a script."""
        is_block = isinstance(node, cst.If) and isinstance(node.body, cst.IndentedBlock)
        return is_block and "__name__" in self.code(node.test)  # type: ignore[attr-defined]

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
        variable = m.Name() | m.Attribute(value=m.Name())
        parent: Any = self.parents[call]
        if m.matches(parent, m.Assign([m.AssignTarget(variable)])):
            return self.code(parent.targets[0].target)
        return self.code(parent.target) if m.matches(parent, m.AnnAssign(variable)) else None

    def line(self, node: cst.CSTNode) -> int:
        """Return the line where a node begins."""
        return self._ranges[node].start.line

    def is_before(self, node: cst.CSTNode, statement: cst.CSTNode) -> bool:
        """Return whether a node stands before a statement, in the same function."""
        is_near = self.function(node) is self.function(statement)
        return is_near and self._ranges[node].start.line < self.line(statement)

    def code(self, node: cst.CSTNode) -> str:
        """Return a node's text."""
        return self.module.code_for_node(node)

    @cached_property
    def words(self) -> set[str]:
        """All names in the file."""
        return {name.value for name in self.find(cst.Name)}

    # What it refers to.

    def _qualified_names(self, node: cst.CSTNode) -> Collection[QualifiedName]:
        scope = self._scopes.get(node)
        return scope.get_qualified_names_for(node) if scope is not None else ()

    def qualified(self, node: cst.CSTNode) -> str:
        """Return what a name or an attribute may refer to: `main.<locals>.model`, or `horovod.torch.rank`."""
        is_name = isinstance(node, (cst.Name, cst.Attribute)) and not self.find(cst.Call, node)
        names = {name.name for name in self._qualified_names(node)} if is_name else set()
        names |= {
            API + name[len(own) :] for own in self.passed for name in names if f"{name}.".startswith(f"{own}.")
        }
        return min(names, key=lambda name: (not re.match(r"horovod\b", name), name), default="")

    def modules(self, node: cst.CSTNode) -> set[str]:
        """Return the names of the modules and packages that a name or an attribute may be imported from."""
        names = (name for name in self._qualified_names(node) if name.source is QualifiedNameSource.IMPORT)
        return {part for name in names for part in name.name.split(".")[:-1] or [name.name] if part}

    @cached_property
    def stars(self) -> set[str]:
        """The names of the modules whose names are all imported."""
        lines = [node for node in self.find(cst.ImportFrom) if isinstance(node.names, cst.ImportStar)]
        return {word for node in lines if node.module for word in re.findall(r"\w+", self.code(node.module))}

    def horovod(self, node: cst.CSTNode) -> str | None:
        """Return the name in Horovod's API that a name or an attribute refers to, such as `Compression.fp16`."""
        name = self.qualified(node)
        inner = re.sub(rf"^{API}\.((mpi_ops|functions|optimizer|compression)\.)?", "", name)
        return inner if name.startswith(f"{API}.") else None

    def has_horovod(self, root: cst.CSTNode) -> bool:
        """Return whether something of Horovod's API is in an expression."""
        return any(self.horovod(node) for node in self.below(root))

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
        for node in self.below(self.module):
            parent: Any = self.parents.get(node)
            is_name = node in (getattr(parent, "attr", None), getattr(parent, "keyword", None))
            if isinstance(node, (cst.Name, cst.Attribute)) and not is_name and (key := self.key(node)):
                result[key].append(node)
        return result

    def assigned(self, node: cst.CSTNode) -> bool:
        """Return whether a variable is assigned here."""
        parent = self.parents.get(node)
        parent = self.parents.get(self.parents[parent]) if isinstance(parent, cst.Element) else parent
        return isinstance(parent, cst.AssignTarget) or getattr(parent, "target", None) is node

    def values(self, variable: cst.BaseExpression) -> list[Any]:
        """Return what is assigned to a variable, alone or among others."""
        uses = [use for use in self.uses[self.key(variable)] if self.assigned(use)]
        whole: list[Any] = [self.around(use, ASSIGNMENTS) for use in uses]
        return [node.value for node in whole if node is not None and node.value is not None]
