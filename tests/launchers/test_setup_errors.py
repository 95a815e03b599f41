"""Wrong set-ups end all ranks with a bad exit code and one clear message, and no rank hangs."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import digits_job
import pytest
from combinations import case
from launchers import OWN_FRAME, Result, launch, requires

from hvd_trainer import LaunchError
from hvd_trainer.launch.world import UNKNOWN, World
from hvd_trainer.rendezvous import connect

pytestmark = pytest.mark.warm

MULTI = ("horovodrun", "torchrun", "mpirun", "srun")
MAX_ERROR_S = 60
"""Far above what an error takes, far below the 300 s that ranks wait for each other."""


def expect_refusal(launcher: str, argv: list[str], *words: str, times: int = 1, **more) -> Result:
    result = launch(launcher, 1 if launcher == "python" else 2, argv, timeout_s=MAX_ERROR_S, check=False, **more)
    # mpirun gives its ranks a terminal, on which the option parser prints in colours.
    # torchrun repeats the error at its own end.
    said = (result.stdout + result.stderr).split("Root Cause")[0]
    printed = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert result.returncode != 0, printed
    # torchrun prints a traceback of its own.
    assert OWN_FRAME not in printed, printed
    for word in words:
        assert printed.count(word) == times, f"{word!r} {printed.count(word)} times:\n{printed}"
    return result


UNSET = {
    "horovodrun": "HOROVOD_SIZE",
    "torchrun": "LOCAL_WORLD_SIZE",
    "mpirun": "OMPI_COMM_WORLD_LOCAL_RANK",
    "srun": "SLURM_STEP_NUM_TASKS",
}


def refusal(launcher: str, before: str, options: str, *words: str, when: str = "") -> Any:
    """Return a case: what a script of the user's does before the job, the job's options, and what is said once."""
    return case(launcher, before, options, words, when=when)


# Each launcher ends its ranks in its own way: the first case is one of all four, and each other one of some.
CHOOSE = (
    "from hvd_trainer.launch.world import detect\n"
    "sys.argv += ['--backend', ['ddp', 'horovod'][detect(os.environ).rank]]"
)
BOTH = "All ranks must use one backend, but found: rank 0 ddp, rank 1 horovod"
INIT_HOROVOD = "import horovod.torch as hvd; hvd.init()"
INIT_ALONE = (
    "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"
)
NOT_ALL = "waited for all 2 ranks, and rank 1 did not come"
REFUSALS = [
    *(
        refusal(
            *(name, f"del os.environ['{lost}']", ""),
            f"looks started by {name}, but {lost} is not. Set what is missing",
            when="" if name in MULTI[:2] else "long",
        )
        for name, lost in UNSET.items()
    ),
    # The other ranks wait for the wrong one, and must not wait for 300 s.
    refusal(
        *("mpirun", f"if os.environ['OMPI_COMM_WORLD_RANK'] == '1': del os.environ['{UNSET['mpirun']}']", ""),
        f"but {UNSET['mpirun']} is not",
    ),
    refusal("srun", "if os.environ['SLURM_PROCID'] == '1': sys.argv.append('--epochz')", "", "--epochz"),
    refusal(
        *("torchrun", "", "--backend mpi"),
        "--backend takes auto, horovod, ddp, single or data-parallel, and not 'mpi'",
    ),
    refusal(
        "horovodrun", "", "--data-dir /nowhere --dataset mnist --repeat 12", "Or train on the embedded digits"
    ),
    refusal("srun", "", "--backend single", "srun started 2 processes, but --backend single trains in one"),
    refusal("horovodrun", INIT_HOROVOD, "", "is already initialised in this process", "take that call out"),
    refusal(
        *("srun", INIT_HOROVOD, "--backend horovod"),
        "srun started rank 0 of 2, but Horovod, already initialised, says rank 0 of 1",
        when="long",
    ),
    refusal(
        *("torchrun", INIT_ALONE, "--backend ddp"),
        "torchrun started rank 0 of 2, but torch.distributed, already initialised, says rank 0 of 1",
        when="long",
    ),
    refusal("torchrun", CHOOSE, "", BOTH),
    # The rank ends with 0, so that torchrun takes it for done and does not end the others.
    refusal(
        *("torchrun", "if os.environ['RANK'] == '1': sys.exit(0)", "--startup-timeout-s 2", NOT_ALL),
        "raise --startup-timeout-s",
    ),
]


@requires("horovod")
@pytest.mark.parametrize(("launcher", "before", "options", "words"), REFUSALS)
def test_wrong_set_up_is_named_once(
    launcher: str, before: str, options: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    argv = ["-m", "hvd_trainer.mnist"]
    if before:
        file = tmp_path / "script.py"
        job = "runpy.run_module('hvd_trainer.mnist', run_name='__main__', alter_sys=True)"
        file.write_text(f"import os, runpy, sys\n{before}\n{job}\n")
        argv = [str(file)]
    expect_refusal(launcher, [*argv, *digits_job.OPTIONS, *options.split()], *words)


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "horovod":
            raise ModuleNotFoundError("No module named 'horovod'", name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_missing_horovod_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    expect_refusal(
        "python",
        digits_job.argv("horovod"),
        "needs Horovod, which could not be imported (No module named 'horovod')",
        "Type: python -m hvd_trainer install-horovod, or train without it: --backend ddp",
        env={"PYTHONPATH": str(tmp_path)},
    )


WITHOUT_HOROVOD = """
import importlib.machinery, os
find = importlib.machinery.PathFinder.find_spec
def without(name, *place):
    if name != "horovod" or os.environ.get("HOROVOD_RANK", "none") not in RANKS:
        return find(name, *place)
importlib.machinery.PathFinder.find_spec = without
"""


@requires("horovod")
@pytest.mark.parametrize("way", [(), ("hvd_trainer", "run", "--", "-m")])
def test_ranks_without_horovod_train_on_ddp(way: tuple[str, ...], tmp_path: Path) -> None:
    """A job under horovodrun ended with an error where the ranks' Python has no Horovod, as a container may."""
    (tmp_path / "sitecustomize.py").write_text(f"RANKS = ('0', '1', '2')\n{WITHOUT_HOROVOD}")
    first, *words = digits_job.argv(None, tmp_path / "log")
    result = launch("horovodrun", 3, [first, *way, *words], env={"PYTHONPATH": str(tmp_path)})
    assert "the default where Horovod is not installed" in result.stdout
    assert ("runs on ddp. Type: python -m hvd_trainer install-horovod" in result.stderr) == bool(way)
    assert digits_job.end_record(tmp_path / "log")["backend"] == "ddp"


@requires("horovod")
def test_hosts_with_and_without_horovod_are_told_apart(tmp_path: Path) -> None:
    """Half of the ranks on another engine would wait for the others for ever."""
    (tmp_path / "sitecustomize.py").write_text(f"RANKS = ('2',)\n{WITHOUT_HOROVOD}")
    result = launch("horovodrun", 3, digits_job.argv(None), env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert result.returncode != 0
    said = "found: rank 2 ddp, rank 0 horovod. Give all the same --backend (auto is ddp where Horovod is not"
    assert said in " ".join((result.stdout + result.stderr).split())


@requires("horovod")
def test_horovod_without_its_extension_is_named(tmp_path: Path) -> None:
    import horovod

    shutil.copytree(Path(horovod.__file__).parent, tmp_path / "horovod", ignore=shutil.ignore_patterns("*.so"))
    result = expect_refusal(
        "torchrun",
        digits_job.argv("horovod"),
        "built without PyTorch or for another version",
        "Type: python -m hvd_trainer install-horovod",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert "Warning!" not in result.stdout


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        yield str(listener.getsockname()[1])


@requires("mpirun")
def test_port_in_use_is_named(taken_port: str) -> None:
    expect_refusal(
        "mpirun",
        digits_job.argv("ddp"),
        f"rank 0 of 2 cannot listen at 127.0.0.1:{taken_port}: ",
        "If the port is in use, choose another",
        options=["-x", "MASTER_ADDR", "-x", "MASTER_PORT"],
        env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken_port},
    )


def test_missing_port_is_named() -> None:
    env = digits_job.by_hand(0, 2)
    expect_refusal(
        "python", digits_job.argv("ddp"), "MASTER_ADDR and MASTER_PORT not set", "export MASTER_ADDR=", env=env
    )
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}
    expect_refusal("python", digits_job.argv("ddp"), "A port is a number from 1 to 65535, not 'http'", env=env)


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "and rank 1 did not come"), (1, "which does not answer at 127.0.0.1:")]
)
def test_missing_rank_ends_the_wait(rank: int, words: str) -> None:
    """The time limit holds on rank 0, which serves, and on the others, which ask."""
    env = {**digits_job.by_hand(rank, 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": digits_job.free_port()}
    argv = digits_job.argv("ddp", extra=["--startup-timeout-s", "2"])
    result = expect_refusal("python", argv, words, env=env)
    assert result.seconds < 25


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (("LOCAL_RANK=0",), "Ranks 0 and 1 both say that they are local rank 0"),
        (("LOCAL_RANK=2{rank}",), "Rank 0 says that it is local rank 20 on "),
    ],
)
def test_wrong_local_ranks_are_refused_on_all_ranks(variables: tuple[str, ...], words: str) -> None:
    result = launch("hand", 2, digits_job.argv("ddp"), options=variables, timeout_s=MAX_ERROR_S, check=False)
    assert result.returncode == 2
    assert result.stderr.count(words) == 2, result.stderr


# Several nodes, which this machine is not.

FAR = World(0, 4, 0, 2, UNKNOWN, UNKNOWN, "mpirun")


def test_mpirun_on_several_nodes_without_mpi4py_asks_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match=r"pip install mpi4py, or pass the address: mpirun -x MASTER_ADDR"):
        connect.open_store(FAR, {}, timeout_s=1)


def test_mpirun_on_several_nodes_takes_an_address() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": digits_job.free_port()}
    with pytest.raises(
        LaunchError, match="rank 1 of 4 waited 0 s for rank 0, which does not answer at 127.0.0.1:"
    ):
        connect.open_store(replace(FAR, rank=1, local_rank=1), environ, timeout_s=0.5)


@pytest.mark.parametrize(
    ("launcher", "environ", "name"),
    [
        ("horovodrun", {}, "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        ("horovodrun", {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        ("run", {}, "HVD_TRAINER_STORE"),
    ],
)
def test_launcher_without_an_address_is_refused(launcher: str, environ: dict[str, str], name: str) -> None:
    world = World(0, 2, 0, 2, launcher=launcher)
    with pytest.raises(LaunchError, match=f"{launcher} should set {name} and has not"):
        connect.open_store(world, environ, timeout_s=1)


def test_variables_of_an_ended_horovodrun_are_refused() -> None:
    environ = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": digits_job.free_port()}
    with pytest.raises(LaunchError, match=r"does not answer .* start the job again"):
        connect.open_store(World(1, 2, 1, 2, launcher="horovodrun"), environ, timeout_s=1)
