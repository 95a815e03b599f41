"""Test `migrate --prove` on real runs: the same bits, and a trap of Horovod that is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from launchers import SCRIPTS, launch, requires

pytestmark = pytest.mark.warm

SCRIPT = (SCRIPTS / "horovod_mnist.py").read_text()
STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n"


def prove(tmp_path: Path, script: str, ranks: int = 2) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    path = tmp_path / "train.py"
    path.write_text(script)
    words = [
        "migrate",
        str(path),
        "--prove",
        "-np",
        str(ranks),
        "--steps",
        "4",
        "--out",
        str(tmp_path / "proof"),
        "--",
    ]
    result = launch("python", 1, ["-m", "hvd_trainer", *words, "--epochs", "1"], check=False)
    return result.returncode, result.stdout


@requires("horovod")
def test_a_migrated_script_trains_the_same_bits(tmp_path: Path) -> None:
    script = SCRIPT.replace(STATE, "").replace("op=hvd.Average", "compression=hvd.Compression.fp16")
    code, printed = prove(tmp_path, script)
    assert "old and new: the same bits through 4 steps" in printed, printed
    assert code == 0


@requires("horovod")
def test_a_trap_of_horovod_is_named_with_its_line(tmp_path: Path) -> None:
    """Weight decay moves the weights in the step that Horovod takes with a new optimizer."""
    script = SCRIPT.replace("momentum=args.momentum)", "momentum=args.momentum, weight_decay=0.1)")
    code, printed = prove(tmp_path, script)
    assert code == 1, printed
    assert "old and new differ before the first step" in printed
    line = script.splitlines().index(STATE.strip()) + 1
    assert f"train.py:{line}: {STATE.strip()}\n    A new optimizer has no state to send" in printed
    assert "old and new: the same bits through 4 steps" in printed.partition("Without that trap of Horovod:")[2]


@pytest.mark.long
@requires("horovod")
def test_many_ranks_add_up_alike(tmp_path: Path) -> None:
    """Gloo adds up an element in an order that depends on its place in a message."""
    code, printed = prove(tmp_path, SCRIPT.replace(STATE, ""), ranks=4)
    assert "old and new: the same bits through 4 steps" in printed, printed
    assert code == 0


OLD = """
import torch
import horovod.torch as hvd
from torch import nn

hvd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 7))
names = model.named_parameters()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=names)
for step in range(4):
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""
NEW = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 7))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""


def test_horovods_api_on_torch_adds_up_as_ddp_on_four_ranks(tmp_path: Path) -> None:
    """Small buckets travel with their requests, and are added in rank order; not where bits are compared."""
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text(OLD)
    new.write_text(NEW)
    words = ["-np", "4", "--backend", "ddp,ddp", "--steps", "4", "--out", str(tmp_path / "out"), "--new", str(new)]
    result = launch("python", 1, ["-m", "hvd_trainer", "parity", *words, "--", str(old)])
    assert "old and new: the same bits through 4 steps" in result.stdout
