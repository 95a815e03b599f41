"""Rewrite one file: its calls by the table, its optimizers by the plans of their models."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
import msgspec
from libcst import matchers as m

from hvd_trainer.tools.migrate.source import API, Source
from hvd_trainer.tools.migrate.table import BY_NAME, Rule
from hvd_trainer.tools.migrate.wrapping import SIGNATURE, Wrapping, bind, broadcast_of

VARIABLES = {"gather": "gathered", "broadcast": "received", "alltoall": "received", "": "reduced"}
"""What a new variable is called, by a part of the call's name."""
OPS = {"Sum": "", "Average": "", "Min": ", op=dist.ReduceOp.MIN", "Max": ", op=dist.ReduceOp.MAX"}
OPS["Product"] = ", op=dist.ReduceOp.PRODUCT"
NEW_TENSOR = r"torch\.(tensor|zeros|ones|full|arange|\w*Tensor)\(.*\)$"
DETACHED = r"\.item\(|\.detach\(|\.data\b|torch\.tensor\(|no_grad"
"""What a line has whose result is used without a gradient."""
UNORDERED = r"\.(items|keys|values)\(\)$|^set\("
SKIP = m.With(items=[m.WithItem(item=m.Call(m.Attribute(attr=m.Name("skip_synchronize"))))])


@dataclass(frozen=True)
class Job:
    """What the files have in common.

    Attributes:
        optimizers: last names of the optimizers.
        loads: last names of the objects whose state is loaded.
        is_sure: whether all optimizers have become plain ones.
        keep: whether calls of Horovod are left, for which it is started, too.
    """

    plans: Sequence[Wrapping]
    optimizers: set[str]
    loads: set[str]
    is_sure: bool
    keep: bool


class Rewriter:
    """Notes the changes of a file.

    Attributes:
        used: rules, with the lines where they were.
        before: what is to stand before a statement.
        done: statements of which nothing is left.
        names: new variables of a statement.
        waits: calls that wait for a handle, with the statements after that and the result.
    """

    def __init__(self, source: Source, job: Job) -> None:
        self.source, self.job, self.words = source, job, {*source.words}
        self.plans = {plan.optimizer: plan for plan in job.plans}
        self.used: list[tuple[int, Rule]] = []
        self.before: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.done: set[cst.CSTNode] = set()
        self.names: dict[cst.CSTNode, set[str]] = defaultdict(set)
        self.waits: dict[cst.CSTNode, tuple[list[str], str]] = {}

    def rewrite(self) -> None:
        """Note all changes but those of the imports."""
        source = self.source
        for node in source.nodes:
            if isinstance(node, (cst.Name, cst.Attribute)):
                self._reference(node)
            elif isinstance(node, cst.Call):
                self._call(node)
            elif self.job.is_sure and m.matches(node, SKIP):
                self._skip(node, BY_NAME.get("skip_synchronize"))
            elif isinstance(node, cst.Comment):
                text = re.sub(
                    r"^# *horovod: *(\w)", lambda match: f"# {match[1].upper()}", node.value, flags=re.IGNORECASE
                )
                text = re.sub(
                    r"(?i)(wrap )optimizer( with )\S*DistributedOptimizer",
                    r"\1model\2DistributedDataParallel",
                    text,
                )
                text = re.sub(
                    r"\bhvd\.(\w+)\(\)", lambda match: _in_words(BY_NAME.get(match[1])) or match[0], text
                )
                source.changes |= {source.span(node): text} if text != node.value else {}
            elif isinstance(node, cst.Parameters) and not self.job.keep:
                kept = [param for param in node.params if source.key(param.name) not in source.passed]
                source.keep(node.params, kept)
        source.remove([statement for statement in self.done if not self.before[statement]])
        for statement, lines in self.before.items():
            indent = source.indent(statement)
            text = "\n".join(lines).replace("\n", f"\n{indent}")
            if lines and statement in self.done:
                source.replace(statement, text)
            elif lines:
                source.insert(source.span(statement)[0], f"{text}\n{indent}")

    def _reference(self, node: Any) -> None:
        """Rewrite a name, called or not, that stands for another one."""
        parent: Any = self.source.parents[node]
        rule = BY_NAME.get(self.source.horovod(node) or "")
        is_part = isinstance(parent, (cst.ImportAlias, cst.ImportFrom)) or getattr(parent, "attr", None) is node
        if rule is None or rule.special or rule.lines or is_part:
            return
        is_called = isinstance(parent, cst.Call) and parent.func is node
        if name := re.fullmatch(r"([\w.]+)" if is_called else r"([\w.]+)(\(\))?", rule.result):
            self._use(rule, node, name[1])

    def _call(self, call: cst.Call) -> None:
        source, name = self.source, self.source.horovod(call.func)
        rule, own = BY_NAME.get(name or ""), source.own_line(call)
        if not self.job.keep:
            source.keep(call.args, [arg for arg in call.args if API not in source.qualified(arg.value)])
        if name is None and m.matches(call, m.Call(m.Attribute(attr=m.Name("synchronize")), args=[])):
            rule, owner = BY_NAME.get("synchronize"), source.code(call.func.value).split(".")[-1]  # type: ignore[attr-defined]
            if rule and self.job.is_sure and owner in self.job.optimizers:
                self._put(call)
                self._use(rule, call, "None")
        elif rule is None or (
            own is None and (rule.lines or rule.special) and (self.job.keep or name not in STARTS)
        ):
            return
        else:
            special = getattr(self, f"rule_{rule.names.split()[0].replace('.', '_')}", None)
            made = special or (self._by_template if rule.lines else self._by_name)
            if (text := made(rule, call)) is not None:
                self._use(rule, call, text)

    def _use(self, rule: Rule, node: cst.CSTNode, text: str) -> None:
        self.used.append((self.source.line(node), rule))
        around = self.source.around(
            node, cst.FormattedString
        )  # which cannot have its own quotes before Python 3.12
        self.source.replace(node, text.replace('"', "'") if around and around.quote == '"' else text)

    def _put(self, call: cst.CSTNode, *lines: str) -> str | None:
        """Put statements in the place of one that is no more than a call; return None if it is more."""
        statement = self.source.own_line(call)
        if statement is None or not isinstance(self.source.parents[call], cst.Expr):
            return None
        self.before[statement] += lines
        self.done.add(statement)
        return "None"

    def _skip(self, block: Any, rule: Rule | None) -> None:
        """Leave out `with optimizer.skip_synchronize():`, and what is said of it."""
        if rule is None:
            return
        self.used.append((self.source.line(block), rule))
        whole, first = self.source.span(block, wide=True), self.source.span(block.body.body[0])[0]
        is_said = any(line.comment for line in block.leading_lines)
        start = whole[0] if is_said else self.source.span(block)[0]
        self.source.changes[start, first] = self.source.indent(block) if is_said else ""
        self.source.shift(first, whole[1], -1)

    def _by_name(self, rule: Rule, call: cst.Call) -> str | None:
        return rule.result if rule.result.endswith(")") and not call.args else None

    def _by_template(self, rule: Rule, call: cst.Call) -> str | None:
        if (made := self._fill(rule, call)) is None:
            return None
        own: Any = self.source.own_line(call)
        self.before[own] += made[0]
        if (isinstance(self.source.parents[call], cst.Expr) and "(" not in made[1]) or made[
            1
        ] == self.source.target(call):
            self.done.add(own)
        return made[1]

    def _fill(self, rule: Rule, call: cst.Call) -> tuple[list[str], str] | None:
        """Return the statements and the expression of a rule with lines; None if the call is left."""
        source, names, own = self.source, rule.signature.split(), self.source.own_line(call)
        bound = bind(call, names)
        if (
            bound is None
            or own is None
            or self._is_differentiated(rule, call)
            or ("name" in bound and self._is_dynamic(bound["name"]))
        ):
            return None
        values = {name: source.new(value) for name, value in bound.items()}
        compression, op = (source.horovod(bound[key]) if key in bound else None for key in ("compression", "op"))
        given = {"None": op if "op" in bound else "Average", "True": "Average", "False": "Sum"}
        op = given.get(values.get("average", "None"))
        if compression not in (None, "Compression.none") or "splits" in bound or op not in OPS:
            return None
        tensor, lines = values[names[0]], list(rule.lines)
        if lines[0] == f"{{x}} = {{{names[0]}}}" and re.fullmatch(r"[\w.]+(\[[^\[\]]*\])?", tensor):
            x, lines = tensor, lines[1:]
        else:
            word = next(word for part, word in VARIABLES.items() if part in rule.names)
            x = (source.target(call) if rule.result == "{x}" else None) or self._new_name(word, own)
        if "{tensor:name}" in "".join(lines) and not re.fullmatch(r"[\w.]+", tensor):
            lines.insert(0, f"{(sent := self._new_name('sent', own))} = {tensor}")
            tensor = sent
        is_simple = isinstance(bound[names[0]], (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
        copied = (tensor if is_simple else f"({tensor})") + ".detach()" * (".detach()" not in tensor)
        fields = dict.fromkeys(("tensor", "tensor:name", "tensors", "obj"), tensor) | {
            "x": x,
            "copy": tensor if re.match(NEW_TENSOR, tensor) else f"{copied}.clone()",
            "each": self._new_name("tensor", own),
            "parts": self._new_name("parts", own),
            "op": OPS[op],
            "divided": " /= dist.get_world_size()",
            "root_rank": values.get("root_rank", "0"),
        }
        self.names[own] |= {x, tensor}
        rows = [[row for row in line.split("\n") if op == "Average" or "{divided}" not in row] for line in lines]
        templates = [*map("\n".join, rows), rule.result]
        texts = [re.sub(r"\{([\w:]+)\}", lambda match: fields[match[1]], template) for template in templates]
        return [text for text in texts[:-1] if text], texts[-1]

    def _new_name(self, base: str, statement: cst.CSTNode) -> str:
        taken = self.words | self.names[statement]
        return next(name for name in (base, *(f"{base}_{number}" for number in range(2, 99))) if name not in taken)

    def _is_differentiated(self, rule: Rule, call: cst.Call) -> bool:
        """Return whether gradients may flow through the result, as they do in Horovod."""
        source, target, own = self.source, self.source.target(call), self.source.own_line(call)
        function: Any = source.around(call, cst.FunctionDef)
        if function is None or "tensor" not in rule.signature or re.search(DETACHED, source.code(own or call)):
            return False
        is_trained = target and re.search(rf"\b{target}\b[^\n]*\.backward\(", source.code(function))
        return bool(is_trained) or function.name.value == "forward" or "loss" in function.name.value

    def _is_dynamic(self, name: cst.BaseExpression) -> bool:
        """Return whether a name is one by which ranks may ask in different orders."""
        loops = [loop for loop in self.source.ancestors(name) if isinstance(loop, cst.For)]
        is_unordered = any(re.search(UNORDERED, self.source.code(loop.iter)) for loop in loops)
        return is_unordered or "rank()" in self.source.code(name)

    # Special rules. Each returns the expression that stands for the call, or None if it is left.

    def rule_init(self, rule: Rule, call: cst.Call) -> str | None:
        """Start, or end, the process group; Horovod, too, where some of it is left."""
        if not self.job.keep:
            return self._by_name(rule, call)
        self.before[self.source.own_line(call)].append(rule.result)  # type: ignore[index]
        return self.source.code(call)

    rule_shutdown = rule_init

    def rule_DistributedOptimizer(self, rule: Rule, call: cst.Call) -> str | None:  # noqa: N802
        """Leave the optimizer as it is."""
        if (plan := self.plans.get(call)) is None:
            return None
        optimizer, own = (bind(call, SIGNATURE) or {})["optimizer"], self.source.own_line(call)
        self.before[own] += plan.lines if plan.place is own else []  # type: ignore[index]
        if self.source.target(call) == self.source.code(optimizer):
            self.done.add(own)  # type: ignore[arg-type]
        return self.source.new(optimizer)

    def rule_broadcast_parameters(self, rule: Rule, call: cst.Call) -> str | None:
        """Wrap the model here, or send its tensors one by one."""
        own, sent = self.source.own_line(call), broadcast_of(self.source, call)
        if own is None or sent is None:
            return None
        model, method, root = sent
        for plan in self.job.plans:
            if plan.place is own or (root == "0" and self._sends_too(plan, model, own)):
                return self._put(call, *(plan.lines if plan.place is own else ()))
        values = {"state_dict": "state_dict().values()", "named_parameters": "parameters()"}[method]
        tensor, code = self._new_name("tensor", own), self.source.code(model)
        return self._put(
            call, f"for {tensor} in {code}.{values}:\n    dist.broadcast({tensor}.detach(), src={root})"
        )

    def _sends_too(self, plan: Wrapping, model: cst.BaseExpression, broadcast: cst.CSTNode) -> bool:
        """Return whether DDP(...) sends the weights of a broadcast: later, or with nothing in between."""
        source, key, place = self.source, self.source.key(model), plan.place
        if plan.source is not source or plan.key != key or plan.guard not in (None, *source.ancestors(broadcast)):
            return False
        first, last = sorted((source.line(place), source.line(broadcast)))
        is_apart = any(first < source.line(use) < last for use in source.uses[key]) and first == source.line(place)
        return source.around(broadcast, cst.FunctionDef) is source.around(place, cst.FunctionDef) and not is_apart

    def rule_broadcast_optimizer_state(self, rule: Rule, call: cst.Call) -> str | None:
        """Send a state that was loaded; a new optimizer has none."""
        bound, own = bind(call, ["optimizer", "root_rank", "model"]), self.source.own_line(call)
        if not self.job.is_sure or not bound or own is None:
            return None
        name, states = self.source.code(bound["optimizer"]), self._new_name("states", own)
        root = self.source.code(bound["root_rank"]) if "root_rank" in bound else "0"
        lines = [f"{states} = [{name}.state_dict()]", f"dist.broadcast_object_list({states}, src={root})"]
        lines += [f"{name}.load_state_dict({states}[0])"]
        return self._put(call, *(lines if name.split(".")[-1] in self.job.loads else ()))

    def rule_allreduce_async(self, rule: Rule, call: cst.Call) -> str | None:
        """Start an exchange whose handle is a variable, and keep for later what follows the wait."""
        source, assigned, own = self.source, self.source.parents[call], self.source.own_line(call)
        base = BY_NAME.get(str(source.horovod(call.func)).replace("_async", ""))
        if base is None or own is None or not m.matches(assigned, m.Assign([m.AssignTarget(m.Name())])):
            return None
        uses = source.uses[source.key(assigned.targets[0].target)]  # type: ignore[attr-defined]
        calls = [outer for use in uses if isinstance(outer := source.parents.get(source.parents[use]), cst.Call)]
        waits = [wait for wait in calls if source.horovod(wait.func) == "synchronize"]
        # Its result is a variable of its own, whatever `synchronize` is assigned to.
        made = self._fill(msgspec.structs.replace(base, result=base.result + " "), call)
        if made is None or len(uses) != 2 or not waits or source.line(waits[0]) <= source.line(call):
            return None
        place = next(number for number, line in enumerate(made[0]) if line.startswith("dist."))
        self.before[own] += made[0][:place]
        self.waits[waits[0]] = made[0][place + 1 :], made[1].strip()
        self.words |= self.names[own]  # the variable must last until then
        return f"{made[0][place][:-1]}, async_op=True)"

    def rule_synchronize(self, rule: Rule, call: cst.Call) -> str | None:
        """Wait for a handle."""
        if call not in self.waits:
            return None
        lines, result = self.waits[call]
        lines = [f"{self.source.code(call.args[0].value)}.wait()", *lines]
        if self._put(call, *lines) is None:
            self.before[self.source.own_line(call)] += lines  # type: ignore[index]
        return result

    def rule_join(self, rule: Rule, call: cst.Call) -> str | None:
        """Leave the call out, where the loop before it has been put under `Join`."""
        own = self.source.own_line(call)
        block = self.source.body(own)
        place = self.source.span(block[block.index(own) - 1])[0] if own in block else -1
        return self._put(call) if "with Join(" in self.source.changes.get((place, place), "") else None

    def rule_elastic_ElasticSampler(self, rule: Rule, call: cst.Call) -> str | None:  # noqa: N802
        """Take PyTorch's sampler, where no more is asked of it."""
        more = re.search(r"\.elastic\.run\b|record_batch|record_indices|\.processed_indices", self.source.text)
        return None if more else f"{rule.result}({self.source.new(call).partition('(')[2]}"


STARTS = ("init", "shutdown")


def _in_words(rule: Rule | None) -> str | None:
    """Return what a call in a comment becomes."""
    return rule.result if rule is not None and rule.result.endswith(")") and not rule.lines else None
