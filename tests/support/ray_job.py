"""Train in workers of Ray Train: ``ray_job.py FOLDER WHAT [--workers N] [--nodes N] [--again N]``.

WHAT is a function below. Each rank writes what it returns to a file in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import documents
import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from trainings import digest, fit_small, signs

from hvd_trainer import Callback

(REPORT,) = (block.text for block in documents.blocks("docs/cluster.md") if "ray.train.report" in block.text)


def trains(folder: Path) -> dict[str, Any]:
    """Train on both engines, and by a function for Horovod; the group of Ray is as it was."""
    before = dist.group.WORLD
    results = {engine: fit_small(engine) for engine in ("ddp", "horovod")}
    results["hvd"] = horovod_function()
    assert dist.group.WORLD is before
    total = torch.ones(1)
    dist.all_reduce(total)
    return {**results, "total": total.item()}


def horovod_function() -> list[Any]:
    """Train as a function for `horovod.torch` does, of which the import alone has changed."""
    from hvd_trainer import hvd

    hvd.init()
    torch.manual_seed(3 + hvd.rank())
    model = nn.Linear(6, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data, size = signs(48), hvd.size()
    own = slice(hvd.rank(), None, size)
    for inputs, targets in zip(data.inputs[own].split(4), data.targets[own].split(4), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    hvd.shutdown()
    return [digest(model.state_dict()), size]


class KillOnce(Callback):
    """Kills the last rank in its third epoch, once."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "killed"

    def on_step_end(self, run: Any, result: Any) -> None:
        is_due = run.progress.step == 2 * run.steps_per_epoch + 1 and run.world.rank == run.world.size - 1
        if is_due and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path, engine: str = "ddp") -> list[Any]:
    """Train in a log folder, from which a later start resumes, with the callback of the documentation."""
    names: dict[str, Any] = {}
    exec(REPORT, names)
    callbacks = names["ReportToRay"](), KillOnce(folder)
    return fit_small(engine, callbacks, log_dir=str(folder / "log"), resume="auto")


def killed_horovod(folder: Path) -> list[Any]:
    """Do the same on Horovod."""
    return killed(folder, "horovod")


JOBS = {job.__name__: job for job in (trains, killed, killed_horovod)}


def work(config: dict[str, str]) -> None:
    """Run one worker of Ray Train."""
    folder = Path(config["folder"])
    result = JOBS[config["what"]](folder)
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))


def main() -> None:
    """Start Ray on some nodes, and the workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("what")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--again", type=int, default=0)
    options = parser.parse_args()
    with ExitStack() as ending:
        if options.nodes == 1:
            ray.init(num_cpus=2, include_dashboard=False)
        else:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
            ending.callback(cluster.shutdown)
            for _ in range(1, options.nodes):
                cluster.add_node(num_cpus=2)
            ray.init(address=cluster.address)
        ending.callback(ray.shutdown)
        result = TorchTrainer(
            work,
            train_loop_config={"folder": str(options.folder), "what": options.what},
            scaling_config=ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                storage_path=str(options.folder / "ray"), failure_config=FailureConfig(max_failures=options.again)
            ),
        ).fit()
        sys.stdout.write(f"metrics {json.dumps(result.metrics)}\n")


if __name__ == "__main__":
    main()
