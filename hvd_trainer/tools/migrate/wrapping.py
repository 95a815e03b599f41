"""Plan where DistributedDataParallel wraps a model in place of a `DistributedOptimizer`, and with which hook."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.flow import OF_DDP, Holder, NotFollowedError, follow
from hvd_trainer.tools.migrate.source import Folder, Source
from hvd_trainer.tools.migrate.table import BY_NAME

SIGNATURE = [
    *("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op"),
    *("gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set"),
]
HOOKS = {
    "sum_gradients": '''
def sum_gradients(state, bucket):
    """Sum the gradients over all ranks, in place of DDP's average."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda summed: summed.value()[0])
''',
    "average_gradients": '''
def average_gradients(state, bucket):
    """Average the gradients over all ranks, dividing after the sum."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda summed: summed.value()[0].div_(dist.get_world_size()))
''',
    "predivided": '''
def average_gradients(factor, bucket):
    """Average the gradients over all ranks, dividing by the factor before the sum, and by the rest after it."""
    work = dist.all_reduce(bucket.buffer().div_(factor), async_op=True)
    return work.get_future().then(lambda summed: summed.value()[0].mul_(factor / dist.get_world_size()))
''',
}
"""Functions that stand before the one that registers them."""


@dataclass(eq=False)
class Wrapping:
    """A model that is wrapped."""

    source: Source
    optimizer: cst.Call
    """the call of DistributedOptimizer"""
    place: cst.SimpleStatementLine
    """where DDP(...) is written: a broadcast of the parameters, or the optimizer's statement"""
    model: str
    key: str
    holder: Holder
    passes: cst.BaseExpression | None = None
    """backward_passes_per_step, if it is not 1"""
    hook: str | None = None
    """name in HOOKS"""
    lines: list[str] = field(default_factory=list)
    """statements in place of `place`"""
    guard: cst.CSTNode | None = None
    """the condition under which it is wrapped; before it the model stands for itself"""
    before: tuple[cst.CSTNode, list[str]] | None = None
    """a condition that it does not need, and the statements that stand before it instead of `lines`"""
    unused: list[cst.CSTNode] = field(default_factory=list)
    """assignments of options that are needed no more"""
    notes: list[tuple[int, str, str]] = field(default_factory=list)
    """line, what is left, and what to do by hand"""

    @property
    def name(self) -> str:
        """The wrapped model: `ddp_model`, `self.ddp_model`."""
        *before, last = self.model.split(".")
        return ".".join([*before, f"ddp_{last}"])


def bind(call: cst.Call, signature: Sequence[str]) -> dict[str, cst.Arg] | None:
    """Return a call's arguments by their names; None if it has others."""
    bound: dict[str, cst.Arg] = {}
    for place, arg in enumerate(call.args):
        name = arg.keyword.value if arg.keyword else signature[place] if place < len(signature) else ""
        if arg.star or name not in signature or name in bound:
            return None
        bound[name] = arg
    return bound


def statement_of(source: Source, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
    """Return the simple statement around a node."""
    return source.around(node, cst.SimpleStatementLine)


def owner_of(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the model in `model.state_dict()`."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.value
    return node


def plan(folder: Folder, source: Source, call: cst.Call, only: bool) -> Wrapping:
    """Return how the model of an optimizer is wrapped.

    Args:
        only: whether the folder has no other DistributedOptimizer.

    Raises:
        NotFollowedError: DDP cannot stand for this optimizer, or it cannot be seen whether it can.
    """
    options = bind(call, SIGNATURE)
    if options is None or "process_set" in options:
        raise NotFollowedError("its options are not those of one exchange among all ranks")
    named = options.get("named_parameters")
    if named is not None and not m.matches(named.value, m.Call(m.Attribute(attr=m.Name("named_parameters")))):
        raise NotFollowedError("its named_parameters are not those of one model")
    model = owner_of(named.value) if named else None
    statement = statement_of(source, call)
    if statement is None:
        raise NotFollowedError("it is part of a larger statement")
    where, place, owner = source, statement, model
    for other, broadcast in folder.calls("broadcast_parameters"):
        sent = owner_of(broadcast.args[0].value)
        is_same = model is not None and other is source and other.key(sent) == source.key(model)
        line = statement_of(other, broadcast)
        if (
            line is not None
            and root_of(other, broadcast) == "0"
            and (is_same or (only and (model is None or source.key(model) is None)))
        ):
            where, place, owner = other, line, sent
            break
    key = where.key(owner) if owner is not None else None
    if (
        named is None
        and owner is not None
        and not _has_only(source, options["optimizer"].value, where.code(owner))
    ):
        owner = None
    if owner is None or key is None:
        raise NotFollowedError(
            "it is not seen which model it trains: name it, as in named_parameters=model.named_parameters()"
        )
    if place is not statement and _moves_later(where, key, place):
        place = statement
    if (
        place is not statement
        and where.function(place) is not source.function(statement)
        and set(options) - {"optimizer", "named_parameters"}
    ):
        where, place, owner = source, statement, model
        key = source.key(model) if model is not None else None
        if key is None:
            raise NotFollowedError("its options are not known where the parameters are broadcast")
    result = Wrapping(where, call, place, where.code(owner), key, Holder(where, key))  # type: ignore[arg-type]
    _check_scope(result)
    result.holder = follow(folder, where, key, place)
    if not result.holder.trains:
        raise NotFollowedError("no training call of the model is seen in these files")
    _check_holders(folder, result.holder)
    if result.guard is not None and not _is_several(where, result.guard) and _needs_module(result.holder):
        raise NotFollowedError(
            "it is wrapped under a condition only, and others ask for what a wrapped model has not"
        )
    _write(result, source, options)
    if result.guard is not None and _is_several(where, result.guard):
        result.before, result.lines, result.guard = (result.guard, result.lines), [], None
    return result


def _is_several(source: Source, condition: cst.CSTNode) -> bool:
    """Return whether a condition is that there is more than one process, which DDP does not need."""
    several = m.Comparison(m.Call(), [m.ComparisonTarget(m.GreaterThan(), m.Integer("1"))])
    test = condition.test if isinstance(condition, cst.If) and m.matches(condition.test, several) else None
    return test is not None and source.horovod(test.left.func) == "size"  # type: ignore[attr-defined]


def _needs_module(root: Holder) -> bool:
    others = [it for it in root.all()[1:] if it.trains]
    asks = any(attribute.attr.value not in OF_DDP for it in others for attribute in it.attributes)
    return asks or any(not to.trains for it in others for _, to in it.passed)


def root_of(source: Source, broadcast: cst.Call) -> str:
    """Return the rank whose parameters are broadcast."""
    bound = bind(broadcast, ["params", "root_rank", "process_set"]) or {}
    return source.code(bound["root_rank"].value) if "root_rank" in bound else "0"


def _has_only(source: Source, optimizer: cst.BaseExpression, model: str) -> bool:
    """Return whether an optimizer is seen to have the parameters of one model, and no others."""
    made = [source.parents[source.parents[it]] for it in source.uses.get(str(source.key(optimizer)), [])]
    text = "".join(source.code(it.value) for it in made if isinstance(it, cst.Assign)) or source.code(optimizer)
    return {*re.findall(r"([\w.]+)\.(?:named_)?parameters\(", text)} == {model}


def _moves_later(source: Source, key: str, place: cst.CSTNode) -> bool:
    """Return whether the model goes to its device only after a statement."""
    for node in source.uses.get(key, []):
        parent = source.parents[node]
        moves = isinstance(parent, cst.Attribute) and parent.attr.value in ("cuda", "to")
        if moves and source.function(node) is source.function(place) and source.line(node) > source.line(place):
            return True
    return False


def _check_scope(plan: Wrapping) -> None:
    """Find out whether the wrapped model is known wherever the model is."""
    source, place, key = plan.source, plan.place, plan.key
    targets = [node for node in source.uses[key] if source.is_target(node)]
    function = source.function(place)
    later = [it for it in targets if source.function(it) is function and source.line(it) > source.line(place)]
    if later:
        raise NotFollowedError(f"`{plan.model}` is assigned again after that, in line {source.line(later[0])}")
    owner = source.around(place, cst.ClassDef) if key.count(".self.") else None
    if owner is not None and any("Module" in source.code(base) for base in owner.bases):
        raise NotFollowedError("the model is part of a module, which would have it twice")
    if ".self." not in key:
        depth = key.count(".<locals>.")
        inside = len([it for it in source.ancestors(place) if isinstance(it, cst.FunctionDef)])
        if depth < inside and depth == 0:
            plan.lines.append(f"global {plan.name}")
        elif depth < inside:
            raise NotFollowedError(f"`{plan.model}` belongs to a function around the one that broadcasts it")
    conditions = [
        it
        for it in source.ancestors(place)
        if isinstance(it, cst.If)
        and source.function(it) is function
        and "__name__" not in source.code(it.test)
        and not isinstance(source.parents.get(it), (cst.If, cst.Else))
    ]
    if conditions:
        within = [node for node in targets if conditions[-1] in source.ancestors(node)]
        if len(within) not in (0, len(targets)):
            raise NotFollowedError(f"`{plan.model}` is another one on each side of the condition around it")
        plan.guard = None if within else conditions[-1]


def _check_holders(folder: Folder, root: Holder) -> None:
    """See that whoever gets the wrapped model always gets it, where that matters."""
    given: dict[tuple[Source, str], int] = {}
    for holder in root.all():
        for _, to in holder.passed:
            given[to.source, to.key] = given.get((to.source, to.key), 0) + 1
    for holder in root.all()[1:]:
        if not holder.trains or all(it.attr.value in OF_DDP for it in holder.attributes):
            continue
        places = 0
        for source in folder.sources:
            for arg in source.find(source.module, cst.Arg):
                given_to = folder.parameter(source, arg)
                places += (
                    given_to is not None
                    and given_to[0] is holder.source
                    and given_to[0].key(given_to[1].name) == holder.key
                )
        if places > given[holder.source, holder.key]:
            raise NotFollowedError(f"`{holder.key}` gets other models, too")


def _write(plan: Wrapping, source: Source, options: dict[str, cst.Arg]) -> None:
    """Write the statements that wrap the model and register its hook."""
    plan.passes = _beyond(options, "backward_passes_per_step", "1")
    factor = _beyond(options, "gradient_predivide_factor", "1", "1.0")
    ops = _cases(plan, source, options.get("op"), "Average")
    codes = _cases(plan, source, options.get("compression"), "Compression.none")
    rows = {"op": ops != [(None, "Average")], "gradient_predivide_factor": factor is not None}
    rows |= {
        "compression": codes != [(None, "Compression.none")],
        "backward_passes_per_step": plan.passes is not None,
    }
    for name in (name for name, is_used in rows.items() if is_used and name not in BY_NAME):
        raise NotFollowedError(f"{name}=... has no rule")
    line = source.line(plan.optimizer)
    base = None
    for condition, op in ops:
        if op == "Adasum" and condition is not None:
            text = "Adasum has no counterpart in torch.distributed"
            plan.lines.append(f'if {condition}:\n    raise ValueError("{text}")')
            plan.notes.append((line, f"op=Adasum if {condition}", f"{text}: the script says so now, and ends"))
        elif op == "Sum" and condition is None and len(ops) == 1:
            base = "sum_gradients"
        elif op != "Average":
            raise NotFollowedError(f"{op or 'its op'} has no counterpart in DDP")
    name = plan.name
    plan.lines.append(f"{name} = DDP({plan.model}, broadcast_buffers=False)")
    state = "None"
    if factor is not None and base is None:
        base, state, plan.hook = "average_gradients", source.code(factor), "predivided"
    hook = base or "average_gradients"
    chosen = [(condition, code) for condition, code in codes if code != "Compression.none"]
    for condition, code in chosen:
        kind = code.removeprefix("Compression.")
        if kind not in ("fp16", "bf16") or len(chosen) > 1:
            raise NotFollowedError("its compression is not hvd.Compression.fp16 or bf16")
        if condition is not None and base is not None:
            plan.lines.append(
                f"hook = {base}\nif {condition}:\n    hook = default_hooks.{kind}_compress_wrapper(hook)"
            )
            hook, condition = "hook", None
        else:
            hook = f"default_hooks.{kind}_compress_wrapper({hook})"
        call = f"{name}.register_comm_hook({state}, {hook})"
        plan.lines.append(call if condition is None else f"if {condition}:\n    {call}")
    if base is not None and not chosen:
        plan.lines.append(f"{name}.register_comm_hook({state}, {hook})")
    if plan.hook is None:
        plan.hook = next((it for it in HOOKS if any(it in line for line in plan.lines)), None)


def _beyond(options: dict[str, cst.Arg], name: str, *usual: str) -> cst.BaseExpression | None:
    """Return an option's value, if it is given and not the usual one."""
    value = options[name].value if name in options else None
    return None if isinstance(value, (cst.Integer, cst.Float)) and value.value in usual else value


def _cases(plan: Wrapping, source: Source, arg: cst.Arg | None, usual: str) -> list[tuple[str | None, str]]:
    """Return an option's values with their conditions, where it may be a variable that was chosen before."""
    if arg is None:
        return [(None, usual)]
    value = arg.value
    key = source.key(value)
    if key is not None and source.horovod(value) is None:
        uses = source.uses[key]
        targets = [source.parents[source.parents[it]] for it in uses if source.is_target(it)]
        if len(targets) == 1 and isinstance(targets[0], cst.Assign):
            value = targets[0].value
            if len(uses) == 2:
                plan.unused.append(source.parents[targets[0]])
    if isinstance(value, cst.IfExp):
        test, body, other = source.code(value.test), source.horovod(value.body), source.horovod(value.orelse)
        if body == usual:
            is_simple = isinstance(value.test, (cst.Name, cst.Attribute, cst.Call))
            test, body, other = f"not {test}" if is_simple else f"not ({test})", other, body
        return [(test, body or ""), (None, other or "")]
    return [(None, source.horovod(value) or "")]


def optimizer_names(folder: Folder) -> set[str]:
    """Return by which names the optimizers are known: the last part of what they are assigned to."""
    made = [(source, source.parents[call]) for source, call in folder.calls("DistributedOptimizer")]
    names = {source.code(it.targets[0].target) for source, it in made if isinstance(it, cst.Assign)}
    return {name.split(".")[-1] for name in [*names, *folder.owners("skip_synchronize")]}
