"""Rewrite one file: its calls by the table, and what the plans of its models say."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.flow import QUIET, Folder, NotFollowedError, last_name
from hvd_trainer.tools.migrate.imports import IMPORT, PLACE, add_imports, names_of, stand_in, statements
from hvd_trainer.tools.migrate.source import API, Source
from hvd_trainer.tools.migrate.table import BY_HAND, Rule
from hvd_trainer.tools.migrate.wrapping import SIGNATURE, bind, broadcast_of

APART = "write it on a line of its own"
VARIABLES = {"gather": "gathered", "state": "states", "cast": "received", "": "reduced"}
"""What a new variable is called, by a part of the call's name."""
OPS = {"Sum": "", "Average": "", "Min": ", op=dist.ReduceOp.MIN", "Max": ", op=dist.ReduceOp.MAX"}
OPS["Product"] = ", op=dist.ReduceOp.PRODUCT"
MAKERS = {"tensor", "zeros", "ones", "full", "arange", "empty", "rand", "randn", "randint", "eye"}
"""Functions of PyTorch whose result shares no memory with another tensor, and is in no graph."""
NEW_TENSOR = m.Call(m.Attribute(m.Name("torch"), m.MatchIfTrue(lambda name: name.value in MAKERS)))
DETACHING = {"item", "detach", "tolist", "argmax", "long", "int", "eq", "ne", "len", "numel", "size"}
"""Methods and functions whose result is in no graph."""
HARMLESS = DETACHING | MAKERS | {"float", "str", "format", "clone", "mean", "sum", "cpu", "view", "double"}
"""Calls without an effect on what a collective sends."""
UNORDERED = r"\.(items|keys|values)\(\)$|^set\("
SKIP = m.With(items=[m.WithItem(item=m.Call(m.Attribute(attr=m.Name("skip_synchronize"))))])
SYNCHRONIZE = m.Call(m.Attribute(attr=m.Name("synchronize")), args=[])
SIMPLE = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)
OPERATION = (cst.BinaryOperation, cst.BooleanOperation)
TIGHT = (*OPERATION, cst.Comparison, cst.UnaryOperation, cst.Attribute, cst.Subscript)
"""Expressions whose operands are bracketed where they are operations."""
STARTS = ("init", "shutdown")


class Rewriter(cst.CSTTransformer):
    """Rewrites the file that it visits.

    Attributes:
        used: rules, with the lines where they were.
        left: what refers to Horovod, with its qualified name.
        why: what to do by hand with the functions of some calls that are left.
        starts: the names by which calls start and end Horovod.
    """

    def __init__(self, source: Source, folder: Folder) -> None:
        super().__init__()
        self.source, self.folder, self.words = source, folder, {*source.words}
        self.rules = {name: source.renamed(rule) for name, rule in folder.rules.items()}
        self.keep, self.is_sure = folder.keep is not None, folder.is_sure
        self.used: list[tuple[int, Rule]] = []
        self.left: dict[cst.CSTNode, str] = {}
        self.why: dict[cst.CSTNode, str] = {}
        self._module = source.module
        self.starts: set[str] = set()
        self._names: dict[cst.CSTNode, set[str]] = defaultdict(set)  # new variables of a statement
        own = [
            top
            for top in source.module.body
            if any(map(self._is_import, source.find(cst.SimpleStatementLine, top)))
        ]
        self._place = next((top for top in own if not isinstance(top, (cst.FunctionDef, cst.ClassDef))), None)
        if not self.keep:
            self._plan_aliases()

    def rewrite(self) -> None:
        """Rewrite the file, but for the imports that it then needs."""
        if self.source.is_concerned:
            self._module = self.source.module.visit(self)

    def code(self) -> str:
        """Return the new text."""
        code = self._module.code if self._module is not self.source.module else self.source.text
        if code == self.source.text:
            return code
        return add_imports(self._module, code, self.source.functions, self.source.aliases).code

    def _plan_aliases(self) -> None:
        """Take out other names of Horovod, and ask for torch.distributed where Horovod is asked for."""
        source, asked = self.source, f"{self.source.aliases['dist']}.is_available()"
        imports = [*source.find(cst.Import), *source.find(cst.ImportFrom)]
        known = {name for node in imports for name, whole, _ in names_of(node) if self._is_horovod(whole)}
        for node in source.find(cst.Assign):
            own, target = source.own_line(node.value), node.targets[0].target
            is_alias = source.qualified(node.value) == source.qualified(target) == API
            if own and (is_alias or (m.matches(node.value, m.Name("None")) and source.code(target) in known)):
                source.gone.add(own)
        for compared in source.find(cst.Comparison):
            operator = compared.comparisons[0]
            if source.qualified(compared.left) == API and m.matches(operator.comparator, m.Name("None")):
                is_not = isinstance(operator.operator, (cst.IsNot, cst.NotEqual))
                source.replaced[compared] = asked if is_not else f"not {asked}"
        for name in source.find(cst.Name):
            parent: Any = source.parents.get(name)
            is_part = isinstance(parent, (cst.BooleanOperation, cst.UnaryOperation))
            if (is_part or name is getattr(parent, "test", None)) and source.qualified(name) == API:
                source.replaced[name] = asked

    def _is_import(self, statement: Any) -> bool:
        """Return whether a statement that is run with the file imports Horovod, or what stands for it."""
        if not m.matches(statement, IMPORT) or self.source.around(statement, (cst.FunctionDef, cst.ClassDef)):
            return False
        return any(self._is_horovod(whole) for _, whole, _ in names_of(statement.body[0]))

    def _is_horovod(self, whole: str) -> bool:
        return bool(re.match(r"horovod\b", whole)) or whole in self.source.passed

    # Expressions.

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Put a planned text in the place of an expression."""
        if original_node not in self.source.replaced:
            return super().on_leave(original_node, updated_node)
        self._forget(original_node)
        return cst.parse_expression(self.source.replaced[original_node])

    def leave_Name(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Rewrite a name, called or not, that stands for another one."""
        parent: Any = self.source.parents[original_node]
        name = self.source.qualified(original_node)
        is_whole = name == API == self.source.code(original_node) and not isinstance(parent, cst.ImportAlias)
        if self.keep and is_whole:
            updated_node = cst.parse_expression("hvd_trainer.hvd")
        is_target = isinstance(parent, cst.AssignTarget) and isinstance(original_node, cst.Name)
        is_known = original_node in (getattr(parent, "keyword", None), getattr(parent, "name", None))
        if is_target or is_known or isinstance(parent, (cst.Attribute, cst.ImportFrom)):
            return updated_node
        if not re.match(r"horovod\b", name):
            return updated_node
        self.left[original_node] = name
        rule = self.rules.get(name.removeprefix(f"{API}."))
        if rule is None or rule.special or rule.lines:
            return updated_node
        is_called = isinstance(parent, cst.Call) and parent.func is original_node
        new = re.fullmatch(r"([\w.]+)" if is_called else r"([\w.]+)(\(\))?", rule.result)
        return self._use(rule, original_node, new[1]) if new else updated_node

    leave_Attribute = leave_Name  # noqa: N815

    def leave_ImportFrom(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """List an import of all names, as none of their uses is seen."""
        for known, whole, _ in names_of(original_node):
            if known == "*" and re.match(r"horovod\b", whole):
                self.left[original_node.names] = whole
        return updated_node

    def leave_Call(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Rewrite a call by its rule."""
        source, name, call = self.source, self.source.horovod(original_node.func), original_node
        if not self.keep:
            named = [arg for arg in call.args if source.qualified(arg.value) == API]
            gone = [arg for arg in named if self.folder.parameter(source, arg)]
            for arg in gone:
                self._forget(arg)
            updated_node = updated_node.with_changes(args=self._without(call.args, updated_node.args, gone))
        rule, own = self.rules.get(name or ""), source.own_line(call)
        if name is None and m.matches(call, SYNCHRONIZE) and last_name(call.func.value) in self.folder.optimizers:
            rule = self.rules.get("synchronize") if self.is_sure else None
            text: str | None = (self._put(call) or "None") if rule else None
        elif rule and own in source.gone:
            text = "None"
        elif rule and (own is not None or not (rule.lines or rule.special) or name in STARTS):
            pairs = zip(call.args, updated_node.args, strict=False)
            new = {old.value: self._code(now.value) for old, now in pairs}
            usual = self._by_template if rule.lines else self._by_name
            try:
                text = getattr(self, f"_{rule.names.split()[0]}", usual)(rule, call, new)
            except NotFollowedError as error:
                text, self.why[call.func] = None, f"{error}, and migrate again"
        else:
            text = None
            if rule and rule.lines:
                self.why[call.func] = f"{APART}, and migrate again"
        if rule is None or text is None:
            return updated_node
        texts = [text, *source.before[own or call]]
        inside = [node for arg in call.args for node in source.below(arg)]
        kept = {node: self.left[node] for node in inside if node in self.left and source.code(node) in str(texts)}
        made = self._use(rule, call, text)
        self.left |= kept
        return made

    def _use(self, rule: Rule, node: Any, text: str) -> Any:
        """Return an expression in the place of one, and note its rule."""
        self.used.append((self.source.line(node), rule))
        self._forget(node)
        # A formatted text cannot have its own quotes before Python 3.12.
        around = self.source.around(node, cst.FormattedString)
        made = cst.parse_expression(text.replace('"', "'") if around and around.quote == '"' else text)
        if isinstance(made, OPERATION) and isinstance(self.source.parents[node], TIGHT):
            return made.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return made

    def is_inner(self, node: cst.CSTNode) -> bool:
        """Return whether something that is left belongs to another call that is left."""
        calls = (call for call in self.source.ancestors(node) if isinstance(call, cst.Call))
        return any(call.func in self.left and call.func is not node for call in calls)

    def _forget(self, root: cst.CSTNode) -> None:
        """Take what refers to Horovod off the list of what is left."""
        for node in self.source.below(root):
            self.left.pop(node, None)

    def _code(self, node: cst.CSTNode) -> str:
        return self.source.module.code_for_node(node)

    def _put(self, call: cst.CSTNode, *lines: str) -> str | None:
        """Put statements in the place of one that is no more than a call; return None if it is more."""
        statement = self.source.own_line(call)
        if statement is None or not isinstance(self.source.parents[call], cst.Expr):
            return None
        self.source.before[statement] += lines
        self.source.gone.add(statement)
        return "None"

    @staticmethod
    def _without(old: Sequence[Any], new: Sequence[Any], gone: Sequence[cst.CSTNode]) -> Sequence[Any]:
        """Return arguments or parameters without some of them."""
        kept = [now for item, now in zip(old, new, strict=True) if item not in gone]
        if gone and kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return kept

    def leave_Parameters(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Leave out parameters that stand for Horovod."""
        kinds = {kind: getattr(original_node, kind) for kind in ("posonly_params", "params", "kwonly_params")}
        every = [param for params in kinds.values() for param in params]
        gone = [param for param in every if self.source.key(param.name) in self.source.passed]
        if self.keep or not gone:
            return updated_node
        changes = {
            kind: self._without(params, getattr(updated_node, kind), gone) for kind, params in kinds.items()
        }
        # LibCST writes the signs between the kinds where both are there.
        star, sign = updated_node.star_arg, cst.MaybeSentinel.DEFAULT
        star = star.with_changes(comma=sign) if isinstance(star, cst.Param) else sign
        return updated_node.with_changes(**changes, star_arg=star, posonly_ind=sign)

    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> cst.Comment:  # noqa: N802
        """Say in a comment what its code does now."""
        if self.folder.whole:
            return updated_node
        text = re.sub(
            r"\bhvd\.(\w+)\(\)", lambda call: _in_words(self.rules.get(call[1])) or call[0], updated_node.value
        )
        begin = re.match(r"(?i)# *((?:\d+\.|\(\w+\))? *)horovod: *([^\W\d_]*\b)?", text)
        if begin:
            word = begin[2] or ""
            text = f"# {begin[1]}{word[:1].upper()}{word[1:]}{text[begin.end() :]}"
        if self.is_sure:
            old = r"(?i)(wrap )optimizer( with )\S*DistributedOptimizer"
            text = re.sub(old, r"\1model\2DistributedDataParallel", text)
        return updated_node.with_changes(value=text)

    # Statements.

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Import what stands in for Horovod where it is used, and take the import out where it is not."""
        names = names_of(original_node.body[0]) if m.matches(original_node, IMPORT) else []
        if any(self._is_horovod(whole) for _, whole, _ in names):
            used = {"*", *(self.folder.keep or {}).get(self.source.path, ())}
            kept = [name for name in names if name[0].split(".")[0] in used or not self._is_horovod(name[1])]
            kept = [(name[0], API, name[0]) if name[1] in self.source.passed else name for name in kept]
            self.source.before[original_node] = [stand_in(*name) for name in kept]
            self.source.gone.add(original_node)
        return updated_node

    def leave_IndentedBlock(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put, wrap and take out statements as planned and as its expressions need it."""
        source, body, blank = self.source, list[Any](), list[cst.EmptyLine]()
        wraps: dict[cst.CSTNode, tuple[int, str]] = {}
        for statement, updated in zip(original_node.body, updated_node.body, strict=True):
            lead = list(updated.leading_lines)
            before = [PLACE] * (statement is self._place) + source.before[statement]
            rows = self._parsed("\n".join(before))
            if statement is self._place and self._is_import(statement):  # below a heading of other imports, too
                lead = [line for line in lead if not re.search("(?i)horovod|hvd", self._code(line))]
            rule = self.rules.get("skip_synchronize") if self.is_sure else None
            is_gone = statement in source.gone or _is_empty(statement, updated)
            if rule and m.matches(statement, SKIP):
                self.used.append((source.line(statement), rule))
                lead = [line for line in lead if not line.comment]
                on_one_line = isinstance(updated.body, cst.SimpleStatementSuite)  # `with ...: optimizer.step()`
                rows += [cst.SimpleStatementLine(updated.body.body)] if on_one_line else updated.body.body
            elif not is_gone:
                rows.append(updated.with_changes(leading_lines=()))
            if rows:
                is_apart = lead and not lead[0].comment and not any(line.comment for line in blank)
                lead = lead if is_apart else [*blank, *lead]
                rows[0] = rows[0].with_changes(leading_lines=(*lead, *rows[0].leading_lines))
                blank = []
            else:  # The line that sets it apart sets apart what follows it at once, too.
                self._forget(statement)
                blank = blank or [line for line in lead[:1] if not line.comment]
                if m.matches(statement, IMPORT):
                    comments = [line for line in statement.leading_lines if line.comment]
                    blank += [line for line in comments if not re.search("(?i)horovod|hvd", line.comment.value)]
            rows += self._parsed("\n".join(source.behind[statement]))
            if statement in source.under:
                last, header = source.under[statement]
                wraps[last] = len(body), header
            body += rows
            if statement in wraps:
                first, header = wraps[statement]
                inner = [body[first].with_changes(leading_lines=()), *body[first + 1 :]]
                (made,) = self._parsed(f"with {header}:\n    pass")
                made = made.with_changes(leading_lines=body[first].leading_lines, body=cst.IndentedBlock(inner))
                body[first:] = [made]
            if statement in source.end:
                (end,) = self._parsed(source.end[statement])
                is_return = m.matches(statement, m.SimpleStatementLine([m.Return()]))
                body.insert(len(body) - is_return, end.with_changes(leading_lines=[cst.EmptyLine(indent=False)]))
        return updated_node.with_changes(body=body)

    leave_Module = leave_IndentedBlock  # noqa: N815

    def _parsed(self, text: str) -> list[Any]:
        return statements(text, self.source.module)

    # Rules. Each returns the expression that stands for the call, or None if it is left.

    def _by_name(self, rule: Rule, call: cst.Call, new: dict[Any, str]) -> str | None:
        return rule.result if rule.result.endswith(")") and not call.args else None

    def _by_template(self, rule: Rule, call: cst.Call, new: dict[Any, str]) -> str | None:
        own, (lines, result) = self.source.own_line(call), self._fill(rule, call, new)
        self.source.before[own] += lines  # type: ignore[index]
        is_unused = isinstance(self.source.parents[call], cst.Expr) and "(" not in result
        if is_unused or result == self.source.target(call):
            self.source.gone.add(own)  # type: ignore[arg-type]
        return result

    def _fill(self, rule: Rule, call: cst.Call, new: dict[Any, str]) -> tuple[list[str], str]:
        """Return the statements and the expression of a rule with lines.

        Raises:
            NotFollowedError: the call is left; the text says what to write instead of it.
        """
        source, names, own = self.source, rule.signature.split(), self.source.own_line(call)
        bound, others = bind(call, names), [arg.keyword.value for arg in call.args if arg.keyword]
        if not bound or own is None:
            other = next((name for name in others if name not in names), "")
            raise NotFollowedError(BY_HAND.get(other, f"write what {other or 'its argument'} does without it"))
        if not self._is_first(call, own):
            raise NotFollowedError(APART)
        if self._is_dynamic(bound.get("name")):
            raise NotFollowedError("ranks may ask in another order: loop over sorted(...), without name=")
        if self._has_gradient(rule, call, bound[names[0]]):
            raise NotFollowedError(
                "its gradient may be used, by torch.distributed.nn.functional: if not, send it with .detach()"
            )
        values = {name: new[value] for name, value in bound.items()}
        compression, op = (source.horovod(bound[key]) if key in bound else None for key in ("compression", "op"))
        given = {"None": op if "op" in bound else "Average", "True": "Average", "False": "Sum"}
        op = given.get(values.get("average", "None"))
        if compression not in (None, "Compression.none") or op not in OPS:
            raise NotFollowedError("write op=hvd.Average or hvd.Sum, and no compression")
        tensor, lines = values[names[0]], list(rule.lines)
        is_leaf = lines[0] == "{x} = {tensor}" and not self._is_detached(bound[names[0]])
        if is_leaf:  # PyTorch changes no leaf of a graph in place
            lines[0] += ".detach()"
        if lines[0] == f"{{x}} = {{{names[0]}}}" and re.fullmatch(r"[\w.]+(\[[^\[\]]*\])?", tensor):
            x, lines = tensor, lines[1:]
        else:
            word = next(word for part, word in VARIABLES.items() if part in rule.names)
            x = (source.target(call) if rule.result == "{x}" else None) or self._new_name(
                word, own, bound[names[0]]
            )
        if "{tensor:name}" in "".join(lines) and not re.fullmatch(r"[\w.]+", tensor):
            lines.insert(0, f"{(sent := self._new_name('sent', own))} = {tensor}")
            tensor = sent
        copied = tensor if isinstance(bound[names[0]], SIMPLE) else f"({tensor})"
        dist = source.aliases["dist"]
        size, is_float = f"{dist}.get_world_size()", self._is_float(bound[names[0]])
        exact = f'.div_({size}, rounding_mode=None if {x}.is_floating_point() else "trunc")'
        fields = dict.fromkeys((names[0], "tensor:name"), tensor) | {
            "x": x,
            "copy": tensor
            if m.matches(bound[names[0]], NEW_TENSOR)
            else f"{copied}{'.detach()' * ('.detach()' not in tensor)}.clone()",
            "each": self._new_name("tensor" if "tensor" not in self.words else "value", own),
            "op": OPS[op].replace("dist.", f"{dist}."),
            "divided": f" /= {size}" if is_float else exact,
            "root_rank": values.get("root_rank", "0"),
            "values": re.sub(
                r"named_(parameters\(\))$", r"\1", re.sub(r"(state_dict\(\))$", r"\1.values()", tensor)
            ),
        }
        self._names[own] |= {x, tensor}
        rows = [[row for row in line.split("\n") if op == "Average" or "{divided}" not in row] for line in lines]
        templates = [*map("\n".join, rows), rule.result]
        texts = [re.sub(r"\{([\w:]+)\}", lambda match: fields[match[1]], template) for template in templates]
        return [text for text in texts[:-1] if text], texts[-1]

    def _new_name(self, base: str, statement: cst.CSTNode, *of: cst.CSTNode) -> str:
        taken = self.words | self._names[statement]
        sent = [name.value for node in of for name in self.source.find(cst.Name, node)]
        names = (base, *(f"{base}_{name}" for name in sent), *(f"{base}_{number}" for number in range(2, 99)))
        return next(name for name in names if name not in taken)

    def _is_detached(self, node: cst.BaseExpression, seen: tuple[str, ...] = ()) -> bool:
        """Return whether an expression is seen to be in no graph, so that no gradient flows through it."""
        source = self.source
        if any(m.matches(ancestor, QUIET) for ancestor in source.ancestors(node)):
            return True
        if isinstance(node, cst.Call):
            name, inner = last_name(node.func), getattr(node.func, "value", None)
            if any(arg.keyword and arg.keyword.value == "requires_grad" for arg in node.args):
                return False
            if m.matches(node, NEW_TENSOR) or name in DETACHING:
                return True
            values = [arg.value for arg in node.args]
            if (called := source.horovod(node.func)) is not None:
                values = values[:1] if self.rules.get(called) else [node.func]
            elif isinstance(inner, cst.BaseExpression) and source.code(inner) != "torch":
                values.append(inner)
            elif not isinstance(inner, cst.BaseExpression):
                return False
            return all(self._is_detached(value, seen) for value in values)
        if isinstance(node, cst.Attribute) and node.attr.value in ("data", "grad"):
            return True
        if isinstance(node, (cst.Name, cst.Attribute)):
            key, values, uses = str(source.key(node)), source.values(node), source.uses[source.key(node)]
            is_given = any(isinstance(source.parents[use], cst.Param) for use in uses)
            is_known = bool(values) and len(values) == sum(source.assigned(use) for use in uses) and not is_given
            is_known = is_known and all(key in seen or self._is_detached(value, (*seen, key)) for value in values)
            return is_known or node.deep_equals(cst.Name("None")) or source.code(node) in ("True", "False")
        if isinstance(node, cst.Subscript):
            return self._is_detached(node.value, seen)
        if isinstance(node, (cst.List, cst.Tuple)):
            return all(self._is_detached(element.value, seen) for element in node.elements)
        parts = [getattr(node, name, None) for name in ("left", "right", "expression", "body", "orelse")]
        operands = [part for part in parts if part is not None]
        return isinstance(node, (cst.BaseNumber, cst.BaseString, cst.Comparison)) or (
            bool(operands) and all(self._is_detached(part, seen) for part in operands)
        )

    def _is_float(self, node: cst.BaseExpression) -> bool:
        """Return whether a tensor is seen to have no integers, of which Horovod's average is one, too."""
        source, text = self.source, self.source.code(node)
        known = source.values(node) if isinstance(node, (cst.Name, cst.Attribute)) else []
        known = [value for value in known if not source.has_horovod(value)]
        is_new = re.search(r"torch\.(zeros|ones|rand|randn|full|empty)\(", text) and "dtype" not in text
        is_named = re.search(r"\.grad\b|\.(float|double|half|mean|std|norm)\(|float\(|\bloss\b", text)
        return bool(is_new or is_named) or (bool(known) and all(self._is_float(value) for value in known))

    def _has_gradient(self, rule: Rule, call: cst.Call, sent: cst.BaseExpression) -> bool:
        """Return whether a gradient may flow through a collective, which its rule cuts off."""
        has_graph = rule.signature.startswith("tensor") and not rule.names.endswith("_")
        return has_graph and not self._is_detached(sent) and not self._is_read(call)

    def _is_read(self, node: cst.CSTNode) -> bool:
        """Return whether a result is only read, as a number or in no graph."""
        parent: Any = self.source.parents[node]
        if m.matches(parent, m.Assign([m.AssignTarget(m.Name())])):
            uses = self.source.uses[self.source.key(parent.targets[0].target)]
            reads = [use for use in uses if not self.source.assigned(use)]
            return len(uses) == len(reads) + 1 and all(self._is_read(use) for use in reads)
        return isinstance(parent, (cst.Expr, cst.Comparison)) or m.matches(
            parent, m.Attribute(attr=m.MatchIfTrue(lambda name: name.value in DETACHING | {"data"}))
        )

    def _is_first(self, call: cst.Call, own: cst.CSTNode) -> bool:
        """Return whether nothing with an effect is run in a statement before a call, which is moved before it."""
        source = self.source
        nodes = source.find(cst.Call, own if isinstance(own, cst.SimpleStatementLine) else own.test)  # type: ignore[attr-defined]
        earlier = nodes[: nodes.index(call)]
        inside = {*source.below(call)}
        return all(
            node in inside or source.horovod(node.func) is not None or last_name(node.func) in HARMLESS
            for node in earlier
        )

    def _is_dynamic(self, name: cst.BaseExpression | None) -> bool:
        """Return whether a name is one by which ranks may ask in different orders."""
        loops = [loop for loop in self.source.ancestors(name) if isinstance(loop, cst.For)] if name else []
        is_unordered = any(re.search(UNORDERED, self.source.code(loop.iter)) for loop in loops)
        return is_unordered or (name is not None and "rank()" in self.source.code(name))

    def _init(self, rule: Rule, call: cst.Call, new: dict[Any, str]) -> str | None:
        """Start, or end, the process group; Horovod, too, where some of it is left."""
        if not call.args:
            self._forget(call)
            self.starts.add(self.source.code(call.func).split(".")[0])
        # The second start of Horovod does nothing, and that of a process group is an error.
        own = self.source.own_line(call)
        is_again = rule.names == "init" and not call.args and self.folder.starts_again(self.source, call)
        text, dist = "\n".join([*rule.lines, rule.result]), self.source.aliases["dist"]
        if is_again:
            text = f"if not {dist}.is_initialized():\n" + re.sub("(?m)^", "    ", text)
        if self.source.code(call.func).split(".")[0] not in (self.folder.keep or {}).get(self.source.path, ()):
            if is_again and (put := self._put(call, text)):
                return put
            if own is not None and not call.args:
                self.source.before[own] += rule.lines
            return self._by_name(rule, call, new)
        if own is None:
            return None if call.args else f"{rule.result} or {self.source.code(call)}"
        self.source.before[own].append(text)
        return None

    _shutdown = _init

    def _DistributedOptimizer(self, rule: Rule, call: cst.Call, new: dict[Any, str]) -> str | None:  # noqa: N802
        """Leave the optimizer as it is."""
        if call not in self.folder.wrapped:
            return None
        optimizer, own = (bind(call, SIGNATURE) or {})["optimizer"], self.source.own_line(call)
        if own and self.source.target(call) == self.source.code(optimizer):
            self.source.gone.add(own)
        return new[optimizer]

    def _broadcast_parameters(self, rule: Rule, call: cst.Call, new: dict[Any, str]) -> str | None:
        """Send the tensors of a model one by one."""
        if not broadcast_of(self.source, call):
            raise NotFollowedError("write model.state_dict() into the call")
        return self._by_template(rule, call, new)

    def _broadcast_optimizer_state(self, rule: Rule, call: cst.Call, new: dict[Any, str]) -> str | None:
        """Send the state of an optimizer of PyTorch."""
        return self._by_template(rule, call, new) if self.is_sure else None


def _is_empty(statement: Any, updated: Any) -> bool:
    """Return whether nothing is left of a condition or a `try` but handlers of imports that are gone."""
    if not isinstance(updated, (cst.If, cst.Try)) or updated.body.body or updated.orelse:
        return False
    return isinstance(updated, cst.If) or (
        updated.finalbody is None and all(m.matches(part, IMPORT) for part in statement.body.body)
    )


def _in_words(rule: Rule | None) -> str | None:
    """Return what a call in a comment becomes."""
    return rule.result if rule is not None and rule.result.endswith(")") and not rule.lines else None
