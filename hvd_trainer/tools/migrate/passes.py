"""Put all passes but the last of an optimizer's step under `no_sync()`."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.flow import BACKWARD, last_name
from hvd_trainer.tools.migrate.source import Source

STEP = m.Attribute(attr=m.Name("step"))


def put_passes_under(source: Source, call: cst.Call, model: str, optimizers: set[str]) -> bool:
    """Note the change of a pass that has a training call; return whether it is seen which pass is the last.

    The last pass exchanges. It is that before a step, in the condition around it, or the last of a loop that ends
    before the step.
    """
    loop, function = source.around(call, cst.For), source.function(call)
    body = list(loop.body.body) if loop is not None else []
    inside = [statement for statement in body if statement in source.ancestors(call)]
    back = [statement for statement in body if m.findall(statement, BACKWARD)]
    if loop is None or source.function(loop) is not function or not inside or not back:
        return False
    pass_ = body[body.index(inside[0]) : body.index(back[-1]) + 1]
    uses = [use for use in source.find(cst.Call, function) if _gives(use, optimizers)]
    steps = [use for use in uses if m.matches(use.func, STEP)]
    other = [use for use in uses if not m.matches(use.func, STEP | m.Attribute(attr=m.Name("unscale_")))]
    in_loop = [step for step in steps if loop in source.ancestors(step)]
    if not pass_ or not steps or any(loop in source.ancestors(use) for use in other):
        return False
    header: str | None
    if in_loop:
        held: Any = next(part for part in body if part in {in_loop[0], *source.ancestors(in_loop[0])})
        is_one = all(held in source.ancestors(step) for step in steps) and isinstance(held, cst.If)
        if not is_one or held.orelse or source.has_horovod(held.test):
            return False
        names = {name.value for name in source.find(cst.Name, held.test)}
        between = body[body.index(pass_[0]) : body.index(held)]
        changed = [name.value for part in between for name in source.find(cst.Name, part) if source.assigned(name)]
        if names & {*changed} or pass_[-1] not in between:
            return False
        header = f"contextlib.nullcontext() if {source.code(held.test)} else {model}.no_sync()"
    elif (header := _last_of(source, loop, model)) is None:
        return False
    source.under[pass_[0]] = pass_[-1], header
    return True


def _gives(call: cst.Call, optimizers: set[str]) -> bool:
    """Return whether a call makes an optimizer's step, or gets the optimizer and may make it."""
    own: list[Any] = [call.func] if m.matches(call.func, STEP) else []
    return any(last_name(node.value) in optimizers for node in (*own, *call.args))


def _last_of(source: Source, loop: cst.For, model: str) -> str | None:
    """Return what the passes of a loop are put under; None if it is not seen which is the last."""
    iterated, target = loop.iter, source.code(loop.target)
    if source.has_horovod(iterated):
        return None
    if m.matches(loop, m.For(target=m.Name(), iter=m.Call(m.Name("range")))):
        words = [source.code(arg.value) for arg in iterated.args]  # type: ignore[attr-defined]
        stop, step = words[min(1, len(words) - 1)], [*words, "1"][2] if len(words) > 1 else "1"
        return f"{model}.no_sync() if {target} + {step} < {stop} else contextlib.nullcontext()"
    if not isinstance(iterated, (cst.Name, cst.Attribute)):
        return None
    text, number = source.code(iterated), "number" if "number" not in source.words else "pass_number"
    source.replaced[iterated] = f"enumerate({text}, start=1)"
    source.replaced[loop.target] = (
        f"{number}, ({target})" if "," in target and target[0] != "(" else f"{number}, {target}"
    )
    return f"contextlib.nullcontext() if {number} == len({text}) else {model}.no_sync()"
