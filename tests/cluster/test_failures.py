"""A rank that fails in any way ends the job soon, with one report that names it, and leaves no process behind.

A new fault is an entry of `faulty_job.FAULTS` and a line of `CASES`.
"""

from __future__ import annotations

import random
import re
import socket
import tempfile
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import digits_job
import pytest
import torch.distributed as dist
from combinations import case, each_launcher, each_pair
from job import REPORT
from launchers import QUICKEST, REPOSITORY, SUPPORT, Result, launch, requires, start
from records import lines

from hvd_trainer.errors import LaunchError
from hvd_trainer.faults import monitor
from hvd_trainer.faults.activity import Activity
from hvd_trainer.faults.monitor import MonitorSettings
from hvd_trainer.faults.monitor_server import MonitorServer
from hvd_trainer.faults.root_cause import RootCause
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo

pytestmark = pytest.mark.warm

TIMEOUT_S, SOON_S = 3, 25
JOB = [str(SUPPORT / "faulty_job.py"), "--epochs", "1000", "--timeout-s", str(TIMEOUT_S)]


GONE = "ended without a word"
SILENT, LATE = "has not answered for", "has made no progress for"
RAISED = "raised an exception"
# A selection: each launcher ends its ranks in its own way, and each hang takes a time limit.
CASES = [
    case("horovodrun", "horovod", "raises", 1, RAISED),
    case("horovodrun", "horovod", "exits", 1, "called sys.exit(0), and other ranks have not come to", when="long"),
    case("horovodrun", "horovod", "is stopped", 1, SILENT),
    case("horovodrun", "ddp", "exits at once", 1, GONE, when="long"),
    case("torchrun", "ddp", "is killed", 1, GONE),
    case("torchrun", "ddp", "loops", 1, LATE, when="long"),
    case("torchrun", "horovod", "is killed", 0, GONE, when="long"),
    case("torchrun", "ddp", "raises in the loss", 1, RAISED),
    case("torchrun", "ddp", "asserts on the device", 0, RAISED, when="long"),
    case("torchrun", "ddp", "takes too much memory", 1, RAISED, when="long"),
    case("mpirun", "horovod", "is killed", 1, GONE, when="long"),
    case("mpirun", "horovod", "raises in the loss", 1, RAISED, when="long"),
    case("mpirun", "ddp", "is stopped", 0, SILENT, when="long"),
    case("srun", "ddp", "is killed", 0, GONE, when="long"),
    case("srun", "ddp", "raises in the loss", 1, RAISED, when="long"),
    case("srun", "horovod", "is stuck", 1, SILENT, when="long"),
]


def run(launcher: str, backend: str, fault: str, *options: str) -> Result:
    argv = [*JOB, "--backend", backend, *options]
    with start(launcher, 2, argv, env={"FAULT": fault, "PYTHONPATH": str(REPOSITORY)}) as job:
        job.wait_for_output("steps", count=2)
        return job.wait(SOON_S)


@requires("horovod")
@pytest.mark.parametrize(("launcher", "backend", "fault", "rank", "message"), CASES)
def test_failure_report_names_failing_rank_once(
    launcher: str, backend: str, fault: str, rank: int, message: str, tmp_path: Path
) -> None:
    """The report has rank, host, step and phase, and a traceback; after a hang all ranks' stacks are saved."""
    result = run(launcher, backend, f"{fault}:{rank}:40", "--log-dir", str(tmp_path))
    assert result.returncode != 0
    printed = result.stderr
    (report,) = REPORT.findall(printed.split("Root Cause")[0])
    phase = "forward" if fault == "raises in the loss" else "step"
    place = rf"failure: rank {rank} of 2 on \S+ \(process \d+\), step 41, {phase}: "
    assert re.match(place + re.escape(message), report), printed
    assert printed.count("ValueError: the user's own words") == copies(launcher) * fault.startswith("raises")
    assert message != RAISED or "Connection closed" not in printed, "of the others' exchanges"
    kept = {path.name for path in tmp_path.glob("failures/*")}
    if fault in ("is stopped", "loops", "is stuck"):
        # If rank 0 is suspended, rank 1 reports it.
        assert kept == ({"rank-0.txt", "rank-1.txt", "report.txt"})
        assert "faulty_job.py" in (tmp_path / "failures" / f"rank-{rank}.txt").read_text()
    else:
        assert not kept


def test_failure_after_the_training_is_told_as_such() -> None:
    """It was told as that of the next step, in its save."""
    result = run("torchrun", "ddp", "raises after fit:1:0", "--max-steps", "20")
    assert result.returncode != 0
    assert re.search(r"failure: rank 1 of 2 on .*, after step 20, outside of fit: raised an exc", result.stderr)


def copies(launcher: str) -> int:
    """Return how often a report is printed: torchrun repeats that of the first rank."""
    return 2 if launcher == "torchrun" else 1


@each_launcher("torchrun", "srun")
def test_exception_in_all_ranks_is_reported_once(launcher: str) -> None:
    result = run(launcher, "ddp", "raises in the loss:all:40")
    assert result.returncode != 0
    assert result.stderr.count("ValueError: the user's own words") == copies(launcher), result.stderr


@pytest.mark.warm(False)
@each_pair(push=2, long=1)
def test_ranks_end_when_launcher_is_killed(launcher: str, backend: str) -> None:
    """Ranks whose torchrun was killed once trained to the end of the epoch."""
    env = {"FAULT": "lives:0:0", "PYTHONPATH": str(REPOSITORY)}
    with start(launcher, 2, [*JOB, "--backend", backend], env=env) as job:
        job.wait_for_output("steps", count=2)
        job.popen.kill()
        job.popen.wait()
        job.check_nothing_left()
        assert len(REPORT.findall(job.stderr)) <= 1
        if launcher == "torchrun":
            assert "its launcher, torchrun, has ended" in job.stderr


USUAL = ("--epochs", "24", "--batch-size", "32", "--save-every-steps", "7")
RESTARTED = (*USUAL, "--reproducible", "4")


@cache
def undisturbed(size: int, options: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        launch(QUICKEST, size, digits_job.argv("ddp", Path(folder), options))
        return digits_job.weights(Path(folder))


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "size", "options", "as_many"),
    [case("ddp", 3, USUAL, 3), case("horovod", 4, USUAL, 4), case("horovod", 4, RESTARTED, 2)],
)
def test_torchrun_restart_resumes_from_checkpoint(
    backend: str, size: int, options: tuple[str, ...], as_many: int, tmp_path: Path
) -> None:
    """Restarted ranks resume from the newest checkpoint; the weights equal those of undisturbed DDP ranks."""
    argv = digits_job.argv(backend, tmp_path, options)
    with start("torchrun", size, argv, options=["--max-restarts", "2"]) as job:
        job.wait_for_output("epoch 3/")
        job.ranks(size)[1].kill()
        assert job.wait().returncode == 0, job.report("did not go on")
        assert "restart  this job was started before, and resumes" in job.stdout
        assert re.search(r"resume   from \S+\nresume   restored model, optimizer", job.stdout)
        assert len(REPORT.findall(job.stderr)) == 1
    assert digits_job.weights(tmp_path) == undisturbed(as_many, options)
    assert not list(tmp_path.glob("earlier-*"))


@pytest.mark.long
@pytest.mark.warm(False)
@pytest.mark.parametrize(("launcher", "backend"), [case("torchrun", "ddp"), case("horovodrun", "horovod")])
def test_job_killed_again_and_again_trains_the_same_weights(launcher: str, backend: str, tmp_path: Path) -> None:
    """A rank, the launcher and rank 0, which saves after each step, are killed at random moments."""
    argv = digits_job.argv(backend, tmp_path, [*USUAL, "--save-every-steps", "1", "--resume", "auto"])
    draw = random.Random(backend)
    for epoch, victim in ((3, 1), (9, None), (15, 0)):
        with start(launcher, 3, argv) as job:
            job.wait_for_output(f"epoch {epoch}/")
            time.sleep(draw.uniform(0, 0.3))
            (job.popen if victim is None else job.ranks(3)[victim]).kill()
            assert job.wait().returncode != 0
            job.check_nothing_left()
    launch(QUICKEST, 3, argv)
    assert digits_job.weights(tmp_path) == undisturbed(3, USUAL)


@pytest.mark.long
@requires("horovod")
def test_torchrun_nodes_join_and_leave(tmp_path: Path) -> None:
    """With `torchrun --nnodes 1:3` a second node joins in the middle, and leaves again."""
    argv = digits_job.argv("horovod", tmp_path, [*RESTARTED, "--epochs", "100000"])
    place = f"localhost:{digits_job.free_port()}"
    options = f"--nnodes 1:3 --max-restarts 3 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint {place}".split()
    options += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1"]
    # In torch 2.15, agents that share their store block each other when a new one joins.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with start("torchrun", 1, argv, options=options, env=env) as first:
        first.wait_for_output("epoch 2/")
        with start("torchrun", 1, argv, options=options, env=env) as second:
            first.wait_for_output("world    2 ranks on 2 nodes")
            first.wait_for_output("resume   restored model, optimizer")
            second.destroy()
        first.wait_for_output("world    1 rank on 1 node", count=2)
        first.wait_for_output("resume   restored model, optimizer", count=2)
        assert first.stdout.count("restart  this job was started before, and resumes") == 2
    epochs = [line["epoch"] for line in lines(tmp_path, "epoch")]
    assert epochs == list(range(1, len(epochs) + 1)), "an epoch twice, or left out"


ALL_LEAVE = """
import sys
from hvd_trainer import backends
with backends.create(backends.EngineOptions(backend=sys.argv[1])) as backend:
    backend.collectives.barrier()
    sys.exit(0)
"""


def test_exit_of_all_ranks_is_no_failure(tmp_path: Path) -> None:
    """sys.exit(0) in one rank is a failure, in all ranks it is not."""
    (tmp_path / "script.py").write_text(ALL_LEAVE)
    argv = [str(tmp_path / "script.py"), "ddp"]
    result = launch("torchrun", 2, argv, env={"PYTHONPATH": str(REPOSITORY)})
    assert "failure" not in result.stderr


TWO_FITS = """
import sys
import torch
from torch import nn
from hvd_trainer import EngineOptions, LogOptions, TensorData, TrainOptions, Trainer, TrainerOptions

for seed in (1, 2):
    options = TrainerOptions(
        EngineOptions(backend="ddp"), TrainOptions(epochs=1, seed=seed), LogOptions(log_dir=sys.argv[1])
    )
    with Trainer(options) as trainer:
        model = nn.Linear(2, 1)
        data = TensorData(torch.ones(512, 2), torch.ones(512, 1))
        history = trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, data)
        assert history.end["step"] == 2, history
"""


def test_second_fit_is_no_restart(tmp_path: Path) -> None:
    """Both trainings have the same torchrun agent, which was once taken for a restart."""
    (tmp_path / "script.py").write_text(TWO_FITS)
    argv = [str(tmp_path / "script.py"), str(tmp_path / "log")]
    result = launch("torchrun", 2, argv, env={"PYTHONPATH": str(REPOSITORY)})
    assert "restart  this job" not in result.stdout
    assert (tmp_path / "log" / "earlier-1").is_dir()


MONITOR_SCRIPT = """
import sys, time
import torch.distributed as dist
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.faults.activity import Activity
from hvd_trainer.faults.monitor import MonitorSettings
from hvd_trainer.faults.monitor_server import MonitorServer
from hvd_trainer.faults.root_cause import RootCause

world = World(0, 1, 0, 1, 0, 1, "hand")
peers = [RankInfo("here", rank, "ddp", (0,)) for rank in (0, 1)]
settings = MonitorSettings(
    world=world, peers=peers, activity=Activity(60), startup_s=60, environ={}, elastic_timeout_s=float(sys.argv[1])
)
monitor = MonitorServer(settings, dist.HashStore(), "127.0.0.1")
monitor.start()
monitor.end_job(RootCause(1, "failure: rank 1", reported=True), 0.1)
if sys.argv[2] == "broken":
    monitor.check = None
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("elastic_timeout_s", "state", "printed"),
    [
        ("0.2", "sound", "rank 0 of 1 is ended: 0.2 s after rank 1 failed it has not left (before the first"),
        # After an error in the monitor thread nothing ended the rank.
        ("60", "broken", "TypeError"),
    ],
)
def test_monitor_ends_rank_that_does_not_leave(
    elastic_timeout_s: str, state: str, printed: str, tmp_path: Path
) -> None:
    """In elastic mode, a rank that does not notice the failure of another one; or whose monitor breaks."""
    (tmp_path / "monitor.py").write_text(MONITOR_SCRIPT)
    argv = [str(tmp_path / "monitor.py"), elastic_timeout_s, state]
    result = launch("python", 1, argv, env={"PYTHONPATH": str(REPOSITORY)}, check=False)
    assert result.returncode == 1
    assert printed in result.stderr


def test_monitor_gives_up_on_a_rank_that_does_not_connect() -> None:
    peers = [RankInfo("here", rank, "ddp", (0,)) for rank in (0, 1)]
    settings = MonitorSettings(
        world=World(0, 2, 0, 2), peers=peers, activity=Activity(60), startup_s=0.5, environ={}
    )
    with pytest.raises(LaunchError, match=r"waited 0 s for all ranks to connect to 127\.0\.0\.1; not all came"):
        MonitorServer(settings, dist.HashStore(), "127.0.0.1")


@pytest.mark.parametrize("phase", ["collective", "backward", "callback"])
def test_monitor_shuts_down_connections_only_during_exchange(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other phases a connection to the lost host may be the user's own, such as a callback's upload."""
    monkeypatch.setattr(monitor, "EXIT_GRACE_S", 0.5)
    peers = [RankInfo("here", 0, "ddp", (0,)), RankInfo("there", 0, "ddp", (0,), address="127.0.0.2")]
    activity = Activity(60)
    activity.enter(phase)
    settings = MonitorSettings(
        world=World(), peers=peers, activity=activity, startup_s=60, environ={}, elastic_timeout_s=60
    )
    with (
        socket.create_server(("127.0.0.2", 0)) as there,
        socket.create_connection(there.getsockname(), timeout=2) as connection,
    ):
        server = MonitorServer(settings, dist.HashStore(), "127.0.0.1")
        server.start()
        server.end_job(RootCause(1, "failure: rank 1", reported=True), 0.1)
        with nullcontext() if phase != "callback" else pytest.raises(TimeoutError):
            assert connection.recv(1) == b""
        server.close()
