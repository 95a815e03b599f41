"""Read the cases of `migrate`, migrate_cases.diff."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

HEAD = "import torch\nimport horovod.torch as hvd\n"
IMPORTS = re.compile(r"^(import|from) .*\n", re.MULTILINE)


class Case(NamedTuple):
    """A script for Horovod, and what it becomes."""

    before: str
    after: str
    """without imports, if the script is given without them"""
    name: str

    def shown(self, text: str) -> str:
        """Return as much of a result as the case tells of it."""
        return text if IMPORTS.search(self.after) else IMPORTS.sub("", text)


def _read() -> dict[str, Case]:
    result = {}
    for part in Path(__file__).with_suffix(".diff").read_text().split("\n## ")[1:]:
        title, *lines = part.rstrip("\n").split("\n")
        before, after = (
            "".join(f"{line[1:]}\n" for line in lines if line[:1] in (side, " ", "")) for side in ("-", "+")
        )
        is_whole = IMPORTS.search(before) or before.startswith("#!")
        name = "train.sh" if before.startswith("#!") else "train.py"
        result[title] = Case(before if is_whole else HEAD + before, after, name)
    return result


CASES = _read()
