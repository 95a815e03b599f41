"""Plan where DistributedDataParallel wraps a model in place of a `DistributedOptimizer`, and with which hook."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.flow import (
    INSPECTORS,
    Folder,
    NotFollowedError,
    Training,
    Variable,
    assigned_to,
    follow,
    is_trained,
    last_name,
)
from hvd_trainer.tools.migrate.passes import put_passes_under
from hvd_trainer.tools.migrate.source import CONDITIONAL, Source
from hvd_trainer.tools.migrate.table import BY_NAME, TABLE

SIGNATURE = [
    *("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op"),
    *("gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense"),
]
USUAL = {"compression": r"[\w.]*\bnone", "backward_passes_per_step": "1", "op": r"[\w.]*\bAverage"}
"""Options that change what is exchanged, and the values with which they do not."""
AVERAGE = "average_gradients"
NO_ADASUM = "Adasum has no counterpart in torch.distributed"
FROZEN = "DDP waits for gradients of what had them when it was wrapped: freeze it before"
NAMED = m.Call(m.Attribute(attr=m.Name("state_dict") | m.Name("named_parameters")))


@dataclass(eq=False)
class Wrapping:
    """A model that is wrapped.

    Attributes:
        optimizer: the call of DistributedOptimizer.
        place: the statement that DDP(...) is written before; or behind, that of the call of the function around.
        lines, later: the statements there, and those behind the optimizer's.
        condition: under which it is wrapped; "": always.
        has_passes: whether gradients are added up in several passes.
        is_sometimes: whether that is under a condition, so that the model may be a plain one afterwards.
        notes: file, line, what is left, and what to do by hand.
    """

    at: Source
    source: Source
    optimizer: cst.Call
    place: cst.SimpleStatementLine
    model: str
    key: str
    training: Training = field(default_factory=Training)
    is_behind: bool = False
    condition: str = ""
    lines: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)
    has_passes: bool = False
    is_sometimes: bool = False
    notes: list[tuple[Source, int, str, str]] = field(default_factory=list)

    def is_inside(self, folder: Folder, function: cst.FunctionDef) -> bool:
        """Return whether the model is a variable of a function and not more."""
        is_local = function in self.source.ancestors(self.place) and ".self." not in self.key
        returns = [node for node in self.source.uses[self.key] if self.source.around(node, cst.Return)]
        return is_local and not any(assigned_to(folder, self.source, node) for node in returns)

    def apply(self, folder: Folder) -> None:
        """Note the changes in the files."""
        folder.wrapped.add(self.optimizer)
        training = self.training
        for at, node, text in training.edits:
            at.replaced[node] = text
        for at, node, variable in training.modules:
            name, is_own, ddp = at.code(node), variable == (self.source, self.key), at.aliases["DDP"]
            has_others = len(folder.given[variable]) > training.given.count(variable)
            is_plain = self._is_plain_at(folder, at, node) if is_own else has_others
            text = f"({name}.module if isinstance({name}, {ddp}) else {name})"
            at.replaced[node] = text if self.is_sometimes or is_plain else f"{name}.module"
        texts = self.lines
        if self.condition:
            texts = [f"if {self.condition}:\n" + re.sub("(?m)^", "    ", "\n".join(texts))]
        (self.source.behind if self.is_behind else self.source.before)[self.place] += texts
        own = self.at.around(self.optimizer, cst.SimpleStatementLine)
        self.at.behind[own] += self.later  # type: ignore[index]

    def _is_plain_at(self, folder: Folder, source: Source, node: cst.CSTNode) -> bool:
        """Return whether a place may have the model before it is wrapped, in a function that is called early."""
        start, function = self.source.function(self.place), source.function(node)
        if function is start:
            return False
        if start is not None and start.name.value != "__init__":
            return True
        calls = self.source.find(cst.Call, start)
        early = [call for call in calls if self.source.is_before(call, self.place)]
        return function is not None and function.name.value in folder.reached(early)


def bind(call: cst.Call, signature: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a call's arguments by their names; None if it has others."""
    bound: dict[str, Any] = {}
    for place, arg in enumerate(call.args):
        name = arg.keyword.value if arg.keyword else signature[place] if place < len(signature) else ""
        if arg.star or name not in signature or name in bound:
            return None
        bound[name] = arg.value
    return bound


def broadcast_of(source: Source, call: cst.Call) -> tuple[Any, str] | None:
    """Return the model whose parameters are broadcast, and the rank."""
    bound = bind(call, ["params", "root_rank"]) or {}
    if not m.matches(bound.get("params", call), NAMED):
        return None
    rank = bound.get("root_rank", cst.Integer("0"))
    known = source.values(rank) if isinstance(rank, cst.Name) else []
    return bound["params"].func.value, source.code(known[0] if len(known) == 1 else rank)


def plan(folder: Folder, source: Source, call: cst.Call) -> Wrapping:
    """Return how the model of an optimizer is wrapped.

    Raises:
        NotFollowedError: DDP cannot stand for this optimizer, or it cannot be seen whether it can.
    """
    options, statement = bind(call, SIGNATURE), source.around(call, cst.SimpleStatementLine)
    if options is None or statement is None or len(statement.body) > 1:
        raise NotFollowedError("its options are not those of one exchange among all ranks")
    named = options.get("named_parameters")
    sent = [
        of[0]
        for at, send in folder.calls("broadcast_parameters")
        if at is source and (of := broadcast_of(at, send))
    ]
    if named is not None and m.matches(named, NAMED):
        model = named.func.value
    elif named is None and sent and _has_only(source, options["optimizer"], source.code(sent[0])):
        model = sent[0]
    else:
        raise NotFollowedError(
            "it is not seen which model it trains: give it named_parameters=model.named_parameters()"
        )
    if (key := source.key(model)) is None:
        raise NotFollowedError(f"`{source.code(model)}` is more than a variable")
    choice = source.around(call, cst.IfExp)
    result = Wrapping(source, source, call, statement, source.code(model), key)
    if choice is not None and choice.body is call:
        result.is_sometimes, result.condition = True, _condition(source, choice.test)
        if source.code(options["optimizer"]) == source.code(choice.orelse):
            source.replaced[choice] = source.code(choice.orelse)
    elif source.around(call, CONDITIONAL) is not None:
        raise NotFollowedError("it is part of an expression that is not followed")
    result.training = follow(folder, (source, key), statement)
    if not result.training.calls and not result.training.notes:
        _climb(folder, result)
    _check_scope(result)
    result.notes += result.training.notes
    _check_kept(folder, result)
    _note_frozen(result)
    _write(folder, result, options)
    calls = result.training.calls if not result.training.notes and not result.is_sometimes else []
    if result.has_passes and not (calls and all(put_passes_under(*use, folder.optimizers) for use in calls)):
        raise NotFollowedError("it is not seen which pass before a step is the last")
    return result


def _note_frozen(plan: Wrapping) -> None:
    """Note where parameters of the wrapped model lose or get their gradients, for which DDP waits."""
    source, function = plan.source, plan.source.function(plan.place)
    for node in source.find(cst.Attribute, function or source.module):
        loop = source.around(node, cst.For)
        of = f"{source.code(node.value)} {source.code(loop.iter) if loop else ''}"
        is_set = source.assigned(node) or getattr(source.parents[node], "func", None) is node
        is_behind = source.function(node) is function and not source.is_before(node, plan.place)
        is_frozen = is_set and is_behind and node.attr.value in ("requires_grad", "requires_grad_")
        if is_frozen and re.search(rf"(?<![\w.]){re.escape(plan.model)}\b", of):
            plan.notes.append((source, source.line(node), source.code(node), FROZEN))


def _condition(source: Source, test: cst.BaseExpression) -> str:
    """Return the text of a condition without Horovod.

    Raises:
        NotFollowedError: it asks for more than ranks.
    """
    text = source.code(test)
    for call in source.find(cst.Call, test):
        rule = BY_NAME.get(str(source.horovod(call.func)))
        if rule and not (rule.special or rule.lines or call.args):
            text = text.replace(source.code(call), source.renamed(rule).result)
        elif source.has_horovod(call.func):
            raise NotFollowedError("the condition around it is not followed")
    return text


def _climb(folder: Folder, plan: Wrapping) -> None:
    """Wrap the model where a function that makes its optimizer is called, if it is not trained in that.

    Raises:
        NotFollowedError: it is not seen where the model is trained.
    """
    source, function = plan.source, plan.source.function(plan.place)
    calls = folder.calls_of(source, function) if function is not None else []
    args = [(at, arg) for at, arg in folder.given[source, plan.key]]
    is_once = len(args) == len(calls) == 1
    place = args[0][0].own_line(calls[0][1]) if is_once else None
    if not is_once or not isinstance(place, cst.SimpleStatementLine) or plan.condition:
        raise NotFollowedError("no training call of the model is seen in the files that import each other here")
    at, arg = args[0]
    if (key := at.key(arg.value)) is None or is_trained(folder, (source, plan.key), None, (at, key)):
        raise NotFollowedError(
            f"`{plan.model}` is trained in the function that makes its optimizer, or no variable"
        )
    plan.source, plan.key, plan.model, plan.place, plan.is_behind = at, key, at.code(arg.value), place, True
    plan.training = follow(folder, (at, key), place, is_behind=True)
    if not plan.training.calls and not plan.training.notes:
        raise NotFollowedError("no training call of the model is seen in the files that import each other here")


def _check_kept(folder: Folder, plan: Wrapping) -> None:
    """See that the training does not have the model by other variables, which got it before it is wrapped.

    Raises:
        NotFollowedError: it has, or this cannot be seen.
    """
    source, place = plan.source, plan.place
    others: list[tuple[Variable, cst.CSTNode | None]] = []
    for node in source.uses[plan.key]:
        parent: Any = source.parents[node]
        is_inside = plan.is_behind and place in source.ancestors(node)
        if source.assigned(node) or not (is_inside or source.is_before(node, place)):
            continue
        targets = assigned_to(folder, source, node)
        others += [(variable, None) for variable in targets or ()]
        if isinstance(parent, (cst.Element, cst.DictElement)) and targets is None:
            raise NotFollowedError(
                f"`{plan.model}` is kept in another object before that, in line {source.line(node)}"
            )
        if isinstance(parent, cst.Arg) and isinstance(call := source.parents[parent], cst.Call):
            inner = folder.parameter(source, parent)
            others += [(inner, None)] if inner else []
            is_kept = not inner and not isinstance(source.parents[call], cst.Expr)
            if is_kept and last_name(call.func) not in INSPECTORS:
                advice = "DDP does not wrap what it may keep of the model"
                plan.notes.append((source, source.line(node), source.code(call.func), advice))
    others += _origins(folder, (source, plan.key), ())
    for variable, after in others:
        if variable != (source, plan.key) and is_trained(folder, variable, after, (source, plan.key)):
            raise NotFollowedError(f"the model is trained as `{variable[1].split('.')[-1]}`, too")


def _origins(
    folder: Folder, variable: Variable, seen: tuple[Variable, ...]
) -> list[tuple[Variable, cst.CSTNode | None]]:
    """Return the variables that a model comes from, with the statements that hand it on."""
    source, key = variable
    result: list[tuple[Variable, cst.CSTNode | None]] = []
    given = [(at, arg, arg.value) for at, arg in folder.given.get(variable, ())]
    assigned = [node for node in source.uses[key] if source.assigned(node)]
    values = [(source, around, around.value) for node in assigned if (around := source.around(node, cst.Assign))]
    for at, node, value in [*given, *values]:
        origin = (at, str(at.key(value))) if at.key(value) else None
        if origin and origin not in (variable, *seen):
            result.append((origin, at.around(node, cst.BaseStatement) if isinstance(node, cst.Arg) else node))
            result += _origins(folder, origin, (*seen, variable))
    return result


def _has_only(source: Source, optimizer: cst.BaseExpression, model: str) -> bool:
    """Return whether an optimizer is seen to have the parameters of one model, and no others."""
    values = source.values(optimizer) or [optimizer]
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
    for loop in (node for node in source.ancestors(place) if isinstance(node, (cst.For, cst.While))):
        if source.function(loop) is function and not any(loop in source.ancestors(node) for node in targets):
            raise NotFollowedError(f"`{plan.model}` would be wrapped in each pass of the loop around it")
    for condition in (node for node in source.ancestors(place) if isinstance(node, cst.If)):
        if source.function(condition) is function and not source.is_main(condition):
            inside = [node for node in targets if condition in source.ancestors(node)]
            if inside and len(inside) < len(targets):
                raise NotFollowedError(f"`{plan.model}` is another one on each side of the condition around it")
            plan.is_sometimes |= not inside


def _has_branches(folder: Folder, plan: Wrapping) -> bool:
    """Return whether a `forward` of these files uses parts of a model by its arguments, in single passes."""
    for source in folder.sources if len(plan.training.calls) == 1 else ():
        for function in source.find(cst.FunctionDef):
            choices: list[Any] = [*source.find(cst.IfExp, function), *source.find(cst.If, function)]
            for choice in choices:
                if function.name.value == "forward":
                    names = {name.value for name in source.find(cst.Name, choice.test)} - {"self", "None"}
                    is_fixed = m.matches(choice.test, m.Attribute(m.Name("self")))
                    if names and not is_fixed and re.search(r"\bself\.\w+", source.code(choice.body)):
                        return True
    return False


def _write(folder: Folder, plan: Wrapping, options: Mapping[str, Any]) -> None:
    """Write the statements that wrap the model and register its hook."""
    source, value, hook, state, names = plan.at, options.get("op"), None, "None", plan.source.aliases
    texts = {name: source.code(options[name]) for name in USUAL if name in options}
    changed = {name for name, text in texts.items() if not re.fullmatch(USUAL[name], text)}
    if missing := sorted(changed - {*BY_NAME}):
        raise NotFollowedError(f"{missing[0]}=... has no rule")
    plan.has_passes = "backward_passes_per_step" in changed
    if isinstance(value, cst.IfExp) and source.horovod(value.body) == "Adasum":
        note = f"{NO_ADASUM}: the script says so now, and ends"
        plan.notes.append((source, source.line(plan.optimizer), "op=hvd.Adasum", note))
        plan.lines.append(f'if {source.code(value.test)}:\n    raise ValueError("{NO_ADASUM}")')
        value = value.orelse
    op = source.horovod(value) if value is not None else "Average"
    if op not in ("Average", "Sum") or (op == "Sum" and plan.has_passes):
        raise NotFollowedError(f"{op or 'its op'} has no counterpart in DDP" + " with passes" * plan.has_passes)
    if op == "Sum":
        hook = "sum_gradients"
    registered = hook
    if "compression" in changed and (compressed := _compressed(source, options["compression"], hook or AVERAGE)):
        hook, registered = hook or AVERAGE, compressed
    is_partly = _has_branches(folder, plan)
    unused = ", find_unused_parameters=True" * is_partly
    plan.lines.append(f"{plan.model} = {names['DDP']}({plan.model}{unused})")
    hooks = [hook] * (hook is not None)
    if is_partly:  # Horovod sends zeros for these
        hooks.append("fill_unused")
        optimizer = options["optimizer"]
        own = (
            source.code(optimizer)
            if isinstance(optimizer, (cst.Name, cst.Attribute))
            else source.target(plan.optimizer)
        )
        if own is None:
            raise NotFollowedError("it has no name, and its model may leave out parameters in a pass")
        plan.later.append(f"{own}.register_step_pre_hook(fill_unused)")
    comment = "# Each rank keeps its own buffers, such as batch-norm statistics."
    plan.lines.append(f"{comment}\n{plan.model}.broadcast_buffers = False")
    if plan.is_behind and "compression" in changed:
        raise NotFollowedError("its compression is chosen in another function than its model")
    if hook is not None:
        plan.lines.append(f"{plan.model}.register_comm_hook({state}, {registered})")
    for text in TABLE.hooks:
        at = source if "def fill_unused" in text else plan.source
        own = text.replace("dist.", f"{at.aliases['dist']}.")
        if any(f"def {one}(" in text for one in hooks) and own not in at.functions:
            at.functions.append(own)


def _compressed(source: Source, value: cst.BaseExpression, hook: str) -> str | None:
    """Return hooks in the place of compressors, also where these are assigned to a variable; None: none is."""
    uses = source.uses[source.key(value)] if isinstance(value, cst.Name) else []
    replaced: dict[cst.CSTNode, str] = {}
    for whole in (source.values(value) if uses else []) or [value]:
        texts = []
        for leaf in [whole.body, whole.orelse] if isinstance(whole, cst.IfExp) else [whole]:
            kind = str(source.horovod(leaf)).removeprefix("Compression.")
            if kind not in ("none", "fp16", "bf16"):
                raise NotFollowedError("its compression is not hvd.Compression.fp16 or bf16")
            texts.append(hook if kind == "none" else f"default_hooks.{kind}_compress_wrapper({hook})")
        replaced[whole] = f" if {source.code(getattr(whole, 'test', whole))} else ".join(texts)
    if {*replaced.values()} == {hook}:
        lines = [source.own_line(use) for use in uses if source.assigned(use)]
        source.gone |= {line for line in lines if line is not None and len(uses) == len(lines) + 1}
        return None
    source.replaced |= replaced
    return source.code(value) if value not in replaced else replaced[value]
