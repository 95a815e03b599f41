"""Change a file's imports to what its new text uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node

from hvd_trainer.tools.migrate.source import API

NEEDED = {
    r"\bcontextlib\.nullcontext\b": "import contextlib",
    r"\bos\.environ\b": "import os",
    r"\btorch\.(cat|zeros_like|nn\.SyncB|cuda\.is)": "import torch",
    r"\bTorchDistributor\(": "from pyspark.ml.torch.distributor import TorchDistributor",
    r"\bTorchTrainer\(": "from ray.train.torch import TorchTrainer",
    r"\bdist\.\w": "import torch.distributed as dist",
    r"\bdefault_hooks\.": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
    r"\bJoin\(\[": "from torch.distributed.algorithms.join import Join",
    r"\bDDP\b": "from torch.nn.parallel import DistributedDataParallel as DDP",
}
"""Imports that the new code needs, by a pattern of what it uses."""
IMPORT = m.SimpleStatementLine([m.Import() | m.ImportFrom()])
PLACE = "import _horovod"
IS_PLACE = m.SimpleStatementLine([m.Import([m.ImportAlias(m.Name("_horovod"))])])
"""Stands where Horovod was imported."""
HEAD = m.Try() | m.SimpleStatementLine([m.Import() | m.ImportFrom() | m.Expr(m.SimpleString())])


def statements(text: str, module: cst.Module) -> list[Any]:
    """Return the statements of a text, to be put into a module."""
    return list(cst.parse_module(text, module.config_for_parsing).body) if text else []


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


def add_imports(module: cst.Module, code: str, functions: list[str], aliases: Mapping[str, str]) -> cst.Module:
    """Add imports where Horovod's was, and functions below.

    Args:
        code: of the module.
        aliases: other names for `dist` and `DDP`, where these are taken.
    """
    have = {known.split(".")[0] for node in _imports(module) for known, *_ in names_of(node)}
    code = re.sub(r"#.*|^\s*(from|import) .*", "", code + "".join(functions), flags=re.MULTILINE)
    body, own = list[Any](module.body), list[Any]()
    for usual, line in NEEDED.items():
        texts = usual, line.split()[-1]
        pattern, known = (re.sub("dist|DDP", lambda name: aliases[name[0]], text) for text in texts)
        if re.search(pattern, code) and known not in have:
            own += statements(re.sub(r"\w+$", known, line), module)
    place = next((at for at, node in enumerate(body) if m.matches(node, IS_PLACE)), -1)
    if place < 0:
        place = len(list(takewhile(lambda node: m.matches(node, HEAD), body)))
    else:
        lead = body.pop(place).leading_lines
        if own:
            own[0] = own[0].with_changes(leading_lines=lead)
        elif place < len(body) and not body[place].leading_lines:
            body[place] = body[place].with_changes(leading_lines=[line for line in lead if not line.comment])
    body[place:place] = own
    end = place + len(own)
    end += len(list(takewhile(lambda node: m.matches(node, HEAD), body[end:])))
    for text in functions:
        (function,) = statements(text, module)
        apart, lead = [cst.EmptyLine(indent=False)] * 2, body[end].leading_lines
        blank = len(list(takewhile(lambda line: not line.comment, lead)))
        body[end] = body[end].with_changes(leading_lines=(*apart[blank:], *lead))
        body.insert(end, function.with_changes(leading_lines=apart))
    return module.with_changes(body=body)


def _imports(node: cst.CSTNode) -> Iterator[cst.Import | cst.ImportFrom]:
    """Yield the imports that are run with the file, and not inside a function or a class."""
    if isinstance(node, (cst.Import, cst.ImportFrom)):
        yield node
    elif not isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.BaseExpression)):
        for child in node.children:
            yield from _imports(child)
