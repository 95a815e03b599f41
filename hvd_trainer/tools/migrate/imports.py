"""Change a file's imports to what its new text uses, and find out what is left of Horovod in it."""

from __future__ import annotations

import re
import sys
from typing import Any

import libcst as cst
from libcst import matchers as m

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.migrate.source import API, Source

NEEDED = {
    r"\bos\.environ\b": "import os",
    r"\bcontextlib\.nullcontext\b": "import contextlib",
    r"\btorch\.(cat|empty_like|nn\.SyncB|utils\.data\.Distrib)": "import torch",
    r"\bdist\.\w": "import torch.distributed as dist",
    r"\bdefault_hooks\.": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
    r"\bJoin\(\[": "from torch.distributed.algorithms.join import Join",
    r"\bDDP\(": "from torch.nn.parallel import DistributedDataParallel as DDP",
}
"""Imports that the new code needs, by a pattern of what it uses."""
NAMES = {"dist": "torch.distributed", "DDP": "torch.nn.parallel.DistributedDataParallel"}
NO_USE = (cst.Attribute, cst.AssignTarget, cst.NameItem, cst.Param, cst.ImportAlias, cst.AsName)
IMPORT = m.SimpleStatementLine([m.Import() | m.ImportFrom(module=~m.Name("__future__"))])


def _aliases(source: Source) -> list[tuple[Any, str, str, str]]:
    """Return the names of all imports: as they are known, with the module's, and as they are written."""
    result = []
    statements: list[Any] = [*source.find(cst.Import), *source.find(cst.ImportFrom)]
    for node in statements:
        module = f"{source.code(node.module)}." if isinstance(node, cst.ImportFrom) and node.module else ""
        for alias in () if isinstance(node.names, cst.ImportStar) else node.names:
            written = source.code(alias.name) + (f" as {source.code(alias.asname.name)}" if alias.asname else "")
            result.append((node, written.split()[-1], module + source.code(alias.name), written))
    return result


def check_names(source: Source, after: str) -> None:
    """See that a file has no other things by the names that its result has for PyTorch's.

    Raises:
        OptionError: it has.
    """
    for name, whole in NAMES.items():
        imported = {of for _, known, of, _ in _aliases(source) if known == name}
        is_variable = any(key == name or str(key).endswith(f"<locals>.{name}") for key in source.uses)
        before, now = (len(re.findall(rf"\b{name}[.(]", text)) for text in (source.text, after))
        if now > before and (imported - {whole} or (is_variable and not imported)):
            raise OptionError(f"{source.path} has a `{name}` that is not {whole}: give it another name first")


def left_over(source: Source) -> list[tuple[cst.CSTNode, str]]:
    """Return what refers to Horovod, with its qualified name."""
    nodes = [node for node in source.nodes if not isinstance(source.parents.get(node), NO_USE)]
    names = ((node, name) for node in nodes for name in sorted(source.qualified(node))[:1])
    return [(node, name) for node, name in names if re.match(r"horovod(\.|$)", name)]


def change_imports(source: Source) -> None:
    """Note the changes of the imports of a file that is else as it is to be."""
    used, aliases = {source.code(node).split(".")[0] for node, _ in left_over(source)}, _aliases(source)
    old = dict.fromkeys(statement for statement, _, whole, _ in aliases if whole.startswith(API))
    for statement in old:
        kept = [
            _stand_in(*names)
            for at, *names in aliases
            if at is statement and (names[0].split(".")[0] in used or API not in names[1])
        ]
        source.changes[source.span(statement)] = "\n".join(kept)
    for node in source.find(cst.Attribute):
        if source.code(node) == API and source.around(node, cst.ImportAlias) is None:
            source.replace(node, "hvd_trainer.hvd")
    source.remove([source.parents[statement] for statement in old if not source.changes[source.span(statement)]])
    code = re.sub(r"#.*|^\s*(from|import) .*", "", source.text, flags=re.MULTILINE)
    have = {known.split(".")[0] for _, known, *_ in aliases}
    top = [node for node in source.module.body if m.matches(node, IMPORT)]
    plain = [node for node in top if re.match(r"import \w+$", text := source.code(node)) and _is_standard(text)]
    torch = (
        [node for node in top if source.code(node) == "import torch"]
        or [node for node in top if {*node.children} & {*old}]
        or top
    )
    for pattern, line in NEEDED.items():
        if re.search(pattern, code) and line.split()[-1] not in have:
            before = [node for node in plain if source.code(node) < line] if _is_standard(line) else torch[:1]
            place = source.span(before[-1], wide=True)[1] if before else source.span(top[0])[0] if top else 0
            source.insert(place, f"{line}\n")


def _stand_in(known: str, whole: str, written: str) -> str:
    """Return the import of what stands in for Horovod's."""
    if whole == API:
        return (
            "import hvd_trainer.hvd"
            if known == API
            else "from hvd_trainer import hvd" + f" as {known}" * (known != "hvd")
        )
    module = whole.removesuffix("." + written.split()[0]).replace(API, "hvd_trainer.hvd")
    return f"from {module} import {written}" if API in whole else f"import {written}"


def _is_standard(line: str) -> bool:
    return line.split()[1].split(".")[0] in sys.stdlib_module_names
