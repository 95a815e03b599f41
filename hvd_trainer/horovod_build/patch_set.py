"""Apply the patches of this folder to Horovod 0.28.1's published source.

Each file of patches/ is a unified diff for one purpose, with its reasons and the files of each on top (DEP-3).
They are applied in the order of their names, each to the result of those before it; quilt, Debian's tool, can edit
such a series.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Mapping
from logging.handlers import BufferingHandler
from pathlib import Path
from types import ModuleType

from hvd_trainer.errors import UserError
from hvd_trainer.horovod_build import messages

PATCH_SET = 21
"""Raise it with every change of what is built: wheels that were built before then no longer count as current."""

PATCHES = Path(__file__).with_name("patches")
MAX_WARNINGS = 10_000
"""More than patch-ng has for one patch: a full buffer would be emptied."""
CXX_STANDARD = "@CXX_STANDARD@"  # the patches' one parameter

RECORD_FILE = "horovod/hvd_trainer_build.py"
"""The module in the built package that says what it was built from and for (see build_plan.BuildPlan)."""

RECORD_TEMPLATE = '''"""What this Horovod was built for."""

import json

RECORD = json.loads({record!r})
'''


class PatchError(UserError):
    """Horovod's source is not the one that the patches were written for."""


def apply_patches(source: Path, tools: Path, *, cxx_standard: int, record: Mapping[str, object]) -> None:
    """Patch the unpacked source in place, and add the messages module and the build's record.

    Raises:
        PatchError: a line differs from the published source of 0.28.1, or is elsewhere in its file.
    """
    patch_ng = _import_patch_ng(tools)
    for path in sorted(PATCHES.glob("*.patch")):
        text = path.read_text(encoding="utf-8").replace(CXX_STANDARD, str(cxx_standard))
        _apply(patch_ng, path.name, text, source)
    shutil.copyfile(messages.__file__, source / "horovod/runner/elastic/messages.py")
    # JSON in a string, so that null needs no translation.
    text = RECORD_TEMPLATE.format(record=json.dumps(dict(record)))
    (source / RECORD_FILE).write_text(text, encoding="utf-8")


def _apply(patch_ng: ModuleType, name: str, text: str, source: Path) -> None:
    """Apply one patch exactly: patch-ng, unlike patch(1), accepts neither an offset nor other context lines."""
    warnings = BufferingHandler(MAX_WARNINGS)
    warnings.setLevel(logging.WARNING)
    patch_ng.logger.addHandler(warnings)
    try:
        patch = patch_ng.fromstring(text.encode())
        applied = patch and patch.apply(strip=1, root=str(source))
    finally:
        patch_ng.logger.removeHandler(warnings)
    # It takes a file that is patched already for a success, and only warns.
    if not applied or warnings.buffer:
        raise PatchError(
            f"cannot apply {name} to Horovod's source:\n"
            + "".join(f"  {record.getMessage().strip()}\n" for record in warnings.buffer)
            + "  This tool builds Horovod 0.28.1 from its published source package only."
        )


def _import_patch_ng(tools: Path) -> ModuleType:
    """Import the build tool patch-ng from its folder; the environment need not have it."""
    spec = importlib.util.spec_from_file_location("patch_ng", tools / "patch_ng.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
