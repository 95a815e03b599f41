"""Scripts for Horovod's elastic API, unchanged: under horovodrun's elastic mode on both engines, and torchrun."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import digits_job
import pytest
from combinations import case
from elastic_hosts import elastic
from job import REPORT
from launchers import SUPPORT, launch, start
from requirements import requires

from hvd_trainer.hvd.common.commits import CommitFiles
from hvd_trainer.utils.process import start_time

pytestmark = pytest.mark.warm

SCRIPT = str(SUPPORT / "elastic_script.py")
RUN = ["-m", "hvd_trainer", "run"]
ENGINES = {engine: [*RUN, "--backend", engine, "--", SCRIPT] for engine in ("ddp", "horovod")}
KILLED_AT, COMMITTED_AT = 8, 6
"""batches of epoch 1"""
ON_BOTH = pytest.mark.parametrize("engine", [case("ddp"), case("horovod", when="long")])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where each process records what it does."""
    path = tmp_path / "events"
    path.mkdir()
    return path


def events(folder: Path, kind: str = "") -> list[list[list[str]]]:
    """Return the events of each process, or those of one kind, without its name."""
    files = [[line.split() for line in file.read_text().splitlines()] for file in folder.iterdir()]
    return [[words[1:] for words in lines if words[0] == kind] if kind else lines for lines in files]


def check_end(folder: Path, ranks: int) -> None:
    """Check that so many ranks have come to the end, with the same weights, and each sample once per epoch."""
    ended = [lines for lines in events(folder) if lines and lines[-1][0] == "weights"]
    assert len(ended) == ranks, events(folder)
    assert len({tuple(lines[-1]) for lines in ended}) == 1
    assert ended[0][-1][2] == str(ranks), "the learning rate does not fit the ranks"
    once = [str(number) for number in range(240)]
    for lines in ended:
        epochs = [sorted(words[1:], key=int) for words in lines if words[0] == "epoch"]
        assert epochs == [once] * 3


@requires("horovodrun")
@ON_BOTH
def test_others_go_on_from_the_last_commit_when_a_rank_is_killed_in_an_allreduce(
    engine: str, folder: Path, tmp_path: Path
) -> None:
    argv = [*ENGINES[engine], str(folder), "0.01", str(KILLED_AT)]
    with elastic(argv, tmp_path, here=2, there=1) as (job, _):
        assert job.wait().returncode == 0, job.report("did not go on")
        if engine == "ddp":
            (report,) = REPORT.findall(job.stderr)
            assert "ended without a word" in report
    check_end(folder, 2)
    three, two = ["3", "0", "0"], ["2", "1", str(COMMITTED_AT)]
    assert sorted(events(folder, "begin")) == [[three], [three, two], [three, two]]
    assert sorted(events(folder, "reset")) == [[], [["2"]], [["2"]]]


@requires("horovodrun")
@ON_BOTH
def test_rank_on_a_new_host_gets_the_state_and_its_part_of_the_epoch(
    engine: str, folder: Path, tmp_path: Path
) -> None:
    with elastic([*ENGINES[engine], str(folder), "0.1"], tmp_path, here=2) as (job, cluster):
        job.wait_for_output("begins on 2 ranks", count=2)
        cluster.has(here=2, there=1)
        assert job.wait().returncode == 0, job.report("did not go on")
    check_end(folder, 3)
    begins = sorted(events(folder, "begin"), key=len)
    assert [len(its) for its in begins] == [1, 2, 2]
    assert begins[0][0] == begins[1][1] == begins[2][1] != ["3", "0", "0"]
    assert sorted(events(folder, "told")) == [[], [], [["2"]]], "horovodrun tells rank 0 of hosts that have come"
    assert sorted(events(folder, "reset")) == [[], [["3"]], [["3"]]]


@pytest.mark.long
@requires("horovodrun")
def test_ranks_of_a_removed_host_leave_without_an_error(folder: Path, tmp_path: Path) -> None:
    """Under real Horovod the sampler keeps the shares of two ranks: some samples come twice, and others never."""
    with elastic([*ENGINES["ddp"], str(folder), "0.1"], tmp_path, here=1, there=1) as (job, cluster):
        job.wait_for_output("begins on 2 ranks", count=2)
        cluster.has(there=1)
        assert job.wait().returncode == 0, job.report("did not go on")
        assert not REPORT.findall(job.stderr)
    check_end(folder, 1)


def test_ranks_that_torchrun_starts_again_go_on_from_the_last_commit(folder: Path, tmp_path: Path) -> None:
    """The memory of all ranks is gone, and rank 0's node has kept the commit in a file."""
    argv = [*ENGINES["ddp"], str(folder), "0.01", str(KILLED_AT)]
    env = {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    launch("torchrun", 2, argv, options=["--max-restarts", "1"], env=env)
    check_end(folder, 2)
    first, again = [["2", "0", "0"]], [["2", "1", str(COMMITTED_AT)]]
    assert sorted(events(folder, "begin")) == [first, first, again, again]
    assert sorted(events(folder, "reset")) == [[], [], [["2"]], [["2"]]]
    assert not [*(tmp_path / "tmp").glob("hvd_trainer-*/elastic*")], "all ranks have come to their end"


@pytest.mark.long
def test_node_that_joins_torchrun_gets_the_last_commit(folder: Path, tmp_path: Path) -> None:
    place = f"localhost:{digits_job.free_port()}"
    options = f"--nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint {place}".split()
    options += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1"]
    # In torch 2.15, agents that share their store block each other when a new one joins.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    argv = [*ENGINES["ddp"], str(folder), "0.1"]
    with start("torchrun", 1, argv, options=options, env=env) as first:
        first.wait_for_output("has trained epoch 1")
        with start("torchrun", 1, argv, options=options, env=env) as second:
            assert second.wait().returncode == 0, second.report("the second node")
        assert first.wait().returncode == 0, first.report("the first node")
    check_end(folder, 2)
    (again,) = {tuple(its[0]) for its in events(folder, "begin") if its[0][0] == "2"}
    assert again != ("2", "0", "0")


def test_commits_of_jobs_that_were_killed_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = f"{os.getpid()} {start_time(os.getpid())}"
    killed, running = CommitFiles(f"{os.getpid()} 1", True), CommitFiles(mine, True)
    for files in (killed, running):
        files.write(0, lambda: {"step": 7})
    assert CommitFiles(mine, True).read(0) == (1, {"step": 7})
    assert killed.read(0) == (0, None)
    assert CommitFiles(mine, False).read(0) == (0, None), "one rank per node reads"


def test_without_an_elastic_launcher_a_killed_rank_ends_the_job(folder: Path) -> None:
    argv = [*RUN, "-np", "2", "--", SCRIPT, str(folder), "0", str(KILLED_AT)]
    result = launch("python", 1, argv, check=False)
    assert result.returncode in (1, 128 + 9)
    (report,) = REPORT.findall(result.stderr)
    assert "rank 1 of 2" in report
    assert "Traceback" not in result.stderr
