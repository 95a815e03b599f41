"""`python -m hvd_trainer run`: scripts that know nothing of this package, on either engine."""

from __future__ import annotations

import importlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hvd_checks
import pytest
from launchers import REPOSITORY, Result, launch, start
from requirements import requires

from hvd_trainer.tools.run import horovod_package
from hvd_trainer.utils.import_hooks import ImportHooks

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
# One write, so that lines of several ranks do not mix.
sys.stdout.write(f"sum {total.item():g} on rank {rank} of {size} by {__name__} {sys.argv[1:]}\\n")
sys.stdout.flush()
if rank == 1 and "raise" in sys.argv:
    raise ValueError("planted")
if rank == 1 and "leave" in sys.argv:
    sys.exit(7)
if rank == 1 and "hang" in sys.argv:
    time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""


HOROVOD_SCRIPT = """
import sys
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
sys.stdout.write(f"weights {model.weight.sum().item()!r} by {hvd.__name__}\\n")
"""
EXAMPLES = REPOSITORY / "examples" / "mnist"
MNIST = REPOSITORY.parent / "shared" / "data" / "mnist"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(TORCH_SCRIPT)
    return path


def run(*words: object, check: bool = True, launcher: str = "python", ranks: int = 1) -> Result:
    argv = ["-m", "hvd_trainer", "run", *map(str, words)]
    return launch(launcher, ranks, argv, check=check)


def sums(result: Result) -> list[str]:
    # horovodrun puts the rank before each line.
    return sorted(re.findall("sum .*", result.stdout))


def test_script_for_torch_distributed_gets_ranks_and_arguments(script: Path) -> None:
    assert sums(run("-np", 2, "--", script, "--epochs", 3)) == [
        "sum 3 on rank 0 of 2 by __main__ ['--epochs', '3']",
        "sum 3 on rank 1 of 2 by __main__ ['--epochs', '3']",
    ]


@requires("horovod")
def test_horovod_script_trains_the_same_weights_on_either_engine(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOROVOD_SCRIPT)
    output = {engine: run("-np", 2, "--backend", engine, "--", script).stdout for engine in ("ddp", "horovod")}
    printed = {engine: re.findall("weights (.*) by (.*)", text) for engine, text in output.items()}
    assert output["ddp"].count("\n") == 2, "only the script prints"
    assert [name for _, name in printed["ddp"]] == ["hvd_trainer.hvd"] * 2
    assert [name for _, name in printed["horovod"]] == ["horovod.torch"] * 2
    assert len({weights for lines in printed.values() for weights, _ in lines}) == 1


@requires("horovod")
def test_script_for_hvd_runs_on_horovod(tmp_path: Path) -> None:
    """It ran on torch.distributed, silently, although Horovod was asked for."""
    script = tmp_path / "train.py"
    for submodule in ("compression", "common.util"):
        script.write_text(
            f"from hvd_trainer import hvd\nimport hvd_trainer.hvd.{submodule} as part\n"
            "hvd.init()\nprint(hvd.size(), hvd.__name__, part.__name__)\n"
        )
        output = run("-np", 2, "--backend", "horovod", "--", script).stdout
        root = "horovod" if submodule.startswith("common") else "horovod.torch"
        assert output == f"2 horovod.torch {root}.{submodule}\n" * 2


@requires("horovod")
def test_torch_script_runs_on_horovod(script: Path) -> None:
    assert sums(run("-np", 2, "--backend", "horovod", "--", script)) == [
        "sum 3 on rank 0 of 2 by __main__ []",
        "sum 3 on rank 1 of 2 by __main__ []",
    ]


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


@pytest.mark.parametrize("engine", ["ddp", pytest.param("horovod", marks=[requires("horovod"), pytest.mark.long])])
def test_rank_of_a_horovod_script_that_raises_ends_the_job(engine: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOROVOD_SCRIPT)
    result = run("-np", 2, "--backend", engine, "--", script, "raise", check=False)
    assert result.returncode == 1
    assert "failure: rank 1 of 2 on " in result.stderr
    assert result.stderr.count("ValueError: planted") == 1


def test_part_of_horovod_without_a_counterpart_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import horovod.tensorflow as hvd\n")
    result = run("--", script, check=False)
    assert result.returncode == 2
    assert "error: horovod.tensorflow is not there on torch.distributed" in result.stderr
    assert "Traceback" not in result.stderr


@requires("horovod")
def test_other_parts_of_an_installed_horovod_stay(tmp_path: Path) -> None:
    """Horovod's own tests of horovod.torch import helpers of its launcher."""
    script = tmp_path / "train.py"
    script.write_text(
        "import horovod\nimport horovod.torch as hvd\nfrom horovod.runner.util.threads import in_thread\n"
        "print(horovod.__version__, hvd.__name__, in_thread.__module__)\n"
    )
    assert "0.28.1 hvd_trainer.hvd horovod.runner.util.threads" in run("--", script).stdout


CALLER = """
import sys
import horovod

def train(start, *, step):
    import horovod.torch as hvd
    hvd.init()
    if "raise" in sys.argv or start < 0:
        raise ValueError("planted")
    return start + step * hvd.rank(), hvd.size(), hvd.__name__

print(horovod.run(train, args=({start},), kwargs={{"step": 5}}, {words}))
"""


def call(folder: Path, words: str, start: int = 7) -> Result:
    script = folder / "caller.py"
    script.write_text(CALLER.format(words=words, start=start))
    return run("--", script, check=False)


def test_horovod_run_returns_the_results_in_rank_order(tmp_path: Path) -> None:
    """The function's script has no `if __name__ == "__main__"`, as it needs none with Horovod."""
    result = call(tmp_path, "np=2, hosts='localhost:2', start_timeout=60, verbose=1")
    assert "[(7, 2, 'hvd_trainer.hvd'), (12, 2, 'hvd_trainer.hvd')]" in result.stdout, result.stderr


@requires("horovod")
def test_horovod_run_has_horovods_parameters() -> None:
    import horovod

    assert hvd_checks.parameters(horovod_package.run) == hvd_checks.parameters(horovod.run)


def test_horovod_run_says_which_rank_failed(tmp_path: Path) -> None:
    result = call(tmp_path, "num_proc=2", start=-1)
    assert result.returncode == 2
    assert "ValueError: planted" in result.stderr
    assert "error: horovod.run: a rank has ended with exit code 1" in result.stderr


def test_horovod_run_refuses_what_it_has_no_use_for(tmp_path: Path) -> None:
    result = call(tmp_path, "np=2, hosts='node1:2', use_mpi=True")
    assert result.returncode == 2
    assert "no use for hosts='node1:2', use_mpi=True." in result.stderr
    assert "Traceback" not in result.stderr


def test_script_runs_alone_without_np(script: Path) -> None:
    assert sums(run("--", script)) == ["sum 1 on rank 0 of 1 by __main__ []"]


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=requires(name)) for name in ("torchrun", "mpirun", "srun", "horovodrun")]
)
def test_launchers_processes_become_the_ranks(launcher: str, script: Path) -> None:
    """mpirun, srun and horovodrun set none of the variables that such a script reads."""
    assert sums(run("--", script, launcher=launcher, ranks=2)) == [
        "sum 3 on rank 0 of 2 by __main__ []",
        "sum 3 on rank 1 of 2 by __main__ []",
    ]


def test_module_is_run_as_python_runs_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    argv = ["-m", "hvd_trainer", "run", "-np", "2", "--", "-m", "script", "one"]
    result = launch("python", 1, argv, cwd=script.parent)
    assert sums(result)[1] == "sum 3 on rank 1 of 2 by __main__ ['one']"


def test_exception_shows_the_scripts_own_lines_only(script: Path) -> None:
    result = run("--np", 2, "--", script, "raise", check=False)
    assert result.returncode == 1
    report = result.stderr[result.stderr.index("failure: rank 1 of 2 on ") :].splitlines()
    assert report[0].endswith("raised an exception")
    assert report[1] == "Traceback (most recent call last):"
    assert report[2].strip().startswith(f'File "{script}", line ')
    assert result.stderr.count("ValueError: planted") == 1


def test_rank_that_is_killed_is_reported(tmp_path: Path) -> None:
    """It was left to the parent, as for `hvd_trainer.run`, and the command's parent prints nothing."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import os\n{HOROVOD_SCRIPT}".replace('raise ValueError("planted")', "os.kill(os.getpid(), 9)")
    )
    result = run("-np", 2, "--", script, "raise", check=False)
    assert result.returncode in (1, 128 + signal.SIGKILL)
    assert "failure: rank 1 of 2 on " in result.stderr
    assert "ended without a word, as by kill -9" in result.stderr


def test_exit_code_of_the_script_is_that_of_the_command(script: Path) -> None:
    assert run("--np", 2, "--", script, "leave", check=False).returncode == 7


def test_rank_that_stays_at_one_place_is_reported_with_its_stack(script: Path) -> None:
    """The other rank waits in a barrier, in C++, and is not the one to blame."""
    result = run("--np", 2, "--timeout-s", 4, "--", script, "hang", check=False)
    assert result.returncode == 1
    assert "failure: rank 1 of 2 on " in result.stderr
    assert re.search(r"has not got on for \d+ s", result.stderr)
    assert "time.sleep(600)" in result.stderr


@pytest.mark.parametrize("engine", ["ddp", pytest.param("horovod", marks=[requires("horovod"), pytest.mark.long])])
def test_rank_of_a_horovod_script_that_stays_at_one_place_is_reported(engine: str, tmp_path: Path) -> None:
    """On ddp there was no time limit, and each report said "step 1"; on horovod each step counted twice."""
    script = tmp_path / "train.py"
    script.write_text(HOROVOD_SCRIPT.replace('raise ValueError("planted")', "import time; time.sleep(600)"))
    result = run("--np", 2, "--timeout-s", 4, "--backend", engine, "--", script, "raise", check=False)
    assert result.returncode == 1
    assert "failure: rank 1 of 2 on " in result.stderr
    assert "time.sleep(600)" in result.stderr
    # Horovod's broadcast_optimizer_state takes a step of its own.
    assert f"step {4 if engine == 'horovod' else 3}," in result.stderr


def test_sigterm_ends_all_ranks(script: Path) -> None:
    argv = ["-m", "hvd_trainer", "run", "--np", "2", "--", str(script), "hang"]
    with start("python", 1, argv) as job:
        job.wait_for_output("sum 3", count=2)
        job.popen.send_signal(signal.SIGTERM)
        assert job.wait(30).returncode == 128 + signal.SIGTERM


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


def test_script_that_starts_no_engine_is_warned_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('hello')\n")
    result = run("--np", 2, "--", script)
    assert result.stdout.count("hello") == 2
    assert result.stderr.count("each of the 2 processes has run it alone") == 1


def test_rank_that_contradicts_the_launcher_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:1', rank=0, world_size=1)\n"
    )
    result = run("--np", 2, "--", script, check=False)
    assert result.returncode == 2
    assert "as rank 0 of 1, but run has started rank" in result.stderr


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
