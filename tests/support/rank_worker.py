"""Run one rank of ``launchers.run_ranks``: ``python rank_worker.py FOLDER``.

Calls the function that FOLDER/call.pickle names and writes what became of it to a file of its own
there. It imports nothing but what the function's module imports, and it does not know its rank.
"""

import os
import pickle
import sys
import time
import traceback
from pathlib import Path


def _record(folder: Path, failed: bool, outcome: bytes) -> None:
    # Renamed when whole: a rank may be killed at any moment because another one failed.
    partial = folder / f"{os.getpid()}.partial"
    partial.write_bytes(pickle.dumps((time.time(), failed, outcome)))
    partial.rename(folder / f"{os.getpid()}.outcome")


def main(folder: Path) -> None:
    """Run the call of ``folder`` and record its value, or its traceback before raising it."""
    with (folder / "call.pickle").open("rb") as file:
        # The test process's import path comes first: the function unpickles by being imported.
        sys.path.extend(entry for entry in pickle.load(file) if entry not in sys.path)
        try:
            function, args, kwargs = pickle.load(file)
            outcome = pickle.dumps(function(*args, **kwargs))
        except BaseException:
            _record(folder, True, pickle.dumps(traceback.format_exc()))
            raise
    _record(folder, False, outcome)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
