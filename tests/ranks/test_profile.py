"""`--profile-steps`: one trace of all ranks on one clock, who waited for whom, and unchanged training."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launchers import QUICKEST, SUPPORT, launch, requires, run_ranks
from records import records

from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.observe.joined_trace import (
    DEVICE_ROWS,
    Ahead,
    ahead_of_first,
    compare_clocks,
    events_of_rank,
    write_trace,
)
from hvd_trainer.observe.phases import PARTS
from hvd_trainer.observe.profile import ROWS, waiting_table

pytestmark = pytest.mark.warm

ENGINES = ("ddp", "horovod")


def train(log: Path, *options: str, ranks: int = 2, backend: str = "ddp") -> str:
    """Train on the 1,438 digits: 6 steps of 2 x 128 in an epoch."""
    job = ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--backend", backend, "--log-dir", str(log)]
    return launch(QUICKEST, ranks, [*job, *options]).stdout


def events_of(log: Path, name: str = "trace.json.gz") -> list[dict[str, Any]]:
    """Return a trace's events, each with what Chrome and Perfetto require of it."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress((log / "profile" / name).read_bytes()))[
        "traceEvents"
    ]
    for event in events:
        assert {type(event[key]) for key in ("pid", "tid")} == {int}, event
        assert event["ts"] >= 0, event
        assert event["ph"] != "X" or event["dur"] >= 0, event
    return events


def names_of(events: Sequence[dict[str, Any]]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"].partition(" (")[0] for e in events if e["name"] == "process_name"}


def is_in(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    end = inner["ts"] + inner["dur"]
    return bool(outer["ts"] <= inner["ts"] + 1e-3 and end <= outer["ts"] + outer["dur"] + 1e-3)


def steps_of(events: Sequence[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Check that a rank's phases are in its steps, and its operators in phases; return the steps."""
    own = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
    steps = [e for e in own if e["name"].startswith("ProfilerStep#")]
    (row,) = {e["tid"] for e in steps}
    marked = {name: [e for e in own if e["name"] == name and e["tid"] == row] for name in PARTS[:-1]}
    for name, phases in marked.items():
        assert all(any(is_in(phase, step) for step in steps) for phase in phases), name
        assert len([step for step in steps if any(is_in(phase, step) for phase in phases)]) >= len(steps) - 1, name
    for forward in marked["forward"]:
        assert any(e["name"] == "aten::addmm" and is_in(e, forward) for e in own)
    return steps


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
def test_profile_joins_all_ranks_on_one_clock(plain: Path, tmp_path: Path, backend: str) -> None:
    """The profile spans the end of an epoch, and training keeps its bits."""
    said = train(tmp_path, "--epochs", "3", "--profile-steps", "10", backend=backend)
    assert (plain / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert results(plain) == results(tmp_path)

    events = events_of(tmp_path)
    assert names_of(events) == {0: "rank 0", 1: "rank 1"}
    first, second = (steps_of(events, rank) for rank in range(2))
    # PyTorch counts them from 0.
    assert [e["name"] for e in first] == [f"ProfilerStep#{number}" for number in range(6, 16)]
    for one, other in zip(first, second, strict=True):
        # Neither rank ends a step before the other one has begun it: they exchange gradients in it.
        assert one["ts"] < other["ts"] + other["dur"], one["name"]
        assert other["ts"] < one["ts"] + one["dur"], one["name"]
    for rank in range(2):
        assert [e for e in events if e["pid"] == rank] == events_of(tmp_path, f"rank-{rank}.json.gz")
    assert "profile  steps 7 to 16 of 2 ranks, mean in ms" in said
    assert "trace of 2 ranks: " in said


def run_job(tmp_path: Path, *options: str, block: str = "", check: bool = True) -> Any:
    job = ["--backend", "ddp", "--epochs", "1", "--batch-size", "64", "--log-dir", "log"]
    argv = [str(SUPPORT / "slow_rank_job.py"), *job, *options]
    return launch(QUICKEST, 2, argv, env={"BLOCK": block}, cwd=tmp_path, check=check)


def test_profile_shows_a_slow_rank(tmp_path: Path) -> None:
    """Each batch of rank 1 takes 30 ms to fetch, and the ranks share no log folder."""
    said = run_job(tmp_path, "--profile-steps", "6", "--profile-skip", "2").stdout.splitlines()
    at = next(number for number, line in enumerate(said) if line.startswith("profile  steps 4 to 9 of 2 ranks"))
    columns, *ranks = (line.split(maxsplit=9) for line in said[at + 1 : at + 4])
    first, second = (dict(zip(columns, rank, strict=True)) for rank in ranks)
    assert float(second["data"]) > 30
    assert float(first["waited"]) > 20 > float(second["waited"])
    assert int(second["last in"].split()[0]) >= 5
    assert names_of(events_of(tmp_path / "0" / "log")) == {0: "rank 0", 1: "rank 1"}
    assert [path.name for path in (tmp_path / "1" / "log" / "profile").iterdir()] == ["rank-1.json.gz"]


def test_profile_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    options = ("--profile-steps", "2", "--profile-skip", "0")
    said = run_job(tmp_path, *options, block="rank-1.json.gz").stdout
    assert "rank 1 has no trace: " in said
    assert "done: " in said
    assert names_of(events_of(tmp_path / "0" / "log")) == {0: "rank 0"}
    said = run_job(tmp_path, *options, block="trace.json.gz").stdout
    assert "the ranks' traces could not be joined: " in said
    assert "done: " in said


def test_failed_training_keeps_no_profile(tmp_path: Path) -> None:
    result = run_job(tmp_path, "--profile-steps", "9", "--profile-skip", "1", block="fail", check=False)
    assert result.returncode != 0
    assert "the user's own mistake" in result.stderr
    assert not (tmp_path / "0" / "log" / "profile").exists()


def test_profile_of_a_short_training_says_so(tmp_path: Path) -> None:
    said = train(tmp_path, "--max-steps", "9", "--profile-steps", "10", ranks=1, backend="single")
    assert "profile  the training has ended after 3 of the 10 steps" in said
    assert "steps 7 to 9 of 1 rank" in said
    assert names_of(events_of(tmp_path)) == {0: "rank 0"}
    said = train(tmp_path, "--max-steps", "6", "--profile-steps", "10", ranks=1, backend="single")
    assert "profile  nothing: the training had 6 steps, and the first 5 and one more are left out." in said
    assert not (tmp_path / "profile").exists()  # the earlier run's is with its other files
    assert (tmp_path / "earlier-1" / "profile" / "trace.json.gz").exists()


@requires("horovod")
@pytest.mark.parametrize("backend", ENGINES)
def test_profile_shows_stages(tmp_path: Path, backend: str) -> None:
    options = ("--stages", "2", "--chunks", "2", "--max-steps", "5", "--profile-steps", "3", "--profile-skip", "1")
    train(tmp_path, *options, "--activation-checkpointing", "none", backend=backend)
    steps = [(e["pid"], e["name"]) for e in events_of(tmp_path) if e["name"].startswith("ProfilerStep#")]
    assert sorted(steps) == [(rank, f"ProfilerStep#{number}") for rank in range(2) for number in range(2, 5)]


# Clocks.


def skewed(machines: Sequence[str], ahead_ms: Sequence[float]) -> tuple[int, list[Ahead]]:
    with create(EngineOptions(backend="ddp")) as backend:
        rank = backend.world.rank
        now = time.time_ns
        return rank, compare_clocks(backend, machines[rank], lambda: now() + int(1e6 * ahead_ms[rank]))


def test_compare_clocks_is_exact_to_an_exchange() -> None:
    found = run_ranks(skewed, num_processes=3, args=(["a", "b", "b"], [0.0, 1234.5, 1234.5]))
    assert found[0] == found[1] == found[2]
    first, *others = found[0]
    assert first == Ahead(0, 0)
    for its in others:
        assert its.unsure_ns < 1e9
        assert abs(its.by_ns - 1234.5e6) <= its.unsure_ns
    assert run_ranks(skewed, num_processes=2, args=(["a", "a"], [0.0, 7.0]))[0] == [Ahead(0, 0), Ahead(0, 0)]


def test_ahead_of_first_narrows_with_every_barrier() -> None:
    """Rank 1's clock is 100 ns ahead."""
    stamps = [[(0, 10), (20, 24)], [(102, 111), (121, 125)]]
    assert ahead_of_first(["a", "b"], stamps) == [Ahead(0, 0), Ahead(101, 5)]
    assert ahead_of_first(["a", "b"], [stamps[1], stamps[0]])[1].by_ns == -101


def test_joined_trace_takes_out_clock_offsets(tmp_path: Path) -> None:
    """Two ranks do the same at the same time, and the clock of the second is 2 ms ahead."""
    own, base_ns, origin_ns = os.getpid(), 1_000_000_000, 1_000_500_000
    parts = []
    for rank, ahead_ns in enumerate((0, 2_000_000)):
        at_us = 700.5 + ahead_ns / 1000
        trace = {
            "baseTimeNanoseconds": base_ns,
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": own, "tid": 0, "ts": at_us, "args": {"name": "python"}},
                {"ph": "X", "name": "work", "pid": own, "tid": own, "ts": at_us, "dur": 3},
                {"ph": "X", "name": "gemm", "pid": own + 1, "tid": 7, "ts": at_us, "dur": 3},
                {"ph": "s", "name": "launch", "pid": own, "tid": own, "ts": at_us, "id": 5},
                {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "a", "ts": at_us, "dur": 9},
            ],
        }
        parts.append(events_of_rank(trace, rank, "node", origin_ns + ahead_ns))
    (tmp_path / "profile").mkdir()
    write_trace(tmp_path / "profile" / "trace.json.gz", parts, origin_ns)
    events = events_of(tmp_path)
    assert names_of(events) == {0: "rank 0", 1: "rank 1"}
    shown = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "X"]
    assert shown == [
        *(("work", 0, own), ("gemm", 0, DEVICE_ROWS + 7)),
        *(("work", 1, own), ("gemm", 1, DEVICE_ROWS + 7)),
    ]
    assert {e["ts"] for e in events if e["ph"] in "Xs"} == {200.5}
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2


# The table.


def test_waiting_table_names_the_last_rank() -> None:
    quick, slow = [0, 1, 1, 5, 1, 0], [3, 1, 1, 2, 1, 0]
    seconds = np.array([[quick, quick, slow], [slow, slow, quick]], dtype=float)
    heading, columns, *rows = waiting_table([4, 5, 6], seconds)
    assert heading.startswith("steps 4 to 6 of 2 ranks, ")
    assert columns.split() == ["rank", *PARTS, "whole", "waited", "last", "in"]
    assert [row.split()[-3:] for row in rows] == [["2000.00", "1", "steps"], ["1000.00", "2", "steps"]]


def test_waiting_table_of_many_ranks_has_those_that_were_last() -> None:
    seconds = np.ones((2 * ROWS, 2, len(PARTS)))
    seconds[-1, :, PARTS.index("collective")] = 0
    _, _, *rows = waiting_table([1, 2], seconds)
    assert len(rows) == ROWS
    assert rows[-1].split()[0] == str(2 * ROWS - 1)
