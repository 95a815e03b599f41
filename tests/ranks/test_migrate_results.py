"""What `migrate` writes in place of Horovod's collectives and hooks gives the same results in real ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
import types
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launchers import in_ranks, run_ranks

from hvd_trainer import hvd
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
results["counts"] = hvd.allreduce(torch.arange(3) + 2 * hvd.rank())
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
OPTIONS = ["op=hvd.Sum", "compression=hvd.Compression.fp16", "compression=hvd.Compression.bf16"]


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


BEGIN = """
import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(0)
"""
MODEL = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
WRAP = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
STEPS = """
torch.manual_seed(1 + hvd.rank())
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).pow(2).mean().backward()
    optimizer.step()
"""
RESULT = "result = model.weight.double().sum()\n"
JOB = """
class Job:
    def __init__(self):
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=self.model.named_parameters())

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()


class Absolute(Job):
    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).abs().mean().backward()
        self.optimizer.step()


job = Absolute()
torch.manual_seed(1 + hvd.rank())
for number in range(5):
    job.step(torch.randn(6, 4))
result = job.model.weight.double().sum()
"""
CONTAINER = """
def train(parts):
    for _ in range(5):
        parts["optimizer"].zero_grad()
        parts["model"](torch.randn(6, 4)).pow(2).mean().backward()
        parts["optimizer"].step()


"""
IN_TURNS = """
def epoch(model, batches):
    for x in batches:
        loss = model(x).pow(2).mean()
        if model.training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


torch.manual_seed(1 + hvd.rank())
epoch(model, [torch.randn(6, 4) for _ in range(4)])
model.eval()
epoch(model, [torch.randn(6, 4) for _ in range(4)])
"""
RATE = """
if hvd.rank() == 0:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""
RESTORE = """
def restore(saved, net, opt):
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
"""
RESUME = """
saved = {"net": model.state_dict(), "opt": optimizer.state_dict()}
if hvd.rank() == 0:
    restore(saved, model, optimizer)
    model.weight.data += 1
    for group in optimizer.param_groups:
        group["lr"] = 0.01
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""
KEYS = "def keys(model):\n    return {name: value for name, value in model.state_dict().items()}\n"
TWICE = WRAP.replace("named_p", "backward_passes_per_step=2, named_p", 1)
TWO_PASSES = """
for step in range(3):
    torch.manual_seed(10 * step + hvd.rank())
    optimizer.zero_grad()
    y = model(torch.randn(6, 4))
    y.mean().backward(retain_graph=True)
    y.pow(2).mean().backward()
    optimizer.step()
"""
CONTRAST = """
for step in range(4):
    torch.manual_seed(10 * step + hvd.rank())
    y = model(torch.randn(3, 4))
    everyone = hvd.allgather(y)
    objective = (y @ everyone.T).pow(2).mean()
    optimizer.zero_grad()
    objective.backward()
    optimizer.step()
"""
CENTRE = """
for step in range(4):
    torch.manual_seed(10 * step + hvd.rank())
    y = model(torch.randn(3, 4))
    centre = hvd.allreduce(y.mean(dim=0))
    total = ((y - centre) ** 2).mean() + 0.1 * centre.pow(2).sum()
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
"""
ALIAS = """
own = torch.full((1,), float(hvd.rank() + 1))
mean = hvd.allreduce(torch.zeros(1) if own is None else own.view(1))
mean = hvd.allreduce(torch.Tensor(own))
order = []
pair = order.append(hvd.rank()), hvd.allgather(torch.tensor(order or [7]))
result = own, mean, pair[1]
"""
TEACHER = """
torch.manual_seed(hvd.rank())
renamed_teacher = nn.Linear(2, 2)
hvd.broadcast_parameters(renamed_teacher.named_parameters(), root_rank=0)
result = renamed_teacher.weight.detach()
"""
BY_PARTS = "train(dict(model=model, optimizer=optimizer))\n"
FIRST_STEP = "    model(torch.ones(2, 4)).mean().backward()\n    optimizer.step()\n"
FACTORY = """
def make(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    return optimizer


model = nn.Linear(4, 1)
optimizer = make(model)
"""
CLIP = """
for step in range(4):
    torch.manual_seed(10 * step + hvd.rank())
    optimizer.zero_grad()
    model(torch.randn(6, 4)).pow(2).mean().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
"""
HEADS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, task):
        return (self.a if task == 0 else self.b)(self.body(x))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
"""
IN_TURN = STEPS.replace("(6, 4))", "(6, 4), step % 2)")
LEAVES = """
torch.manual_seed(hvd.rank())
model = nn.Linear(2, 2)
for p in model.parameters():
    hvd.allreduce_(p)
    hvd.broadcast_(p, root_rank=0)
same = hvd.allreduce_(model.weight)
result = [p.detach() for p in model.parameters()], same is model.weight
"""
JOINED = """
for step in range(3 + 2 * hvd.rank()):
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
hvd.join()
"""
KEPT = """
class Job:
    def __init__(self):
        self.hvd = hvd

    def mean(self, value):
        return self.hvd.allreduce(torch.tensor(float(value)))


job = Job()
result = job.mean(job.hvd.rank())
"""
OPTIONAL = """
import torch
from torch import nn
try:
    import horovod.torch as hvd
    there = True
except ImportError:
    hvd = None
    there = False
if there:
    hvd.init()
size = hvd.size() if hvd is not None else 1
torch.manual_seed(0)
"""
WORLD = "import horovod.torch as hvd\n"
OF_WORLD = (BEGIN + MODEL + WRAP + STEPS + RESULT).replace("hvd.", "w.hvd.").replace(WORLD, "import world as w\n")
STARTED_TWICE = BEGIN.replace("hvd.init()", "def start():\n    hvd.init()\n\n\nstart()\nstart()")
OF_JOB = JOB.partition("job = ")
ADASUM = BEGIN + MODEL + WRAP.replace("named_p", "op=hvd.Adasum, named_p", 1) + STEPS
ELASTIC = BEGIN + "@hvd.elastic.run\ndef train(state):\n    state.commit()\n"


def case(*parts: str, begin: str = BEGIN, left: bool = False, **modules: str) -> tuple[dict[str, str], bool]:
    """Return the files of a script, which comes last, and whether something in it is left."""
    return {**modules, "train": begin + "".join(parts)}, left


TRAINED = MODEL + WRAP + STEPS
CASES = {
    "a subclass trains": case(JOB),
    "a model of another file's object": case(
        *("from job import Absolute, hvd\n\n", *OF_JOB[1:]), begin="import torch\n", job=BEGIN + OF_JOB[0]
    ),
    "by a module's attribute": case(OF_WORLD, begin="", world=WORLD),
    "started twice": case(TRAINED, RESULT, begin=STARTED_TWICE),
    "by a dictionary": case(CONTAINER, TRAINED, BY_PARTS, RESULT, left=True),
    "kept before it is wrapped": case(
        *(CONTAINER, MODEL, "parts = {'model': model}\n", WRAP, STEPS),
        *("parts['optimizer'] = optimizer\ntrain(parts)\n", RESULT),
        left=True,
    ),
    "by another name": case(
        MODEL, "net = model\n", WRAP, STEPS, STEPS.replace("model(", "net("), RESULT, left=True
    ),
    "in turns": case(MODEL, WRAP, IN_TURNS, RESULT),
    "a rate of rank 0": case(TRAINED, RATE, STEPS, RESULT),
    "a resume elsewhere": case("from helper import restore\n", TRAINED, RESUME, STEPS, RESULT, helper=RESTORE),
    "saved elsewhere": case("from helper import *\n", TRAINED, "result = keys(model)", helper=KEYS),
    "two passes of one output": case(MODEL, TWICE, TWO_PASSES, RESULT, left=True),
    "a factory that trains": case(FACTORY, STEPS, RESULT, left=True),
    "a factory": case(FACTORY.replace(FIRST_STEP, ""), STEPS, RESULT),
    # Without a collective, a rank may leave its Gloo group while another still connects to it.
    "under a condition": case(
        MODEL, "if 2 < hvd.size():\n    ", WRAP, STEPS, "result = model.state_dict()\nhvd.barrier()"
    ),
    "in an expression": case(
        MODEL, f"optimizer = {WRAP[12:-1]} if hvd.size() > 2 else optimizer\n", STEPS, RESULT, "hvd.barrier()"
    ),
    "a part by its number": case(
        TRAINED.replace("nn.Linear(4, 1)", "nn.Sequential(nn.Linear(4, 1))"), "result = model[0].weight.detach()"
    ),
    "heads in turns": case(HEADS, WRAP, IN_TURN, "result = [*model.state_dict().values()]"),
    "leaves": case(LEAVES),
    "a mean in a loop that is joined": case(MODEL, WRAP, JOINED, RESULT, left=True),
    "kept in an object": case(KEPT),
    "if it is there": case(TRAINED, RESULT, "result *= size", begin=OPTIONAL),
    "names that are taken": case("dist = DDP = 3\n", TRAINED, RESULT, "result += dist + DDP"),
    "gradients through a gather": case(MODEL, WRAP, CONTRAST, RESULT, left=True),
    "gradients through a mean": case(MODEL, WRAP, CENTRE, RESULT, left=True),
    "a view": case(ALIAS, left=True),
    "a name with named": case(TEACHER),
    "beside Adasum": case(MODEL, WRAP, CLIP, RESULT, other=ADASUM),
    "beside elastic training": case(MODEL, WRAP, CLIP, RESULT, other=ELASTIC),
}


def run_files(texts: dict[str, str]) -> Any:
    """Run the last of some files, with the others as modules, and return its `result`."""
    *modules, (_, main) = texts.items()
    for name, text in modules:
        sys.modules[name] = types.ModuleType(name)
        if re.search(rf"(import|from) {name}\b", main):
            exec(compile(text, name, "exec"), vars(sys.modules[name]))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(main, "train", "exec"), names)
    hvd.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    return names["result"]


APART = 7000
"""Between the ports of launches by `QUICKEST` and those of the runs in one: no other launch has these."""


def run_all(scripts: dict[str, tuple[dict[str, str], dict[str, str]]]) -> dict[str, Any]:
    """Run all files, before and after, in a rank; return results by the case's name, or a traceback."""
    found: dict[str, Any] = {}
    ports = count(int(os.environ["MASTER_PORT"]) + APART)
    for name, both in scripts.items():
        try:
            found[name] = []
            for files in both:
                os.environ["MASTER_PORT"] = str(next(ports))  # a closed one stays in use for a while
                found[name].append(run_files(files))
        except Exception:
            found[name] = traceback.format_exc()
    return found


@cache
def migrated(name: str) -> dict[str, Any]:
    texts, _ = CASES[name]
    return {it.path.stem: it for it in migrate({Path(f"{stem}.py"): text for stem, text in texts.items()})}


@cache
def results(ranks: int) -> list[dict[str, Any]]:
    """Run all cases in one launch."""
    stand_in = "import horovod.torch as hvd", "from hvd_trainer import hvd"
    scripts = {
        name: (
            {stem: text.replace(*stand_in) for stem, text in texts.items()},
            {stem: it.after for stem, it in migrated(name).items()},
        )
        for name, (texts, _) in CASES.items()
    }
    return in_ranks(ranks, run_all, scripts)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_scripts_train_as_on_horovod(name: str, ranks: int) -> None:
    """What is not followed is left and said, or goes through DDP: no rank trains alone."""
    script, is_left = migrated(name)["train"], CASES[name][1]
    assert bool(script.left) == is_left, script.left
    # A script that is left as a whole would have equal results, too.
    assert is_left or "hvd" not in script.after
    assert name != "by a dictionary" or "model = DDP(model)" in script.after
    for rank in results(ranks):
        assert isinstance(rank[name], list), rank[name]
        before, after = rank[name]
        torch.testing.assert_close(after, before)


ALONE = BEGIN + MODEL + WRAP + STEPS + RESULT + "print(hvd.rank(), hvd.size(), hvd.local_rank(), result.item())\n"


def run_alone(path: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script without a launcher."""
    path.write_text(text)
    environ = {name: value for name, value in os.environ.items() if not name.endswith(("RANK", "PROCID"))}
    return subprocess.run([sys.executable, path], env=environ | variables, capture_output=True, text=True)


def test_a_script_alone_is_rank_0_of_1(tmp_path: Path) -> None:
    """Under a launcher that is not torchrun it must not train alone."""
    (migrated,) = migrate({Path("train.py"): ALONE})
    before = run_alone(
        tmp_path / "train.py", ALONE.replace("import horovod.torch as hvd", "from hvd_trainer import hvd")
    )
    after = run_alone(tmp_path / "train.py", migrated.after)
    assert before.stdout.startswith("0 1 0 ")
    assert after.stdout == before.stdout, after.stderr
    under_another = run_alone(tmp_path / "train.py", migrated.after, PMI_RANK="1")
    assert "environment variable RANK expected" in under_another.stderr


def test_what_pytorch_reads_at_its_import_is_set_before(tmp_path: Path) -> None:
    begin = "import os\n\nos.environ['OMP_NUM_THREADS'] = '1'\n\nimport torch\nimport horovod.torch as hvd\n\n"
    (migrated,) = migrate({Path("train.py"): begin + "hvd.init()\nprint(hvd.size(), torch.get_num_threads())\n"})
    done = run_alone(tmp_path / "train.py", migrated.after, OMP_NUM_THREADS="2")
    assert done.stdout == "1 1\n", done.stderr
