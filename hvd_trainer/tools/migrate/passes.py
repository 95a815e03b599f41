"""Find the passes of an accumulated step: the loop, its last pass, and the statements of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.source import Source

BACKWARD = m.Call(m.Attribute(attr=m.Name("backward")))
STEP = m.Call(m.Attribute(attr=m.Name("step")), args=[m.ZeroOrMore()])


@dataclass
class Passes:
    """Statements that are put under `no_sync()`."""

    statements: Sequence[cst.BaseStatement]
    is_last: str
    """the condition under which gradients are exchanged"""
    is_not_last: str | None = None
    renamed: dict[cst.CSTNode, str] = field(default_factory=dict)
    """changes of the loop's head"""

    def header(self, model: str) -> str:
        """Return the item of the `with` statement."""
        if self.is_not_last is not None:
            return f"{model}.no_sync() if {self.is_not_last} else contextlib.nullcontext()"
        return f"contextlib.nullcontext() if {self.is_last} else {model}.no_sync()"


def find_passes(source: Source, call: cst.Call, optimizers: set[str]) -> Passes | None:
    """Return the passes in which a training call is made; None if their last is not seen.

    Args:
        call: of the model.
        optimizers: the names that optimizers have.
    """
    loop, function = source.around(call, cst.For), source.function(call)
    if loop is None or source.function(loop) is not function or not isinstance(loop.body, cst.IndentedBlock):
        return None
    body = loop.body.body
    inside = [it for it in body if call in source.find(it, cst.Call)]
    back = [it for it in body if m.findall(it, BACKWARD)]
    if not inside or not back or body.index(inside[0]) > body.index(back[-1]):
        return None
    statements = body[body.index(inside[0]) : body.index(back[-1]) + 1]
    steps = [it for it in source.find(function or source.module, cst.Call) if _is_step(source, it, optimizers)]
    steps = [it for it in steps if source.function(it) is function]
    if any(_gives_away(source, it, optimizers) for it in source.find(loop, cst.Call)):
        return None
    within = [it for it in steps if loop in source.ancestors(it)]
    if not within:
        return _by_place(source, loop, statements) if steps else None
    held = {part for part in body for it in within if part in source.ancestors(it)}
    condition: Any = next(iter(held))
    is_one = len(held) == 1 and len(within) == len(steps) and isinstance(condition, cst.If)
    if not is_one or condition.orelse is not None or body.index(condition) <= body.index(statements[-1]):
        return None
    names = {source.code(it) for it in source.find(condition.test, cst.Name)}
    between = body[body.index(inside[0]) : body.index(condition)]
    changed = {
        source.code(it)
        for part in between
        for it in source.find(part, cst.Name)
        if source.is_target(it) or isinstance(source.parents[it], cst.AugAssign)
    }
    return None if names & changed else Passes(statements, source.code(condition.test))


def _gives_away(source: Source, call: cst.Call, optimizers: set[str]) -> bool:
    """Return whether a call gets an optimizer, and may make its step."""
    given = {source.code(arg.value).split(".")[-1] for arg in call.args}
    return bool(given & optimizers) and not m.matches(
        call.func, m.Attribute(attr=m.OneOf(m.Name("step"), m.Name("unscale_")))
    )


def _is_step(source: Source, call: cst.Call, optimizers: set[str]) -> bool:
    if not m.matches(call, STEP):
        return False
    names = [source.code(call.func.value), *(source.code(arg.value) for arg in call.args)]  # type: ignore[attr-defined]
    return any(name.split(".")[-1] in optimizers for name in names)


def _by_place(source: Source, loop: cst.For, statements: Sequence[cst.BaseStatement]) -> Passes | None:
    """Return the passes of a loop that ends before the step: the last is its last round."""
    iterated, target = loop.iter, source.code(loop.target)
    if m.matches(iterated, m.Call(m.Name("range"))) and isinstance(loop.target, cst.Name):
        words = [source.code(arg.value) for arg in iterated.args]  # type: ignore[attr-defined]
        stop = words[1] if len(words) > 1 else words[0]
        step = words[2] if len(words) > 2 else "1"
        return Passes(statements, "", f"{target} + {step} < {stop}")
    if isinstance(iterated, (cst.Name, cst.Attribute)):
        text = source.code(iterated)
        number = next(it for it in ("number", "pass_number", "number_of_pass") if it not in source.words)
        head: dict[cst.CSTNode, str] = {iterated: f"enumerate({text}, start=1)"}
        is_bare = isinstance(loop.target, cst.Tuple) and not loop.target.lpar
        head[loop.target] = f"{number}, ({target})" if is_bare else f"{number}, {target}"
        return Passes(statements, f"{number} == len({text})", None, head)
    return None
