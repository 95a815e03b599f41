"""Rewrite one file: its calls by the table, its models by their plans, and then its imports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import msgspec
from libcst import matchers as m

from hvd_trainer.tools.migrate.imports import spell
from hvd_trainer.tools.migrate.source import API, Source
from hvd_trainer.tools.migrate.table import BY_NAME, Rule
from hvd_trainer.tools.migrate.wrapping import SIGNATURE, Wrapping, bind, broadcast_of

NAMES = {"gather": "gathered", "broadcast": "received", "alltoall": "received", "": "reduced"}
"""What a new variable is called."""
OPS = {"Sum": "", "Average": "", "Min": ", op=dist.ReduceOp.MIN", "Max": ", op=dist.ReduceOp.MAX"}
OPS["Product"] = ", op=dist.ReduceOp.PRODUCT"
NEW_TENSOR = r"torch\.(tensor|zeros|ones|full|arange|\w*Tensor)\("
DETACHED = r"\.item\(|\.detach\(|\.data\b|torch\.tensor\(|no_grad"
"""What a line has whose result is used without a gradient."""
UNORDERED = r"\.(items|keys|values)\(\)$|^set\("


@dataclass(frozen=True)
class Job:
    """What the files have in common."""

    plans: Sequence[Wrapping]
    optimizers: set[str]
    """last names of the optimizers"""
    loads: set[str]
    """last names of the objects whose state is loaded"""
    is_sure: bool
    """whether all optimizers have become plain ones"""
    keep: bool
    """whether calls of Horovod are left, for which it is started, too"""


@dataclass
class Lines:
    """What is to stand in the place of a statement, or before it."""

    before: list[str] = field(default_factory=list)
    is_done: bool = False
    """whether nothing is left to do by the statement itself"""
    names: set[str] = field(default_factory=set)


class Rewriter:
    """Notes the changes of a file."""

    def __init__(self, source: Source, job: Job) -> None:
        self.source, self.job = source, job
        self.rules = {name: _spelled(source, rule) for name, rule in BY_NAME.items()}
        self.plans = {it.optimizer: it for it in job.plans}
        self.places = {it.place: it for it in job.plans}
        self.used: list[tuple[int, Rule]] = []
        self.words = {*source.words}
        self.lines: dict[cst.CSTNode, Lines] = {}
        self.waits: dict[cst.CSTNode, tuple[list[str], str]] = {}
        """calls that wait for a handle, the statements after that, and the result"""

    def rewrite(self) -> None:
        """Note all changes but those of the imports."""
        for node in self.source.nodes:
            if isinstance(node, (cst.Name, cst.Attribute)) and self.source.around(node, (cst.Import, cst.ImportFrom)) is None:  # type: ignore[arg-type]
                self._reference(node)
            elif isinstance(node, cst.Call):
                self._call(node)
            elif isinstance(node, cst.With):
                self._skip(node)
            elif isinstance(node, cst.Comment):
                text = re.sub(r"^# *horovod: *(\w)", lambda it: f"# {it[1].upper()}", node.value, flags=re.IGNORECASE)
                text = re.sub(r"\bhvd\.(\w+)\(\)", _in_words, text)
                self.source.changes |= {self.source.span(node): text} if text != node.value else {}
            elif isinstance(node, cst.Parameters) and not self.job.keep:
                kept = [it for it in node.params if self.source.key(it.name) not in self.source.passed]
                if len(kept) < len(node.params):
                    self.source.keep(node.params, kept)

    def finish(self, removed: Sequence[cst.CSTNode]) -> None:
        """Put the new lines in, and take out statements of which nothing is left."""
        gone = [it for it, lines in self.lines.items() if lines.is_done and not lines.before]
        self.source.remove([*gone, *removed])
        for statement, lines in self.lines.items():
            indent = self.source.indent(statement)
            text = "\n".join(lines.before).replace("\n", f"\n{indent}")
            if lines.is_done and lines.before:
                self.source.replace(statement, text)
            elif lines.before:
                self.source.insert(self.source.span(statement)[0], f"{text}\n{indent}")

    def before(self, statement: cst.CSTNode, *texts: str) -> None:
        """Put statements before one."""
        self.lines.setdefault(statement, Lines()).before += texts

    # Expressions.

    def _reference(self, node: Any) -> None:
        """Rewrite a name, called or not, that stands for another one."""
        parent = self.source.parents[node]
        rule = self.rules.get(self.source.horovod(node) or "")
        is_part = isinstance(parent, cst.Attribute) and parent.attr is node
        if rule is None or rule.special or rule.lines or is_part:
            return
        is_called = isinstance(parent, cst.Call) and parent.func is node
        name = re.fullmatch(r"([\w.]+)" if is_called else r"([\w.]+)(\(\))?", rule.result)
        if name is not None:
            self._use(rule, node, name[1])

    def _call(self, call: cst.Call) -> None:
        source = self.source
        handed = [arg for arg in call.args if API in source.qualified(arg.value) and source.key(arg.value) is not None]
        name = source.horovod(call.func)
        rule = self.rules.get(name or "")
        if handed and not self.job.keep:
            source.keep(call.args, [arg for arg in call.args if arg not in handed])
        if name is None and m.matches(call, m.Call(m.Attribute(attr=m.Name("synchronize")), args=[])):
            owner = source.code(call.func.value).split(".")[-1]  # type: ignore[attr-defined]
            if self.job.is_sure and owner in self.job.optimizers and "synchronize" in self.rules:
                self._done(call) or source.replace(call, "None")
                self.used.append((source.line(call), self.rules["synchronize"]))
            return
        is_short = rule is not None and not rule.lines and (not rule.special or name in ("init", "shutdown"))
        if rule is None or (source.own_line(call) is None and (not is_short or self.job.keep)):
            return
        if rule.special:
            text = getattr(self, f"rule_{rule.names.split()[0].replace('.', '_')}", lambda *_: None)(rule, call)
        elif rule.lines:
            text = self._by_template(rule, call)
        else:
            text = rule.result if rule.result.endswith(")") and not call.args else None
        if text is not None:
            self._use(rule, call, text)

    def _use(self, rule: Rule, node: cst.CSTNode, text: str) -> None:
        self.used.append((self.source.line(node), rule))
        self.source.replace(node, text)

    def _done(self, call: cst.CSTNode, *texts: str) -> bool:
        """Put statements in the place of one that is no more than a call; False if it is more."""
        statement = self.source.own_line(call)
        if statement is None or not isinstance(self.source.parents[call], cst.Expr):
            return False
        self.before(statement, *texts)
        self.lines[statement].is_done = True
        return True

    def _skip(self, block: cst.With) -> None:
        """Leave out `with optimizer.skip_synchronize():`, and what is said of it."""
        skip = m.With(items=[m.WithItem(item=m.Call(m.Attribute(attr=m.Name("skip_synchronize"))))])
        if not (self.job.is_sure and "skip_synchronize" in self.rules and m.matches(block, skip)):
            return
        self.used.append((self.source.line(block), self.rules["skip_synchronize"]))
        (start, _), (_, end) = self.source.span(block), self.source.span(block, wide=True)
        first = self.source.span(block.body.body[0])[0]
        if any(it.comment for it in block.leading_lines):
            start = self.source.span(block, wide=True)[0]
        self.source.changes[start, first] = self.source.indent(block) if start < self.source.span(block)[0] else ""
        self.source.shift(first, end, -1)

    def _by_template(self, rule: Rule, call: cst.Call) -> str | None:
        made = self._fill(rule, call)
        if made is None:
            return None
        lines, result = made
        statement: Any = self.source.own_line(call)
        self.before(statement, *lines)
        is_expression = isinstance(self.source.parents[call], cst.Expr) and "(" not in result
        self.lines[statement].is_done = is_expression or result == self.source.target(call)
        return result

    def _fill(self, rule: Rule, call: cst.Call) -> tuple[list[str], str] | None:
        """Return the statements and the expression of a rule with lines; None if the call is left."""
        source, names = self.source, rule.signature.split()
        bound, statement = bind(call, names), source.own_line(call)
        if bound is None or statement is None or self._is_differentiated(rule, call) or self._is_dynamic(bound.get("name")):
            return None
        values = {name: source.new(value) for name, value in bound.items()}
        compression, op = (source.horovod(bound[it]) if it in bound else None for it in ("compression", "op"))
        given = {"None": op if "op" in bound else "Average", "True": "Average", "False": "Sum"}
        op = given.get(values.get("average", "None"))
        if compression not in (None, "Compression.none") or "splits" in bound or op not in OPS:
            return None
        tensor, lines = values[names[0]], list(rule.lines)
        if lines[0] == f"{{x}} = {{{names[0]}}}" and re.fullmatch(r"[\w.]+(\[[^\[\]]*\])?", tensor):
            x, lines = tensor, lines[1:]
        else:
            word = next(word for part, word in NAMES.items() if part in rule.names)
            x = (source.target(call) if rule.result == "{x}" else None) or self._new_name(word, statement)
        if "{tensor:name}" in "".join(lines) and not re.fullmatch(r"[\w.]+", tensor):
            lines.insert(0, f"{(sent := self._new_name('sent', statement))} = {tensor}")
            tensor = sent
        is_simple = isinstance(bound[names[0]], (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
        copied = (tensor if is_simple else f"({tensor})") + ".detach().clone()"
        fields = dict.fromkeys(("tensor", "tensor:name", "tensors", "obj"), tensor) | {
            "x": x,
            "copy": tensor if re.match(NEW_TENSOR, tensor) and tensor.endswith(")") else copied,
            "each": self._new_name("tensor", statement),
            "parts": self._new_name("parts", statement),
            "op": OPS[op],
            "divided": " /= dist.get_world_size()",
            "root_rank": values.get("root_rank", "0"),
        }
        self.lines.setdefault(statement, Lines()).names |= {x, tensor}
        rows = [[row for row in it.split("\n") if op == "Average" or "{divided}" not in row] for it in lines]
        texts = [re.sub(r"\{([\w:]+)\}", lambda it: fields[it[1]], it) for it in (*map("\n".join, rows), rule.result)]
        return [it for it in texts[:-1] if it], texts[-1]

    def _new_name(self, base: str, statement: cst.CSTNode) -> str:
        taken = self.words | self.lines.setdefault(statement, Lines()).names
        return next(it for it in (base, *(f"{base}_{number}" for number in range(2, 99))) if it not in taken)

    def _is_differentiated(self, rule: Rule, call: cst.Call) -> bool:
        """Return whether gradients may flow through the result, as they do in Horovod."""
        function, target = self.source.function(call), self.source.target(call)
        statement: Any = self.source.own_line(call)
        if function is None or "tensor" not in rule.signature or re.search(DETACHED, self.source.code(statement)):
            return False
        is_trained = target and re.search(rf"\b{target}\b[^\n]*\.backward\(", self.source.code(function))
        return bool(is_trained) or function.name.value == "forward" or "loss" in function.name.value

    def _is_dynamic(self, name: Any) -> bool:
        """Return whether a name is one by which ranks may ask in different orders."""
        loops = [it for it in self.source.ancestors(name) if isinstance(it, cst.For)] if name is not None else []
        is_unordered = any(re.search(UNORDERED, self.source.code(it.iter)) for it in loops)
        return name is not None and (is_unordered or "rank()" in self.source.code(name))

    # Special rules. Each returns the expression that stands for the call, or None if it is left.

    def rule_init(self, rule: Rule, call: cst.Call) -> str | None:
        """Start the process group; Horovod, too, where some of it is left."""
        if self.job.keep:
            self.before(self.source.own_line(call), rule.result)  # type: ignore[arg-type]
            return self.source.code(call)
        return None if call.args else rule.result

    rule_shutdown = rule_init

    def rule_DistributedOptimizer(self, rule: Rule, call: cst.Call) -> str | None:  # noqa: N802
        """Leave the optimizer as it is."""
        if (plan := self.plans.get(call)) is None:
            return None
        optimizer = (bind(call, SIGNATURE) or {})["optimizer"]
        own: Any = self.source.own_line(call)
        self.before(own, *(spell(self.source, it) for it in plan.lines if plan.place is own))
        self.lines[own].is_done = self.source.target(call) == self.source.code(optimizer)
        return self.source.new(optimizer)

    def rule_broadcast_parameters(self, rule: Rule, call: cst.Call) -> str | None:
        """Wrap the model here, or send its tensors one by one."""
        statement, sent = self.source.own_line(call), broadcast_of(self.source, call)
        if statement is None or sent is None:
            return None
        model, method, root = sent
        if (plan := self.places.get(statement)) is not None:  # type: ignore[call-overload]
            return "None" if self._done(call, *(spell(self.source, it) for it in plan.lines)) else None
        if root == "0" and any(self._sends_too(plan, model, statement) for plan in self.job.plans):
            return "None" if self._done(call) else None
        values = {"state_dict": "state_dict().values()", "named_parameters": "parameters()"}[method]
        tensor, code = self._new_name("tensor", statement), self.source.code(model)
        loop = f"for {tensor} in {code}.{values}:\n    dist.broadcast({tensor}.detach(), src={root})"
        return "None" if self._done(call, spell(self.source, loop)) else None

    def _sends_too(self, plan: Wrapping, model: cst.BaseExpression, broadcast: cst.CSTNode) -> bool:
        """Return whether DDP(...) sends the weights of a broadcast: later, or with nothing in between."""
        source, key = self.source, self.source.key(model)
        is_sure = plan.guard in (None, *source.ancestors(broadcast))
        if plan.source is not source or plan.key != key or not is_sure:
            return False
        first, last = sorted((source.line(plan.place), source.line(broadcast)))
        between = [it for it in source.uses[key] if first < source.line(it) < last]
        is_before = source.line(broadcast) < source.line(plan.place)
        return source.function(broadcast) is source.function(plan.place) and (is_before or not between)

    def rule_broadcast_optimizer_state(self, rule: Rule, call: cst.Call) -> str | None:
        """Send a state that was loaded; a new optimizer has none."""
        bound, statement = bind(call, ["optimizer", "root_rank", "model"]), self.source.own_line(call)
        if not self.job.is_sure or not bound or statement is None:
            return None
        name, lines = self.source.code(bound["optimizer"]), []
        if name.split(".")[-1] in self.job.loads:
            root = self.source.code(bound["root_rank"]) if "root_rank" in bound else "0"
            states = self._new_name("states", statement)
            lines = [f"{states} = [{name}.state_dict()]", f"dist.broadcast_object_list({states}, src={root})"]
            lines += [f"{name}.load_state_dict({states}[0])"]
        return "None" if self._done(call, *(spell(self.source, line) for line in lines)) else None

    def rule_allreduce_async(self, rule: Rule, call: cst.Call) -> str | None:
        """Start an exchange whose handle is a variable, and keep for later what follows the wait."""
        source, assigned = self.source, self.source.parents[call]
        base = self.rules.get(str(source.horovod(call.func)).replace("_async", ""))
        if base is None or not m.matches(assigned, m.Assign([m.AssignTarget(m.Name())])):
            return None
        uses = source.uses[source.key(assigned.targets[0].target)]  # type: ignore[attr-defined]
        calls = [source.parents.get(source.parents[it]) for it in uses]
        waits = [it for it in calls if isinstance(it, cst.Call) and source.horovod(it.func) == "synchronize"]
        # Its result is a variable of its own, whatever `synchronize` is assigned to.
        made = self._fill(msgspec.structs.replace(base, result=base.result + " "), call)
        if made is None or len(uses) != 2 or not waits or source.line(waits[0]) <= source.line(call):
            return None
        statement: Any = source.own_line(call)
        place = next(number for number, line in enumerate(made[0]) if not line.startswith(made[1]))
        self.before(statement, *made[0][:place])
        self.waits[waits[0]] = made[0][place + 1 :], made[1].strip()
        self.words |= self.lines[statement].names  # the variable must last until then
        return f"{made[0][place][:-1]}, async_op=True)"

    def rule_synchronize(self, rule: Rule, call: cst.Call) -> str | None:
        """Wait for a handle."""
        if call not in self.waits:
            return None
        lines, result = self.waits[call]
        lines = [f"{self.source.code(call.args[0].value)}.wait()", *lines]
        if not self._done(call, *lines):
            self.before(self.source.own_line(call), *lines)  # type: ignore[arg-type]
        return result

    def rule_join(self, rule: Rule, call: cst.Call) -> str | None:
        """Leave the call out, where the loop before it has been put under `Join`."""
        block, statement = self.source.body(self.source.own_line(call)), self.source.own_line(call)
        place = self.source.span(block[block.index(statement) - 1])[0] if statement in block else -1
        is_under = "with Join(" in self.source.changes.get((place, place), "")
        return "None" if is_under and self._done(call) else None

    def rule_elastic_ElasticSampler(self, rule: Rule, call: cst.Call) -> str | None:  # noqa: N802
        """Take PyTorch's sampler, where no more is asked of it."""
        more = re.search(r"\.elastic\.run\b|record_batch|record_indices|\.processed_indices", self.source.text)
        return None if more else f"{rule.result}({self.source.new(call).partition('(')[2]}"


def _spelled(source: Source, rule: Rule) -> Rule:
    lines, result = [spell(source, line) for line in rule.lines], spell(source, rule.result)
    return msgspec.structs.replace(rule, lines=tuple(lines), result=result)


def _in_words(call: re.Match[str]) -> str:
    """Return what a call in a comment becomes."""
    rule = BY_NAME.get(call[1])
    return rule.result if rule is not None and rule.result.endswith(")") and not rule.lines else call[0]
