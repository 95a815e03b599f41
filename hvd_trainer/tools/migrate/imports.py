"""Change a file's imports to what its new text uses."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node

from hvd_trainer.tools.migrate.source import API

NEEDED = {
    r"\bos\.environ\b": "import os",
    r"\bcontextlib\.nullcontext\b": "import contextlib",
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


def add_imports(module: cst.Module, functions: list[str], aliases: Mapping[str, str]) -> cst.Module:
    """Add imports where Horovod's was, those of Python's own modules where its others are, and functions below.

    Args:
        aliases: other names for `dist` and `DDP`, where these are taken.
    """
    have = {known.split(".")[0] for node in _imports(module) for known, *_ in names_of(node)}
    code = re.sub(r"#.*|^\s*(from|import) .*", "", module.code + "".join(functions), flags=re.MULTILINE)
    body: list[Any] = list(module.body)
    texts = [module.code_for_node(node.with_changes(leading_lines=())).strip() for node in body]
    place, own = texts.index(PLACE) if PLACE in texts else -1, list[Any]()
    for usual, line in NEEDED.items():
        pattern = re.sub("dist|DDP", lambda name: aliases.get(name[0], name[0]), usual)
        known = line.split()[-1]
        if not re.search(pattern, code) or aliases.get(known, known) in have:
            continue
        (added,) = statements(re.sub(r"\w+$", lambda name: aliases.get(name[0], name[0]), line), module)
        if not _is_standard(line):
            own.append(added)
            continue
        heads = list(takewhile(lambda pair: m.matches(pair[1], HEAD), enumerate(body)))
        lines = [(at, module.code_for_node(node.with_changes(leading_lines=())).strip()) for at, node in heads]
        before = [at + 1 for at, text in lines if re.match(r"import \w+$", text) and text < line]
        usual_place = next((at for at, text in lines if re.match("import|from (?!__future__)", text)), len(heads))
        at = max((at for at in before if _is_standard(lines[at - 1][1])), default=usual_place)
        if at == usual_place < len(heads):
            added = added.with_changes(leading_lines=body[at].leading_lines)
            body[at] = body[at].with_changes(leading_lines=())
        body.insert(at, added)
        place += at <= place
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


def _is_standard(line: str) -> bool:
    return line.split()[1].split(".")[0] in sys.stdlib_module_names
