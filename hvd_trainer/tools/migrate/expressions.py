"""What can be said of an expression from where it stands: whether it can be moved, copied, or differentiated."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.source import Source
from hvd_trainer.tools.migrate.table import Rule
from hvd_trainer.tools.migrate.wrapping import statement_of

CREATED = {
    *("tensor", "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like"),
    *("Tensor", "FloatTensor", "LongTensor", "IntTensor", "DoubleTensor"),
}
"""Calls whose result is a tensor of its own, in no graph."""
COMPUTED = {"stack", "cat", "sum", "mean", "clone", "norm", "std", "var"}
"""Calls whose result is a tensor of its own."""
AROUND = (cst.SimpleStatementLine, cst.If, cst.For, cst.With, cst.While, cst.Try, cst.FunctionDef, cst.ClassDef)


def target_of(source: Source, call: cst.CSTNode) -> str | None:
    """Return the variable that a call's result is assigned to."""
    parent = source.parents[call]
    is_simple = isinstance(parent, cst.Assign) and m.matches(parent, m.Assign([m.AssignTarget(m.Name())]))
    return source.code(parent.targets[0].target) if is_simple else None  # type: ignore[attr-defined]


def copy_of(node: cst.BaseExpression, text: str) -> str:
    """Return the text of a tensor that nothing else refers to, and that is in no graph."""
    name = getattr(getattr(node, "func", None), "attr", None) or getattr(node, "func", None)
    called = name.value if isinstance(name, cst.Name) else ""
    detached = "" if re.search(r"\.detach\(\)|\.data\b", text) else ".detach()"
    if called in CREATED:
        return text
    if not isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
        text = f"({text})"
    return text + detached + ("" if called in COMPUTED or isinstance(node, cst.BinaryOperation) else ".clone()")


def is_own(source: Source, call: cst.CSTNode, name: str) -> bool:
    """Return whether a variable was assigned a new tensor by the statement before."""
    statement = statement_of(source, call)
    body: Any = getattr(source.parents.get(statement), "body", ()) if statement else ()
    place = list(body).index(statement) if statement in body else 0
    before: Any = body[place - 1] if place else None
    if before is None or not m.matches(before, m.SimpleStatementLine(body=[m.Assign()])):
        return False
    assigned = before.body[0]
    is_it = source.code(assigned.targets[0].target) == name
    return is_it and not copy_of(assigned.value, "x").endswith(")")


def can_stand_before(source: Source, node: cst.CSTNode) -> bool:
    """Return whether statements before the one around an expression are run just as often as it."""
    child = node
    for it in source.ancestors(node):
        if isinstance(it, (cst.Lambda, cst.BaseComp, cst.Param, cst.Decorator, cst.While, cst.Assert)):
            return False
        is_late = isinstance(it, cst.IfExp) and child is not it.test
        if is_late or (isinstance(it, cst.BooleanOperation) and child is not it.left):
            return False
        is_shared = isinstance(it, cst.SimpleStatementLine) and len(it.body) > 1
        if is_shared or isinstance(it, cst.SimpleStatementSuite):
            return False
        if isinstance(it, AROUND):
            is_elif = isinstance(it, cst.If) and isinstance(source.parents.get(it), cst.If)
            return not is_elif
        child = it
    return False


def is_differentiated(source: Source, rule: Rule, call: cst.Call) -> bool:
    """Return whether gradients may flow through the result, as they do in Horovod."""
    function = source.function(call)
    if "tensor" not in rule.signature or function is None:
        return False
    around = {source.code(it.func).split(".")[-1] for it in source.ancestors(call) if isinstance(it, cst.Call)}
    quiet = r"\.detach\(|\.data\b|\.item\(|no_grad|torch\.tensor\("
    if around & {"item", "float", "tolist", "numpy"} or re.search(quiet, source.code(call)):
        return False
    if any(
        isinstance(it, cst.With) and "no_grad" in source.code(it.items[0].item) for it in source.ancestors(call)
    ):
        return False
    target, text = target_of(source, call), source.code(function)
    return (
        "loss" in function.name.value
        or function.name.value == "forward"
        or bool(target and re.search(rf"\b{target}\b[^\n]*\.backward\(", text))
    )


def is_dynamic(source: Source, name: cst.Arg | None) -> bool:
    """Return whether a name is one by which ranks may ask in different orders."""
    if name is None:
        return False
    own = {source.code(it) for it in source.find(name.value, cst.Name)}
    if any(source.horovod(it.func) == "rank" for it in source.find(name.value, cst.Call)):
        return True
    loops = [it for it in source.ancestors(name) if isinstance(it, cst.For)]
    unordered = [it for it in loops if re.search(r"\.(items|keys|values)\(\)$|^set\(", source.code(it.iter))]
    return any(own & {source.code(it) for it in source.find(loop.target, cst.Name)} for loop in unordered)
