"""Follow a model through the files: which functions get it, where it is called, and which of these calls train."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.source import API, Source
from hvd_trainer.tools.migrate.table import BY_NAME

ELASTIC = re.compile(rf"{API}\.elastic\.(?!ElasticSampler)")
Variable = tuple[Source, str]
"""A file, and the key of a variable in it."""
OF_DDP = {
    *("train", "eval", "parameters", "zero_grad", "training", "requires_grad_", "buffers", "modules", "apply"),
    *("no_sync", "register_comm_hook", "join", "to", "cuda", "cpu", "float", "half"),
}
"""Attributes that DistributedDataParallel has with the meaning that they have in the model."""
OF_MODULES = OF_DDP | {
    *("state_dict", "load_state_dict", "named_parameters", "named_buffers", "named_modules", "children", "module"),
    *("named_children", "share_memory", "double", "register_forward_hook", "compile", "device", "__class__"),
}
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
        rules: those that apply, by the names of calls.
        wrapped: calls of DistributedOptimizer in whose place DDP has come.
        optimizers, loads: last names of the optimizers, and of the objects whose state is loaded.
        is_sure: whether all optimizers have become plain ones.
    """

    def __init__(self, texts: Mapping[Path, str], keep: Mapping[Path, set[str]] | None = None) -> None:
        self.keep, self.wrapped, self.is_sure = keep, set[cst.CSTNode](), False
        self.sources = [Source(path, text) for path, text in texts.items()]
        self._calls = [(source, call) for source in self.sources for call in source.find(cst.Call)]
        self._definitions: dict[str, list[tuple[Source, Any]]] = defaultdict(list)
        for source in self.sources:
            for node in source.below(source.module):
                if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                    self._definitions[node.name.value].append((source, node))
        self.given: dict[Variable, list[tuple[Source, cst.Arg]]] = defaultdict(list)
        for source in self.sources:
            for arg in source.find(cst.Arg):
                if place := self.parameter(source, arg):
                    self.given[place].append((source, arg))
        given = self._given_horovod()
        while any(key not in source.passed for source, key in given):  # which may give it on in their turn
            for source, key in given:
                source.passed.add(key)
            given = self._given_horovod()
        # Where the ranks of a training change, `hvd_trainer.hvd` takes all of it.
        names = (source.qualified(node) for source in self.sources for node in source.below(source.module))
        self.is_elastic = any(ELASTIC.match(name) for name in names)
        self.rules = {} if self.is_elastic else BY_NAME
        targets = (source.target(call) for source, call in self.calls("DistributedOptimizer"))
        self.optimizers = {name.split(".")[-1] for name in targets if name} | self.owners("skip_synchronize")
        self.loads = self.owners("load_state_dict")

    def _given_horovod(self) -> list[Variable]:
        """Return the parameters that get `horovod.torch`."""
        return [
            place for place, args in self.given.items() if any(at.qualified(arg.value) == API for at, arg in args)
        ]

    def defined(self, source: Source, node: cst.CSTNode) -> list[tuple[Source, Any]]:
        """Return the functions and classes of these files that a name or an attribute may refer to."""
        modules, known = source.modules(node), self._definitions.get(last_name(node), [])
        if modules:
            return [(at, made) for at, made in known if at.path.stem in modules]
        local = [(at, made) for at, made in known if at is source]
        return local if local or isinstance(node, cst.Name) else known

    def calls(self, name: str) -> list[tuple[Source, cst.Call]]:
        """Return all calls of a name in Horovod's API."""
        return [(source, call) for source, call in self._calls if source.horovod(call.func) == name]

    def calls_of(self, source: Source, function: cst.FunctionDef) -> list[tuple[Source, cst.Call]]:
        """Return all calls of a function, or of the class whose `__init__` it is."""
        owner = source.around(function, cst.ClassDef) if function.name.value == "__init__" else None
        made = source, owner or function
        return [(at, call) for at, call in self._calls if made in self.defined(at, call.func)]

    def owners(self, method: str) -> set[str]:
        """Return the last names of the objects whose method of this name is called."""
        named = m.Call(m.Attribute(m.Name() | m.Attribute(), m.Name(method)))
        return {last_name(call.func.value) for _, call in self._calls if m.matches(call, named)}  # type: ignore[attr-defined]

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
    """The uses of a model variable in the training; empty if the training does not call it.

    Attributes:
        calls: of the model, with the name by which they call the wrapped one.
        edits: expressions, and what stands for them when the wrapped model is given on.
        given: variables that get it.
        asks: those of them that are asked for more than a wrapped model has.
    """

    calls: list[tuple[Source, cst.Call, str]] = field(default_factory=list)
    edits: list[tuple[Source, cst.BaseExpression, str]] = field(default_factory=list)
    given: list[Variable] = field(default_factory=list)
    asks: list[Variable] = field(default_factory=list)


def follow(
    folder: Folder,
    variable: Variable,
    name: str | None = None,
    after: cst.CSTNode | None = None,
    seen: tuple[Variable, ...] = (),
) -> Training:
    """Return where the model in a variable goes.

    Args:
        name: of the wrapped model where that is another variable; None: this one gets it.
        after: the statement that wraps it: places before it in its function are not of the training.
        seen: variables on the way here.

    Raises:
        NotFollowedError: the model is trained by other means than calls.
    """
    (source, key), result, passed = variable, Training(), []
    for node in source.uses[key] if variable not in seen else ():
        parent: Any = source.parents[node]
        outer: Any = source.parents[parent] if isinstance(parent, (cst.Attribute, cst.Arg)) else parent
        is_early = (
            after and source.function(node) is source.function(after) and source.line(node) <= source.line(after)
        )
        if source.assigned(node) or is_early:
            continue
        is_call = isinstance(outer, cst.Call) and (parent is outer or outer.func is parent)
        is_used = not isinstance(source.parents.get(outer), cst.Expr) and trains(source, node)
        code = source.code(node)
        if is_call and (parent is outer or parent.attr.value == "forward"):
            if not is_evaluation(source, node):
                result.calls.append((source, outer, name or code))
                result.edits.append((source, outer.func, name or code))
        elif isinstance(parent, cst.Attribute):
            if is_call and is_used and parent.attr.value not in OF_MODULES:
                raise NotFollowedError(f"the training calls `{source.code(parent)}`, which DDP does not see")
            if name is None and parent.attr.value not in OF_DDP:
                result.asks.append(variable)
                result.edits.append((source, node, f"{code}.module"))
        elif isinstance(parent, cst.Arg) and (place := folder.parameter(source, parent)):
            passed.append((node, place))
        elif isinstance(parent, cst.Arg) and is_used:
            called = source.code(getattr(outer, "func", outer))
            raise NotFollowedError(f"the training gives the model to `{called}`, which is not in these files")
        is_known = bool(passed) and passed[-1][0] is node  # what a known function returns is followed there
        for place in () if is_known else _assigned_to(folder, source, node):
            if isinstance(parent, cst.Arg) and follow(folder, place, seen=(*seen, variable)).calls:
                raise NotFollowedError(f"the model is trained as `{place[1].split('.')[-1]}`")
            passed += [] if isinstance(parent, cst.Arg) or place == variable else [(node, place)]
    for node, place in passed:
        inner = follow(folder, place, seen=(*seen, variable))
        for uses, inner_uses in zip(vars(result).values(), vars(inner).values(), strict=True):
            uses += inner_uses
        if inner.calls:
            result.given.append(place)
            result.edits += [(source, node, name)] if name else []
        elif name is None:
            result.asks.append(variable)
            result.edits.append((source, node, f"{source.code(node)}.module"))
    return result if result.calls else Training()


def _assigned_to(folder: Folder, source: Source, node: cst.BaseExpression) -> list[Variable]:
    """Return the variables that get a model: by an assignment, that of an unknown call of it, or by a return."""
    parent: Any = source.parents[node]
    outer: Any = source.parents[source.parents[parent]] if isinstance(parent, (cst.Arg, cst.Element)) else parent
    targets = [(source, outer.targets[0].target)] if isinstance(outer, cst.Assign) else []
    function: Any = source.function(node)
    for other in folder.sources if isinstance(outer, cst.Return) and function is not None else ():
        for assigned in other.find(cst.Assign):
            call, target = assigned.value, assigned.targets[0].target
            if not isinstance(call, cst.Call) or last_name(call.func) != function.name.value:
                continue
            if isinstance(parent, cst.Element) and isinstance(target, cst.Tuple):
                target = target.elements[outer.value.elements.index(parent)].value
            if other is source or source.path.stem in other.modules(call.func):
                targets.append((other, target))
    return [(other, key) for other, target in targets if (key := other.key(target)) is not None]


def starts(source: Source, made: cst.CSTNode) -> list[cst.FunctionDef]:
    """Return the `__init__` of a class."""
    inside = source.find(cst.FunctionDef, made) if isinstance(made, cst.ClassDef) else []
    return [part for part in inside if part.name.value == "__init__" and source.around(part, cst.ClassDef) is made]


def last_name(expression: cst.CSTNode) -> str:
    """Return `train` of `train` and of `job.train`."""
    return str(getattr(getattr(expression, "attr", expression), "value", ""))


def is_evaluation(source: Source, model: cst.BaseExpression) -> bool:
    """Return whether a call of the model is not one of the training."""
    stop = m.Call(m.Attribute(m.MatchIfTrue(model.deep_equals), m.Name("eval")))
    function = source.function(model)
    is_quiet = any(m.matches(ancestor, QUIET) for ancestor in source.ancestors(model))
    return is_quiet or (function is not None and not trains(source, model) and bool(m.findall(function, stop)))


def trains(source: Source, node: cst.CSTNode) -> bool:
    """Return whether the function around a node computes gradients, and where it does."""
    is_quiet = any(m.matches(ancestor, QUIET) for ancestor in source.ancestors(node))
    return not is_quiet and bool(m.findall(source.function(node) or source.module, BACKWARD))
