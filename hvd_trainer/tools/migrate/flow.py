"""Follow a model through a folder: which functions get it, where it is called, and which of these calls train.

ddp_model      where the model's name, `model`, is in the scope of the wrapping: its training calls are renamed
model          a parameter (or attribute) elsewhere, to which `ddp_model` is passed if it is trained there
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.source import Folder, Source

OF_DDP = {
    *("train", "eval", "parameters", "zero_grad", "training", "requires_grad_", "buffers", "modules", "apply"),
    *("no_sync", "register_comm_hook", "join", "to", "cuda", "cpu", "float", "half"),
}
"""What a wrapped model answers as the model itself does."""
OF_MODULES = OF_DDP | {
    *("state_dict", "load_state_dict", "named_parameters", "named_buffers", "named_modules", "children", "module"),
    *("named_children", "share_memory", "double", "register_forward_hook", "compile", "device", "__class__"),
}
QUIET = m.With(
    items=[
        m.ZeroOrMore(),
        m.WithItem(item=m.Call(m.Attribute(attr=m.OneOf(m.Name("no_grad"), m.Name("inference_mode"))))),
        m.ZeroOrMore(),
    ]
)
"""A block without gradients."""


class NotFollowedError(Exception):
    """The model's training calls are not all known; the text says why."""


@dataclass(eq=False)
class Holder:
    """A variable that has the model."""

    source: Source
    key: str
    calls: list[cst.Call] = field(default_factory=list)
    """of the model, in training"""
    attributes: list[cst.Attribute] = field(default_factory=list)
    passed: list[tuple[cst.BaseExpression, Holder]] = field(default_factory=list)
    """places where it is given on"""

    @property
    def trains(self) -> bool:
        """Whether a training call is made through this variable, or one that it is given to."""
        return bool(self.calls) or any(holder.trains for _, holder in self.passed)

    def all(self) -> list[Holder]:
        """Return this holder, and those that it is given to."""
        return [self, *(it for _, holder in self.passed for it in holder.all())]


def follow(
    folder: Folder, source: Source, key: str, after: cst.CSTNode | None = None, seen: frozenset[str] = frozenset()
) -> Holder:
    """Return where the model in a variable goes.

    Args:
        after: the statement that wraps it: places before it in its function are not of the training.
        seen: variables on the way here.

    Raises:
        NotFollowedError: the model is trained by other means than calls.
    """
    holder = Holder(source, key)
    if f"{source.path}:{key}" in seen:
        return holder
    seen |= {f"{source.path}:{key}"}
    for node in source.uses.get(key, []):
        parent = source.parents[node]
        if source.is_target(node) or _is_before(source, node, after):
            continue
        if isinstance(parent, cst.Call) and parent.func is node:
            if not is_evaluation(source, parent, node):
                holder.calls.append(parent)
        elif isinstance(parent, cst.Attribute):
            _take_attribute(holder, parent, node)
        elif isinstance(parent, cst.Arg):
            _take_argument(folder, holder, parent, node, seen)
        elif returned := _returned_to(folder, source, node):
            holder.passed += [(node, follow(folder, *place, None, seen)) for place in returned]
        elif isinstance(parent, cst.Assign) and len(parent.targets) == 1:
            alias = source.key(parent.targets[0].target)
            if alias is None:
                raise NotFollowedError(f"the model is kept as `{source.code(parent.targets[0].target)}`")
            if alias != key:
                holder.passed.append((node, follow(folder, source, alias, None, seen)))
    return holder


def _take_argument(
    folder: Folder, holder: Holder, arg: cst.Arg, node: cst.BaseExpression, seen: frozenset[str]
) -> None:
    source, call = holder.source, holder.source.parents[arg]
    place = folder.parameter(source, arg)
    if place is not None:
        key = str(place[0].key(place[1].name))
        holder.passed.append((node, follow(folder, place[0], key, None, seen)))
        return
    if not _is_used(source, call):
        return
    if _has_backward(source, arg) and not _is_quiet(source, arg):
        callee = source.code(call.func) if isinstance(call, cst.Call) else source.code(call)
        raise NotFollowedError(f"the training gives the model to `{callee}`, which is not in these files")
    assigned = source.parents.get(call)
    target = source.key(assigned.targets[0].target) if isinstance(assigned, cst.Assign) else None
    if target not in (None, holder.key) and follow(folder, source, str(target), None, seen).trains:
        raise NotFollowedError(f"the model is trained as `{source.code(assigned.targets[0].target)}`")  # type: ignore


def _returned_to(folder: Folder, source: Source, node: cst.BaseExpression) -> list[tuple[Source, str]]:
    """Return the variables to which a function's callers assign a model that it returns."""
    parent = source.parents[node]
    returned = source.around(node, cst.Return)
    function = source.function(node)
    value = source.parents.get(parent) if isinstance(parent, cst.Element) else parent
    if returned is None or function is None or (value is not returned and value is not returned.value):
        return []
    places = []
    for other in folder.sources:
        for call in other.find(other.module, cst.Call):
            assigned = other.parents[call]
            if _name(call.func) != function.name.value or not isinstance(assigned, cst.Assign):
                continue
            target: Any = assigned.targets[0].target
            if isinstance(parent, cst.Element) and isinstance(target, cst.Tuple):
                target = target.elements[returned.value.elements.index(parent)].value  # type: ignore[union-attr]
            if (key := other.key(target)) is not None:
                places.append((other, key))
    return places


def _name(function: cst.BaseExpression) -> str:
    return function.attr.value if isinstance(function, cst.Attribute) else getattr(function, "value", "")


def _take_attribute(holder: Holder, attribute: cst.Attribute, node: cst.BaseExpression) -> None:
    source = holder.source
    outer = source.parents[attribute]
    name = attribute.attr.value
    is_call = isinstance(outer, cst.Call) and outer.func is attribute
    if name == "forward" and is_call:
        if not is_evaluation(source, outer, node):
            holder.calls.append(outer)  # type: ignore[arg-type]
        return
    holder.attributes.append(attribute)
    if (
        name not in OF_MODULES
        and is_call
        and _is_used(source, outer)
        and _has_backward(source, node)
        and not _is_quiet(source, node)
    ):
        raise NotFollowedError(f"the training calls `{source.code(attribute)}`, which DDP does not see")


def is_evaluation(source: Source, node: cst.CSTNode, model: cst.BaseExpression) -> bool:
    """Return whether a call of the model is not one of the training."""
    if _is_quiet(source, node):
        return True
    function = source.function(node)
    if function is None or _has_backward(source, node):
        return False
    stop = m.Call(m.Attribute(m.MatchIfTrue(lambda it: source.code(it) == source.code(model)), m.Name("eval")))
    return bool(m.findall(function.body, stop))


def _is_quiet(source: Source, node: cst.CSTNode) -> bool:
    """Return whether no gradients are computed here."""
    for it in source.ancestors(node):
        if m.matches(it, QUIET):
            return True
        if isinstance(it, cst.FunctionDef) and any(
            "no_grad" in source.code(d) or "inference_mode" in source.code(d) for d in it.decorators
        ):
            return True
    return False


def _is_used(source: Source, call: cst.CSTNode) -> bool:
    return not isinstance(source.parents.get(call), cst.Expr)


def _has_backward(source: Source, node: cst.CSTNode) -> bool:
    """Return whether the function around a node trains."""
    return bool(m.findall(source.function(node) or source.module, m.Call(m.Attribute(attr=m.Name("backward")))))


def _is_before(source: Source, node: cst.CSTNode, statement: cst.CSTNode | None) -> bool:
    if statement is None or source.function(node) is not source.function(statement):
        return False
    return source.line(node) <= source.line(statement)
