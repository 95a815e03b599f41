"""Find out whether a model may have buffers, which DDP would send from rank 0 before each pass."""

from __future__ import annotations

import re
import sys
from typing import Any

import libcst as cst

from hvd_trainer.tools.migrate.flow import Folder, starts
from hvd_trainer.tools.migrate.source import Source

BUFFERS = re.compile(r"Norm\d|SyncBatchNorm|spectral_norm|register_buffer|\bBuffer\(|\bhub\b")
WITHOUT = {"torch", "horovod", *sys.stdlib_module_names}
"""Packages whose modules have none, but for those by the names above."""


def may_have_buffers(folder: Folder, source: Source, model: Any, seen: set[Any] | None = None) -> bool:
    """Return whether what makes a model has buffers, or is neither in these files nor PyTorch's own.

    Args:
        model: a variable, or an expression, a function or a class that makes one.
        seen: what has been looked at.
    """
    seen = set() if seen is None else seen
    if model in seen:
        return False
    seen.add(model)
    if BUFFERS.search(source.code(model)):
        return True
    parts = (
        [*(base.value for base in model.bases), *starts(source, model)]
        if isinstance(model, cst.ClassDef)
        else [model]
    )
    names = [node for part in parts for node in source.below(part) if isinstance(node, (cst.Name, cst.Attribute))]
    own = WITHOUT | {at.path.stem for at in folder.sources}
    for node in names:
        if source.find(cst.Call, node):
            continue
        made = [(source, value) for value in source.values(node)]
        made += [(at, arg.value) for at, arg in folder.given.get((source, str(source.key(node))), ())]
        is_parameter = any(isinstance(source.parents[use], cst.Param) for use in source.uses[source.key(node)])
        modules, known = source.modules(node), folder.defined(source, node)
        if not made and is_parameter and node is model or modules and not modules & own:
            return True
        if any(may_have_buffers(folder, *place, seen) for place in [*made, *known]):
            return True
    return False
