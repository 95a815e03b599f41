"""Change a file's imports to what its new text uses, and find out what is left of Horovod in it."""

from __future__ import annotations

import re
import sys
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.tools.migrate.source import API, Source

NEEDED = {
    r"\bos\.environ\b": "import os",
    r"\bcontextlib\.nullcontext\b": "import contextlib",
    r"\btorch\.(cat|empty_like|nn\.SyncB|nn\.parallel\.D|utils\.data\.Distrib|distributed\.\w)": "import torch",
    r"\bdist\.\w": "import torch.distributed as dist",
    r"\bdefault_hooks\.": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
    r"\bJoin\(\[": "from torch.distributed.algorithms.join import Join",
    r"\bDDP\(": "from torch.nn.parallel import DistributedDataParallel as DDP",
}
"""What a new text uses, and the import that it needs."""
SHORT = {"dist": "torch.distributed", "DDP": "torch.nn.parallel.DistributedDataParallel"}


def _aliases(source: Source, statement: Any) -> list[tuple[str, str, str]]:
    """Return the names of an import: as they are known, with the module's, and as they are written."""
    if isinstance(statement.names, cst.ImportStar):
        return []
    module = source.code(statement.module) + "." if getattr(statement, "module", None) else ""
    names = [(it, source.code(it.name)) for it in statement.names]
    written = [name + (f" as {source.code(it.asname.name)}" if it.asname else "") for it, name in names]
    return [(text.split()[-1], module + name, text) for (_, name), text in zip(names, written, strict=True)]


def _bound(source: Source) -> dict[str, str]:
    """Return the names that the file's own imports bind, by what they stand for."""
    statements = [*source.find(cst.Import), *source.find(cst.ImportFrom)]
    return {stands_for: known for it in statements for known, stands_for, _ in _aliases(source, it)}


def spell(source: Source, text: str) -> str:
    """Return a text of the table with the names that a file has for PyTorch's modules."""
    bound = _bound(source)
    for short, whole in SHORT.items():
        name = bound.get(whole, whole if short in source.words else short)
        text = re.sub(rf"\b{short}(?=[.(])", name, text)
    return text


def left_over(source: Source) -> list[tuple[cst.CSTNode, str]]:
    """Return what refers to Horovod, with its qualified name."""
    result = []
    for node in source.nodes:
        parent = source.parents.get(node)
        no_use = (cst.Attribute, cst.AssignTarget, cst.NameItem, cst.Param, cst.ImportAlias, cst.AsName)
        names = [] if isinstance(parent, no_use) else sorted(source.qualified(node))
        result += [(node, name) for name in names if re.match(r"horovod(\.|$)", name)][:1]
    return result


def change_imports(source: Source) -> None:
    """Note the changes of the imports of a file that is else as it is to be."""
    used = {source.code(node).split(".")[0] for node, _ in left_over(source)}
    removed, old = [], []
    for it in [*source.find(cst.Import), *source.find(cst.ImportFrom)]:
        aliases, statement = _aliases(source, it), source.parents[it]
        if not any(name.startswith(API) for _, name, _ in aliases):
            continue
        old.append(statement)
        kept = [_stand_in(*alias) for alias in aliases if alias[0].split(".")[0] in used or API not in alias[1]]
        removed += [statement] if not kept else []
        source.changes |= {source.span(it): "\n".join(kept)} if kept else {}
    for node in source.find(cst.Attribute):
        if source.code(node) == API and source.around(node, cst.ImportAlias) is None:
            source.replace(node, "hvd_trainer.hvd")
    source.remove(removed)
    code = re.sub(r"#.*|^\s*(from|import) .*", "", source.text, flags=re.MULTILINE)
    have = _bound(source).values()
    lines = [it for pattern, it in NEEDED.items() if re.search(pattern, code) and it.split()[-1] not in have]
    top = [it for it in source.module.body if m.matches(it, m.SimpleStatementLine([m.Import() | m.ImportFrom()]))]
    top = [it for it in top if "__future__" not in source.code(it)]
    plain = [it for it in top if re.match(r"import \w+$", source.code(it)) and _is_standard(source.code(it))]
    torch = [it for it in top if source.code(it) == "import torch"] or [it for it in top if it in old] or top
    for line in lines:
        before = [it for it in plain if source.code(it) < line] if _is_standard(line) else torch[:1]
        place = source.span(before[-1], wide=True)[1] if before else source.span(top[0])[0] if top else 0
        source.insert(place, f"{line}\n")


def _stand_in(known: str, stands_for: str, written: str) -> str:
    """Return the import of what stands in for Horovod's."""
    if stands_for == API:
        return "import hvd_trainer.hvd" if known == API else "from hvd_trainer import hvd" + f" as {known}" * (known != "hvd")
    module = stands_for.removesuffix("." + written.split()[0])
    return f"from {module.replace(API, 'hvd_trainer.hvd')} import {written}" if API in module else f"import {written}"


def _is_standard(line: str) -> bool:
    return line.split()[1].split(".")[0] in sys.stdlib_module_names
