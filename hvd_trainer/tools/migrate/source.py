"""A file: what its expressions refer to, by LibCST's scopes, and the changes that are planned for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import libcst as cst
import msgspec
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameSource, ScopeProvider
from tqdm import tqdm

from hvd_trainer.tools.migrate.table import Rule

IMPORTS = re.compile(r"^[ \t]*((?:from\s+[\w.]+\s+)?import\s+(?:\([^)]*\)|.*))", re.MULTILINE)
HINT = re.compile("(?i)horovod|synchronize")
NAMES = {"dist": "torch.distributed", "DDP": "torch.nn.parallel.DistributedDataParallel"}
"""Names of the imports in the new code."""
T = TypeVar("T", bound=cst.CSTNode)
API = "horovod.torch"
progress = partial(tqdm, delay=1, disable=None, leave=False, unit=" files")
"""A bar on a terminal, over files of which there are many."""
ASSIGNMENTS = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)
CONDITIONAL = (cst.Lambda, cst.BaseComp, cst.IfExp, cst.BooleanOperation, cst.SimpleStatementSuite)


@lru_cache(maxsize=4096)
def imported_words(text: str) -> set[str]:
    """Return all names in the imports of a file."""
    return {word for line in IMPORTS.findall(text) for word in re.findall(r"\w+", line)}


class Parsed(NamedTuple):
    """What all plans for a file share: its module, with scopes and places when asked for, and what was asked."""

    metadata: MetadataWrapper
    below: dict[cst.CSTNode, list[cst.CSTNode]]
    parents: dict[cst.CSTNode, cst.CSTNode]
    names: dict[cst.CSTNode, dict[str, bool]]
    kinds: dict[type[cst.CSTNode], list[Any]]


@lru_cache(maxsize=4096)
def _parsed(path: Path, text: str) -> Parsed:
    below: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    metadata = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    _note(metadata.module, below, parents)
    return Parsed(metadata, below, parents, {}, {})


def _note(
    node: cst.CSTNode, below: dict[cst.CSTNode, list[cst.CSTNode]], parents: dict[cst.CSTNode, cst.CSTNode]
) -> list[cst.CSTNode]:
    """Note the parents of all nodes below one, and what is below each statement and expression."""
    rows = list[cst.CSTNode]()
    for child in node.children:
        parents[child] = node
        rows += _note(child, below, parents)
    below[node] = [*rows, node]
    return below[node]


class Source:
    """A parsed file.

    Attributes:
        passed: its variables, parameters and imports that stand for `horovod.torch`, by their keys.
        attributes: names of attributes that do, in all files.
        starred: names from `import *` that do.
        replaced: texts in the place of expressions.
        before, behind: texts of statements before and behind one; end: one that ends its block.
        under: the last of the statements that are put under `with`, and its items, by the first.
        gone: statements of which nothing is left.
        functions: texts of functions that it gets.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        parsed = _parsed(path, text)
        self.module, self.parents, self._metadata = parsed.metadata.module, parsed.parents, parsed.metadata
        self._below, self._names, self._kinds = parsed.below, parsed.names, parsed.kinds
        self.passed: set[str] = set()
        self.attributes: set[str] = set()
        self.starred: set[str] = set()
        self.replaced: dict[cst.CSTNode, str] = {}
        self.before: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.behind: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.end: dict[cst.CSTNode, str] = {}
        self.under: dict[cst.CSTNode, tuple[cst.CSTNode, str]] = {}
        self.gone: set[cst.CSTNode] = set()
        self.functions: list[str] = []
        self.aliases = {name: self._alias(name, whole) for name, whole in NAMES.items()}

    def _alias(self, usual: str, whole: str) -> str:
        """Return a name for a module or class of PyTorch's that the file does not have for something else."""
        if not re.search(rf"\b{usual}\b", self.text):
            return usual
        imports: list[Any] = [*self.find(cst.Import), *self.find(cst.ImportFrom)]
        module, _, last = whole.rpartition(".")
        pattern = rf"(import {whole}|from {module} import [^$]*\b{last}) as {usual}\b"
        own = any(re.search(pattern, self.code(node)) for node in imports)
        names = [name for name in self.find(cst.Name) if name.value == usual]
        parts = [(name, self.parents.get(name)) for name in names]
        is_taken = not own and any(
            name not in (getattr(at, "attr", 0), getattr(at, "keyword", 0)) for name, at in parts
        )
        return f"torch_{usual}" if is_taken else usual

    def renamed(self, rule: Rule) -> Rule:
        """Return a rule with this file's name for torch.distributed."""
        dist, old = self.aliases["dist"], re.compile(r"\bdist\.")
        lines = tuple(old.sub(f"{dist}.", line) for line in rule.lines)
        return msgspec.structs.replace(rule, lines=lines, result=old.sub(f"{dist}.", rule.result))

    # What is where.

    def below(self, root: cst.CSTNode) -> list[cst.CSTNode]:
        """Return a node and all below it, those inside another before it."""
        return self._below[root]

    def find(self, kind: type[T], root: cst.CSTNode | None = None) -> list[T]:
        """Return all nodes of a kind, or those below a node."""
        if root is not None:
            return [node for node in self.below(root) if isinstance(node, kind)]
        if kind not in self._kinds:
            self._kinds[kind] = [node for node in self.below(self.module) if isinstance(node, kind)]
        return list(self._kinds[kind])

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
        return int(self._metadata.resolve(PositionProvider)[node].start.line)

    def is_before(self, node: cst.CSTNode, statement: cst.CSTNode) -> bool:
        """Return whether a node stands before a statement, in the same function."""
        is_near = statement in self.parents and self.function(node) is self.function(statement)
        return is_near and self.line(node) < self.line(statement)

    def code(self, node: cst.CSTNode) -> str:
        """Return a node's text."""
        return self.module.code_for_node(node)

    @cached_property
    def words(self) -> set[str]:
        """All names in the file."""
        return {name.value for name in self.find(cst.Name)}

    # What it refers to.

    @property
    def may_have_horovod(self) -> bool:
        """Whether some of its names may be Horovod's."""
        return bool(self.passed or self.starred or self.attributes or re.search("horovod|hvd", self.text))

    @property
    def is_concerned(self) -> bool:
        """Whether something may have to be changed in it."""
        planned = [
            self.replaced,
            self.before,
            self.behind,
            self.under,
            self.gone,
            self.end,
            self.passed,
            self.starred,
        ]
        return any(planned) or bool(re.search("horovod|synchronize", self.text)) or bool(self.attributes)

    def imports(self, other: Source) -> bool:
        """Return whether this file may import another one."""
        return other.module_name in self._imported

    @cached_property
    def module_name(self) -> str:
        """The last part of the name by which others import this file."""
        return self.path.stem if self.path.stem != "__init__" else self.path.resolve().parent.name

    @cached_property
    def _imported(self) -> set[str]:
        """All names in its imports."""
        return imported_words(self.text)

    def _qualified_names(self, node: cst.CSTNode) -> dict[str, bool]:
        """Return what a name may refer to, and whether it is imported."""
        if node not in self._names:
            scope = self._metadata.resolve(ScopeProvider).get(node)
            names = scope.get_qualified_names_for(node) if scope is not None else ()
            self._names[node] = {name.name: name.source is QualifiedNameSource.IMPORT for name in names}
        return self._names[node]

    def qualified(self, node: cst.CSTNode) -> str:
        """Return what a name or an attribute may refer to: `main.<locals>.model`, or `horovod.torch.rank`."""
        root: Any = node
        parts = list[str]()
        while isinstance(root, cst.Attribute) and root.attr.value not in self.attributes:
            root, parts = root.value, [root.attr.value, *parts]
        is_kept = isinstance(root, cst.Attribute) or (isinstance(root, cst.Name) and root.value in self.starred)
        if is_kept:
            return ".".join([API, *parts])
        names = {*self._qualified_names(node)} if isinstance(root, cst.Name) else set()
        names |= {
            API + name[len(own) :] for own in self.passed for name in names if f"{name}.".startswith(f"{own}.")
        }
        return min(names, key=lambda name: (not re.match(r"horovod\b", name), name), default="")

    def modules(self, node: cst.CSTNode) -> set[str]:
        """Return the names of the modules and packages that a name or an attribute may be imported from."""
        names = (name for name, is_imported in self._qualified_names(node).items() if is_imported)
        return {part for name in names for part in name.split(".")[:-1] or [name] if part}

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
        return any(self.horovod(node) for node in self.below(root) if isinstance(node, (cst.Name, cst.Attribute)))

    def key(self, node: cst.CSTNode) -> str | None:
        """Return what identifies a variable in this file: `main.<locals>.model`, or `Class.self.model`."""
        if isinstance(node, cst.Name):
            return min(self._qualified_names(node), default=None)
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
