"""Plan where DistributedDataParallel wraps a model in place of a `DistributedOptimizer`, and with which hook."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.flow import BACKWARD, Folder, NotFollowedError, Training, follow
from hvd_trainer.tools.migrate.source import Source
from hvd_trainer.tools.migrate.table import BY_NAME, TABLE

SIGNATURE = [
    *("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op"),
    *("gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense"),
]
USUAL = {
    "compression": r"[\w.]*\bnone",
    "backward_passes_per_step": "1",
    "op": r"[\w.]*\bAverage",
    "gradient_predivide_factor": r"1(\.0)?",
}
"""Options that change what is exchanged, and the values with which they do not."""
COMPRESSED = ("Compression.fp16", "Compression.bf16")
NO_ADASUM = "Adasum has no counterpart in torch.distributed"


@dataclass(eq=False)
class Wrapping:
    """A model that is wrapped.

    Attributes:
        optimizer: the call of DistributedOptimizer.
        place: where DDP(...) is written: the optimizer's statement, or a broadcast of the parameters behind it.
        lines: statements in place of `place`.
        hook: its name in the table.
        has_passes: whether gradients are added up in several passes.
        guard: the condition under which it is wrapped; before it the model stands for itself.
        notes: line, what is left, and what to do by hand.
    """

    source: Source
    optimizer: cst.Call
    place: cst.SimpleStatementLine
    model: str
    key: str
    training: Training
    lines: list[str] = field(default_factory=list)
    hook: str | None = None
    has_passes: bool = False
    guard: cst.CSTNode | None = None
    notes: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The wrapped model: `ddp_model`, `self.ddp_model`."""
        return re.sub(r"(\w+)$", r"ddp_\1", self.model)


def bind(call: cst.Call, signature: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a call's arguments by their names; None if it has others."""
    bound: dict[str, Any] = {}
    for place, arg in enumerate(call.args):
        name = arg.keyword.value if arg.keyword else signature[place] if place < len(signature) else ""
        if arg.star or name not in signature or name in bound:
            return None
        bound[name] = arg.value
    return bound


def broadcast_of(source: Source, call: cst.Call) -> tuple[Any, str, str] | None:
    """Return the model whose parameters are broadcast, its method that names them, and the rank."""
    bound = bind(call, ["params", "root_rank"]) or {}
    named = m.Call(m.Attribute(attr=m.Name("state_dict") | m.Name("named_parameters")))
    if not m.matches(bound.get("params", call), named):
        return None
    root = source.code(bound["root_rank"]) if "root_rank" in bound else "0"
    return bound["params"].func.value, bound["params"].func.attr.value, root


def plan(folder: Folder, source: Source, call: cst.Call) -> Wrapping:
    """Return how the model of an optimizer is wrapped.

    Raises:
        NotFollowedError: DDP cannot stand for this optimizer, or it cannot be seen whether it can.
    """
    options, statement = bind(call, SIGNATURE), source.around(call, cst.SimpleStatementLine)
    if options is None or statement is None:
        raise NotFollowedError("its options are not those of one exchange among all ranks")
    sends = [send for at, send in folder.calls("broadcast_parameters") if at is source]
    whole = [(send, of[0]) for send in sends if (of := broadcast_of(source, send)) is not None and of[2] == "0"]
    named = options.get("named_parameters")
    if named is not None and m.matches(named, m.Call(m.Attribute(attr=m.Name("named_parameters")))):
        model = named.func.value
    elif named is None and whole and _has_only(source, options["optimizer"], source.code(whole[0][1])):
        model = whole[0][1]
    else:
        raise NotFollowedError(
            "it is not seen which model it trains: give it named_parameters=model.named_parameters()"
        )
    if (key := source.key(model)) is None:
        raise NotFollowedError(f"`{source.code(model)}` is more than a variable")
    block = source.body(statement)
    lines = [source.own_line(send) for send, of in whole if source.key(of) == key]
    later = [line for line in lines if line in block and block.index(line) > block.index(statement)]
    place: Any = later[0] if later else statement
    result = Wrapping(source, call, place, source.code(model), key, Training())
    _check_scope(result)
    result.training = follow(folder, source, key, result.name, place)
    if not result.training.calls:
        raise NotFollowedError("no training call of the model is seen in these files")
    for wanted in result.training.asks:
        given = sum(folder.parameter(*arg) == wanted for arg in folder.args)
        if result.guard is not None or given > result.training.given.count(wanted):
            raise NotFollowedError(
                f"`{wanted[1]}` gets other models, too, and is asked for what a wrapped one has not"
            )
    _write(result, options)
    return result


def _has_only(source: Source, optimizer: cst.BaseExpression, model: str) -> bool:
    """Return whether an optimizer is seen to have the parameters of one model, and no others."""
    assigned = [source.parents[source.parents[use]] for use in source.uses[source.key(optimizer)]]
    values = [node.value for node in assigned if isinstance(node, cst.Assign)] or [optimizer]
    return {*re.findall(r"([\w.]+)\.(?:named_)?parameters\(", "".join(map(source.code, values)))} == {model}


def _check_scope(plan: Wrapping) -> None:
    """Find out whether the wrapped model is known wherever the model is."""
    source, place = plan.source, plan.place
    targets = [node for node in source.uses[plan.key] if source.assigned(node)]
    function = source.function(place)
    for node in targets:
        if source.function(node) is function and source.line(node) > source.line(place):
            raise NotFollowedError(f"`{plan.model}` is assigned again after that, in line {source.line(node)}")
    if ".self." in plan.key:
        owner: Any = source.around(place, cst.ClassDef)
        if any("Module" in source.code(base) for base in owner.bases):
            raise NotFollowedError("the model is part of a module, which would have it twice")
    elif plan.key.count("<locals>") != sum(isinstance(node, cst.FunctionDef) for node in source.ancestors(place)):
        raise NotFollowedError(f"`{plan.model}` is not a variable of the function that makes its optimizer")
    for condition in (node for node in source.ancestors(place) if isinstance(node, cst.If)):
        if source.function(condition) is function and "__name__" not in source.code(condition.test):
            inside = [node for node in targets if condition in source.ancestors(node)]
            if inside and len(inside) < len(targets):
                raise NotFollowedError(f"`{plan.model}` is another one on each side of the condition around it")
            plan.guard = condition if not inside else plan.guard


def _write(plan: Wrapping, options: Mapping[str, Any]) -> None:
    """Write the statements that wrap the model and register its hook."""
    texts = {name: plan.source.code(options[name]) for name in USUAL if name in options}
    changed = {name for name, text in texts.items() if not re.fullmatch(USUAL[name], text)}
    if missing := sorted(changed - {*BY_NAME}):
        raise NotFollowedError(f"{missing[0]}=... has no rule")
    plan.has_passes, state = "backward_passes_per_step" in changed, "None"
    value = options.get("op")
    if isinstance(value, cst.IfExp) and plan.source.horovod(value.body) == "Adasum":
        said = (
            plan.source.line(plan.optimizer),
            "op=hvd.Adasum",
            f"{NO_ADASUM}: the script says so now, and ends",
        )
        plan.notes.append(said)
        plan.lines.append(f'if {plan.source.code(value.test)}:\n    raise ValueError("{NO_ADASUM}")')
        value = value.orelse
    op = plan.source.horovod(value) if value is not None else "Average"
    if op not in ("Average", "Sum") or (op == "Sum" and plan.has_passes):
        raise NotFollowedError(f"{op or 'its op'} has no counterpart in DDP" + " with passes" * plan.has_passes)
    if op == "Sum":
        plan.hook = "sum_gradients"
    elif "gradient_predivide_factor" in changed:
        plan.hook, state = "predivided", plan.source.code(options["gradient_predivide_factor"])
    elif "compression" in changed:
        plan.hook = "average_gradients"
    plan.lines.append(f"{plan.name} = DDP({plan.model}, broadcast_buffers=False)")
    if plan.hook is not None:
        hook = TABLE.hooks[plan.hook].split("(")[0].removeprefix("def ")
        if "compression" in changed:
            _compress(plan.source, options["compression"], hook)
            hook = plan.source.new(options["compression"])
        plan.lines.append(f"{plan.name}.register_comm_hook({state}, {hook})")


def _compress(source: Source, value: cst.BaseExpression, hook: str) -> None:
    """Put hooks in the place of an option's compressors, also where these are assigned to a variable."""
    uses = source.uses[source.key(value)] if isinstance(value, cst.Name) else []
    assigned: list[Any] = [source.parents[source.parents[use]] for use in uses if source.assigned(use)]
    values = [node.value for node in assigned if isinstance(node, cst.Assign)] or [value]
    leaves = []
    for value in values:
        leaves += [value.body, value.orelse] if isinstance(value, cst.IfExp) else [value]
    if any(source.horovod(leaf) not in ("Compression.none", *COMPRESSED) for leaf in leaves):
        raise NotFollowedError("its compression is not hvd.Compression.fp16 or bf16")
    for leaf in leaves:
        kind = str(source.horovod(leaf)).removeprefix("Compression.")
        source.replace(leaf, hook if kind == "none" else f"default_hooks.{kind}_compress_wrapper({hook})")


def find_passes(source: Source, call: cst.Call, model: str, optimizers: set[str]) -> tuple[list[Any], str] | None:
    """Return the statements of a pass that has a training call, and what they are put under; None if not seen.

    The last pass exchanges. It is that before a step, in the condition around it, or the last of a loop that ends
    before the step.
    """
    loop, function = source.around(call, cst.For), source.function(call)
    body = list(loop.body.body) if loop is not None else []
    inside = [statement for statement in body if statement in source.ancestors(call)]
    back = [statement for statement in body if m.findall(statement, BACKWARD)]
    if loop is None or source.function(loop) is not function or not inside or not back:
        return None
    pass_ = body[body.index(inside[0]) : body.index(back[-1]) + 1]
    uses = [use for use in source.find(cst.Call, function) if _gives(source, use, optimizers)]
    steps = [use for use in uses if m.matches(use.func, m.Attribute(attr=m.Name("step")))]
    other = [use for use in uses if not m.matches(use.func, m.Attribute(attr=m.Name("step") | m.Name("unscale_")))]
    in_loop = [step for step in steps if loop in source.ancestors(step)]
    if not pass_ or not steps or any(loop in source.ancestors(use) for use in other):
        return None
    if not in_loop:
        return _last_of(source, loop, pass_, model)
    held: Any = [part for part in body if {part} & {*source.ancestors(in_loop[0])}][0]
    names = {name.value for name in source.find(cst.Name, held.test)} if isinstance(held, cst.If) else set()
    between = body[body.index(pass_[0]) : body.index(held)]
    changed = {
        name.value
        for part in between
        for name in source.find(cst.Name, part)
        if source.assigned(name) or isinstance(source.parents[name], cst.AugAssign)
    }
    is_one = all(held in source.ancestors(step) for step in steps) and isinstance(held, cst.If) and not held.orelse
    if not is_one or names & changed or pass_[-1] not in between:
        return None
    return pass_, f"contextlib.nullcontext() if {source.code(held.test)} else {model}.no_sync()"


def _gives(source: Source, call: cst.Call, optimizers: set[str]) -> bool:
    """Return whether a call makes an optimizer's step, or gets the optimizer and may make it."""
    own: list[Any] = [call.func] if m.matches(call.func, m.Attribute(attr=m.Name("step"))) else []
    return any(source.code(node.value).split(".")[-1] in optimizers for node in (*own, *call.args))


def _last_of(source: Source, loop: cst.For, pass_: list[Any], model: str) -> tuple[list[Any], str] | None:
    iterated, target = loop.iter, source.code(loop.target)
    if m.matches(loop, m.For(target=m.Name(), iter=m.Call(m.Name("range")))):
        words = [source.code(arg.value) for arg in iterated.args]  # type: ignore[attr-defined]
        stop, step = words[min(1, len(words) - 1)], [*words, "1"][2] if len(words) > 1 else "1"
        return pass_, f"{model}.no_sync() if {target} + {step} < {stop} else contextlib.nullcontext()"
    if not isinstance(iterated, (cst.Name, cst.Attribute)):
        return None
    text, number = source.code(iterated), "number" if "number" not in source.words else "pass_number"
    source.replace(iterated, f"enumerate({text}, start=1)")
    source.replace(
        loop.target, f"{number}, ({target})" if "," in target and target[0] != "(" else f"{number}, {target}"
    )
    return pass_, f"contextlib.nullcontext() if {number} == len({text}) else {model}.no_sync()"
