"""Texts for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMAND = "hvd-trainer" if Path(sys.argv[0]).name == "hvd-trainer" else "python -m hvd_trainer"
"""How messages name this package's commands: as the user has typed it; else by what needs no folder on PATH."""
INSTALL_HOROVOD = f"{COMMAND} install-horovod"
SOURCE = Path(__file__).parents[2]
"""The folder of the package's source, where it is used from there."""


def plural(count: float, singular: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 rank`, `2 ranks`; the plural adds an s if none is given."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {singular if count == 1 else plural or singular + 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return such as `rank 0`, or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def install_extra(name: str) -> str:
    """Return the command that installs an extra of this package, from where the package itself came (PEP 610)."""
    # In a clone its own egg-info is found first, which does not say.
    origins = (entry.read_text("direct_url.json") for entry in distributions(name="hvd_trainer"))
    origin = json.loads(next(filter(None, origins), "{}"))
    url = urlsplit(origin.get("url", ""))
    source = unquote(url.path) if url.scheme == "file" else "hvd_trainer"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    if not origin and (SOURCE / "setup.cfg").is_file():
        source, editable = str(SOURCE), "-e "
    return f"pip install {editable}'{source}[{name}]'"
