"""`python -m hvd_trainer <tool>`: finds the tool by its name and hands it the remaining arguments.

A tool is a module with `main(argv) -> exit code`; it is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from hvd_trainer.errors import UserError

TOOLS = {
    "compare": (
        "hvd_trainer.tools.compare.cli",
        "which engine is faster here, for a job of yours, by how much and why",
    ),
    "doctor": ("hvd_trainer.tools.doctor.cli", "look at all that training needs here, and say what to type"),
    "diagnose": (
        "hvd_trainer.tools.diagnose.cli",
        "what a step's time goes to, by leaving things out, and what to do about it",
    ),
    "export": ("hvd_trainer.tools.export", "write the weights of a checkpoint as model.safetensors"),
    "grid": (
        "hvd_trainer.tools.grid.cli",
        "measure a job in all configurations of a grid: ranks, stages, chunks, ...",
    ),
    "install-horovod": (
        "hvd_trainer.horovod_build.installer",
        "build, install and prove a Horovod that fits this PyTorch",
    ),
    "parity": (
        "hvd_trainer.tools.parity.cli",
        "do both engines train the same model, and if not, from which step and tensor on, and why",
    ),
    "project": (
        "hvd_trainer.tools.estimate.cli",
        "how fast a job would be on hosts that are not here, on paper, and how sure that is",
    ),
    "tune": (
        "hvd_trainer.tools.tune.cli",
        "search the fastest settings of each engine for a job of yours, and write them as YAML",
    ),
    "verify-resume": (
        "hvd_trainer.tools.verify_resume.cli",
        "kill a training again and again, and prove that nothing was lost",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool; returns the exit code: 0 done, 2 a user's mistake, others the tool's own."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in TOOLS:
        print(f"error: there is no tool named {name!r}.\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(TOOLS[name][0]).main(rest))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    width = max(map(len, TOOLS))
    tools = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in TOOLS.items())
    return (
        "usage: python -m hvd_trainer <tool> [options]\n\n"
        f"tools:\n{tools}\n\n"
        "`python -m hvd_trainer <tool> --help` lists a tool's options."
    )
