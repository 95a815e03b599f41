"""Test `migrate --prove` on real runs: the same bits, and a trap of Horovod that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launchers import REPOSITORY, SCRIPTS, launch, requires

pytestmark = pytest.mark.warm

SCRIPT = (SCRIPTS / "horovod_mnist.py").read_text()
STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n"


def proved(tmp_path: Path, *paths: Path, ranks: int = 2, job: str = "", **how: Any) -> tuple[int, str]:
    """Return the exit code of `migrate --prove` and what was printed.

    Args:
        job: words for the script.
        how: of the launch.
    """
    options = f"--prove -np {ranks} --steps 4 --out {tmp_path / 'proof'} -- {job}".split()
    result = launch("python", 1, ["-m", "hvd_trainer", "migrate", *paths, *options], check=False, **how)
    return result.returncode, result.stdout


def prove(tmp_path: Path, script: str, ranks: int = 2) -> tuple[int, str]:
    path = tmp_path / "train.py"
    path.write_text(script)
    return proved(tmp_path, path, ranks=ranks, job="--epochs 1")


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
    assert code == 0, printed
    assert "old and new differ before the first step" in printed
    line = script.splitlines().index(STATE.strip()) + 1
    assert f"train.py:{line}: {STATE.strip()}\n    A new optimizer has no state to send" in printed
    assert "old and new: the same bits through 4 steps" in printed.partition("Without that trap of Horovod:")[2]


ALIKE = """
import torch
import torch.distributed as dist
import horovod.torch as hvd
from torch import nn

hvd.init()
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def test_ranks_that_a_script_seeds_alike_do_not_hide_a_lost_gradient(tmp_path: Path) -> None:
    """Each rank trained on the same numbers, and so alike without an exchange."""
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text(ALIKE)
    wrap = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
    new.write_text(ALIKE.replace(wrap, "").replace("hvd.init", "dist.init_process_group"))
    words = ["-np", "3", "--backend", "ddp,ddp", "--steps", "4", "--out", str(tmp_path / "out"), "--new", str(new)]
    result = launch("python", 1, ["-m", "hvd_trainer", "parity", *words, "--", str(old)], check=False)
    assert result.returncode == 1, result.stdout
    assert "old and new differ in step 2" in result.stdout, result.stdout


def test_a_script_beside_its_package_is_proved_with_it(tmp_path: Path) -> None:
    """It imports what is migrated, by PYTHONPATH, and reads data beside its files."""
    package, script = tmp_path / "job/nets", tmp_path / "job/bin/train.py"
    for folder in (package, script.parent):
        folder.mkdir(parents=True)
    (tmp_path / "job/setup.py").write_text("")
    (package / "rate.txt").write_text("0.1")
    (package / "__init__.py").write_text("")
    wrap = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
    module = "from pathlib import Path\nimport horovod.torch as hvd\n\n"
    module += "RATE = float(Path(__file__).with_name('rate.txt').read_text())\n"
    module += "\n\ndef begin():\n    hvd.init()\n    return hvd.rank()\n"
    (package / "world.py").write_text(module)
    text = ALIKE.replace("import torch.distributed as dist\n", "from nets import world\n")
    text += "assert __file__.rpartition('/bin')[0] == world.__file__.rpartition('/nets')[0], world.__file__\n"
    script.write_text(text.replace("hvd.init", "world.begin").replace("0.1", "world.RATE"))
    assert wrap in text
    code, printed = proved(tmp_path, script, package, env={"PYTHONPATH": f"{tmp_path}/job:{REPOSITORY}"})
    assert "old and new: the same bits through 4 steps" in printed, printed
    assert code == 0


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
