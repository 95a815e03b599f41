"""Prove an installed Horovod by real collectives, as one rank of horovodrun's.

horovodrun -np 2 python -m hvd_trainer.horovod_build.self_test_job cpu
"""

from __future__ import annotations

import sys
from typing import Any


def check_collectives(device_name: str) -> str:
    """Run allreduce, broadcast and one optimizer step on "cpu" or "cuda"; return what was proved.

    Raises:
        AssertionError: a collective gave a wrong number, or the build's record is wrong.
    """
    import horovod.torch as hvd
    import torch
    from horovod.common import util

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device("cuda", hvd.local_rank()) if device_name == "cuda" else torch.device("cpu")
    ranks = torch.full((1000,), float(rank), device=device)
    mean = hvd.allreduce(ranks, op=hvd.Average, name="mean")
    assert torch.equal(mean, torch.full_like(mean, (size - 1) / 2)), mean
    total = hvd.allreduce(torch.tensor([rank + 1], device=device), op=hvd.Sum, name="total")
    assert total.item() == size * (size + 1) // 2, total
    first = hvd.broadcast(ranks, root_rank=0, name="first")
    assert not first.any(), first
    _check_optimizer(hvd, torch, device)
    # horovodrun chooses its controller by the first pair; the second is what was compiled.
    assert (util.mpi_built(), util.gloo_built()) == (hvd.mpi_built(), hvd.gloo_built())
    hvd.shutdown()
    return f"rank {rank} of {size} on {device}: collectives and one optimizer step are right"


def _check_optimizer(hvd: Any, torch: Any, device: Any) -> None:
    """Check one step: with loss = rank * weight the averaged gradient, and so the step, is the mean rank."""
    weight = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)])
    (weight * hvd.rank()).sum().backward()
    optimizer.step()
    assert torch.equal(weight.data, torch.full_like(weight, -(hvd.size() - 1) / 2)), weight


if __name__ == "__main__":
    print(check_collectives(sys.argv[1]), flush=True)
