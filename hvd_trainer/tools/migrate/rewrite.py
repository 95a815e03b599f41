"""Rewrite one file: expressions by the table, statements by the plans of its models."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import msgspec
from libcst import matchers as m

from hvd_trainer.tools.migrate.expressions import (
    AROUND,
    can_stand_before,
    copy_of,
    is_differentiated,
    is_dynamic,
    is_own,
    target_of,
)
from hvd_trainer.tools.migrate.source import Source
from hvd_trainer.tools.migrate.table import BY_NAME, Rule
from hvd_trainer.tools.migrate.wrapping import Wrapping, bind, owner_of, root_of, statement_of

STARTS = ("init", "shutdown")
NAMES = {"gather": "gathered", "broadcast": "received", "alltoall": "received"}
"""What a new variable is called."""
OPS = {"Sum": "", "Average": "", "Min": ", op=dist.ReduceOp.MIN", "Max": ", op=dist.ReduceOp.MAX"}
OPS["Product"] = ", op=dist.ReduceOp.PRODUCT"
Changed = cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel


@dataclass
class Edits:
    """What is to be done with a file, by its nodes, before its calls are looked at."""

    renamed: dict[cst.CSTNode, str] = field(default_factory=dict)
    """expressions, and what stands there now"""
    removed: set[cst.CSTNode] = field(default_factory=set)
    """statements"""
    before: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    """statements that stand before one"""
    within: list[tuple[Sequence[cst.CSTNode], str]] = field(default_factory=list)
    """statements that are put under `with` and what follows it"""
    hooks: list[str] = field(default_factory=list)
    """functions that are put behind the imports"""
    at_end: dict[cst.CSTNode, str] = field(default_factory=dict)
    """a function, a condition or the module, and its last statement"""


@dataclass
class Frame:
    """A statement that is being rewritten."""

    lines: list[str] = field(default_factory=list)
    """statements to stand before it"""
    is_done: bool = False
    """whether nothing is left to do by the statement itself"""
    names: set[str] = field(default_factory=set)


class Rewriter(cst.CSTTransformer):
    """Rewrites a file.

    Args:
        dist: the file's name for torch.distributed.
        keep: whether calls of Horovod are left, for which `init` is called, too.
        is_sure: whether all optimizers have become plain ones.
        loads: names of the optimizers whose state is loaded.
    """

    def __init__(
        self,
        source: Source,
        edits: Edits,
        plans: Sequence[Wrapping],
        dist: str,
        keep: bool,
        is_sure: bool,
        optimizers: set[str],
        loads: set[str],
        without: Callable[[cst.Arg], bool],
    ) -> None:
        self.source, self.edits, self.plans, self.dist = source, edits, plans, dist
        self.keep, self.is_sure, self.optimizers, self.loads, self.without = (
            keep,
            is_sure,
            optimizers,
            loads,
            without,
        )
        self.frames: list[Frame] = []
        self.used: list[tuple[int, Rule]] = []
        self.notes: list[tuple[int, str, str]] = [
            note for plan in plans if plan.source is source for note in plan.notes
        ]
        self.words = {*source.words}
        self.pending: dict[cst.CSTNode, tuple[list[str], str]] = {}
        self.collected: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        self.calls = {plan.optimizer: plan for plan in plans}
        self.places = {plan.place: plan for plan in plans}

    # Statements.

    def on_visit(self, node: cst.CSTNode) -> bool:  # noqa: D102
        if isinstance(node, AROUND):
            self.frames.append(Frame())
        return not isinstance(node, (cst.Import, cst.ImportFrom))

    def on_leave(self, original: cst.CSTNode, updated: Any) -> Any:  # noqa: D102
        if original in self.edits.renamed:
            return cst.parse_expression(self.edits.renamed[original])
        if isinstance(original, AROUND):
            return self._collect(original, self._leave_statement(original, updated))
        if isinstance(original, (cst.Call, cst.Attribute, cst.Name)):
            return self._leave_expression(original, updated)
        if isinstance(original, cst.Comment):
            text = re.sub(
                r"^# *horovod: *(\w)", lambda it: f"# {it[1].upper()}", updated.value, flags=re.IGNORECASE
            )
            return updated.with_changes(value=re.sub(r"\bhvd\.(\w+)\(\)", _in_words, text))
        if isinstance(original, cst.IndentedBlock) and not updated.body:
            return updated.with_changes(body=[cst.parse_statement("pass")])
        if isinstance(original, cst.Module):
            return self._leave_module(original, updated)
        if isinstance(original, cst.Parameters) and not self.keep:
            pairs = zip(original.params, updated.params, strict=True)
            kept = [new for old, new in pairs if self.source.key(old.name) not in self.source.passed]
            if len(kept) < len(updated.params):
                kept[-1:] = [it.with_changes(comma=cst.MaybeSentinel.DEFAULT) for it in kept[-1:]]
                return updated.with_changes(params=kept)
        return updated

    def _leave_module(self, original: cst.CSTNode, updated: cst.Module) -> cst.Module:
        """Add the hooks behind the imports, and the last statement."""
        body: list[Any] = [*updated.body, *self._parse_all(self.edits.at_end.get(original, ""))]
        if len(body) > len(updated.body):
            body[-1] = body[-1].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        is_head = m.SimpleStatementLine(
            body=[m.Import() | m.ImportFrom() | m.Expr(m.SimpleString() | m.ConcatenatedString())]
        )
        place = next((number for number, it in enumerate(body) if not m.matches(it, is_head)), len(body))
        gap = [cst.EmptyLine(indent=False)] * 2
        for text in self.edits.hooks:
            hook = self._parse_all(text)[0].with_changes(leading_lines=gap)
            lines = list(body[place].leading_lines)
            while lines and lines[0].comment is None:
                del lines[0]
            body[place] = body[place].with_changes(leading_lines=[*gap, *lines])
            body.insert(place, hook)
        return updated.with_changes(body=body)

    def _leave_statement(self, original: cst.CSTNode, updated: Any) -> Changed:
        frame = self.frames.pop()
        if original in self.edits.at_end:
            last = self._parse_all(self.edits.at_end[original])
            last[0] = last[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
            body: list[Any] = list(updated.body.body)
            place = len(body) - m.matches(body[-1], m.SimpleStatementLine(body=[m.Return()]))
            updated = updated.with_deep_changes(updated.body, body=[*body[:place], *last, *body[place:]])
        if isinstance(self.source.parents.get(original), cst.If) and isinstance(original, cst.If):  # an elif
            return updated  # type: ignore[no-any-return]
        is_removed = original in self.edits.removed or frame.is_done
        texts = [*self.edits.before.get(original, []), *frame.lines]
        kept: list[Any] = [] if is_removed else [updated]
        if isinstance(updated, cst.With) and self._skips(original):
            block: Any = updated.body
            kept = (
                list(block.body) if isinstance(block, cst.IndentedBlock) else [cst.SimpleStatementLine(block.body)]
            )
            about = " ".join(it.comment.value for it in updated.leading_lines if it.comment)
            is_about = re.search("wait|synchron|skip|allreduce|horovod", about, re.IGNORECASE)
            kept[0] = kept[0].with_changes(leading_lines=() if is_about else updated.leading_lines)
        if isinstance(updated, cst.If) and self._is_empty(original, updated):
            kept = []
        made = [statement for text in texts for statement in self._parse_all(text)]
        if made:
            made[0] = made[0].with_changes(leading_lines=updated.leading_lines)
            kept = [it.with_changes(leading_lines=()) if it is updated else it for it in kept]
        made += kept
        return cst.FlattenSentinel(made) if made else cst.RemoveFromParent()

    def _collect(self, original: cst.CSTNode, changed: Changed) -> Changed:
        """Hold a statement back until the `with` that it is put under is complete."""
        for statements, header in self.edits.within:
            if original not in statements:
                continue
            made = list(changed.nodes) if isinstance(changed, cst.FlattenSentinel) else []
            held = self.collected.setdefault(statements[0], [])
            held += made
            if original is not statements[-1]:
                return cst.RemoveFromParent()
            block: Any = self._parse_all(f"with {header}:\n    pass")[0]
            first: Any = held[0]
            block = block.with_changes(leading_lines=first.leading_lines)
            held[0] = first.with_changes(leading_lines=())
            return cst.FlattenSentinel([block.with_changes(body=block.body.with_changes(body=held))])
        return changed

    def _parse_all(self, text: str) -> list[Any]:
        if self.dist != "dist":
            text = re.sub(r"\bdist\.", f"{self.dist}.", text)
        return list(cst.parse_module(text + "\n", self.source.module.config_for_parsing).body) if text else []

    def _skips(self, node: cst.CSTNode) -> bool:
        skip = m.WithItem(item=m.Call(m.Attribute(attr=m.Name("skip_synchronize"))))
        is_ours = self.is_sure and "skip_synchronize" in BY_NAME and m.matches(node, m.With(items=[skip]))
        return is_ours and self._use("skip_synchronize", node)

    def _is_empty(self, original: cst.CSTNode, updated: cst.If) -> bool:
        """Return whether all that a condition is for has been removed."""
        is_pass = m.matches(updated.body, m.IndentedBlock(body=[m.SimpleStatementLine(body=[m.Pass()])]))
        return (
            is_pass
            and updated.orelse is None
            and not m.matches(original, m.If(body=m.IndentedBlock(body=[m.SimpleStatementLine(body=[m.Pass()])])))
        )

    # Expressions.

    def _leave_expression(self, original: cst.CSTNode, updated: Any) -> Any:
        parent = self.source.parents.get(original)
        if isinstance(parent, cst.Attribute) and (parent.attr is original or self.source.horovod(parent)):
            return updated
        if isinstance(original, cst.Call):
            if not self.keep and any(self.without(arg) for arg in original.args):
                kept = [new for old, new in zip(original.args, updated.args, strict=True) if not self.without(old)]
                kept = [*kept[:-1], *(it.with_changes(comma=cst.MaybeSentinel.DEFAULT) for it in kept[-1:])]
                updated = updated.with_changes(args=kept)
            name = self.source.horovod(original.func)
            if name is None:
                return self._leave_method(original, updated)
            rule = BY_NAME.get(name)
            is_whole = rule is not None and (rule.special or rule.lines) and (self.keep or name not in STARTS)
            if rule is None or (is_whole and not can_stand_before(self.source, original)):
                return updated
            done = (
                getattr(self, f"rule_{rule.names.split()[0].replace('.', '_')}", None)
                if rule.special
                else self._by_template
            )
            expression = done(rule, original, updated) if done is not None else None
            if expression is None:
                return updated
            self.used.append((self.source.line(original), rule))
            text = re.sub(r"\bdist\.", f"{self.dist}.", expression) if self.dist != "dist" else expression
            return cst.parse_expression(text)
        name = self.source.horovod(original)
        rule = BY_NAME.get(name) if name else None
        is_called = isinstance(parent, cst.Call) and parent.func is original
        if rule is None or rule.special or rule.lines or (is_called and rule.result.endswith(")")):
            return updated
        function = re.fullmatch(r"(dist\.\w+)\(\)|([\w.]+)", rule.result)
        if function is None or not self._use(rule.names, original):
            return updated
        return cst.parse_expression((function[1] or function[2]).replace("dist.", f"{self.dist}."))

    def _use(self, name: str, node: cst.CSTNode) -> bool:
        self.used.append((self.source.line(node), BY_NAME[name]))
        return True

    def _leave_method(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """Leave out `optimizer.synchronize()`."""
        if self.is_sure and m.matches(original, m.Call(m.Attribute(attr=m.Name("synchronize")), args=[])):
            owner = self.source.code(original.func.value).split(".")[-1]  # type: ignore[attr-defined]
            if owner in self.optimizers and "synchronize" in BY_NAME and self._use("synchronize", original):
                self.frames[-1].is_done = self._is_statement(original)
                return updated if self.frames[-1].is_done else cst.Name("None")
        return updated

    def _is_statement(self, call: cst.CSTNode) -> bool:
        """Return whether a call is a line of its own."""
        return isinstance(self.source.parents[call], cst.Expr) and can_stand_before(self.source, call)

    def _by_template(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:
        if not rule.signature and not rule.lines:
            return rule.result if not original.args and rule.result.endswith(")") else None
        made = self._fill(rule, original, updated)
        if made is None:
            return None
        lines, result = made
        frame = self.frames[-1]
        frame.lines += lines
        frame.is_done = result == target_of(self.source, original) or (
            self._is_statement(original) and "(" not in result
        )
        return result

    def _fill(self, rule: Rule, original: cst.Call, updated: cst.Call) -> tuple[list[str], str] | None:
        """Return the statements and the expression of a rule with lines; None if the call is left."""
        names = rule.signature.split()
        old, new = bind(original, names), bind(updated, names) or {}
        if old is None or is_differentiated(self.source, rule, original):
            return None
        values = {name: self.source.module.code_for_node(arg.value) for name, arg in new.items()}
        compression, op = (
            self.source.horovod(old[it].value) if it in old else None for it in ("compression", "op")
        )
        if ("compression" in old and compression != "Compression.none") or is_dynamic(
            self.source, old.get("name")
        ):
            return None
        given = {"None": op if "op" in old else "Average", "True": "Average", "False": "Sum"}
        op = given.get(values.get("average", "None"))
        if "splits" in old or op not in OPS:
            return None
        tensor, lines, frame = values[names[0]], list(rule.lines), self.frames[-1]
        if lines[0] == f"{{x}} = {{{names[0]}}}" and re.fullmatch(r"[\w.]+(\[[^\[\]]*\])?", tensor):
            x, lines = tensor, lines[1:]
        else:
            word = next((word for part, word in NAMES.items() if part in rule.names), "reduced")
            x = (target_of(self.source, original) if rule.result == "{x}" else None) or self._new_name(word)
        if "{tensor:name}" in "".join(lines) and not re.fullmatch(r"[\w.]+", tensor):
            lines.insert(0, f"{self._new_name('sent')} = {tensor}")
            tensor = self._new_name("sent")
        is_new = is_own(self.source, original, tensor)
        if x == tensor and is_new:
            lines = [it for it in lines if it != "{x} = {copy}"]
        fields = dict.fromkeys(("tensor", "tensor:name", "tensors", "obj"), tensor) | {
            "x": x,
            "copy": f"{tensor}.clone()" if is_new else copy_of(old[names[0]].value, tensor),
            "each": self._new_name("tensor"),
            "parts": self._new_name("parts"),
            "op": OPS[op],
            "divided": " /= dist.get_world_size()",
            "root_rank": values.get("root_rank", "0"),
        }
        frame.names |= {x, tensor}
        rows = [[row for row in it.split("\n") if op == "Average" or "{divided}" not in row] for it in lines]
        texts = [
            re.sub(r"\{([\w:]+)\}", lambda it: fields[it[1]], it) for it in (*map("\n".join, rows), rule.result)
        ]
        return [it for it in texts[:-1] if it], texts[-1]

    def _new_name(self, base: str) -> str:
        taken = self.words | self.frames[-1].names
        return next(it for it in (base, *(f"{base}_{number}" for number in range(2, 99))) if it not in taken)

    # Special rules. Each returns the expression that stands for the call, or None if it is left.

    def rule_init(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:
        """Start the process group; Horovod, too, where some of it is left."""
        if not isinstance(self.source.parents[original], cst.Expr) or (original.args and not self.keep):
            return None
        if self.keep:
            self.frames[-1].lines.append(rule.result)
            return self.source.code(original)
        return rule.result

    def rule_shutdown(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:
        """End the process group."""
        if self.keep and self._is_statement(original):
            self.frames[-1].lines.append(rule.result)
            return self.source.code(original)
        return None if self.keep else rule.result

    def rule_DistributedOptimizer(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:  # noqa: N802
        """Leave the optimizer as it is."""
        if original not in self.calls:
            return None
        inner = bind(updated, ["optimizer"] + [it.keyword.value for it in updated.args if it.keyword])
        first = original.args[0].value if inner is None else inner["optimizer"].value
        text = self.source.module.code_for_node(first)
        parent = self.source.parents[original]
        if m.matches(parent, m.Assign(targets=[m.AssignTarget()])):
            self.frames[-1].is_done = self.source.code(parent.targets[0].target) == text  # type: ignore[attr-defined]
        plan = self.calls[original]
        if plan.place is statement_of(self.source, original) and plan.source is self.source:
            self.frames[-1].lines += plan.lines
        return text

    def rule_broadcast_parameters(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:
        """Wrap the model here, or send its tensors one by one."""
        if not self._is_statement(original):
            return None
        frame, statement = self.frames[-1], statement_of(self.source, original)
        frame.is_done = True
        bound = bind(original, ["params", "root_rank", "process_set"])
        if bound is None or "process_set" in bound:
            frame.is_done = False
            return None
        model = owner_of(original.args[0].value)
        root = root_of(self.source, original)
        if statement in self.places:
            frame.lines += self.places[statement].lines
            return "None"
        for plan in self.plans:
            same = plan.source is self.source and self.source.key(model) == plan.key and root == "0"
            if (
                same
                and self.source.function(original) is self.source.function(plan.place)
                and self.source.line(original) < self.source.line(plan.place)
            ):
                return "None"
        sent = self.source.code(original.args[0].value)
        values = (
            f"{sent.removesuffix('.state_dict()')}.state_dict().values()"
            if sent.endswith(".state_dict()")
            else None
        )
        if values is None and sent.endswith(".named_parameters()"):
            values = sent.replace(".named_parameters()", ".parameters()")
        if values is None:
            frame.is_done = False
            return None
        tensor = self._new_name("tensor")
        frame.lines.append(f"for {tensor} in {values}:\n    dist.broadcast({tensor}.detach(), src={root})")
        return "None"

    def rule_broadcast_optimizer_state(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:
        """Send a state that was loaded; a new optimizer has none."""
        if not self.is_sure or not self._is_statement(original):
            return None
        name = self.source.code(original.args[0].value)
        bound = bind(original, ["optimizer", "root_rank", "model"]) or {}
        self.frames[-1].is_done = True
        if name.split(".")[-1] in self.loads:
            root = self.source.code(bound["root_rank"].value) if "root_rank" in bound else "0"
            states = self._new_name("states")
            self.frames[-1].lines += [
                f"{states} = [{name}.state_dict()]",
                f"dist.broadcast_object_list({states}, src={root})",
                f"{name}.load_state_dict({states}[0])",
            ]
        return "None"

    def rule_allreduce_async(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:
        """Start an exchange whose handle is a variable, and keep for later what follows the wait."""
        base = BY_NAME.get(str(self.source.horovod(original.func)).replace("_async", ""))
        handle, assigned = target_of(self.source, original), self.source.parents[original]
        if base is None or handle is None or not isinstance(assigned, cst.Assign):
            return None
        uses = self.source.uses[str(self.source.key(assigned.targets[0].target))]
        calls = [
            self.source.parents[self.source.parents[it]] for it in uses if it is not assigned.targets[0].target
        ]
        waits = [it for it in calls if isinstance(it, cst.Call) and self.source.horovod(it.func) == "synchronize"]
        is_later = bool(waits) and self.source.line(waits[0]) > self.source.line(original)
        # Its result is a variable of its own, whatever `synchronize` is assigned to.
        made = self._fill(msgspec.structs.replace(base, result=base.result + " "), original, updated)
        if made is None or not is_later or len(uses) != 2:
            return None
        lines, result = made
        place = next(number for number, line in enumerate(lines) if line.startswith("dist."))
        self.frames[-1].lines += lines[:place]
        self.pending[waits[0]] = lines[place + 1 :], result.strip()
        self.words |= self.frames[-1].names  # the variable must last until then
        return f"{lines[place][:-1]}, async_op=True)"

    def rule_synchronize(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:
        """Wait for a handle."""
        if original not in self.pending:
            return None
        lines, result = self.pending[original]
        self.frames[-1].lines += [f"{self.source.code(original.args[0].value)}.wait()", *lines]
        self.frames[-1].is_done = self._is_statement(original)
        return result

    def rule_join(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:
        """Leave the call out, where the loop before it is under `Join`."""
        statement = statement_of(self.source, original)
        block: Any = self.source.parents.get(statement) if statement else None
        body = list(getattr(block, "body", ()))
        loop = body[body.index(statement) - 1] if statement in body else None
        if not any("Join([" in header and loop in held for held, header in self.edits.within):
            return None
        self.frames[-1].is_done = True
        return "None"

    def rule_elastic_ElasticSampler(self, rule: Rule, original: cst.Call, updated: cst.Call) -> str | None:  # noqa: N802
        """Take PyTorch's sampler, where no more is asked of it."""
        more = re.search(r"\.elastic\.run\b|record_batch|record_indices|\.processed_indices", self.source.text)
        return None if more else f"{rule.result}({self.source.code(original).partition('(')[2]}"


def _in_words(call: re.Match[str]) -> str:
    """Return what a call in a comment becomes."""
    rule = BY_NAME.get(call[1])
    return rule.result if rule is not None and rule.result.endswith(")") and not rule.lines else call[0]
