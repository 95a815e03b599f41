"""horovodrun's elastic mode: hosts come and go, ranks are lost, and the others continue from their snapshot.

Two names of this machine are its hosts, so that horovodrun starts the ranks of both without ssh.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import digits_job
import elastic_job
import psutil
import pytest
from combinations import case
from elastic_hosts import HERE, THERE, elastic
from job import REPORT
from launchers import QUICKEST, SUPPORT, Job, launch, requires
from records import lines
from waiting import wait_for

from hvd_trainer import EngineOptions
from hvd_trainer.backends import create, horovod
from hvd_trainer.checkpoint.manager import CheckpointManager, InMemorySnapshot
from hvd_trainer.config.options import SaveOptions
from hvd_trainer.errors import BackendError, LaunchError, OptionError
from hvd_trainer.faults.elastic import DismissedError, HorovodElasticDriver
from hvd_trainer.launch.world import set_world

pytestmark = requires("horovodrun")
BATCH = ("--global-batch-size", str(elastic_job.GLOBAL_BATCH))
JOB = [str(SUPPORT / "elastic_job.py"), *BATCH, "--commit-every-steps", "5"]
ONCE = dict.fromkeys(range(elastic_job.SAMPLES), 1)


def rank_on(job: Job, host: str) -> psutil.Process:
    """Wait for a rank on this host; return its process."""

    def rank() -> psutil.Process | None:
        for process in job.processes():
            with suppress(psutil.Error):
                if process.name() == "python" and process.environ().get("HOROVOD_HOSTNAME") == host:
                    return process
        return None

    return wait_for(rank, lambda: job.report(f"no rank on {host}"))


@pytest.mark.long
@pytest.mark.parametrize("backend", [case("horovod"), case("ddp", when="long")])
def test_elastic_ranks_join_and_are_killed(backend: str, tmp_path: Path) -> None:
    """Two ranks join, one is killed, and its host excluded: the weights equal those of an undisturbed run."""
    options = ["--epochs", "24", "--batch-size", "32", "--reproducible", "4", "--commit-every-steps", "7"]
    argv = digits_job.argv(backend, tmp_path / "log", options)
    with elastic(argv, tmp_path, here=2) as (job, cluster):
        job.wait_for_output("epoch 2/")
        cluster.has(here=2, there=2)
        job.wait_for_output("world    4 ranks on 2 nodes")
        job.wait_for_output("resume   restored model, optimizer")
        rank_on(job, THERE).kill()
        job.wait_for_output("world    2 ranks on 1 node", count=2)
        assert job.wait().returncode == 0, job.report("did not go on")
        (report,) = REPORT.findall(job.stderr)
        assert re.search(r"failure: rank [23] of 4 on 127.0.0.1 .*: ended without a word", report)
    launch(QUICKEST, 2, digits_job.argv("ddp", tmp_path / "undisturbed", options))
    assert digits_job.weights(tmp_path / "log") == digits_job.weights(tmp_path / "undisturbed")
    assert [line["epoch"] for line in lines(tmp_path / "log", "epoch")] == list(range(1, 25))


@pytest.mark.long
def test_elastic_trains_each_sample_once_per_epoch(tmp_path: Path) -> None:
    """Ranks join while the first one starts; one is suspended, and its host excluded."""
    argv = [*JOB, "--epochs", "40", "--timeout-s", "3", "--log-dir", str(tmp_path)]
    with elastic(argv, tmp_path, here=1) as (job, cluster):
        rank_on(job, HERE)
        cluster.has(here=2, there=1)
        job.wait_for_output("world    3 ranks on 2 nodes")
        job.wait_for_output("resume   restored model, optimizer")
        job.wait_for_output("epoch ", count=job.stdout.count("epoch ") + 2)
        rank_on(job, HERE).suspend()
        job.wait_for_output("world    1 rank on 1 node, started by horovodrun", count=2)
        assert re.search(r"failure: rank [012] of 3 on localhost .*: has not answered", job.stderr)
        assert job.wait().returncode == 0, job.report("did not go on")
    assert elastic_job.trained_on(tmp_path) == dict.fromkeys(range(40), ONCE)


@pytest.mark.long
def test_elastic_host_of_rank_0_is_removed(tmp_path: Path) -> None:
    """Its ranks leave without an error, and another rank continues the log."""
    argv = [*JOB, "--epochs", "40", "--log-dir", str(tmp_path)]
    with elastic(argv, tmp_path, here=1, there=1) as (job, cluster):
        job.wait_for_output("epoch 2/")
        cluster.has(there=1)
        job.wait_for_output("world    1 rank on 1 node")
        assert job.wait().returncode == 0, job.report("did not go on")
        assert not REPORT.findall(job.stderr)
    assert elastic_job.trained_on(tmp_path) == dict.fromkeys(range(40), ONCE)


def test_horovodrun_ends_when_its_only_host_fails(tmp_path: Path) -> None:
    """It excludes a host with a failed rank, and prints one line after the report."""
    argv = [*JOB, "--epochs", "1000", "--log-dir", str(tmp_path)]
    with elastic(argv, tmp_path, here=2) as (job, _):
        job.wait_for_output("epoch 2/")
        rank_on(job, HERE).send_signal(signal.SIGKILL)
        assert job.wait().returncode == 1
        assert len(REPORT.findall(job.stderr)) == 1
        assert job.stderr.splitlines()[-1].startswith("horovodrun: Horovod detected")


@pytest.mark.long
@pytest.mark.parametrize(("backend", "frozen"), [("horovod", HERE), ("ddp", THERE)])
def test_elastic_continues_without_frozen_rank(backend: str, frozen: str, tmp_path: Path) -> None:
    """No rank of its host can kill it: horovodrun waited for it without limit, and the other for horovodrun."""
    argv = [*JOB, "--backend", backend, "--epochs", "200", "--log-dir", str(tmp_path)]
    argv += ["--timeout-s", "4", "--startup-timeout-s", "20"]
    with elastic(argv, tmp_path, ["--elastic-timeout", "15"], here=1, there=1) as (job, _):
        job.wait_for_output("epoch 2/")
        rank_on(job, frozen).suspend()
        job.wait_for_output("world    1 rank on 1 node")
        (report,) = REPORT.findall(job.stderr)
        # Of a rank on another host the last heartbeat is known, which may be from before its first step.
        assert re.search(rf"rank [01] of 2 on {frozen} .*: has not answered", report)
        assert job.wait().returncode == 0, job.report("did not go on")


def test_horovodrun_excludes_host_of_frozen_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts whose ranks have left the world by themselves are not excluded."""
    from horovod.runner.elastic.registration import WorkerStateRegistry

    given_up: set[str] = set()
    next_world = threading.Event()
    slot = SimpleNamespace(local_rank=0)
    driver = SimpleNamespace(finished=lambda: False, resume=next_world.set, _timeout=0.2)
    driver.host_assignments = {"a": [slot], "b": [slot], "c": [slot]}
    hosts = SimpleNamespace(blacklist=given_up.add, is_blacklisted=given_up.__contains__)
    registry = WorkerStateRegistry(driver, hosts)
    registry.reset(3)
    for host in "ac":
        threading.Thread(target=registry.record_ready, args=(host, 0), daemon=True).start()
    assert next_world.wait(30)
    assert given_up == {"b"}


@pytest.mark.long
def test_elastic_rank_in_long_callback_survives(tmp_path: Path) -> None:
    """It was killed if it took longer than --timeout-s to notice that another rank had failed."""
    argv = [*JOB, "--epochs", "40", "--timeout-s", "2", "--log-dir", str(tmp_path)]
    with elastic(argv, tmp_path, env={elastic_job.LONG_CALLBACK: "5"}, here=1, there=1) as (job, _):
        job.wait_for_output("a long callback")
        rank_on(job, THERE).kill()
        job.wait_for_output("world    1 rank on 1 node")
        assert job.wait().returncode == 0, job.report("did not go on")


@pytest.mark.parametrize("mistake", [["--epochz", "3"], case(["--timeout-s", "0"], when="long")])
def test_option_error_of_all_ranks_is_printed_once(mistake: list[str], tmp_path: Path) -> None:
    """horovodrun ends no rank while others run: each rank printed the error after its ten seconds."""
    with elastic([*JOB, *mistake], tmp_path, here=2) as (job, _):
        assert job.wait().returncode != 0
        printed = job.stdout + job.stderr
        assert len(re.findall(rf"{mistake[0]}\b", printed)) == 1, printed


def test_restore_refuses_second_fit_of_elastic_job() -> None:
    """A rank that joins during the others' second training is in its own first."""
    others = (1, 240)
    backend: Any = SimpleNamespace(
        session=SimpleNamespace(driver=object()),
        collectives=SimpleNamespace(all_gather_object=lambda mine: [others, mine]),
    )
    parts: dict[str, Any] = dict.fromkeys(("progress", "before_save"))
    state: Any = SimpleNamespace(parts=SimpleNamespace(is_sharded=False))
    log: Any = SimpleNamespace(folder=None)
    manager = CheckpointManager(
        backend=backend,
        options=SaveOptions(),
        log=log,
        is_enabled=False,
        snapshot=InMemorySnapshot(fit=0),
        state=state,
        **parts,
    )
    with pytest.raises(OptionError, match="training 1 of its process, and others are in 2: .* fit only once"):
        manager.restore(seed=0, is_over=lambda: False)


def test_elastic_refuses_older_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, some ranks whose peers had left waited until Gloo's time limit."""
    monkeypatch.setattr(horovod, "patch_set", lambda: 5)
    engine: Any = create(EngineOptions(backend="horovod"), dict(RANK))
    with pytest.raises(BackendError, match="python -m hvd_trainer install-horovod"):
        engine._start()


NUMBERS = {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "HOSTNAME": "b", "ELASTIC": 1}
SERVER = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": "1"}
RANK = {f"HOROVOD_{name}": str(value) for name, value in {**NUMBERS, **SERVER}.items()}


@contextmanager
def answering(status: int, answer: str) -> Iterator[HorovodElasticDriver]:
    """Yield a driver, as rank 1 of 2 on host b, whose horovodrun gives this answer."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/rank_and_size/b:0"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield HorovodElasticDriver(RANK | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port)})
        server.shutdown()


def test_driver_without_horovodrun() -> None:
    """horovodrun's variables were set by hand, or it has ended."""
    with pytest.raises(LaunchError, match="HOROVOD_GLOO_RENDEZVOUS_PORT too.* Type: unset HOROVOD_ELASTIC"):
        HorovodElasticDriver({name: value for name, value in RANK.items() if not name.endswith("PORT")})
    with pytest.raises(LaunchError, match=r"horovodrun at 127.0.0.1:1 does not answer: .* start the job again"):
        HorovodElasticDriver(dict(RANK)).listen()


def test_next_world() -> None:
    with answering(200, "0,3,0,1,0,3") as driver:
        driver.hosts_changed.set()
        world = driver.next_world()
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 3, 0, 1)
        assert (driver.past_worlds, driver.hosts_changed.is_set()) == (1, False)


def test_next_world_is_also_in_the_variables_that_scripts_read() -> None:
    """`hvd_trainer run` sets torchrun's, which stayed those of the first world."""
    environ = {**RANK, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    set_world(environ, rank=0, size=3, local_rank=0, local_size=1)
    assert (environ["HOROVOD_RANK"], environ["HOROVOD_SIZE"]) == ("0", "3")
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("0", "3")


def test_next_world_without_place() -> None:
    with answering(200, "-1,-1,-1,-1,-1,-1") as driver, pytest.raises(DismissedError) as left:
        driver.next_world()
    assert left.value.code == 0


def test_next_world_after_end_of_horovodrun() -> None:
    with answering(404, "") as driver, pytest.raises(LaunchError, match="not started in its elastic mode"):
        driver.next_world()
    with pytest.raises(LaunchError, match=r"has no place for this process: .*--elastic-timeout"):
        driver.next_world()
