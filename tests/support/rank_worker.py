"""Run one rank of ``launchers.run_ranks``: ``python rank_worker.py FOLDER``.

Calls the function that FOLDER/call.pickle names and writes what became of it to a file of its own
there. It imports nothing but what the function's module imports.
"""

import os
import pickle
import sys
import time
import traceback
from pathlib import Path

RANK = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables by which launchers tell a process its rank."""


def _record(folder: Path, failed: bool, outcome: bytes) -> None:
    # Renamed when whole: a rank may be killed at any moment because another one failed.
    partial = folder / f"{os.getpid()}.partial"
    partial.write_bytes(pickle.dumps((time.time(), failed, outcome)))
    partial.rename(folder / f"{os.getpid()}.outcome")


def _seed_torch() -> None:
    # A failure comes again. Each rank has another seed: a model that nobody has broadcast shall differ.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(next((os.environ[name] for name in RANK if name in os.environ), 0)))


def main(folder: Path) -> None:
    """Run the call of ``folder`` and record its value, or its traceback before raising it."""
    with (folder / "call.pickle").open("rb") as file:
        # The test process's import path comes first: the function unpickles by being imported.
        sys.path.extend(entry for entry in pickle.load(file) if entry not in sys.path)
        try:
            function, args, kwargs = pickle.load(file)
            _seed_torch()
            outcome = pickle.dumps(function(*args, **kwargs))
        except BaseException:
            _record(folder, True, pickle.dumps(traceback.format_exc()))
            raise
    _record(folder, False, outcome)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
