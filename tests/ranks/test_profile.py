"""`--profile-steps`: a trace of each rank, who waited for whom, and unchanged training."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_job import train
from launchers import QUICKEST, SUPPORT, launch, requires
from records import records

from hvd_trainer.observe.phases import PHASES
from hvd_trainer.observe.profile import ROWS, waiting_table

pytestmark = pytest.mark.warm

ENGINES = ("ddp", "horovod")


def events_of(log: Path, rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank's trace."""
    text = gzip.decompress((log / "profile" / f"rank-{rank}.json.gz").read_bytes())
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def is_in(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    end = inner["ts"] + inner["dur"]
    return bool(outer["ts"] <= inner["ts"] + 1e-3 and end <= outer["ts"] + outer["dur"] + 1e-3)


def steps_of(events: Sequence[dict[str, Any]]) -> list[str]:
    """Check that a rank's phases are in its steps, and its operators in phases; return the names of the steps."""
    own = [e for e in events if e["ph"] == "X"]
    steps = [e for e in own if e["name"].startswith("ProfilerStep#")]
    (row,) = {e["tid"] for e in steps}
    marked = {name: [e for e in own if e["name"] == name and e["tid"] == row] for name in PHASES[:-1]}
    for name, phases in marked.items():
        assert all(any(is_in(phase, step) for step in steps) for phase in phases), name
        assert len([step for step in steps if any(is_in(phase, step) for phase in phases)]) >= len(steps) - 1, name
    for forward in marked["forward"]:
        assert any(e["name"] == "aten::addmm" and is_in(e, forward) for e in own)
    return [step["name"] for step in steps]


def results(log: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "backend"} for line in records(log)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without a profile; return the log folder."""
    log = tmp_path_factory.mktemp("plain")
    train(log, "--epochs", "3")
    return log


@requires("horovod")
@pytest.mark.parametrize("backend", ENGINES)
def test_each_rank_has_a_trace(plain: Path, tmp_path: Path, backend: str) -> None:
    """The profile spans the end of an epoch, and training keeps its bits."""
    said = train(tmp_path, "--epochs", "3", "--profile-steps", "10", ranks=2, backend=backend)
    assert (plain / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert results(plain) == results(tmp_path)
    for rank in range(2):  # PyTorch counts the steps from 0
        assert steps_of(events_of(tmp_path, rank)) == [f"ProfilerStep#{number}" for number in range(6, 16)]
    assert "profile  steps 7 to 16 of 2 ranks, mean in ms" in said
    assert f"traces: rank-N.json.gz in {tmp_path}/profile, for https://ui.perfetto.dev" in said


def run_job(folder: Path, fault: str, *options: str, check: bool = True, **variables: str) -> Any:
    job = ["--backend", "ddp", "--epochs", "1", "--batch-size", "64", "--log-dir", "log"]
    argv = [str(SUPPORT / "faulty_job.py"), *job, *options]
    return launch(QUICKEST, 2, argv, env={"FAULT": fault, **variables}, cwd=folder, check=check)


def test_profile_shows_a_slow_rank(tmp_path: Path) -> None:
    """Each batch of rank 1 takes 30 ms to fetch, and the ranks share no log folder."""
    options = ("--profile-steps", "6", "--profile-skip", "2")
    said = run_job(tmp_path, "is slow:1:0", *options, OWN_FOLDERS="1").stdout.splitlines()
    at = next(number for number, line in enumerate(said) if line.startswith("profile  steps 4 to 9 of 2 ranks"))
    columns, *ranks = (line.split(maxsplit=9) for line in said[at + 1 : at + 4])
    first, second = (dict(zip(columns, rank, strict=True)) for rank in ranks)
    assert float(second["data"]) > 30
    assert float(first["waited"]) > 20 > float(second["waited"])
    assert int(second["last in"].split()[0]) >= 5
    for rank in range(2):
        kept = tmp_path / str(rank) / "log" / "profile"
        assert [path.name for path in kept.iterdir()] == [f"rank-{rank}.json.gz"]


def test_profile_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    options = ("--profile-steps", "2", "--profile-skip", "0")
    said = run_job(tmp_path, "has no place for its trace:1:1", *options).stdout
    assert "rank 1 has no trace: " in said
    assert "done: " in said
    assert steps_of(events_of(tmp_path / "log", 0))


def test_failed_training_keeps_no_profile(tmp_path: Path) -> None:
    result = run_job(tmp_path, "raises:1:5", "--profile-steps", "9", "--profile-skip", "1", check=False)
    assert result.returncode != 0
    assert "the user's own words" in result.stderr
    assert not (tmp_path / "log" / "profile").exists()


def test_profile_of_a_short_training_says_so(tmp_path: Path) -> None:
    said = train(tmp_path, "--max-steps", "9", "--profile-steps", "10", ranks=1, backend="single")
    assert "profile  the training has ended after 3 of the 10 steps" in said
    assert "steps 7 to 9 of 1 rank" in said
    assert steps_of(events_of(tmp_path, 0))[:3] == [f"ProfilerStep#{number}" for number in range(6, 9)]
    said = train(tmp_path, "--max-steps", "6", "--profile-steps", "10", ranks=1, backend="single")
    assert "profile  nothing: the training had 6 steps, and the first 5 and one more are left out." in said
    assert not (tmp_path / "profile").exists()  # the earlier run's is with its other files
    assert (tmp_path / "earlier-1" / "profile" / "rank-0.json.gz").exists()


@requires("horovod")
@pytest.mark.parametrize("backend", ENGINES)
def test_profile_shows_stages(tmp_path: Path, backend: str) -> None:
    options = ("--stages", "2", "--chunks", "2", "--max-steps", "5", "--profile-steps", "3", "--profile-skip", "1")
    train(tmp_path, *options, "--activation-checkpointing", "none", backend=backend)
    for rank in range(2):
        names = [event["name"] for event in events_of(tmp_path, rank) if event["name"].startswith("ProfilerStep#")]
        assert sorted({*names}) == [f"ProfilerStep#{number}" for number in range(2, 5)]


# The table.


def test_waiting_table_names_the_last_rank() -> None:
    quick, slow = [0, 1, 1, 5, 1, 0], [3, 1, 1, 2, 1, 0]
    seconds = np.array([[quick, quick, slow], [slow, slow, quick]], dtype=float)
    heading, columns, *rows = waiting_table([4, 5, 6], seconds)
    assert heading.startswith("steps 4 to 6 of 2 ranks, ")
    assert columns.split() == ["rank", *PHASES, "whole", "waited", "last", "in"]
    assert [row.split()[-3:] for row in rows] == [["2000.00", "1", "steps"], ["1000.00", "2", "steps"]]


def test_waiting_table_of_many_ranks_has_those_that_were_last() -> None:
    seconds = np.ones((2 * ROWS, 2, len(PHASES)))
    seconds[-1, :, PHASES.index("collective")] = 0
    _, _, *rows = waiting_table([1, 2], seconds)
    assert len(rows) == ROWS
    assert rows[-1].split()[0] == str(2 * ROWS - 1)
