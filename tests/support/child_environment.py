"""Build the environment that the tests' child processes start with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import process_tree

STARTUP = str(Path(__file__).with_name("startup"))
_RANK_VARIABLE_PREFIXES = (
    *("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SBATCH_", "SLURM_", "SLURMD_", "TORCHELASTIC_"),
)
_RANK_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


def is_rank_variable(name: str) -> bool:
    """Return whether a launcher, a scheduler or a user of Horovod sets this variable."""
    return name in _RANK_VARIABLES or name.startswith(_RANK_VARIABLE_PREFIXES)


def child_environment(
    environ: Mapping[str, str], changes: Mapping[str, str | None], *, mark: str, folder: Path
) -> dict[str, str]:
    """Return ``environ`` without any launcher's variables, and with ``changes`` on top.

    Args:
        changes: None removes a variable.
        mark: by which the processes are found again, see :mod:`process_tree`.
        folder: becomes the temporary folder: launchers leave log and session folders behind there.
    """
    result: dict[str, str | None] = {
        **{name: value for name, value in environ.items() if not is_rank_variable(name)},
        "OMP_NUM_THREADS": "1",
        # On SIGABRT Python prints the stacks of all its threads.
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(folder),
        **changes,
        process_tree.MARK: mark,
    }
    # Last: a test may have a sitecustomize of its own.
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [result.get("PYTHONPATH"), STARTUP]))
    return {name: value for name, value in result.items() if value is not None}
