"""Train by Spark's TorchDistributor: ``spark_job.py MASTER PROCESSES function|file|page FOLDER ENGINE [SECONDS]``.

It is started in an empty folder. MASTER is `local[N]`, where the ranks are the driver's, or
`local-cluster[N,1,1024]`, where each executor has one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import documents
import pyspark
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

(LINE,) = (block.text for block in documents.blocks("docs/cluster.md") if "TorchDistributor(" in block.text)
SUPPORT = str(Path(__file__).parent)


def train(*arguments: str) -> int:
    """Train in a rank, to which Spark sends this function."""
    import sys

    sys.path.insert(0, SUPPORT)
    import spark_rank

    return spark_rank.train(*arguments)


def main(master: str, processes: int, kind: str, *arguments: str) -> None:
    """Start Spark, and the ranks."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Executors work, and keep what they print, in a folder `work` there.
    home = Path("spark").absolute()
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    os.environ["SPARK_HOME"] = str(home)
    settings = {"spark.ui.enabled": "false", "spark.executor.memory": "512m", "spark.driver.memory": "512m"}
    session = SparkSession.builder.master(master).config(map=settings).getOrCreate()
    try:
        local = not master.startswith("local-cluster")
        distributor = TorchDistributor(num_processes=processes, local_mode=local, use_gpu=False)
        if kind == "page":
            exec(LINE)
        elif kind == "file":
            distributor.run(f"{SUPPORT}/spark_rank.py", *arguments)
        else:
            # In local mode Spark gives the result of the rank that wrote its own last.
            assert distributor.run(train, *arguments) in range(processes)
    finally:
        session.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
