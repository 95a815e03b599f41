"""Follow a model through the files: which functions get it, where it is called, and which of these calls train."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.imports import names_of
from hvd_trainer.tools.migrate.source import API, Source, progress
from hvd_trainer.tools.migrate.table import BY_NAME

Variable = tuple[Source, str]
"""A file, and the key of a variable in it."""
OF_DDP = {
    *("train", "eval", "parameters", "zero_grad", "requires_grad_", "buffers", "modules", "apply", "module"),
    *("no_sync", "register_comm_hook", "join", "to", "cuda", "cpu", "float", "half"),
}
"""Attributes that DistributedDataParallel has with the meaning that they have in the model."""
INSPECTORS = {
    *("print", "isinstance", "len", "type", "id", "repr", "str", "list", "iter", "deepcopy", "save", "hasattr")
}
"""Functions, of Python and PyTorch, that do not call a model."""
WITHOUT = m.Attribute(attr=m.Name("no_grad") | m.Name("inference_mode"))
NO_GRAD = m.Call(WITHOUT)
QUIET = m.With(items=[m.ZeroOrMore(), m.WithItem(item=NO_GRAD), m.ZeroOrMore()]) | m.FunctionDef(
    decorators=[m.ZeroOrMore(), m.Decorator(NO_GRAD | WITHOUT), m.ZeroOrMore()]
)
"""A block without gradients."""
BACKWARD = m.Call(m.Attribute(attr=m.Name("backward")))


class NotFollowedError(Exception):
    """DDP cannot stand for an optimizer, or it cannot be seen whether it can; the text says why."""


class Folder:
    """All files that are migrated together.

    Attributes:
        keep: the names of each file that still refer to Horovod, which is started, too; None: nothing does.
        whole: the name in Horovod's API for which all is left; "": there is none.
        rules: those that apply, by the names of calls.
        wrapped: calls of DistributedOptimizer in whose place DDP has come.
        optimizers: last names of the optimizers.
        is_sure: whether all optimizers have become plain ones.
        is_started: whether a launcher has made a process group.
    """

    def __init__(
        self, texts: Mapping[Path, str], keep: Mapping[Path, set[str]] | None = None, whole: str = ""
    ) -> None:
        self.keep, self.wrapped, self.is_sure, self.is_started = keep, set[cst.CSTNode](), False, False
        self.sources = [Source(path, text) for path, text in progress(texts.items(), "parse")]
        self._calls = [(source, call) for source in self.sources for call in source.find(cst.Call)]
        self.definitions: dict[str, list[tuple[Source, Any]]] = defaultdict(list)
        for source in self.sources:
            for node in source.below(source.module):
                if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                    self.definitions[node.name.value].append((source, node))
        self._find_aliases()
        given = self._given_horovod()
        while any(key not in source.passed for source, key in given):  # which may give it on in their turn
            for source, key in given:
                source.passed.add(key)
            given = self._given_horovod()
        # Where the ranks of a training change, `hvd_trainer.hvd` takes all of it.
        elastic = [source for source in self.sources if "elastic" in source.text]
        names = (source.qualified(node) for source in elastic for node in source.find(cst.Attribute))
        is_elastic = any(name.startswith(f"{API}.elastic.") for name in names)
        self.whole = whole or "elastic" * is_elastic
        self.rules = {} if self.whole else BY_NAME
        targets = (source.target(call) for source, call in self.calls("DistributedOptimizer"))
        self.optimizers = {name.split(".")[-1] for name in targets if name} | self.owners("skip_synchronize")

    def _given_horovod(self) -> list[Variable]:
        """Return the parameters that get `horovod.torch`."""
        sources = [source for source in self.sources if source.may_have_horovod]
        args = [(source, arg) for source in sources for arg in source.find(cst.Arg)]
        places = (self.parameter(at, arg) for at, arg in args if at.qualified(arg.value) == API)
        return [place for place in places if place]

    @cached_property
    def given(self) -> dict[Variable, list[tuple[Source, cst.Arg]]]:
        """The arguments that parameters of these files get."""
        result: dict[Variable, list[tuple[Source, cst.Arg]]] = defaultdict(list)
        for source in self.sources:
            for arg in source.find(cst.Arg):
                if place := self.parameter(source, arg):
                    result[place].append((source, arg))
        return result

    def _find_aliases(self) -> None:
        """Find variables, attributes and imports that stand for `horovod.torch`, in all files."""
        known: dict[str, set[str]] = defaultdict(set)
        for source in (source for source in self.sources if re.search("horovod|hvd", source.text)):
            for node in source.find(cst.Assign):
                if source.qualified(node.value) != API:
                    continue
                for target in (part.target for part in node.targets):
                    others = {source.code(value) for value in source.values(target)} - {source.code(node.value)}
                    if isinstance(target, cst.Attribute):
                        for each in self.sources:
                            each.attributes.add(target.attr.value)
                    elif isinstance(target, cst.Name) and others <= {"None"}:
                        source.passed.add(str(source.key(target)))
            imports = [*source.find(cst.Import), *source.find(cst.ImportFrom)]
            known[source.path.stem] |= {
                name for node in imports for name, whole, _ in names_of(node) if whole == API
            }
        for source in self.sources:
            for imported in [*source.find(cst.Import), *source.find(cst.ImportFrom)]:
                for name, whole, _ in names_of(imported):
                    module, _, wanted = whole.rpartition(".")
                    have = known.get(module.rpartition(".")[2], set()) - {"*"}
                    source.passed |= {whole} if wanted in have else set()
                    source.passed |= {f"{whole}.{one}" for one in known.get(wanted, ())}  # as its attribute
                    source.starred |= have if name == "*" and not whole.startswith("horovod") else set()

    def defined(self, source: Source, node: cst.CSTNode) -> list[tuple[Source, Any]]:
        """Return the functions and classes of these files that a name or an attribute may refer to."""
        known = self.definitions.get(last_name(node), [])
        if known and (modules := source.modules(node)):
            return [(at, made) for at, made in known if at.path.stem in modules]
        local = [(at, made) for at, made in known if at is source]
        if not local and isinstance(node, cst.Name):
            return [(at, made) for at, made in known if at.path.stem in source.stars]
        return local if local or isinstance(node, cst.Name) else known

    def places(self, variable: Variable) -> list[tuple[Source, Any]]:
        """Return all places of a variable; of an attribute, also in kin of its class and in objects."""
        source, key = variable
        owner, is_attribute, name = key.partition(".self.")
        if not is_attribute:
            return [(source, node) for node in source.uses[key]]
        kin = self.kin(owner)
        keys = {f"{one}.self.{name}" for one in kin}
        return [
            (at, node)
            for at, node in self._attributes[name]
            if at.key(node) in keys or self._is_made_of(at, node.value, kin)
        ]

    @cached_property
    def _attributes(self) -> dict[str, list[tuple[Source, Any]]]:
        """All attributes of all files, by their names."""
        result: dict[str, list[tuple[Source, Any]]] = defaultdict(list)
        for source in self.sources:
            for node in source.find(cst.Attribute):
                result[node.attr.value].append((source, node))
        return result

    @cached_property
    def _bases(self) -> dict[str, set[str]]:
        """The names of all classes, with those of their bases."""
        classes = [made for source in self.sources for made in source.find(cst.ClassDef)]
        return {made.name.value: {last_name(base.value) for base in made.bases} for made in classes}

    def kin(self, name: str) -> set[str]:
        """Return the names of a class, of those it comes from, and of those that come from it."""
        bases = self._bases

        def above(one: str, known: tuple[str, ...] = ()) -> set[str]:
            return {one}.union(*(above(base, (*known, one)) for base in bases.get(one, ()) if base not in known))

        return {one for one in bases if name in above(one)} | (above(name) & {*bases})

    @staticmethod
    def _is_made_of(source: Source, node: cst.BaseExpression, classes: set[str]) -> bool:
        """Return whether a variable is seen to have an object of some classes."""
        values = source.values(node) if isinstance(node, cst.Name) else []
        return any(isinstance(value, cst.Call) and last_name(value.func) in classes for value in values)

    def calls(self, name: str) -> list[tuple[Source, cst.Call]]:
        """Return all calls of a name in Horovod's API."""
        return list(self._horovods.get(name, ()))

    @cached_property
    def _horovods(self) -> dict[str, list[tuple[Source, cst.Call]]]:
        """All calls of Horovod's API, by their names."""
        result: dict[str, list[tuple[Source, cst.Call]]] = defaultdict(list)
        for source, call in self._calls:
            if source.may_have_horovod and (name := source.horovod(call.func)):
                result[name].append((source, call))
        return result

    def calls_of(self, source: Source, function: cst.FunctionDef) -> list[tuple[Source, cst.Call]]:
        """Return all calls of a function, or of the class whose `__init__` it is."""
        owner = source.around(function, cst.ClassDef) if function.name.value == "__init__" else None
        made = source, owner or function
        return [(at, call) for at, call in self._calls if made in self.defined(at, call.func)]

    def owners(self, method: str) -> set[str]:
        """Return the last names of the objects whose method of this name is called."""
        named = m.Call(m.Attribute(m.Name() | m.Attribute(), m.Name(method)))
        return {last_name(call.func.value) for _, call in self._calls if m.matches(call, named)}  # type: ignore[attr-defined]

    @cached_property
    def scripts(self) -> list[set[Source]]:
        """The files that are run together: each that no other imports, with all that it imports."""
        imports = {
            source: {other for other in self.sources if source.imports(other)} - {source}
            for source in self.sources
        }
        tops = [source for source in self.sources if not any(source in others for others in imports.values())]
        result = []
        for top in tops or self.sources[:1]:
            files, new = set[Source](), {top}
            while new:
                files |= new
                new = set[Source]().union(*(imports[source] for source in new)) - files
            result.append(files)
        rest = {*self.sources}.difference(*result)
        return [*result, rest] if rest else result

    def starts_again(self, source: Source, call: cst.Call) -> bool:
        """Return whether a script that has a call starts Horovod in several places, or may make it twice."""
        starts = [at for at, _ in self.calls("init")]
        is_one = all(sum(at in files for at in starts) < 2 for files in self.scripts if source in files)
        return self.is_started or not is_one or not self._is_once(source, call)

    def _is_once(self, source: Source, node: cst.CSTNode) -> bool:
        """Return whether a place is seen to be run once in a process."""
        seen = set[cst.CSTNode]()
        while (function := source.function(node)) is not None:
            calls = self.calls_of(source, function)
            if len(calls) != 1 or function in seen:
                return False
            seen.add(function)
            source, node = calls[0]
        return True

    def reached(self, calls: Sequence[cst.Call]) -> set[str]:
        """Return the names of all functions that calls may run, by way of others in these files, too."""
        names, new = set[str](), {last_name(call.func) for call in calls}
        while new:
            names |= new
            bodies = [(source, made) for name in new for source, made in self.definitions.get(name, ())]
            new = {last_name(call.func) for source, made in bodies for call in source.find(cst.Call, made)} - names
        return names

    def parameter(self, source: Source, arg: cst.Arg) -> Variable | None:
        """Return the parameter of a function, or of a class's `__init__`, that an argument is for."""
        call: Any = source.parents[arg]
        if arg.star or not isinstance(call, cst.Call):
            return None
        known = self.defined(source, call.func)
        known += [(at, part) for at, made in known for part in starts(at, made)]
        known = [(at, made) for at, made in known if isinstance(made, cst.FunctionDef)]
        if len(known) != 1:
            return None
        owner, function = known[0]
        params = [*function.params.posonly_params, *function.params.params]
        params = params[1:] if isinstance(owner.parents.get(owner.parents[function]), cst.ClassDef) else params
        place = call.args.index(arg)
        wanted = arg.keyword.value if arg.keyword else params[place].name.value if place < len(params) else ""
        named = [param for param in [*params, *function.params.kwonly_params] if param.name.value == wanted]
        return (owner, str(owner.key(named[0].name))) if named else None


@dataclass
class Training:
    """The uses of a variable that has the wrapped model.

    Attributes:
        calls: those of the training, with the name of the wrapped model there.
        edits: expressions, and what stands for them.
        modules: expressions that stand for the model itself, with their variables.
        given: variables that get the wrapped model.
        notes: file, line, what is not followed, and what to do by hand.
    """

    calls: list[tuple[Source, cst.Call, str]] = field(default_factory=list)
    edits: list[tuple[Source, cst.BaseExpression, str]] = field(default_factory=list)
    modules: list[tuple[Source, cst.BaseExpression, Variable]] = field(default_factory=list)
    given: list[Variable] = field(default_factory=list)
    notes: list[tuple[Source, int, str, str]] = field(default_factory=list)

    def note(self, source: Source, node: cst.CSTNode, advice: str) -> None:
        """Note a use that is not followed."""
        self.notes.append((source, source.line(node), source.code(node), advice))


def follow(
    folder: Folder,
    variable: Variable,
    after: cst.CSTNode | None = None,
    seen: tuple[Variable, ...] = (),
    *,
    is_behind: bool = False,
) -> Training:
    """Return where the wrapped model in a variable goes.

    Args:
        after: the statement that wraps it: places before it in its function have the model itself.
        is_behind: whether it is wrapped behind that statement, whose places have the model itself, too.
        seen: variables on the way here.

    Raises:
        NotFollowedError: the model is trained by other means than calls.
    """
    result, passed = Training(), list[Variable]()
    if variable in seen:
        return result
    for source, node in folder.places(variable):
        is_inside = is_behind and after in [*source.ancestors(node)]
        if source.assigned(node) or is_inside or (after and source.is_before(node, after)):
            continue
        parent: Any = source.parents[node]
        outer: Any = source.parents[parent] if isinstance(parent, (cst.Attribute, cst.Arg)) else parent
        is_called = isinstance(outer, cst.Call) and (parent is outer or outer.func is parent)
        if is_called and (parent is outer or parent.attr.value == "forward"):
            if parent is not outer:
                result.edits.append((source, parent, source.code(node)))
            if not is_evaluation(source, node):
                result.calls.append((source, outer, source.code(node)))
        elif isinstance(parent, (cst.Attribute, cst.Subscript)) and parent.value is node:
            _check_inside(folder, source, node)
            if isinstance(parent, cst.Subscript) or parent.attr.value not in OF_DDP:
                result.modules.append((source, node, variable))
        elif isinstance(parent, cst.For) and parent.iter is node:
            result.modules.append((source, node, variable))
        elif isinstance(parent, cst.Arg) and (place := folder.parameter(source, parent)):
            passed.append(place)
        elif isinstance(parent, cst.Arg) and isinstance(outer, cst.Call):
            if last_name(outer.func) in INSPECTORS:
                result.modules.append((source, node, variable))
            else:
                called = source.code(outer.func)
                other = f"give it `{source.code(node)}.module` if it does not call it"
                result.note(source, node, f"`{called}`, which is not followed, gets the DDP object: {other}")
        else:
            targets = assigned_to(folder, source, node)
            passed += targets or []
            if targets is None and isinstance(parent, KEEPERS):
                result.note(
                    source, node, "what is kept here is the DDP object: write `.module` where it is not called"
                )
    for place in passed:
        inner = follow(folder, place, seen=(*seen, variable))
        for uses, inner_uses in zip(vars(result).values(), vars(inner).values(), strict=True):
            uses += inner_uses
        result.given.append(place)
    return result


KEEPERS = (cst.Assign, cst.AnnAssign, cst.Return, cst.Element, cst.DictElement, cst.Yield, cst.NamedExpr)
"""Statements whose value is kept."""


def is_trained(folder: Folder, variable: Variable, after: cst.CSTNode | None, wrapped: Variable) -> bool:
    """Return whether the training calls the model in a variable, other than by the variable that is wrapped."""
    try:
        return bool(follow(folder, variable, after, (wrapped,)).calls)
    except NotFollowedError:
        return True


@cache
def _inspecting() -> set[str]:
    """Return the methods of a model, or of what is in it, that compute no result of it."""
    import torch

    return {*OF_DDP, *dir(torch.nn.Module), *dir(torch.Tensor)} - {"forward", "__call__", "_call_impl"}


def _check_inside(folder: Folder, source: Source, node: cst.CSTNode) -> None:
    """See that the training uses no part of a model past DDP.

    Raises:
        NotFollowedError: it does.
    """
    last, name = node, ""
    while isinstance(outer := source.parents[last], (cst.Attribute, cst.Subscript)) and outer.value is last:
        last, name = outer, last_name(outer)
    if is_evaluation(source, node):
        return
    is_called = isinstance(outer, cst.Call) and outer.func is last
    if is_called and name not in _inspecting() and not isinstance(source.parents[outer], cst.Expr):
        raise NotFollowedError(f"the training calls `{source.code(last)}`, which DDP does not see")
    places = assigned_to(folder, source, last) or []  # type: ignore[arg-type]
    if isinstance(outer, cst.Arg) and (place := folder.parameter(source, outer)):
        places.append(place)
    for at, key in places:
        if any(getattr(at.parents[use], "func", None) is use for use in at.uses[key]):
            raise NotFollowedError(f"the training calls `{source.code(last)}` as `{key.split('.')[-1]}`, past DDP")


def assigned_to(folder: Folder, source: Source, node: cst.BaseExpression) -> list[Variable] | None:
    """Return the variables that get a model by an assignment, or by a return; None if it cannot be seen which."""
    parent: Any = source.parents[node]
    row: Any = source.parents[parent] if isinstance(parent, cst.Element) else None
    outer: Any = source.parents[row] if row else parent
    targets: list[tuple[Source, Any]] = []
    function: Any = source.function(node)
    if isinstance(outer, (cst.Assign, cst.AnnAssign)):
        targets = [(source, outer.target if isinstance(outer, cst.AnnAssign) else outer.targets[0].target)]
    elif isinstance(outer, cst.Return) and function is not None:
        calls = folder.calls_of(source, function)
        around = [(other, other.parents[call]) for other, call in calls]
        targets = [(other, made.targets[0].target) for other, made in around if isinstance(made, cst.Assign)]
        if not calls or len(targets) + sum(isinstance(made, cst.Expr) for _, made in around) < len(calls):
            return None
    else:
        return None
    if row and targets:
        places = [(at, target) for at, target in targets if isinstance(target, cst.Tuple)]
        if not isinstance(row, cst.Tuple) or len(places) < len(targets):
            return None
        targets = [(at, target.elements[row.elements.index(parent)].value) for at, target in places]
    result = [(at, key) for at, target in targets if (key := at.key(target)) is not None]
    return result if len(result) == len(targets) else None


def starts(source: Source, made: cst.CSTNode) -> list[cst.FunctionDef]:
    """Return the `__init__` of a class."""
    inside = source.find(cst.FunctionDef, made) if isinstance(made, cst.ClassDef) else []
    return [part for part in inside if part.name.value == "__init__" and source.around(part, cst.ClassDef) is made]


def last_name(expression: cst.CSTNode) -> str:
    """Return `train` of `train` and of `job.train`."""
    return str(getattr(getattr(expression, "attr", expression), "value", ""))


def is_evaluation(source: Source, model: cst.CSTNode) -> bool:
    """Return whether a call of the model is not one of the training."""
    stop = m.Call(m.Attribute(m.MatchIfTrue(model.deep_equals), m.Name("eval")))
    function = source.function(model)
    is_quiet = any(m.matches(ancestor, QUIET) for ancestor in source.ancestors(model))
    return is_quiet or (function is not None and not trains(source, model) and bool(m.findall(function, stop)))


def trains(source: Source, node: cst.CSTNode) -> bool:
    """Return whether the function around a node computes gradients, and where it does."""
    is_quiet = any(m.matches(ancestor, QUIET) for ancestor in source.ancestors(node))
    return not is_quiet and bool(m.findall(source.function(node) or source.module, BACKWARD))
