"""The test bench itself: launchers start real ranks, nothing hangs, nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import environments
import process_tree
import psutil
import pytest
from child_environment import child_environment
from combinations import each_launcher
from launchers import (
    REPOSITORY,
    SUPPORT,
    LaunchError,
    LaunchTimeoutError,
    OrphanError,
    RankError,
    launch,
    run_ranks,
    start,
)
from waiting import wait_for

RANK_VARIABLE = {
    "horovodrun": "HOROVOD_RANK",
    "torchrun": "RANK",
    "mpirun": "OMPI_COMM_WORLD_RANK",
    "srun": "SLURM_PROCID",
}


def own_rank(launcher: str) -> int:
    return int(os.environ[RANK_VARIABLE[launcher]]) if launcher in RANK_VARIABLE else 0


@pytest.fixture
def write(tmp_path: Path):
    def write_script(text: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        return [str(script)]

    return write_script


HANG = """
import time
def rank_is_stuck_here():
    print("started", flush=True)
    time.sleep(600)
rank_is_stuck_here()
"""


def test_launch_raises_exit_code_and_output(write) -> None:
    script = write("import sys\nprint('words', flush=True)\nsys.exit(3)")
    with pytest.raises(LaunchError, match=r"^exit code 3: (.|\n)*words"):
        launch("python", 1, script, timeout_s=60)


# horovodrun's ranks descend from it as torchrun's do; srun's are children of a daemon.
@each_launcher("torchrun", "mpirun", "srun")
def test_launch_ends_a_hanging_script_and_shows_where(launcher: str, write) -> None:
    script = write(HANG)
    began = time.monotonic()
    with start(launcher, 2, script) as job:
        job.wait_for_output("started", count=2)
        assert len(job.ranks(2)) == 2
        mark = job.processes()[0].environ()[process_tree.MARK]
        with pytest.raises(LaunchTimeoutError) as caught:
            job.wait(0.5)
    assert str(caught.value).count("in rank_is_stuck_here") == 2
    assert "processes:\n  pid" in str(caught.value)
    assert process_tree.marked(mark) == []
    assert time.monotonic() - began < 40


def report_environment(launcher: str) -> tuple[int, dict[str, str]]:
    return own_rank(launcher), dict(os.environ)


def raise_in_rank_1(launcher: str) -> tuple[int, None]:
    if own_rank(launcher) == 1:
        raise ValueError("the last rank's own words")
    time.sleep(600)
    return own_rank(launcher), None


@each_launcher("torchrun", "srun")
def test_run_ranks_raises_the_exception_of_a_rank(launcher: str) -> None:
    """srun lets the other rank hang until the time limit; the exception must not be lost in it."""
    limit_s = 5 if launcher == "srun" else 60
    with pytest.raises(RankError, match="^in a rank:\nTraceback(.|\n)*the last rank's own words"):
        run_ranks(raise_in_rank_1, launcher=launcher, num_processes=2, args=(launcher,), timeout_s=limit_s)


def claim_rank_0() -> tuple[int, None]:
    return 0, None


def test_run_ranks_refuses_two_rank_0() -> None:
    with pytest.raises(LaunchError, match=r"wanted \(rank, value\) from ranks \[0, 1\]"):
        run_ranks(claim_rank_0, num_processes=2, launcher="torchrun")


def end_badly_after_the_work() -> tuple[int, None]:
    import atexit

    atexit.register(os.abort)
    return 0, None


def test_run_ranks_refuses_an_abort_after_the_work() -> None:
    with pytest.raises(LaunchError, match="no rank raised, exit code -6"):
        run_ranks(end_badly_after_the_work, num_processes=1, launcher="python")


DAEMON = """
import os, subprocess, sys
subprocess.Popen(["sleep", "600"], start_new_session=True,
                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


def is_sleeping(pid: int) -> bool:
    try:
        return process_tree.is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def test_launch_kills_a_process_left_behind(write) -> None:
    with pytest.raises(OrphanError, match="sleep 600") as caught:
        launch("python", 1, write(DAEMON), timeout_s=60)
    pids = re.findall(r"pid (\d+) .*: sleep 600", str(caught.value))
    assert not any(is_sleeping(int(pid)) for pid in pids)


def test_launch_hides_outer_rank_variables(write, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in environments.CASES.values():
        for name, value in case[0].items():
            monkeypatch.setenv(name, value)
    result = launch("python", 1, write("import os\nprint(sorted(os.environ))"))
    assert not set(RANK_VARIABLE.values()) & set(re.findall(r"'(\w+)'", result.stdout))


BAD_SUITE = """
import os, subprocess

def test_leaves_a_variable():
    os.environ["HVD_TRAINER_FORGOTTEN"] = "1"

def test_variable_is_gone():
    assert "HVD_TRAINER_FORGOTTEN" not in os.environ
    assert "OMPI_COMM_WORLD_RANK" not in os.environ

def test_leaves_a_process_group(tmp_path):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_leaves_a_daemon():
    subprocess.Popen(["setsid", "--fork", "sleep", "602"]).wait()
"""


def test_suite_fails_on_leftovers(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(BAD_SUITE)
    (tmp_path / "conftest.py").write_text((SUPPORT.parent / "conftest.py").read_text())
    result = launch(
        "python",
        1,
        ["-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "."],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{SUPPORT}{os.pathsep}{REPOSITORY}"},
        check=False,
    )
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "the test left changes in os.environ: HVD_TRAINER_FORGOTTEN" in result.stdout
    assert "process group initialised" in result.stdout
    assert re.search(r"processes left behind by the tests(.|\n)*sleep 602", result.stdout)
    assert "4 passed, 2 errors" in result.stdout


CHANGES_FROM_RUN_TO_RUN = re.compile(
    "PORT|JOB_?ID|RUN_ID|TASK_PID|JOB_NAME|HOST|COMMAND|MCA|PMIX|CPU|PRIO|UMASK|CLUSTER|OMP_"
)


@each_launcher()
def test_run_ranks_values_are_in_rank_order_and_as_recorded(launcher: str) -> None:
    """The recorded environments of the pure tests are those that this machine's launchers set."""
    case = environments.CASES["python" if launcher == "python" else f"{launcher}_2"]
    recorded = [
        {name: text for name, text in environ.items() if not CHANGES_FROM_RUN_TO_RUN.search(name)}
        for environ in case
    ]
    values = run_ranks(
        report_environment,
        num_processes=len(case),
        launcher=launcher,
        args=(launcher,),
        env={"HVD_TRAINER_SEEN": "yes"},
    )
    seen = [{name: environ.get(name) for name in recorded[0]} for environ in values]
    assert seen == recorded
    for environ in values:
        assert environ["HVD_TRAINER_SEEN"] == "yes"
        assert environ["OMP_NUM_THREADS"] == "1"


def test_warm_ranks_server_ends_with_those_it_serves(tmp_path: Path) -> None:
    """A client killed before its request left a spinning process, and a killed pytest left the whole server."""
    address = tmp_path / "socket"
    command = f"{sys.executable} {SUPPORT / 'warm_server.py'} {address} & wait"
    mark = f"{os.environ[process_tree.MARK]}/warm"
    environ = child_environment(os.environ, {}, mark=mark, folder=tmp_path)
    with subprocess.Popen(["sh", "-c", command], env=environ, start_new_session=True) as starter:
        try:
            wait_for(lambda: address.exists() or starter.poll() is not None)
            (server,) = psutil.Process(starter.pid).children()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(address))
            launched = wait_for(server.children)
            assert not process_tree.wait_for_end(launched, limit_s=10)
        finally:
            starter.kill()
        assert not process_tree.wait_for_end([server], limit_s=10)


SERVED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("torch" in sys.modules, os.getpid(), os.environ["SEEN"], sys.argv[1:], flush=True)
time.sleep(60)
"""


@pytest.mark.warm
@pytest.mark.parametrize(
    ("ended_by", "code"), [(signal.SIGTERM, 7), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_served_process_is_what_its_stand_in_would_be(ended_by: signal.Signals, code: int, tmp_path: Path) -> None:
    """It has PyTorch imported, is found as the launch's rank, gets its signals and gives it its exit code."""
    (tmp_path / "served.py").write_text(SERVED)
    with start("python", 1, [str(tmp_path / "served.py"), "--option"], env={"SEEN": "yes"}) as job:
        job.wait_for_output("yes")
        (rank,) = job.ranks(1)
        assert job.stdout == f"True {rank.pid} yes ['--option']\n"
        assert rank.pid != job.popen.pid
        job.popen.send_signal(ended_by)
        assert job.wait().returncode == code
    assert not process_tree.wait_for_end([rank], limit_s=5)


def test_tests_that_are_not_marked_warm_start_their_own_processes(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    with start("python", 1, [str(tmp_path / "served.py")], env={"SEEN": "yes"}) as job:
        job.wait_for_output("yes")
        assert job.stdout == f"False {job.popen.pid} yes []\n"
