"""A file of the folder, with LibCST's scopes: what each expression refers to, and where it stands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import libcst as cst
from libcst import matchers as m
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameSource,
    ScopeProvider,
)

T = TypeVar("T", bound=cst.CSTNode)
API = "horovod.torch."


class Source:
    """A parsed file.

    Attributes:
        passed: its function parameters that stand for `horovod.torch`, as qualified names.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.module = wrapper.module
        self.scopes = wrapper.resolve(ScopeProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self._positions = wrapper.resolve(PositionProvider)
        self.passed: set[str] = set()
        self._below: dict[cst.CSTNode, list[cst.CSTNode]] = {}

    def line(self, node: cst.CSTNode) -> int:
        """Return the line where a node begins."""
        return self._positions[node].start.line

    def code(self, node: cst.CSTNode) -> str:
        """Return a node's own text."""
        return self.module.code_for_node(node)

    def qualified(self, node: cst.CSTNode) -> set[str]:
        """Return what a name or an attribute may refer to: `horovod.torch.rank`, `main.<locals>.model`."""
        root = node
        while isinstance(root, cst.Attribute):
            root = root.value
        scope = self.scopes.get(node) if isinstance(root, cst.Name) else None
        names = {it.name for it in scope.get_qualified_names_for(node)} if scope is not None else set()
        for name in [*names]:
            parameter = next((it for it in self.passed if name == it or name.startswith(it + ".")), None)
            if parameter is not None:
                names.add(API[:-1] + name[len(parameter) :])
        return names

    def imported(self, node: cst.CSTNode) -> set[str]:
        """Return the qualified names of what a name or an attribute refers to, if that is imported."""
        scope = self.scopes.get(node)
        names = scope.get_qualified_names_for(node) if scope is not None else ()
        return {it.name for it in names if it.source is QualifiedNameSource.IMPORT}

    def horovod(self, node: cst.CSTNode) -> str | None:
        """Return the name in Horovod's API that a name or an attribute refers to, such as `Compression.fp16`."""
        names = [name for name in self.qualified(node) if name.startswith(API)]
        return names[0][len(API) :] if names else None

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, from its parent on."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def around(self, node: cst.CSTNode, kind: type[T]) -> T | None:
        """Return the innermost node of a kind around a node."""
        return next((it for it in self.ancestors(node) if isinstance(it, kind)), None)

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the function around a node."""
        return self.around(node, cst.FunctionDef)

    def find(self, root: cst.CSTNode, kind: type[T]) -> list[T]:
        """Return all nodes of a kind below a node, in their order."""
        return [it for it in self._all(root) if isinstance(it, kind)]

    def _all(self, root: cst.CSTNode) -> list[cst.CSTNode]:
        if root not in self._below:
            self._below[root] = [root, *(it for child in root.children for it in self._all(child))]
        return self._below[root]

    def key(self, node: cst.CSTNode) -> str | None:
        """Return what identifies a variable in this file: `main.<locals>.model`, or `Class.self.model`."""
        if isinstance(node, cst.Name):
            scope = self.scopes.get(node)
            names = {it.name for it in scope.get_qualified_names_for(node)} if scope is not None else set()
            return min(names, default=None) or None
        if m.matches(node, m.Attribute(value=m.Name("self"))):
            owner = self.around(node, cst.ClassDef)
            return f"{owner.name.value}.self.{node.attr.value}" if owner else None  # type: ignore[attr-defined]
        return None

    @cached_property
    def words(self) -> set[str]:
        """All names in the file."""
        return {it.value for it in self.find(self.module, cst.Name)}

    @cached_property
    def uses(self) -> dict[str, list[cst.BaseExpression]]:
        """All places of each variable, by its key."""
        result: dict[str, list[cst.BaseExpression]] = defaultdict(list)
        for node in self._all(self.module):
            parent = self.parents.get(node)
            is_part = isinstance(parent, cst.Attribute) and parent.attr is node
            is_keyword = isinstance(parent, cst.Arg) and parent.keyword is node
            key = None if is_part or is_keyword else self.key(node)
            if key is not None and isinstance(node, cst.BaseExpression):
                result[key].append(node)
        return result

    def is_target(self, node: cst.CSTNode) -> bool:
        """Return whether a variable is assigned here."""
        parent = self.parents.get(node)
        return isinstance(parent, cst.AssignTarget) or (
            isinstance(parent, cst.Element)
            and isinstance(self.parents.get(self.parents[parent]), cst.AssignTarget)
        )


class Folder:
    """All files that are migrated together."""

    def __init__(self, texts: dict[Path, str]) -> None:
        self.sources = [Source(path, text) for path, text in texts.items()]
        self.functions: dict[str, list[tuple[Source, cst.FunctionDef]]] = defaultdict(list)
        self.classes: dict[str, tuple[Source, cst.ClassDef]] = {}
        for source in self.sources:
            for function in source.find(source.module, cst.FunctionDef):
                self.functions[function.name.value].append((source, function))
            for kind in source.find(source.module, cst.ClassDef):
                self.classes[kind.name.value] = source, kind
        for source in self.sources:
            for arg in source.find(source.module, cst.Arg):
                if API[:-1] in source.qualified(arg.value) and (place := self.parameter(source, arg)):
                    place[0].passed.add(str(place[0].key(place[1].name)))

    def calls(self, name: str) -> list[tuple[Source, cst.Call]]:
        """Return all calls of a name in Horovod's API."""
        every = ((source, call) for source in self.sources for call in source.find(source.module, cst.Call))
        return [(source, call) for source, call in every if source.horovod(call.func) == name]

    def owners(self, method: str) -> set[str]:
        """Return the expressions whose method of this name is called."""
        every = ((source, call.func) for source in self.sources for call in source.find(source.module, cst.Call))
        named = m.Attribute(attr=m.Name(method))
        return {
            source.code(it.value) for source, it in every if isinstance(it, cst.Attribute) and m.matches(it, named)
        }

    def parameter(self, source: Source, arg: cst.Arg) -> tuple[Source, cst.Param] | None:
        """Return the parameter of a function, or of a class's `__init__`, that an argument is for."""
        call = source.parents[arg]
        if not isinstance(call, cst.Call) or arg.star:
            return None
        candidates = self._functions(source, call)
        if len(candidates) != 1:
            return None
        owner, function = candidates[0]
        params = [*function.params.posonly_params, *function.params.params]
        is_method = owner.around(function, cst.ClassDef) is owner.parents.get(owner.parents.get(function))  # type: ignore[arg-type]
        if is_method and owner.around(function, cst.ClassDef) is not None:
            params = params[1:]
        if arg.keyword is not None:
            named = [it for it in [*params, *function.params.kwonly_params] if it.name.value == arg.keyword.value]
            return (owner, named[0]) if named else None
        place = call.args.index(arg)
        return (owner, params[place]) if place < len(params) else None

    def _functions(self, source: Source, call: cst.Call) -> list[tuple[Source, cst.FunctionDef]]:
        """Return the functions of the folder that a call may be of; of a class its `__init__`."""
        is_method = isinstance(call.func, cst.Attribute)
        name = call.func.attr.value if isinstance(call.func, cst.Attribute) else getattr(call.func, "value", "")
        modules = {it.rpartition(".")[0].rpartition(".")[2] for it in source.imported(call.func)}
        files = {it.path.stem for it in self.sources}
        if modules and not modules & files:
            return []
        if name in self.classes:
            owner, kind = self.classes[name]
            return [(owner, it) for it in owner.find(kind, cst.FunctionDef) if it.name.value == "__init__"]
        candidates = self.functions.get(name, [])
        if modules:
            return [it for it in candidates if it[0].path.stem in modules]
        candidates = [it for it in candidates if is_method or it[0].around(it[1], cst.ClassDef) is None]
        return [it for it in candidates if it[0] is source] or candidates
