"""`python -m hvd_trainer run`: scripts that know nothing of this package, on either engine."""

from __future__ import annotations

import importlib
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import digits_job
import environments
import process_tree
import psutil
import pytest
from combinations import case
from launchers import REPOSITORY, Result, launch, start, write_script
from requirements import requires
from waiting import wait_for

from hvd_trainer.measure.message import Message
from hvd_trainer.tools.run import engines
from hvd_trainer.utils.import_hooks import ImportHooks

pytestmark = pytest.mark.warm
TORCH_SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert os.environ["RANK"] == os.environ["HOROVOD_RANK"] == str(rank)
assert os.environ["WORLD_SIZE"] == os.environ["HOROVOD_SIZE"] == str(size)
assert os.environ["LOCAL_RANK"] == os.environ["HOROVOD_LOCAL_RANK"] == str(rank)
assert os.environ["LOCAL_WORLD_SIZE"] == str(size)
# One write, so that lines of several ranks do not mix.
sys.stdout.write(f"sum {total.item():g} on rank {rank} of {size} by {__name__} {sys.argv[1:]}\\n")
sys.stdout.flush()
if "raise after an exchange" in sys.argv:
    time.sleep(2.5 * (1 - rank))
    dist.barrier()
if rank == 1 and any("raise" in word for word in sys.argv):
    raise ValueError("planted")
if rank == 1 and "leave" in sys.argv:
    sys.exit(7)
if rank == 1 and "hang" in sys.argv:
    time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""


HOROVOD_SCRIPT = """
import os, signal, sys, time
import torch
import horovod.torch as hvd
from horovod.torch.compression import Compression

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    if step == 1 and hvd.rank() == 1 and "raise" in sys.argv:
        raise ValueError("planted")
    if step == 1 and hvd.rank() == 1 and "hang" in sys.argv:
        time.sleep(600)
    if step == 1 and hvd.rank() == 1 and "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(f"weights {model.weight.sum().item()!r} by {hvd.__name__}\\n")
"""
ENGINES = ("ddp", "horovod")
EXAMPLES = REPOSITORY / "examples" / "mnist"
MNIST = REPOSITORY.parent / "shared" / "data" / "mnist"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_script(tmp_path / "script.py", TORCH_SCRIPT)


SHELLS = {
    "of Slurm's": environments.CASES["salloc_interactive"][0],
    "of a lone pod": {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
    "of one of two pods": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
    "with half of a rank": {"RANK": "1"},
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("size", [2, case(1, when="long")])
def test_ranks_that_are_asked_for_are_started_in_any_shell(shell: str, size: int, script: Path) -> None:
    """Its variables made the command one rank of what they speak of: an error, or a wait for the others."""
    argv = ["-m", "hvd_trainer", "run", "-np", str(size), "--", str(script)]
    result = launch("python", 1, argv, env=SHELLS[shell])
    total = sum(range(size + 1))
    assert sums(result) == [f"sum {total} on rank {rank} of {size} by __main__ []" for rank in range(size)]
    of_others = "WORLD_SIZE=2 is set, as for one of 2 ranks, and --np starts a job of its own"
    assert result.stderr.count(of_others) == (shell == "of one of two pods")


@pytest.fixture
def horovod_script(tmp_path: Path) -> Path:
    return write_script(tmp_path / "train.py", HOROVOD_SCRIPT)


def run(*words: object, launcher: str = "python", ranks: int = 1, **options: Any) -> Result:
    argv = ["-m", "hvd_trainer", "run", *map(str, words)]
    return launch(launcher, ranks, argv, **options)


def sums(result: Result) -> list[str]:
    # horovodrun puts the rank before each line.
    return sorted(re.findall("sum .*", result.stdout))


WAYS = [
    pytest.param("python", 1, ()),
    pytest.param("python", 2, ("-np", 2)),
    pytest.param("python", 2, ("-np", 2, "--backend", "horovod"), marks=requires("horovod")),
    # Whoever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: the places on the node follow from the meeting.
    pytest.param("hand", 4, ()),
    pytest.param("hand", 3, ("--backend", "horovod"), marks=requires("horovod")),
    # mpirun, srun and horovodrun set none of the variables that such a script reads.
    *(case(name, 2, ()) for name in ("torchrun", "mpirun", "srun", "horovodrun")),
]


@pytest.mark.parametrize(("launcher", "size", "words"), WAYS)
def test_script_gets_its_ranks_and_arguments(
    launcher: str, size: int, words: tuple[object, ...], script: Path
) -> None:
    ranks = 1 if launcher == "python" else size
    result = run(*words, "--", script, "--epochs", 3, launcher=launcher, ranks=ranks)
    total = sum(range(size + 1))
    assert sums(result) == [
        f"sum {total} on rank {rank} of {size} by __main__ ['--epochs', '3']" for rank in range(size)
    ]


@requires("horovod")
def test_horovod_script_trains_the_same_weights_on_either_engine(horovod_script: Path) -> None:
    words = ("-np", 2, "--backend")
    output = {engine: run(*words, engine, "--", horovod_script).stdout for engine in ("ddp", "horovod")}
    printed = {engine: re.findall("weights (.*) by (.*)", text) for engine, text in output.items()}
    assert output["ddp"].count("\n") == 2, "only the script prints"
    assert [name for _, name in printed["ddp"]] == ["hvd_trainer.hvd"] * 2
    assert [name for _, name in printed["horovod"]] == ["horovod.torch"] * 2
    assert len({weights for lines in printed.values() for weights, _ in lines}) == 1


FIRST_STEPS = """
import sys
import torch
from torch import nn, optim
import horovod.torch as hvd

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)
        self.linear.bias.requires_grad = False

hvd.init()
me, printed = hvd.rank(), []
for make, wrapped, resumes in (
    (lambda its: optim.AdamW(its.linear.parameters(), lr=0.1 + me, weight_decay=0.1), "no", False),
    (lambda its: optim.AdamW(its.linear.parameters(), lr=0.1, weight_decay=0.1), "before", me == 0),
    (lambda its: optim.AdamW(its.linear.parameters(), lr=0.1, weight_decay=0.1), "after", me == 0),
    (lambda its: optim.SGD(its.linear.parameters(), lr=0.1 + me, momentum=0.9, dampening=0.5), "after", False),
    (lambda its: optim.SGD(its.parameters(), lr=0.1 + me), "no", False),
    (lambda its: optim.SparseAdam(its.table.parameters(), lr=0.1), "no", False),
):
    torch.manual_seed(3)
    model = Model()
    optimizer = make(model)
    if resumes:
        model.linear(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    saved = optimizer.state_dict()
    if wrapped == "before":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        optimizer.load_state_dict(saved)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if wrapped == "after":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    gradients = [its.grad is not None and its.grad.is_sparse for its in model.parameters()]
    model.linear(model.table(torch.arange(5))).square().sum().backward()
    if wrapped == "no":
        optimizer.step()
    else:
        with optimizer.skip_synchronize():
            optimizer.synchronize()
            optimizer.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    printed.append((gradients, rates, [its.sum().item() for its in model.parameters()], len(optimizer.state)))
sys.stdout.write(f"rank {me}: {printed}\\n")
"""


@requires("horovod")
def test_horovods_step_before_the_training_is_taken_if_asked_for(tmp_path: Path) -> None:
    """By itself the native side leaves it out, and Adam's first update is another one."""
    (tmp_path / "train.py").write_text(FIRST_STEPS)
    words = ("-np", 2, "--exactly-horovod", "--backend")
    printed = [sorted(run(*words, engine, "--", tmp_path / "train.py").stdout.splitlines()) for engine in ENGINES]
    assert printed[0] == printed[1]
    assert len(printed[0]) == 2


ON_THREE_RANKS = """
import hashlib, sys, torch
import horovod.torch as hvd
from torch import nn
hvd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 7))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for step in range(8):
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
sys.stdout.write(hashlib.sha256(weights.numpy().tobytes()).hexdigest() + "\\n")
"""


@requires("horovod")
def test_engines_give_a_script_the_same_bits_on_three_ranks_without_fusion(tmp_path: Path) -> None:
    """Horovod fuses gradients by timing, and from three ranks on a sum depends on what shares its buffer."""
    (tmp_path / "train.py").write_text(ON_THREE_RANKS)
    words = ("-np", 3, "--exactly-horovod", "--fusion-threshold-mb", 0, "--backend")
    printed = [run(*words, engine, "--", tmp_path / "train.py").stdout.splitlines() for engine in ENGINES]
    assert printed[0] == printed[1]
    assert len(printed[0]) == 3
    assert len(set(printed[0])) == 1


@requires("horovod")
def test_script_for_hvd_runs_on_horovod(tmp_path: Path) -> None:
    """It ran on torch.distributed, silently, although Horovod was asked for."""
    script = tmp_path / "train.py"
    for submodule in ("compression", "common.util"):
        script.write_text(
            f"from hvd_trainer import hvd\nimport hvd_trainer.hvd.{submodule} as part\n"
            "hvd.init()\nprint(f'{hvd.size()} {hvd.__name__} {part.__name__}\\n', end='')\n"
        )
        output = run("-np", 2, "--backend", "horovod", "--", script).stdout
        root = "horovod" if submodule.startswith("common") else "horovod.torch"
        assert output == f"2 horovod.torch {root}.{submodule}\n" * 2


@pytest.mark.long
@requires("horovod")
@pytest.mark.skipif(not (MNIST / "MNIST" / "raw").is_dir(), reason="needs MNIST in ../shared/data/mnist")
def test_scripts_by_hand_train_the_same_weights_on_either_engine(tmp_path: Path) -> None:
    """Each of the two was written for one engine, and neither is changed."""
    weights = set()
    for name in ("plain_horovod.py", "plain_ddp.py"):
        for engine in ("ddp", "horovod"):
            file = tmp_path / f"{name}.{engine}"
            words = ("--data-dir", MNIST, "--max-steps", 20, "--save", file)
            run("-np", 2, "--backend", engine, "--", EXAMPLES / name, *words)
            weights.add(file.read_bytes())
    assert len(weights) == 1


SMALL_SCRIPTS = [
    pytest.param(
        "import horovod.tensorflow as hvd", (), 2, "error: horovod.tensorflow is not there on torch.distributed"
    ),
    # Horovod's own tests of horovod.torch import helpers of its launcher.
    pytest.param(
        "import horovod\nimport horovod.torch as hvd\nfrom horovod.runner.util.threads import in_thread\n"
        "print(horovod.__version__, hvd.__name__, in_thread.__module__)",
        *((), 0, "0.28.1 hvd_trainer.hvd horovod.runner.util.threads"),
        marks=requires("horovod"),
    ),
    pytest.param("print('hello')", ("--np", 2), 0, "each of the 2 processes runs it alone"),
    pytest.param(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:1', rank=0, world_size=1)",
        *(("--np", 2), 2, "as rank 0 of 1, but run has started rank"),
    ),
    # A fork has the rank's memory and connections, and is no rank.
    pytest.param(
        "import os, sys, torch.distributed as dist\ndist.init_process_group('gloo')\nchild = os.fork()\n"
        "if child == 0: sys.exit(0)\nos.waitpid(child, 0)\ndist.barrier()\n"
        "if dist.get_rank() == 0: print('its child has ended')",
        *(("--np", 2), 0, "its child has ended"),
    ),
    # A rank may leave by a thread that sees to it that it ends.
    pytest.param(
        "import os, threading, time, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0: print('it leaves', flush=True)\nthreading.Timer(0.5, os._exit, (0,)).start()\n"
        "time.sleep(1000)",
        *(("--np", 2), 0, "it leaves"),
    ),
    # DDP imports it: after the group's start it would keep that, and some ranks would abort at their end.
    pytest.param(
        "import sys, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0: print('imported before:', 'torch.distributed.nn.functional' in sys.modules)",
        *(("--np", 2), 0, "imported before: True"),
    ),
    # A mesh starts torch.distributed and makes its groups by functions of its own names: Gloo carried them, and
    # nobody watched the ranks.
    pytest.param(
        "import torch.distributed as dist\n"
        "mesh = dist.device_mesh.init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))\n"
        "groups = dist.group.WORLD, mesh['dp'].get_group()\n"
        "if dist.get_rank() == 0: print('by', [group._get_backend_name() for group in groups])",
        *(("--np", 2, "--backend", "horovod"), 0, "by ['horovod', 'horovod']"),
        marks=requires("horovod"),
    ),
    # There was no such variable.
    pytest.param(
        "import os, torch.distributed as dist\n"
        "url = 'tcp://{MASTER_ADDR}:{MASTER_PORT}'.format(**os.environ)\n"
        "dist.init_process_group('gloo', url, rank=int(os.environ['RANK']), world_size=2)\n"
        "if dist.get_rank() == 0: print('they have met')",
        *(("--np", 2), 0, "they have met"),
    ),
    # The watch puts a function of its own in the place of `write`, to see that the script makes progress.
    pytest.param(
        "import sys, torch.distributed as dist\nclass Copy:\n    __slots__ = ()\n"
        "    def write(self, text): sys.__stdout__.write(text)\n    def flush(self): sys.__stdout__.flush()\n"
        "sys.stdout = Copy()\ndist.init_process_group('gloo')\nif dist.get_rank() == 0: print('own stream')",
        *(("--np", 2), 0, "own stream"),
    ),
    # Each got its share of the cores all the same when the ranks met.
    pytest.param(
        "import os, torch, torch.distributed as dist\nos.environ.pop('OMP_NUM_THREADS', None)\n"
        "torch.set_num_threads(5)\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0: print('threads:', torch.get_num_threads())",
        *(("--np", 2), 0, "threads: 5"),
    ),
    pytest.param(
        "import os, torch, horovod.torch as hvd\nos.environ.pop('OMP_NUM_THREADS', None)\n"
        "torch.set_num_threads(5)\nhvd.init()\nif hvd.rank() == 0: print('threads:', torch.get_num_threads())",
        *(("--np", 2), 0, "threads: 5"),
    ),
    # Groups of torch.distributed beside Horovod: both asked for the one Horovod of the process.
    pytest.param(
        "import torch, torch.distributed as dist, horovod.torch as hvd\nhvd.init()\n"
        "dist.init_process_group('gloo')\ntotal = torch.ones(1)\n"
        "dist.all_reduce(total, group=dist.new_group([0, 1]))\ndist.destroy_process_group()\n"
        "total = hvd.allreduce(total, op=hvd.Sum)\nif hvd.rank() == 0: print('total:', total.item())",
        *(("--np", 2, "--backend", "horovod"), 0, "total: 4.0"),
        marks=requires("horovod"),
    ),
    # Horovod ended with the groups.
    pytest.param(
        "import torch, torch.distributed as dist, horovod.torch as hvd\ndist.init_process_group('gloo')\n"
        "hvd.init()\ndist.destroy_process_group()\ntotal = hvd.allreduce(torch.ones(1), op=hvd.Sum)\n"
        "if hvd.rank() == 0: print('total:', total.item())",
        *(("--np", 2, "--backend", "horovod"), 0, "total: 2.0"),
        marks=requires("horovod"),
    ),
    # Horovod was given the one that the ranks had met by, whatever the user had chosen.
    pytest.param(
        "import os\nos.environ['HOROVOD_GLOO_IFACE'] = 'chosen'\nimport horovod.torch as hvd\n"
        "library = hvd.mpi_ops._basics.MPI_LIB_CTYPES\nstart = library.horovod_init\n"
        "def init(*args):\n"
        "    if os.environ['HOROVOD_RANK'] == '0': print('interface', os.environ['HOROVOD_GLOO_IFACE'])\n"
        "    os.environ['HOROVOD_GLOO_IFACE'] = 'lo'\n"
        "    return start(*args)\n"
        "library.horovod_init = init\nhvd.init()",
        *(("--np", 2, "--backend", "horovod"), 0, "interface chosen"),
        marks=requires("horovod"),
    ),
    # The ranks of a set that is added later did not find each other, and Horovod ended after 30 s.
    pytest.param(
        "import torch, horovod.torch as hvd\n"
        "for _ in range(2):\n"
        "    hvd.init(process_sets='dynamic')\n"
        "    ends = hvd.add_process_set([0, 2])\n"
        "    if hvd.rank() != 1: total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=ends)\n"
        "    last = hvd.rank() == 2\n"
        "    hvd.barrier()\n"
        "    hvd.shutdown()\n"
        "if last: print('total:', total.item())",
        *(("--np", 3, "--backend", "horovod"), 0, "total: 2.0"),
        marks=requires("horovod"),
    ),
]


@pytest.mark.parametrize(("text", "words", "code", "said"), SMALL_SCRIPTS)
def test_small_script(text: str, words: tuple[object, ...], code: int, said: str, tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", f"{text}\n")
    result = run(*words, "--", script, check=False)
    assert result.returncode == code
    count = (result.stdout + result.stderr).count(said)
    assert count == 1 or (code and count == 2), "each rank that fails may say why"
    assert "Traceback" not in result.stderr


CALLER = """
import sys
import horovod

def train(start, *, step):
    import horovod.torch as hvd
    hvd.init()
    if "raise" in sys.argv or start < 0:
        raise ValueError("planted")
    return start + step * hvd.rank(), hvd.size(), hvd.__name__

try:
    print(horovod.run(train, args=({start},), kwargs={{"step": 5}}, {words}))
except RuntimeError as error:
    print("as RuntimeError:", error)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("words", "start", "code", "said"),
    [
        # The function's script has no `if __name__ == "__main__"`, as it needs none with Horovod.
        (
            *("np=2, hosts='localhost:2', start_timeout=60, verbose=1", 7, 0),
            "[(7, 2, 'hvd_trainer.hvd'), (12, 2, 'hvd_trainer.hvd')]",
        ),
        (
            *("num_proc=2", -1, 3),
            "as RuntimeError: horovod.run: Horovod detected that one or more processes exited with non-zero "
            "status: a rank has ended with exit code 1",
        ),
        ("np=2, hosts='node1:2', use_mpi=True", 7, 2, "no use for hosts='node1:2', use_mpi=True."),
    ],
)
def test_horovod_run(words: str, start: int, code: int, said: str, tmp_path: Path) -> None:
    """Return the results in rank order, or say which rank failed, or what it has no use for."""
    script = write_script(tmp_path / "caller.py", CALLER.format(words=words, start=start))
    result = run("--", script, check=False)
    assert result.returncode == code, result.stderr
    assert said in result.stdout + result.stderr
    assert ("ValueError: planted" in result.stderr) == (start < 0)


@pytest.mark.parametrize("engine", [case("ddp"), case("horovod")])
def test_horovod_run_calls_its_function_in_the_ranks_of_a_tool(engine: str, tmp_path: Path) -> None:
    """Each of them started ranks of its own, of which the tool saw nothing."""
    script = write_script(tmp_path / "caller.py", CALLER.format(words="np=2", start=7))
    measured = Message(log_dir=str(tmp_path)).variables()
    result = run("-np", 2, "--backend", engine, "--", script, env=measured)
    api = "hvd_trainer.hvd" if engine == "ddp" else "horovod.torch"
    assert sorted(result.stdout.split("\n")) == ["", f"[(12, 2, '{api}')]", f"[(7, 2, '{api}')]"]


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_mistake_in_the_script_is_told_once_as_python_tells_it(launcher: str, tmp_path: Path) -> None:
    """Each rank printed it, with the frames of this package."""
    script = write_script(tmp_path / "train.py", "import os\nreturn 3\n")
    plain = launch("python", 1, [str(script)], check=False)
    words = ("-np", 2) if launcher == "python" else ()
    result = run(*words, "--", script, launcher=launcher, ranks=1 if words else 2, check=False)
    assert (result.returncode, plain.returncode) == (1, 1)
    assert result.stderr.count(plain.stderr) == 1
    assert "execute(job)" not in result.stderr
    assert launcher != "python" or result.stderr == plain.stderr


def test_mistake_of_the_user_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """The other ranks waited to be ended, and what was to end them waited for them, for 10 s."""
    script = write_script(
        tmp_path / "train.py", "import sys, time\nprint(time.time())\nimport horovod.tensorflow\n"
    )
    result = run("-np", 2, "--", script, check=False)
    assert result.returncode == 2
    assert time.time() - max(map(float, result.stdout.split())) < 8


LAUNCHES = """
import os, subprocess, sys
how, script = sys.argv[1:]
programs = {
    "horovodrun": [os.path.join(os.path.dirname(sys.executable), "horovodrun"), "-np", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "run": [sys.executable, "-m", "hvd_trainer", "run", "-np", "2", "--backend", "ddp", "--"],
    "run one": [sys.executable, "-m", "hvd_trainer", "run", "-np", "1", "--backend", "ddp", "--"],
}
sys.exit(subprocess.run([*programs[how], script]).returncode)
"""
RANK_SCRIPT = """
import horovod.torch as hvd
hvd.init()
ranks = hvd.allgather_object(hvd.rank())
print(f"ranks {ranks} by {hvd.__name__}\\n", end="")
"""


@pytest.mark.parametrize(
    ("engine", "size", "how", "said"),
    [
        case("ddp", 1, "torchrun", "ranks [0, 1] by hvd_trainer.hvd"),
        case("horovod", 1, "horovodrun", "ranks [0, 1] by horovod.torch"),
        case("horovod", 1, "run", "ranks [0, 1] by hvd_trainer.hvd"),
        case("ddp", 2, "torchrun", "ranks [0, 1] by hvd_trainer.hvd", when="long"),
        case("ddp", 2, "run one", "ranks [0] by hvd_trainer.hvd", when="long"),
        case("horovod", 1, "torchrun", "but Horovod says rank 0 of 1", when="long"),
    ],
)
def test_ranks_that_a_script_starts_are_those_of_the_nearest_launcher(
    engine: str, size: int, how: str, said: str, tmp_path: Path
) -> None:
    """They trained alone, each as the rank of the script that had started them, with exit code 0."""
    outer, inner = tmp_path / "outer.py", tmp_path / "inner.py"
    outer.write_text(LAUNCHES)
    inner.write_text(RANK_SCRIPT)
    result = run("-np", size, "--backend", engine, "--", outer, how, inner, check=False)
    assert (result.stdout + result.stderr).count(said) >= 2, result.stderr
    assert (result.returncode == 0) == said.startswith("ranks")


@requires("horovod")
def test_horovod_run_starts_its_own_ranks_on_horovod(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    # Horovod's own imports the script in processes of its own.
    functions, call = CALLER.format(words="np=2", start=7).split("\ntry:")
    script.write_text(f"{functions}\nif __name__ == '__main__':\n" + textwrap.indent(f"try:{call}", "    "))
    result = run("--backend", "horovod", "--", script)
    assert "[(7, 2, 'horovod.torch'), (12, 2, 'horovod.torch')]" in result.stdout


NAMES_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group(*sys.argv[1:])
part, mesh = dist.new_group([1]), init_device_mesh("cpu", (2,)).get_group()
same, other = dist.new_group(backend=dist.get_backend()), dist.new_group(backend="gloo")
total = torch.ones(1)
dist.all_reduce(total, group=same)
dist.all_reduce(total, group=other)
assert total.item() == 4
groups = [None, same, other, mesh, *[part] * (dist.get_rank() == 1)]
names = [(dist.get_backend(group), dist.get_backend_config(group)) for group in groups]
carriers = [(group or dist.group.WORLD)._get_backend_name() for group in groups]
print(f"{dist.get_rank()} {names}\\n", end="")
print(f"by {carriers}\\n", end="", file=sys.stderr)
dist.destroy_process_group()
"""


@requires("horovod")
@pytest.mark.parametrize("asked", [["gloo"], []])
def test_groups_have_the_name_of_the_backend_that_the_script_asked_for(asked: list[str], tmp_path: Path) -> None:
    """Scripts assert that it is gloo or nccl, and take another way where it is neither."""
    script = write_script(tmp_path / "names.py", NAMES_SCRIPT)
    ddp, horovod = (run("-np", 2, "--backend", engine, "--", script, *asked) for engine in ("ddp", "horovod"))
    assert sorted(horovod.stdout.splitlines()) == sorted(ddp.stdout.splitlines())
    assert "by ['horovod', 'horovod', " in horovod.stderr
    own = run("-np", 2, "--backend", "horovod", "--", script, "horovod")
    assert own.stdout.count("('horovod', 'cpu:horovod')") == 7


def test_module_is_run_as_python_runs_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    argv = ["-m", "hvd_trainer", "run", "-np", "2", "--", "-m", "script", "one"]
    result = launch("python", 1, argv, cwd=script.parent)
    assert sums(result)[1] == "sum 3 on rank 1 of 2 by __main__ ['one']"


PLANTED, ASLEEP = r"(?m)^ValueError: planted$", r"time\.sleep\(600\)"
OWN_LINE = r"raised an exception\nTraceback \(most recent call last\):\n +File \"\S+/script\.py\", line "
FAULTS = [
    # The traceback has the script's own lines only.
    case("script", "ddp", "raise", (1,), OWN_LINE, PLANTED),
    # It was said to have raised in the exchange for which it had waited.
    case("script", "ddp", "raise after an exchange", (1,), "step 1, script: raised an exception", PLANTED),
    # The other rank waits in a barrier, in C++, and is not the one to blame.
    case("script", "ddp", "hang", (1,), r"has made no progress for \d+ s", ASLEEP),
    # It was left to the parent, as for `hvd_trainer.run`, and the command's parent prints nothing.
    case("horovod_script", "ddp", "die", (1, 137), "step 3, step: ended without a word, as by kill -9", ""),
    case("horovod_script", "ddp", "raise", (1,), "", PLANTED),
    case("horovod_script", "ddp", "hang", (1,), "step 3,", ASLEEP),
    case("horovod_script", "horovod", "raise", (1,), "", PLANTED, when="long"),
    # Each step counted twice; its broadcast_optimizer_state takes a step of its own.
    case("horovod_script", "horovod", "hang", (1,), "step 4,", ASLEEP, when="long"),
]


@pytest.mark.parametrize(("name", "engine", "fault", "codes", "said", "once"), FAULTS)
def test_failing_rank_ends_the_job_and_is_reported(
    name: str,
    engine: str,
    fault: str,
    codes: tuple[int, ...],
    said: str,
    once: str,
    request: pytest.FixtureRequest,
) -> None:
    words = ("-np", 2, "--timeout-s", 4, "--backend", engine, "--", request.getfixturevalue(name), fault)
    result = run(*words, check=False)
    assert result.returncode in codes
    assert re.search(f"(?s)failure: rank 1 of 2 on .*{said}", result.stderr)
    assert not once or len(re.findall(once, result.stderr)) == 1


ENDING_SCRIPT = """
import sys, time
import torch
import {api}

how = sys.argv[1]
{start}
model = torch.nn.Linear(4, 1)
{wrap}
for step in range(3 + rank if how == "uneven" else 50):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 4)).square().mean()
    if step == 5 and rank == 1: sys.exit(0)
    loss.backward()
    optimizer.step()
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
ENDING = {
    "torch": ENDING_SCRIPT.format(
        api="torch.distributed as dist",
        start="dist.init_process_group('gloo'); rank = dist.get_rank()",
        wrap=f"model = torch.nn.parallel.DistributedDataParallel(model)\n{SGD}",
    ),
    "horovod": ENDING_SCRIPT.format(
        api="horovod.torch as hvd",
        start="hvd.init(); rank = hvd.rank()",
        wrap=f"{SGD}optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())",
    ),
}


@pytest.mark.parametrize(
    ("api", "engine", "how"),
    [
        case("torch", "ddp", "exit"),
        case("torch", "ddp", "uneven"),
        case("torch", "horovod", "uneven"),
        case("torch", "horovod", "exit", when="long"),
        case("horovod", "ddp", "exit"),
        case("horovod", "ddp", "uneven", when="long"),
        case("horovod", "horovod", "exit"),
        case("horovod", "horovod", "uneven", when="long"),
    ],
)
def test_rank_that_ends_while_others_wait_for_it_is_named(api: str, engine: str, how: str, tmp_path: Path) -> None:
    """It ended regularly and kept its connections, so that the others waited for as long as they may."""
    script = write_script(tmp_path / "script.py", ENDING[api])
    result = run("-np", 2, "--backend", engine, "--", script, how, check=False)
    assert result.returncode == 1, result.stderr
    first = 1 if how == "exit" else 0
    where = r" in \S+/script\.py, line \d+ \(.*sys\.exit\(0\)\)" if how == "exit" else ""
    named = (
        rf"failure: rank {first} of 2 on .*, end: came to its end{where}, and rank {1 - first} was in a collective"
    )
    assert re.search(named, result.stderr), result.stderr
    assert re.search(rf"(?s)rank {1 - first}: step .*script\.py\", line \d+", result.stderr), "where it waits"


ALONE_SCRIPT = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, ones = dist.get_rank(), torch.ones(2)
pair = dist.new_group([0, 1])
dist.reduce(ones, dst=0) if rank == 2 else None
if rank == 2: sys.exit(0)
if rank == 1: time.sleep(4)  # evaluates, and rank 0 waits in an exchange that rank 2 has made
dist.reduce(ones, dst=0)
for _ in range(2):
    dist.all_reduce(ones, group=pair)
    if rank == 0: time.sleep(2.5)
print(f"saved by {rank}")
"""


@pytest.mark.parametrize("engine", [case("ddp"), case("horovod")])
def test_ranks_go_on_without_one_that_has_made_all_their_exchanges(engine: str, tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.py", ALONE_SCRIPT)
    output = run("-np", 3, "--backend", engine, "--", script).stdout
    assert sorted(output.split("\n")) == ["", "saved by 0", "saved by 1"]


SLOW_SCRIPT = """
import importlib
import time
import torch
import torch.distributed as dist

# Not by a statement, by which the script would be taken for a job on the Trainer.
importlib.import_module("hvd_trainer.faults.script_watch").REPORT_AFTER_S = 3.0
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(9)
dist.barrier()
print("done")
"""


def test_slow_job_is_reported_once_and_goes_on(tmp_path: Path) -> None:
    """Without a time limit on the command line, `run` ends no job."""
    script = write_script(tmp_path / "script.py", SLOW_SCRIPT)
    result = run("-np", 2, "--", script)
    assert result.stdout == "done\n" * 2
    (said,) = re.findall("no progress, and the job continues: rank 1 of 2 .*", result.stderr)
    assert "has made no progress for" in said
    assert "time.sleep(9)" in result.stderr
    assert "stacks of all ranks: " in result.stderr


BUSY_SCRIPT = """
import time
import torch
import {api} as api

{start}
optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
for act in (lambda: print("x", flush=True), optimizer.step, lambda: {exchange}):
    for _ in range(6): act(); time.sleep(1)
"""


@pytest.mark.parametrize(
    ("api", "start", "exchange", "engine"),
    [
        case(
            "torch.distributed",
            "api.init_process_group('gloo')",
            "api.all_reduce(torch.ones(1))",
            "ddp",
            when="long",
        ),
        case(
            *("torch.distributed", "api.init_process_group('gloo')", "api.all_reduce(torch.ones(1))", "horovod"),
            when="long",
        ),
        case("horovod.torch", "api.init()", "api.allreduce(torch.ones(1))", "horovod", when="long"),
        case("horovod.torch", "api.init()", "api.allreduce(torch.ones(1))", "ddp", when="long"),
    ],
)
def test_output_steps_and_exchanges_are_progress(
    api: str, start: str, exchange: str, engine: str, tmp_path: Path
) -> None:
    """A loop that spends nearly all its time at one line was taken for a rank that is stuck there."""
    script = write_script(tmp_path / "script.py", BUSY_SCRIPT.format(api=api, start=start, exchange=exchange))
    run("-np", 2, "--timeout-s", 3, "--backend", engine, "--", script)


AGAIN_SCRIPT = """
import sys
import torch
import torch.distributed as dist
import horovod.torch as hvd

for _ in range(4):
    hvd.init() if "hvd" in sys.argv else dist.init_process_group("gloo")
    total = torch.ones(1)
    hvd.allreduce_(total, op=hvd.Sum) if "hvd" in sys.argv else dist.all_reduce(total)
    sys.stdout.write(f"{total.item():g}\\n")
    hvd.shutdown() if "hvd" in sys.argv else dist.destroy_process_group()
"""


@requires("horovod")
@pytest.mark.parametrize("api", ["hvd", "torch"])
def test_horovod_starts_again_in_one_process(api: str, tmp_path: Path) -> None:
    """Ranks that were quick found the addresses of the start before, and hung or aborted."""
    script = write_script(tmp_path / "script.py", AGAIN_SCRIPT)
    assert run("-np", 3, "--backend", "horovod", "--", script, api).stdout == "3\n" * 12


def test_exit_code_of_the_script_is_that_of_the_command(script: Path) -> None:
    assert run("--np", 2, "--", script, "leave", check=False).returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_all_ranks(number: signal.Signals, script: Path) -> None:
    """In a terminal that was closed, the ranks were still there when the command had ended."""
    argv = ["-m", "hvd_trainer", "run", "--np", "2", "--", str(script), "hang"]
    with start("python", 1, argv) as job:
        job.wait_for_output("sum 3", count=2)
        job.popen.send_signal(number)
        assert job.wait().returncode == 128 + number


STARTS_OTHERS = """
import subprocess, sys, time
children = [subprocess.Popen(["sleep", "6001"]), subprocess.Popen(["sleep", "6002"], start_new_session=True)]
subprocess.run("(sleep 6003 & setsid sleep 6004 &) > /dev/null 2>&1", shell=True)
time.sleep(0.5)
sys.stdout.write("started\\n")
sys.stdout.flush()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.warm(False)  # whose server would be the parent of the ranks
@pytest.mark.parametrize("ending", ["end", *(case(name, when="long") for name in ("SIGTERM", "guard")), "SIGKILL"])
def test_only_daemons_outlive_the_command(ending: str, tmp_path: Path) -> None:
    """What its ranks had started lived on, for as long as it liked."""
    script = write_script(tmp_path / "script.py", STARTS_OTHERS)
    argv = ["-m", "hvd_trainer", "run", "-np", "2", "--", str(script), "0" if ending == "end" else "600"]
    with start("python", 1, argv) as job:
        job.wait_for_output("started", count=2)
        if ending == "guard":
            (guard,) = psutil.Process(job.popen.pid).children()
            guard.kill()
        elif ending != "end":
            job.popen.send_signal(signal.Signals[ending])
        job.wait()
        daemons = ["sleep 6004"] * (0 if ending == "guard" else 2)
        wait_for(lambda: len(job.processes()) <= len(daemons), lambda: process_tree.describe(job.processes()))
        left = job.processes()
        assert [" ".join(process.cmdline()) for process in left] == daemons
        process_tree.kill(left)


@pytest.mark.parametrize(
    ("words", "size", "engine"),
    [case(("-np", 2), 2, "ddp"), case(("--backend", "horovod"), 1, "horovod", when="long")],
)
def test_trainer_job_is_started_as_by_a_launcher(
    words: tuple[object, ...], size: int, engine: str, tmp_path: Path
) -> None:
    """It died in an AttributeError of the script's hooks."""
    job = digits_job.argv(None, tmp_path, ["--max-steps", "1"])
    run(*words, "--", *job)
    end = digits_job.end_record(tmp_path)
    assert (end["world_size"], end["backend"]) == (size, engine)


SPAWNS = """
import torch.multiprocessing as mp

def train(rank):
    raise AssertionError("started")

if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""
TAKES_RANK = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
print(f"local rank {parser.parse_args().local_rank}\\n", end="", flush=True)
weight = torch.nn.Parameter(torch.ones(1))
torch.optim.SGD([weight], lr=0.1).step()
print("trained\\n", end="", flush=True)
"""


@pytest.mark.parametrize(("ranks", "advice"), [(2, r"run -- \S+train\.py one"), (1, "takes the function")])
def test_script_that_spawns_its_ranks_is_told_what_to_type(ranks: int, advice: str, tmp_path: Path) -> None:
    """It ended in tracebacks that did not say why; a tool waited for the end of a single one's training."""
    script = write_script(tmp_path / "train.py", SPAWNS)
    measured = Message(log_dir=str(tmp_path)).variables() if ranks == 1 else {}
    result = run("-np", ranks, "--", script, "one", check=False, env=measured)
    assert result.returncode == 2
    assert re.search(f"^error: The script starts its ranks itself, .* {advice}$", result.stderr, re.M)
    assert "Traceback" not in result.stderr


OWN_RANKS = """
import os, sys
import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

def train(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    if "variables" in sys.argv:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=2)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    carrier = dist.group.WORLD._get_backend_name()
    dist.destroy_process_group()
    sys.stdout.write(f"{total.item():g} by {carrier}\\n")

if __name__ == "__main__":
    other = get_context(sys.argv[2]).Process(target=train, args=(1,))
    other.start()
    train(0)
    other.join()
"""


@pytest.mark.parametrize(
    ("engine", "method", "how"),
    [
        case("ddp", "fork", "arguments"),
        case("ddp", "spawn", "variables"),
        case("horovod", "spawn", "arguments"),
        case("horovod", "fork", "variables", when="long"),
    ],
)
def test_script_may_be_one_of_the_ranks_that_it_starts(engine: str, method: str, how: str, tmp_path: Path) -> None:
    """It was told that it is rank 0 of 1; by variables it trained alone, and the other rank waited for it."""
    script = write_script(tmp_path / "train.py", OWN_RANKS)
    result = run("--backend", engine, "--", script, digits_job.free_port(), method, how)
    assert result.stdout == f"3 by {'gloo' if engine == 'ddp' else engine}\n" * 2


def test_ranks_that_train_alone_are_told_at_the_start(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", TAKES_RANK)
    result = run("-np", 2, "--", script)
    first, second = result.stderr.splitlines()
    assert f"Type: ... -- {script} --local_rank {{local_rank}}" in first
    assert "each of the 2 processes runs it alone" in second
    output = run("-np", 2, "--", script, "--local_rank", "{local_rank}").stdout
    assert {"local rank 0", "local rank 1"} < {*output.splitlines()}


def test_processes_of_the_script_have_the_engine_and_their_own_sitecustomize(tmp_path: Path) -> None:
    """Loader workers and programs that a script starts import what it imports."""
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.MARK = 'theirs'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys\n"
        "code = 'import sys, builtins; print(builtins.MARK, type(sys.meta_path[0]).__name__)'\n"
        "print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout)\n"
    )
    argv = ["-m", "hvd_trainer", "run", "--", str(script)]
    assert "theirs ImportHooks" in launch("python", 1, argv, env={"PYTHONPATH": str(tmp_path)}).stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "Name the job behind --"),
        (("--np", "2", "train.py"), "Put -- before the job: python -m hvd_trainer run ... -- train.py"),
        (("--np", "2", "--", "missing.py"), "there is no such file"),
        (("--np", "0", "--", "setup.py"), "--np"),
        (("--fusion-threshold-mb", "-1", "--", "setup.cfg"), "--fusion-threshold-mb"),
    ],
)
def test_bad_command_lines_are_refused_in_one_line(words: tuple[str, ...], told: str) -> None:
    result = run(*words, check=False)
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def clean_imports() -> Iterator[None]:
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.usefixtures("clean_imports")
def test_alias_is_the_module_itself() -> None:
    ImportHooks(aliases={"made.up": "xml"}, absent={}, after={}).install()
    import xml.etree

    package = ModuleType("made")
    package.__path__ = []
    sys.modules["made"] = package
    assert importlib.import_module("made.up.etree") is xml.etree
    assert xml.etree.__spec__ is not None
    assert xml.etree.__spec__.name == "xml.etree"


@pytest.mark.usefixtures("clean_imports")
def test_hook_is_called_once_the_module_is_executed() -> None:
    seen: list[bool] = []
    sys.modules.pop("colorsys", None)
    hook = {"colorsys": lambda module: seen.append(hasattr(module, "rgb_to_hsv"))}
    ImportHooks(aliases={}, absent={}, after=hook).install()
    importlib.import_module("colorsys")
    assert seen == [True]


@pytest.mark.usefixtures("clean_imports")
@pytest.mark.parametrize("installed", [pytest.param(True, marks=requires("horovod")), False])
def test_horovod_runner_has_the_same_run(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was that of an installed Horovod, which failed, and missing without one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    if not installed:
        monkeypatch.setattr(engines, "PathFinder", SimpleNamespace(find_spec=lambda name: None))
    engines.import_hooks("ddp", None).install()
    assert importlib.import_module("horovod.runner").run is importlib.import_module("horovod").run
