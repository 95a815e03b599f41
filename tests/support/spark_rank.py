"""One rank of Spark's TorchDistributor: ``spark_rank.py FOLDER ENGINE [SECONDS]``, or its function."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from trainings import fit_small

from hvd_trainer import Callback


class Slowly(Callback):
    """Says which process a rank is, and takes its time in each step."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = Path(folder), seconds

    def on_step_end(self, run: Any, result: Any) -> None:
        (self.folder / f"rank-{run.world.rank}.pid").write_text(str(os.getpid()))
        time.sleep(self.seconds)


def train(folder: str, engine: str, seconds: str = "0") -> int:
    """Train, write what came of it, and return the rank."""
    trained = fit_small(engine, [Slowly(folder, float(seconds))])
    rank = int(os.environ["RANK"])
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(trained))
    return rank


if __name__ == "__main__":
    train(*sys.argv[1:])
