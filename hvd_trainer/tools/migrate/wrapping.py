"""Plan where DistributedDataParallel wraps a model in place of a `DistributedOptimizer`, and with which hook."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.flow import BACKWARD, OF_DDP, Folder, Holder, NotFollowedError, follow
from hvd_trainer.tools.migrate.source import Source
from hvd_trainer.tools.migrate.table import BY_NAME, TABLE

SIGNATURE = [
    *("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op"),
    *("gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense"),
]
USUAL = {
    "compression": ("Compression.none", "hvd.Compression.none"),
    "backward_passes_per_step": ("1",),
    "op": ("Average",),
    "gradient_predivide_factor": ("1", "1.0"),
}
"""Options that change what is exchanged, and the values with which they do not."""
Cases = list[tuple[str | None, str]]
"""Values of an option, with the conditions under which it has them."""


@dataclass(eq=False)
class Wrapping:
    """A model that is wrapped."""

    source: Source
    optimizer: cst.Call
    """the call of DistributedOptimizer"""
    place: cst.SimpleStatementLine
    """where DDP(...) is written: the optimizer's statement, or a broadcast of the parameters behind it"""
    model: str
    key: str
    holder: Holder
    lines: list[str] = field(default_factory=list)
    """statements in place of `place`"""
    hook: str | None = None
    """name in the table"""
    passes: bool = False
    """whether gradients are added up in several passes"""
    guard: cst.CSTNode | None = None
    """the condition under which it is wrapped; before it the model stands for itself"""
    unused: list[cst.CSTNode] = field(default_factory=list)
    """assignments of options that are needed no more"""
    notes: list[tuple[int, str, str]] = field(default_factory=list)
    """line, what is left, and what to do by hand"""

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
    sent = [(it, broadcast_of(source, it)) for at, it in folder.calls("broadcast_parameters") if at is source]
    whole = [(it, of[0]) for it, of in sent if of is not None and of[2] == "0"]
    named = options.get("named_parameters")
    if named is not None and m.matches(named, m.Call(m.Attribute(attr=m.Name("named_parameters")))):
        model = named.func.value
    elif named is None and whole and _has_only(source, options["optimizer"], source.code(whole[0][1])):
        model = whole[0][1]
    else:
        raise NotFollowedError("it is not seen which model it trains: give it named_parameters=model.named_parameters()")
    if (key := source.key(model)) is None:
        raise NotFollowedError(f"`{source.code(model)}` is more than a variable")
    block = source.body(statement)
    lines = [source.own_line(it) for it, of in whole if source.key(of) == key]
    later = [it for it in lines if it in block and block.index(it) > block.index(statement)]
    place: Any = later[0] if later else statement
    result = Wrapping(source, call, place, source.code(model), key, follow(folder, source, key, place))
    _check_scope(result)
    if not result.holder.trains:
        raise NotFollowedError("no training call of the model is seen in these files")
    _check_others(folder, result)
    _write(result, options)
    return result


def _has_only(source: Source, optimizer: cst.BaseExpression, model: str) -> bool:
    """Return whether an optimizer is seen to have the parameters of one model, and no others."""
    made = [source.parents[source.parents[it]] for it in source.uses[source.key(optimizer)]]
    text = "".join(source.code(it.value) for it in made if isinstance(it, cst.Assign)) or source.code(optimizer)
    return {*re.findall(r"([\w.]+)\.(?:named_)?parameters\(", text)} == {model}


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
    elif plan.key.count("<locals>") != sum(isinstance(it, cst.FunctionDef) for it in source.ancestors(place)):
        raise NotFollowedError(f"`{plan.model}` is not a variable of the function that makes its optimizer")
    for it in source.ancestors(place):
        if isinstance(it, cst.If) and source.function(it) is function and "__name__" not in source.code(it.test):
            inside = [node for node in targets if it in source.ancestors(node)]
            if inside and len(inside) < len(targets):
                raise NotFollowedError(f"`{plan.model}` is another one on each side of the condition around it")
            plan.guard = it if not inside else plan.guard


def _check_others(folder: Folder, plan: Wrapping) -> None:
    """See that whoever gets the wrapped model always gets it, where it asks for more than a wrapped one has."""
    others = plan.holder.others
    for it in others:
        asks = any(attribute.attr.value not in OF_DDP for attribute in it.attributes)
        if not it.trains or not (asks or any(not to.trains for _, to in it.passed)):
            continue
        if plan.guard is not None:
            raise NotFollowedError("it is wrapped under a condition only, and others ask for what a wrapped model has not")
        given = sum(folder.parameter(*arg) == (it.source, it.key) for arg in folder.args)
        if given > sum((to.source, to.key) == (it.source, it.key) for to in others):
            raise NotFollowedError(f"`{it.key}` gets other models, too")


def _write(plan: Wrapping, options: Mapping[str, Any]) -> None:
    """Write the statements that wrap the model and register its hook."""
    cases = {name: _cases(plan, options.get(name), *usual) for name, usual in USUAL.items()}
    changed = {name for name, values in cases.items() if values != [(None, USUAL[name][0])]}
    if missing := sorted(changed - {*BY_NAME}):
        raise NotFollowedError(f"{missing[0]}=... has no rule")
    plan.passes = "backward_passes_per_step" in changed
    name, state, hook = plan.name, "None", None
    for condition, op in cases["op"]:
        if op == "Adasum" and condition is not None:
            text = "Adasum has no counterpart in torch.distributed"
            plan.lines.append(f'if {condition}:\n    raise ValueError("{text}")')
            said = (plan.source.line(plan.optimizer), f"op=Adasum if {condition}", f"{text}: the script says so, and ends")
            plan.notes.append(said)
        elif op == "Sum" and condition is None and len(cases["op"]) == 1:
            hook = plan.hook = "sum_gradients"
        elif op != "Average":
            raise NotFollowedError(f"{op or 'its op'} has no counterpart in DDP")
    if "gradient_predivide_factor" in changed and hook is None:
        hook, plan.hook, state = "average_gradients", "predivided", plan.source.code(options["gradient_predivide_factor"])
    plan.lines.append(f"{name} = DDP({plan.model}, broadcast_buffers=False)")
    chosen = [case for case in cases["compression"] if case[1] != "Compression.none"]
    if len(chosen) > 1 or any(code not in ("Compression.fp16", "Compression.bf16") for _, code in chosen):
        raise NotFollowedError("its compression is not hvd.Compression.fp16 or bf16")
    for condition, code in chosen:
        inner, plan.hook = hook or "average_gradients", plan.hook or "average_gradients"
        wrapped = f"default_hooks.{code.removeprefix('Compression.')}_compress_wrapper({inner})"
        hook = wrapped if condition is None else f"{wrapped} if {condition} else {hook}" if hook else hook
        if condition is not None and hook is None:
            plan.lines.append(f"if {condition}:\n    {name}.register_comm_hook(None, {wrapped})")
    if hook is not None:
        plan.lines.append(f"{name}.register_comm_hook({state}, {hook})")


def _cases(plan: Wrapping, value: Any, usual: str, *also: str) -> Cases:
    """Return an option's values with their conditions, where it may be a variable that was chosen before."""
    source = plan.source
    if value is None or source.code(value) in (usual, *also):
        return [(None, usual)]
    uses = source.uses[source.key(value)] if source.horovod(value) is None else []
    targets = [source.parents[source.parents[it]] for it in uses if source.assigned(it)]
    if len(targets) == 1 and isinstance(targets[0], cst.Assign):
        value = targets[0].value
        plan.unused += [source.parents[targets[0]]] if len(uses) == 2 else []
    if isinstance(value, cst.IfExp):
        test, body, other = source.code(value.test), source.horovod(value.body) or "", source.horovod(value.orelse) or ""
        if body == usual:
            is_simple = isinstance(value.test, (cst.Name, cst.Attribute, cst.Call))
            test, body, other = f"not {test}" if is_simple else f"not ({test})", other, body
        return [(test, body), (None, other)]
    return [(None, source.horovod(value) or "")]


def find_passes(source: Source, call: cst.Call, model: str, optimizers: set[str]) -> tuple[list[Any], str] | None:
    """Return the statements of a pass that has a training call, and what they are put under; None if it is not seen.

    The last pass exchanges. It is that before a step, in the condition around it, or the last of a loop that ends
    before the step.
    """
    loop, function = source.around(call, cst.For), source.function(call)
    body = list(loop.body.body) if loop is not None else []
    inside = [it for it in body if it in source.ancestors(call)]
    back = [it for it in body if m.findall(it, BACKWARD)]
    if loop is None or source.function(loop) is not function or not inside or not back:
        return None
    pass_ = body[body.index(inside[0]) : body.index(back[-1]) + 1]
    has_long = any("\n" in source.code(it) for part in pass_ for it in source.find(cst.BaseString, part))
    mine = [it for it in source.find(cst.Call, function) if _gives(source, it, optimizers)]
    steps = [it for it in mine if m.matches(it.func, m.Attribute(attr=m.Name("step")))]
    other = [it for it in mine if it not in steps and not m.matches(it.func, m.Attribute(attr=m.Name("unscale_")))]
    in_loop = [it for it in steps if loop in source.ancestors(it)]
    if not pass_ or has_long or not steps or any(loop in source.ancestors(it) for it in other):
        return None
    if not in_loop:
        return _last_of(source, loop, pass_, model)
    held: list[Any] = [part for part in body if {part} & {*source.ancestors(in_loop[0])}]
    names = {it.value for it in source.find(cst.Name, held[0].test)} if isinstance(held[0], cst.If) else set()
    between = body[body.index(pass_[0]) : body.index(held[0])]
    changed = {
        it.value
        for part in between
        for it in source.find(cst.Name, part)
        if source.assigned(it) or isinstance(source.parents[it], cst.AugAssign)
    }
    is_one = all(held[0] in source.ancestors(it) for it in steps) and isinstance(held[0], cst.If) and not held[0].orelse
    if not is_one or names & changed or pass_[-1] not in between:
        return None
    return pass_, f"contextlib.nullcontext() if {source.code(held[0].test)} else {model}.no_sync()"


def _gives(source: Source, call: cst.Call, optimizers: set[str]) -> bool:
    """Return whether a call makes an optimizer's step, or gets the optimizer and may make it."""
    own = [call.func.value] if m.matches(call.func, m.Attribute(attr=m.Name("step"))) else []  # type: ignore[attr-defined]
    return any(source.code(it).split(".")[-1] in optimizers for it in (*own, *(arg.value for arg in call.args)))


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
    source.replace(loop.target, f"{number}, ({target})" if "," in target and target[0] != "(" else f"{number}, {target}")
    return pass_, f"contextlib.nullcontext() if {number} == len({text}) else {model}.no_sync()"
