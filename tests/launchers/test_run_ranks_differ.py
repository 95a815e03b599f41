"""`run` tells of ranks whose weights differ, by what the script has wrapped; and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from combinations import case
from launchers import launch

pytestmark = pytest.mark.warm

DDP = """
import atexit
import multiprocessing
import sys
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main(fault):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for step in range(1, 9):
        for last in (False, True):  # two passes in a step
            local = not last or (fault == "no_sync" and step == 5)
            with ddp.no_sync() if local else nullcontext():
                called = net if fault in ("module", "closed") and step == 5 and last else ddp
                called(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault == "forks" and step == dist.get_rank() + 1:  # as processes of loaders end, at different steps
            process = multiprocessing.get_context("fork").Process(target=int)
            process.start()
            process.join()
    if fault == "closed":
        atexit.register(lambda: torch._foreach_zero_([p.detach() for p in ddp.parameters()]))
    if fault == "left":
        return  # the process group stays, and the model is gone before the script is done
    dist.destroy_process_group()

main(sys.argv[1])
"""
HOROVOD = """
import sys
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
torch.manual_seed(hvd.rank() + 1)
for step in range(1, 9):
    optimizer.zero_grad()
    net(torch.randn(8, 3)).square().mean().backward()
    optimizer.synchronize()
    if sys.argv[1] == "own update" and step == 5 and hvd.rank() == 1:
        net[1].bias.grad.mul_(2)
    with optimizer.skip_synchronize():
        optimizer.step()
"""
SAYS = "warning: the ranks no longer train one model: "


def told(tmp_path: Path, script: str, backend: str, size: int, fault: str, *options: str) -> list[str]:
    """Run a script with a fault; return the lines about ranks that differ."""
    path = tmp_path / "train.py"
    path.write_text(script)
    words = ["-m", "hvd_trainer", "run", "-np", str(size), "--backend", backend, *options, "--", str(path), fault]
    result = launch("python", 1, words)
    assert result.returncode == 0, result.stderr
    return [line for line in result.stderr.splitlines() if SAYS in line]


@pytest.mark.parametrize(("backend", "size"), [case("ddp", 2), case("ddp", 3), case("horovod", 3)])
def test_ranks_that_differ_are_told_at_the_end(tmp_path: Path, backend: str, size: int) -> None:
    others = ", ".join(map(str, range(1, size)))
    for fault in ("module", "no_sync"):
        [line] = told(tmp_path, DDP, backend, size, fault)
        assert line.startswith(f"{SAYS}0.weight of rank {others} is not that of rank 0 at the end.")
        assert line.endswith(f"parity -- {tmp_path}/train.py {fault}")
    [line] = told(tmp_path, HOROVOD, backend, size, "own update")
    assert line.startswith(f"{SAYS}1.bias of rank 1 is not that of rank 0 at the end.")


def test_ranks_are_compared_before_exit_handlers(tmp_path: Path) -> None:
    """A handler may close what the parameters are on: the comparison waited there for ever."""
    [line] = told(tmp_path, DDP, "ddp", 3, "closed")
    assert " is not that of rank 0 at the end." in line


@pytest.mark.parametrize(("backend", "size"), [case("ddp", 3), case("horovod", 4)])
def test_ranks_are_compared_every_few_steps(tmp_path: Path, backend: str, size: int) -> None:
    """The fault is in step 5: of comparisons after steps 2, 4, 6 the third is the first to find it."""
    [line] = told(tmp_path, DDP, backend, size, "module", "--check-ranks", "2")
    assert " is not that of rank 0 after step 6." in line
    [line] = told(tmp_path, HOROVOD, backend, size, "own update", "--check-ranks", "1")
    assert " of rank 1 is not that of rank 0 after step 5." in line


@pytest.mark.parametrize(("backend", "size"), [case("ddp", 3), case("horovod", 3)])
def test_nothing_is_said_of_equal_ranks(tmp_path: Path, backend: str, size: int) -> None:
    assert told(tmp_path, DDP, backend, size, "none", "--check-ranks", "1") == []
    assert told(tmp_path, DDP, backend, size, "left") == []
    assert told(tmp_path, DDP, backend, size, "forks") == []
    assert told(tmp_path, HOROVOD, backend, size, "none", "--check-ranks", "1") == []
