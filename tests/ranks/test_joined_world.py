"""Ranks that somebody else has made a world of, by torch.distributed, before this package is asked."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import digits_job
import environments
import pytest
import torch
import torch.distributed as dist
from combinations import case
from launchers import in_ranks, launch, write_script
from torch import nn
from trainings import fit_small, signs, train

from hvd_trainer import LaunchError, hvd
from hvd_trainer.backends import process_group
from hvd_trainer.errors import BackendError
from hvd_trainer.launch.launchers import without_ranks
from hvd_trainer.launch.world import World, find_world, may_be_first

pytestmark = pytest.mark.warm

SIZES = [2, 3, case(4, when="long")]
ENGINES = [case("ddp"), case("horovod")]
WAYS = ["env://", "tcp://", "file://"]
"""How the group was made: by the launcher's variables, which stay, or without any."""


@contextmanager
def group_of_others(way: str, folder: str, port: str, backend: str = "gloo") -> Iterator[tuple[int, int]]:
    """Make the default group, as another package does, and end it; see that it was left as it was."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if way == "env://":
        dist.init_process_group(backend)
    else:
        for name in os.environ.keys() - without_ranks(os.environ).keys():
            del os.environ[name]
        url = f"tcp://127.0.0.1:{port}" if way == "tcp://" else f"file://{folder}/store"
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)
    before = dist.group.WORLD, dict(dist.distributed_c10d._world.pg_map)
    yield rank, size
    assert (dist.group.WORLD, dict(dist.distributed_c10d._world.pg_map)) == before
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == size * (size + 1) / 2
    dist.destroy_process_group()


def fit_twice(engine: str, *group: str) -> list[list[Any]]:
    """Train twice in one process, in a group that others have made or without; return weights and places."""
    with group_of_others(*group) if group else nullcontext():
        return [fit_small(engine, epochs=2) for _ in range(2)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("engine", ENGINES)
def test_trainer_joins_a_group_and_leaves_it_as_it_was(size: int, engine: str, tmp_path: Path) -> None:
    """It asked for the call of init_process_group to be taken out, or for a port that the group had taken."""
    joined = in_ranks(size, fit_twice, engine, WAYS[size - 2], str(tmp_path), digits_job.free_port())
    assert joined == in_ranks(size, fit_twice, engine)
    assert [[place for _, place in both] for both in joined] == [[[rank, size, 0, 1]] * 2 for rank in range(size)]
    assert len({weights for both in joined for weights, _ in both}) == 1


def train_in_stages(engine: str) -> float:
    with group_of_others("env://", "", "", "cpu:gloo"):
        samples = signs(48), signs(12)
        return float(
            train(engine, three_layers, *samples, stages=2, epochs=1, batch_size=4).history[-1]["val_loss"]
        )


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_for_stages_end_beside_the_joined_one(engine: str) -> None:
    assert len({*in_ranks(4, train_in_stages, engine)}) == 1


def use_hvd(way: str, folder: str, port: str) -> list[float]:
    with group_of_others(way, folder, port) as (rank, size):
        totals = []
        for _ in range(2):
            hvd.init()
            assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
            totals.append(hvd.allreduce(torch.tensor(rank + 1.0), op=hvd.Sum).item())
            hvd.shutdown()
        return totals


@pytest.mark.parametrize("size", SIZES)
def test_hvd_joins_a_group(size: int, tmp_path: Path) -> None:
    args = (WAYS[size - 2], str(tmp_path), digits_job.free_port())
    totals = in_ranks(size, use_hvd, *args)
    assert totals == [[size * (size + 1) / 2] * 2] * size


def use_a_group_of_another_backend() -> list[Any]:
    """Train where the default group is of a backend that does not fit."""
    import hvd_trainer.c10d  # noqa: F401  registers a backend that exchanges CPU tensors by itself

    dist.init_process_group("horovod")
    before = dist.group.WORLD
    trained = fit_twice("ddp")
    assert dist.group.WORLD is before
    dist.destroy_process_group()
    return trained


def test_ddp_makes_a_group_of_its_own_where_the_backend_does_not_fit() -> None:
    assert in_ranks(3, use_a_group_of_another_backend) == in_ranks(3, fit_twice, "ddp")


FAILING = """
import sys, torch
import torch.distributed as dist
from torch import nn
from hvd_trainer import Callback, TensorData, Trainer, TrainerOptions, hvd, run_job

class Fail(Callback):
    def on_step_end(self, run, result):
        if run.progress.step == 2 and dist.get_rank() == 1:
            raise ValueError("planted")

def job(options):
    dist.init_process_group("gloo")
    with Trainer(options) as trainer:
        model = nn.Linear(6, 2)
        data = TensorData(torch.randn(96, 6), torch.zeros(96).long())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, nn.functional.cross_entropy, data, callbacks=[Fail()])

if "hvd.py" in sys.argv[0]:
    dist.init_process_group("gloo")
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == 1:
        raise ValueError("planted")
    hvd.allreduce(torch.ones(1))
run_job(TrainerOptions, job)
"""


@pytest.mark.parametrize("engine", [*ENGINES, case("hvd")])
@pytest.mark.parametrize("size", [3, case(4, when="long")])
def test_failure_in_a_joined_world_names_the_rank(engine: str, size: int, tmp_path: Path) -> None:
    script = write_script(tmp_path / f"{engine}.py", FAILING)
    options = [] if engine == "hvd" else ["--backend", engine]
    argv = [str(script), "--device", "cpu", "--batch-size", "4", *options]
    result = launch("hand", size, argv, timeout_s=60, check=False)
    assert result.returncode != 0
    assert set(re.findall(r"failure: rank (\d) of (\d)", result.stderr)) == {("1", str(size))}, result.stderr
    assert "ValueError: planted" in result.stderr


def test_failure_of_a_joined_trainer_under_run_is_reported_once(tmp_path: Path) -> None:
    """The script's session reported it again."""
    script = write_script(tmp_path / "script.py", FAILING)
    job = [str(script), "--device", "cpu", "--batch-size", "4", "--backend", "ddp"]
    result = launch("python", 1, ["-m", "hvd_trainer", "run", "-np", "3", "--", *job], check=False)
    assert result.returncode != 0
    assert re.findall(r"failure: rank (\d) of 3", result.stderr) == ["1"], result.stderr


TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from hvd_trainer import TensorData, Trainer, hvd, parse, TrainerOptions

before = dist.group.WORLD
sums = []
for turn in range(2):
    torch.manual_seed(3)
    model = nn.Linear(6, 2)
    data = TensorData(torch.randn(48, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(48).long())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(parse(TrainerOptions, sys.argv[1:])) as trainer:
        trainer.fit(model, optimizer, nn.functional.cross_entropy, data)
        rank = trainer.world.rank
    sums.append(model.weight.double().sum().item())
hvd.init()
assert hvd.rank() == rank == dist.get_rank()
sums.append(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item())
hvd.shutdown()
assert dist.group.WORLD is before
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"ended {[*sums, total.item()]}\\n")
"""
SMALL = ("--device", "cpu", "--epochs", "1", "--batch-size", "4")
MADE_BY = {
    "accelerate": "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)",
    "fabric": (
        "from lightning_fabric import Fabric\n"
        "fabric = Fabric(accelerator='cpu', devices=3, strategy='ddp')\nfabric.launch()"
    ),
    "script": "import torch.distributed as dist\ndist.init_process_group('gloo')",
}


@pytest.mark.parametrize(
    ("maker", "launcher", "engine"),
    [
        case("accelerate", "torchrun", "ddp"),
        case("fabric", "torchrun", "horovod", when="long"),
        case("script", "run", "ddp"),
        case("script", "run", "horovod"),
        case("accelerate", "run", "ddp", when="long"),
    ],
)
def test_worlds_of_other_packages_and_of_scripts_under_run(
    maker: str, launcher: str, engine: str, tmp_path: Path
) -> None:
    """Ports were bound twice, and `run` refused a Trainer behind init_process_group."""
    script = write_script(tmp_path / "script.py", f"{MADE_BY[maker]}\n{TRAINING}")
    job = [str(script), "--backend", engine, *SMALL]
    if launcher == "run":
        result = launch("python", 1, ["-m", "hvd_trainer", "run", "-np", "3", "--", *job])
    else:
        result = launch(launcher, 3, job)
    ended = re.findall("ended .*", result.stdout)
    assert len(ended) == 3
    assert len(set(ended)) == 1, ended
    first, second, *totals = ast.literal_eval(ended[0].removeprefix("ended "))
    assert (first, totals) == (second, [3.0, 3.0])


def test_accelerates_launcher_starts_ranks(tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.py", f"{MADE_BY['accelerate']}\n{TRAINING}")
    accelerate = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "3"]
    job = [str(script), "--backend", "ddp", *SMALL]
    result = launch("python", 1, [*accelerate, "--main_process_port", digits_job.free_port(), *job])
    assert len(re.findall(r"ended .*, 3.0, 3.0\]", result.stdout)) == 3, result.stdout


NOTEBOOK = f"""
import sys

def train():
    exec({MADE_BY["accelerate"]!r})
    exec({TRAINING!r}, {{"__name__": "cell"}})

if __name__ == "__main__":
    from accelerate import debug_launcher
    debug_launcher(train, num_processes=3)
"""


def test_accelerates_launcher_for_notebooks_starts_ranks(tmp_path: Path) -> None:
    """On a CPU it sets WORLD_SIZE without RANK, and its ranks meet in a file."""
    script = write_script(tmp_path / "notebook.py", NOTEBOOK)
    job = [str(script), "--backend", "ddp", *SMALL]
    result = launch("python", 1, job)
    assert len(re.findall(r"ended .*, 3.0, 3.0\]", result.stdout)) == 3, result.stdout


# What cannot be joined.


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FOUR = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_group_of_one_that_the_variables_allow(group: None) -> None:
    assert find_world({}) == World(launcher="torch.distributed")
    assert find_world(FOUR) == World(launcher="hand")
    assert find_world({"RANK": "3"}).size == 1, "half of a rank says nothing beside a group"
    assert may_be_first({"RANK": "1", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (FOUR | {"WORLD_SIZE": "2"}, "hand"),
        (environments.CASES["torchrun_2"][0], "torchrun"),
        (environments.CASES["mpirun_2"][0], "mpirun"),
        (environments.CASES["srun_2"][0], "srun"),
    ],
)
def test_group_of_another_size_than_the_variables_is_refused(
    group: None, variables: dict[str, str], launcher: str
) -> None:
    words = f"{launcher} started rank 0 of 2, but torch.distributed, already initialised, says rank 0 of 1"
    with pytest.raises(LaunchError, match=words):
        find_world(variables)


def test_group_for_gpus_is_refused_on_a_cpu(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    words = r"is initialised for cuda:nccl, and this rank trains on the CPU. Type --device cuda, or call init_"
    with pytest.raises(BackendError, match=words):
        process_group._fits(torch.device("cpu"), "gloo")
    assert not process_group._fits(torch.device("cuda", 0), "nccl"), "it exchanges no CPU tensors"
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert process_group._fits(torch.device("cuda", 0), "nccl")
    assert not process_group._fits(torch.device("cuda", 0), "gloo")


ON_ONE_RANK = """
import os, sys, time
import torch.distributed as dist
from hvd_trainer import Trainer, TrainerOptions, run_job

def job(options):
    dist.init_process_group("gloo")
    if dist.get_rank() == int(sys.argv[0][-4]):
        dist.destroy_process_group()
    with Trainer(options):
        pass

run_job(TrainerOptions, job)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_group_on_some_ranks_only_is_refused_in_time(lost: int, tmp_path: Path) -> None:
    script = write_script(tmp_path / f"lost{lost}.py", ON_ONE_RANK)
    argv = [str(script), "--backend", "ddp", "--device", "cpu", "--startup-timeout-s", "3"]
    result = launch("hand", 3, argv, timeout_s=60, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: ") == 3, result.stderr
    assert "init_process_group on all ranks, or on none" in result.stderr
