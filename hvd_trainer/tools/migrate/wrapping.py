"""Plan where DistributedDataParallel wraps a model in place of a `DistributedOptimizer`, and with which hook."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.buffers import may_have_buffers
from hvd_trainer.tools.migrate.flow import Folder, NotFollowedError, Training, follow
from hvd_trainer.tools.migrate.passes import put_passes_under
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
AVERAGE = "average_gradients"
NO_ADASUM = "Adasum has no counterpart in torch.distributed"
NAMED = m.Call(m.Attribute(attr=m.Name("state_dict") | m.Name("named_parameters")))


@dataclass(eq=False)
class Wrapping:
    """A model that is wrapped.

    Attributes:
        optimizer: the call of DistributedOptimizer.
        place: where DDP(...) is written: the optimizer's statement, or a broadcast of the parameters behind it.
        sends: broadcasts of its parameters.
        lines: the statements there.
        has_passes: whether gradients are added up in several passes.
        guard: the condition under which it is wrapped; before it the model stands for itself.
        notes: line, what is left, and what to do by hand.
    """

    source: Source
    optimizer: cst.Call
    place: cst.SimpleStatementLine
    model: str
    key: str
    sends: list[cst.CSTNode]
    training: Training = field(default_factory=Training)
    lines: list[str] = field(default_factory=list)
    has_passes: bool = False
    guard: cst.CSTNode | None = None
    notes: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The wrapped model: `ddp_model`, `self.ddp_model`."""
        return re.sub(r"(\w+)$", r"ddp_\1", self.model)

    def is_inside(self, function: cst.FunctionDef) -> bool:
        """Return whether the model is a variable of a function and not more."""
        is_local = function in self.source.ancestors(self.place) and ".self." not in self.key
        returns = [node for at, node, _ in self.training.edits if at.around(node, cst.Return)]
        return is_local and not any(function in self.source.ancestors(node) for node in returns)

    def apply(self, folder: Folder) -> None:
        """Note the changes in the files."""
        folder.wrapped.add(self.optimizer)
        source, is_plain = self.source, self.has_passes and self.guard is None
        calls = self.training.calls if is_plain else []
        if self.has_passes and not [call for call in calls if put_passes_under(*call, folder.optimizers)]:
            advice = (
                f"put all passes but the last under `with {self.name}.no_sync():`: it is right without, and slower"
            )
            self.notes.append((source.line(self.optimizer), "backward_passes_per_step", advice))
        for at, node, text in self.training.edits:
            at.replaced[node] = text
        source.before[self.place] += self.lines
        if self.guard is not None:
            source.before[self.guard].append(f"{self.name} = {self.model}")
        source.gone |= {line for line in self.sends if self._covers(line)}

    def _covers(self, broadcast: cst.CSTNode) -> bool:
        """Return whether DDP(...) sends the weights of a broadcast: later, or with nothing in between."""
        source, place = self.source, self.place
        if self.guard not in (None, *source.ancestors(broadcast)):
            return False
        first, last = sorted((source.line(place), source.line(broadcast)))
        is_apart = any(first < source.line(use) < last for use in source.uses[self.key])
        return source.function(broadcast) is source.function(place) and not (
            is_apart and first == source.line(place)
        )


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
    sends = [send for at, send in folder.calls("broadcast_parameters") if at is source]
    whole = [(send, of[0]) for send in sends if (of := broadcast_of(source, send)) is not None and of[1] == "0"]
    named = options.get("named_parameters")
    if named is not None and m.matches(named, NAMED):
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
    lines = [line for send, of in whole if source.key(of) == key and (line := source.own_line(send))]
    later = [line for line in lines if line in block and block.index(line) > block.index(statement)]
    place: Any = later[0] if later else statement
    result = Wrapping(source, call, place, source.code(model), key, lines)
    _check_scope(result)
    result.training = follow(folder, (source, key), result.name, place)
    if not result.training.calls:
        raise NotFollowedError("no training call of the model is seen in these files")
    for wanted in result.training.asks:
        if result.guard is not None or len(folder.given[wanted]) > result.training.given.count(wanted):
            raise NotFollowedError(
                f"`{wanted[1]}` gets other models, too, and is asked for what a wrapped one has not"
            )
    _write(folder, result, model, options)
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
    for condition in (node for node in source.ancestors(place) if isinstance(node, cst.If)):
        if source.function(condition) is function and not source.is_main(condition):
            inside = [node for node in targets if condition in source.ancestors(node)]
            if inside and len(inside) < len(targets):
                raise NotFollowedError(f"`{plan.model}` is another one on each side of the condition around it")
            plan.guard = condition if not inside else plan.guard


def _write(folder: Folder, plan: Wrapping, model: cst.BaseExpression, options: Mapping[str, Any]) -> None:
    """Write the statements that wrap the model and register its hook."""
    source, value, hook, state = plan.source, options.get("op"), None, "None"
    texts = {name: source.code(options[name]) for name in USUAL if name in options}
    changed = {name for name, text in texts.items() if not re.fullmatch(USUAL[name], text)}
    if missing := sorted(changed - {*BY_NAME}):
        raise NotFollowedError(f"{missing[0]}=... has no rule")
    plan.has_passes = "backward_passes_per_step" in changed
    if isinstance(value, cst.IfExp) and source.horovod(value.body) == "Adasum":
        note = f"{NO_ADASUM}: the script says so now, and ends"
        plan.notes.append((source.line(plan.optimizer), "op=hvd.Adasum", note))
        plan.lines.append(f'if {source.code(value.test)}:\n    raise ValueError("{NO_ADASUM}")')
        value = value.orelse
    op = source.horovod(value) if value is not None else "Average"
    if op not in ("Average", "Sum") or (op == "Sum" and plan.has_passes):
        raise NotFollowedError(f"{op or 'its op'} has no counterpart in DDP" + " with passes" * plan.has_passes)
    if op == "Sum":
        hook = "sum_gradients"
    elif "gradient_predivide_factor" in changed:
        hook, state = "average_predivided", texts["gradient_predivide_factor"]
    registered = hook
    if "compression" in changed and (compressed := _compressed(source, options["compression"], hook or AVERAGE)):
        hook, registered = hook or AVERAGE, compressed
    plan.lines.append(f"{plan.name} = DDP({plan.model})")
    if may_have_buffers(folder, source, model):
        comment = "# Each rank keeps its own buffers, such as batch-norm statistics."
        plan.lines.append(f"{comment}\n{plan.name}.broadcast_buffers = False")
    if hook is not None:
        plan.lines.append(f"{plan.name}.register_comm_hook({state}, {registered})")
        source.functions += [
            text for text in TABLE.hooks if f"def {hook}(" in text and text not in source.functions
        ]
    if any(source.has_horovod(options[name]) for name in changed & {"gradient_predivide_factor"}):
        raise NotFollowedError("its factor is of Horovod")


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
