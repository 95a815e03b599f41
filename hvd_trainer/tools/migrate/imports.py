"""Change a file's imports to what its new text uses."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node

from hvd_trainer.tools.migrate.source import API

NEEDED = {
    r"\bos\.environ\b": "import os",
    r"\bcontextlib\.nullcontext\b": "import contextlib",
    r"\btorch\.(cat|empty_like|nn\.SyncB|utils\.data\.Distrib)": "import torch",
    r"\bdist\.\w": "import torch.distributed as dist",
    r"\bdefault_hooks\.": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
    r"\bJoin\(\[": "from torch.distributed.algorithms.join import Join",
    r"\bDDP\b": "from torch.nn.parallel import DistributedDataParallel as DDP",
}
"""Imports that the new code needs, by a pattern of what it uses."""
IMPORT = m.SimpleStatementLine([m.Import() | m.ImportFrom()])
HEAD = m.Try() | m.SimpleStatementLine([m.Import() | m.ImportFrom() | m.Expr(m.SimpleString())])


def statements(text: str, module: cst.Module) -> list[Any]:
    """Return the statements of a text, to be put into a module."""
    return list(cst.parse_module(text, module.config_for_parsing).body)


def names_of(node: Any) -> list[tuple[str, str, str]]:
    """Return the names of an import: as they are known, with the module's, and as they are written."""
    module = "." * len(getattr(node, "relative", ()))
    module += f"{get_full_name_for_node(node.module)}." if getattr(node, "module", None) else ""
    if isinstance(node.names, cst.ImportStar):
        return [("*", f"{module}*", "*")]
    names = [(alias.evaluated_alias or alias.evaluated_name, alias.evaluated_name) for alias in node.names]
    return [(known, module + name, name + f" as {known}" * (known != name)) for known, name in names]


def stand_in(known: str, whole: str, written: str) -> str:
    """Return an import, that of what stands in for Horovod's."""
    if whole == API:
        alias = f" as {known}" * (known != "hvd")
        return "import hvd_trainer.hvd" if known == API else f"from hvd_trainer import hvd{alias}"
    module = whole.removesuffix("." + written.split()[0]).replace(API, "hvd_trainer.hvd")
    return f"import {written}" if whole == written.split()[0] else f"from {module} import {written}"


def add_imports(module: cst.Module, functions: list[str]) -> cst.Module:
    """Add imports, each where its kind is, and functions behind them."""
    have = {known.split(".")[0] for node in _imports(module) for known, *_ in names_of(node)}
    code = re.sub(r"#.*|^\s*(from|import) .*", "", module.code + "".join(functions), flags=re.MULTILINE)
    body: list[Any] = list(module.body)
    size = len(list(takewhile(lambda node: m.matches(node, HEAD), body)))
    for pattern, line in NEEDED.items():
        if not re.search(pattern, code) or line.split()[-1] in have:
            continue
        texts = [module.code_for_node(node.with_changes(leading_lines=())).strip() for node in body[:size]]
        first = next((at for at, text in enumerate(texts) if re.match("import|from (?!__future__)", text)), size)
        if _is_standard(line):
            before = [at for at, text in enumerate(texts) if re.match(r"import \w+$", text) and text < line]
            place = max((at + 1 for at in before if _is_standard(texts[at])), default=first)
        else:
            place = max((at + 1 for at, text in enumerate(texts) if text in [*NEEDED.values()][2:]), default=size)
        (added,) = statements(line, module)
        if place == first < size:
            added = added.with_changes(leading_lines=body[place].leading_lines)
            body[place] = body[place].with_changes(leading_lines=())
        body.insert(place, added)
        size += 1
    for text in functions:
        (function,) = statements(text, module)
        apart, lead = [cst.EmptyLine(indent=False)] * 2, body[size].leading_lines
        blank = len(list(takewhile(lambda line: not line.comment, lead)))
        body[size] = body[size].with_changes(leading_lines=(*apart[blank:], *lead))
        body.insert(size, function.with_changes(leading_lines=apart))
    return module.with_changes(body=body)


def _imports(node: cst.CSTNode) -> Iterator[cst.Import | cst.ImportFrom]:
    """Yield the imports that are run with the file, and not inside a function or a class."""
    if isinstance(node, (cst.Import, cst.ImportFrom)):
        yield node
    elif not isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.BaseExpression)):
        for child in node.children:
            yield from _imports(child)


def _is_standard(line: str) -> bool:
    return line.split()[1].split(".")[0] in sys.stdlib_module_names
