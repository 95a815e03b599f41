"""What `migrate` writes in place of Horovod's collectives and hooks gives the same results in real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import run_ranks

from hvd_trainer.tools.migrate.migration import migrate

pytestmark = pytest.mark.warm

SCRIPT = """
import torch

import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
results = {}
rows = torch.randn(hvd.rank() + 1, 2)
same = torch.randn(6, 2)
results["mean"] = hvd.allreduce(same)
results["sum"] = hvd.allreduce(same, op=hvd.Sum)
results["max"] = hvd.allreduce(same, op=hvd.Max)
results["gathered"] = hvd.allgather(rows)
results["sent"] = hvd.broadcast(same, root_rank=1)
results["kept"] = same.clone()
results["part"] = hvd.reducescatter(torch.arange(7.0) + hvd.rank(), op=hvd.Sum)
results["all to all"] = hvd.alltoall(same)
means = hvd.grouped_allreduce([same, rows.sum(0)])
results["means"] = torch.cat([it.flatten() for it in means])
results["parts"] = hvd.grouped_reducescatter([same], op=hvd.Sum)[0]
results["rows"] = hvd.grouped_allgather([rows])[0]
handle = hvd.allreduce_async(same)
results["later"] = hvd.synchronize(handle)
hvd.allreduce_(rows[:1])
hvd.broadcast_(same, root_rank=2)
results["in place"] = torch.cat([rows[:1], same])
results["object"] = torch.tensor(hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1)["rank"])
results["objects"] = torch.tensor(hvd.allgather_object(hvd.rank()))


def train(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(same).pow(3).mean().backward()
        optimizer.step()


model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1, affine=False))
model[1].running_mean += hvd.rank()  # as if rank 0 alone had loaded it
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), OPTIONS)
same += hvd.rank()
train(model, optimizer)
results["weights"] = model[0].weight.detach().clone()
results["statistics"] = model[1].running_mean.clone()
hvd.shutdown()
"""
OPTIONS = [
    "op=hvd.Sum",
    "gradient_predivide_factor=2.0",
    "compression=hvd.Compression.fp16",
    "compression=hvd.Compression.bf16",
]


def results_of(text: str) -> tuple[int, dict[str, Any]]:
    """Run a script in a rank."""
    names: dict[str, Any] = {}
    exec(compile(text, "job", "exec"), names)
    return int(names["results"]["objects"].tolist().index(names["rank"])), names["results"]


@pytest.mark.parametrize("options", OPTIONS)
def test_results_are_those_of_horovods_api(options: str) -> None:
    text = SCRIPT.replace("OPTIONS", options).replace("results = {}", "rank, results = hvd.rank(), {}")
    (migrated,) = migrate({Path("job.py"): text})
    assert migrated.left == []
    assert "hvd" not in migrated.after
    old = text.replace("import horovod.torch as hvd", "from hvd_trainer import hvd")
    before, after = (
        run_ranks(results_of, num_processes=3, launcher="torchrun", args=[it]) for it in (old, migrated.after)
    )
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, msg=lambda said, name=name: f"{name}: {said}")
