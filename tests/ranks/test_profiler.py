"""`--profile`: one trace of all ranks on one clock, a breakdown as text, and unchanged training."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launchers import QUICKEST, SUPPORT, launch, requires, run_ranks
from records import records
from trainings import options_of

from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.backends.base import Span
from hvd_trainer.backends.horovod_timeline import read_timeline
from hvd_trainer.config.profile_plan import ProfilePlan
from hvd_trainer.config.rules import find_mistakes
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.profiler.breakdown import Figures, breakdown, waits
from hvd_trainer.observe.profiler.merge import Ahead, ahead_of_first, compare_clocks
from hvd_trainer.observe.profiler.operators import operators

pytestmark = pytest.mark.warm

ENGINES = ("ddp", "horovod")
PHASES = {"data", "forward", "backward", "reduce", "step"}

# The option.


def test_profile_plan_parses_valid_text() -> None:
    assert ProfilePlan.parse("steps=10") == ProfilePlan(10, skip=5)
    every = ProfilePlan(3, skip=0, memory=True, stacks=True, shapes=True)
    assert ProfilePlan.parse("shapes,skip=0,steps=3,stacks,memory") == every


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is nothing that it knows, steps=N is missing"),
        ("10", "'10' is nothing that it knows"),
        ("skip=3", "steps=N is missing"),
        ("steps=0", "steps needs a number of steps, 1 or more: steps=10"),
        ("steps=ten", "steps needs a number"),
        ("steps=-1", "steps needs a number"),
        ("steps=\u0661", "steps needs a number"),
        ("steps=10,skip=", "skip needs a number of steps, 0 or more"),
        ("steps=10,steps=20", "steps is there twice"),
        ("steps=10, skip=2", "' skip=2' is nothing that it knows"),
        ("steps=10,memory=yes", "'memory=yes' is nothing that it knows"),
        ("steps=10,flops", "'flops' is nothing that it knows"),
    ],
)
def test_profile_plan_refuses_invalid_text(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        ProfilePlan.parse(text)
    assert message in str(caught.value)
    assert str(caught.value).endswith(
        "type steps=N, and behind it with commas what you need of skip=N, memory, stacks, shapes"
    )
    assert find_mistakes(options_of(profile=text, log_dir="somewhere")) == [str(caught.value)]


# Trainings.


def train(log: Path, *options: str, ranks: int = 2, backend: str = "ddp", **env: str) -> str:
    """Train on the 1,438 digits: 6 steps of 2 x 128 in an epoch."""
    job = ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--backend", backend, "--log-dir", str(log)]
    return launch(QUICKEST, ranks, [*job, *options], env=env).stdout


def trace_of(log: Path, name: str = "trace.json.gz") -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress((log / "profile" / name).read_bytes()))
    return trace


def process_names(events: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the trace's processes, in the order in which they are shown."""
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    names = [(order[e["pid"]], e["args"]["name"], e["pid"]) for e in events if e["name"] == "process_name"]
    return {name: pid for _, name, pid in sorted(names)}


def check_events(events: Sequence[dict[str, Any]]) -> None:
    """Check the events as Chrome and Perfetto require them."""
    for event in events:
        assert event["ph"] in "XMisf", event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event["name"], str), event
        assert event["ts"] >= 0, event
        assert event["ph"] != "X" or event["dur"] >= 0, event
        assert event["ph"] not in "sf" or isinstance(event["id"], int), event
    starts, ends = ({e["id"] for e in events if e["ph"] == ph} for ph in "sf")
    assert starts & ends


def is_in(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    end = inner["ts"] + inner["dur"]
    return bool(outer["ts"] <= inner["ts"] + 1e-3 and end <= outer["ts"] + outer["dur"] + 1e-3)


def check_steps(events: Sequence[dict[str, Any]], pid: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Check that one rank's steps are there in order, and that each phase is inside a step; return the steps."""
    named = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name" and e["args"]["name"] == "steps"]
    row = next(e["tid"] for e in named if e["pid"] == pid)
    its = sorted((e for e in events if (e["pid"], e["tid"], e["ph"]) == (pid, row, "X")), key=lambda e: e["ts"])
    steps = [e for e in its if e["name"].startswith("step ")]
    assert [e["name"] for e in steps] == [f"step {number}" for number in numbers]
    for before, after in zip(steps, steps[1:], strict=False):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    for name in PHASES - {"data"}:
        phases = [e for e in its if e["name"] == name]
        inside = [e for e in phases if any(is_in(e, step) for step in steps)]
        assert len(inside) >= len(steps), name
        assert inside == phases or name in ("step", "reduce"), name  # those are also between epochs
    operators = [e for e in events if e["pid"] == pid and e.get("cat") == "cpu_op"]
    for step in steps:
        assert any(e["name"] == "aten::addmm" and is_in(e, step) for e in operators)
    return steps


def results(log: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "backend"} for line in records(log)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without --profile; return the log folder."""
    log = tmp_path_factory.mktemp("plain")
    train(log, "--epochs", "3")
    return log


@requires("horovod")
@pytest.mark.parametrize("backend", ENGINES)
def test_profile_merges_all_ranks_on_one_clock(plain: Path, tmp_path: Path, backend: str) -> None:
    """The profile spans the end of an epoch, and training keeps its bits."""
    profiled = tmp_path / "profiled"
    said = train(profiled, "--epochs", "3", "--profile", "steps=10", backend=backend)
    assert (plain / "model.safetensors").read_bytes() == (profiled / "model.safetensors").read_bytes()
    assert results(plain) == results(profiled)

    trace = trace_of(profiled)
    events, numbers = trace["traceEvents"], range(7, 17)
    check_events(events)
    processes = process_names(events)
    ranks = [pid for name, pid in processes.items() if " (" in name]
    assert [name.partition(" (")[0] for name in processes if " (" in name] == ["rank 0", "rank 1"]
    first, second = (check_steps(events, pid, numbers) for pid in ranks)
    for one, other in zip(first, second, strict=True):
        # Neither rank ends a step before the other one has begun it: they exchange gradients in it.
        assert one["ts"] < other["ts"] + other["dur"], one["name"]
        assert other["ts"] < one["ts"] + one["dur"], one["name"]
    assert abs(trace["baseTimeNanoseconds"] / 1e9 - time.time()) < 300
    assert trace["otherData"]["steps"] == "steps 7 to 16"

    engine = [pid for name, pid in processes.items() if name.startswith("rank 0: Horovod")]
    assert len(engine) == (backend == "horovod")
    if engine:
        check_timeline(events, engine[0], first)
    for rank in range(2):
        with np.load(profiled / "steps" / f"rank-{rank}.npz") as kept:
            assert kept["step"].tolist() == list(range(1, 19))
            assert (kept["seconds"][:, 1:5] > 0).all()
    for rank in range(2):
        check_events(trace_of(profiled, f"rank-{rank}.json.gz")["traceEvents"])
    check_text(profiled, said)


def check_timeline(events: Sequence[dict[str, Any]], pid: int, steps: Sequence[dict[str, Any]]) -> None:
    """Check that Horovod exchanges each gradient between the forward pass and the update of a step."""
    rows = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == pid and e["name"] == "thread_name"}
    sent = [e for e in events if e["pid"] == pid and e["name"] == "ALLREDUCE" and "bucket" in rows[e["tid"]]]
    assert len(sent) == len(steps)
    for step, exchange in zip(steps, sorted(sent, key=lambda e: e["ts"]), strict=True):
        assert is_in(exchange, step)
        its = [e for e in events if (e["pid"], e["tid"]) == (step["pid"], step["tid"]) and e["ph"] == "X"]
        forward, update = (
            max(e["ts"] for e in its if e["name"] == n and is_in(e, step)) for n in ("forward", "step")
        )
        assert forward < exchange["ts"]
        assert exchange["ts"] + exchange["dur"] < update


def check_text(log: Path, said: str) -> None:
    """Check the breakdown, which is printed as it is kept."""
    text = (log / "profile" / "breakdown.txt").read_text()
    lines = text.splitlines()
    assert lines[0].startswith("steps 7 to 16 of 2 ranks, in ms. The median step took ")
    head = next(line.split() for line in lines if line.startswith("mean of steps"))
    assert head[3:] == ["data", "forward", "backward", "reduce", "step", "other", "whole"]
    for rank in range(2):
        row = next(line.split()[2:] for line in lines if line.startswith(f"rank {rank} "))
        *parts, whole = map(float, row)
        assert sum(parts) == pytest.approx(whole, abs=0.05)
        assert all(part > 0 for part in parts[:-1])
    operator = next(line.split() for line in lines if line.startswith("aten::convolution_backward"))
    assert float(operator[1]) > 0
    assert operator[2] == "2"  # of each step and rank, and none of the evaluation between two steps
    for line in lines:
        assert line in said


def test_profile_names_a_slow_rank(tmp_path: Path) -> None:
    """Each batch of rank 1 takes 30 ms to fetch, and the ranks share no log folder."""
    lines = run_script(tmp_path, "--profile", "steps=6,skip=2,shapes,memory,stacks", "--accumulate", "2")
    wait = next(line for line in lines if line.startswith("rank 0 waited"))
    assert "for rank 1, the last one in " in wait
    assert wait.endswith(" longer for data")
    waited_ms, longer_ms = (float(wait.split(f"{word} ")[1].split()[0]) for word in ("waited", "taken"))
    assert waited_ms > 40
    assert longer_ms > 40
    trace = trace_of(tmp_path / "0" / "log")
    check_events(trace["traceEvents"])
    assert len(process_names(trace["traceEvents"])) == 2
    assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])
    assert any(event["name"] == "[memory]" for event in trace["traceEvents"])
    assert any(event.get("cat") == "python_function" for event in trace["traceEvents"])
    assert (tmp_path / "1" / "log" / "profile" / "rank-1.json.gz").exists()


def test_profile_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    lines = run_script(tmp_path, "--profile", "steps=2,skip=0", block="rank-1.json.gz")
    assert next(line for line in lines if line.startswith("rank 1 is not in it: "))
    assert len(process_names(trace_of(tmp_path / "0" / "log")["traceEvents"])) == 1
    lines = run_script(tmp_path, "--profile", "steps=2,skip=0", block="trace.json.gz")
    assert any("could not be put together in" in line for line in lines)


def test_failed_training_keeps_no_profile(tmp_path: Path) -> None:
    result = run_job(tmp_path, "--profile", "steps=9,skip=1", block="fail", check=False)
    assert result.returncode != 0
    assert "the user's own mistake" in result.stderr
    assert not (tmp_path / "0" / "log" / "profile").exists()


def run_script(tmp_path: Path, *options: str, block: str = "") -> list[str]:
    stdout = run_job(tmp_path, *options, block=block).stdout
    assert "done: " in stdout
    lines = stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("profile "))
    return [line[9:] for line in lines[begin:] if line.startswith(("profile ", "         "))]


def run_job(tmp_path: Path, *options: str, block: str, check: bool = True) -> Any:
    job = ["--backend", "ddp", "--epochs", "1", "--batch-size", "64", "--log-dir", "log"]
    argv = [str(SUPPORT / "slow_rank_job.py"), *job, *options]
    return launch(QUICKEST, 2, argv, env={"BLOCK": block}, cwd=tmp_path, check=check)


def test_profile_of_a_short_training_says_so(tmp_path: Path) -> None:
    said = train(tmp_path, "--max-steps", "9", "--profile", "steps=10", ranks=1, backend="single")
    assert "profile  the training has ended after 3 of the 10 steps" in said
    assert "steps 7 to 9 of 1 rank" in said
    steps = [e["name"] for e in trace_of(tmp_path)["traceEvents"] if e["name"].startswith("step ")]
    assert steps == ["step 7", "step 8", "step 9"]
    said = train(tmp_path, "--max-steps", "6", "--profile", "steps=10", ranks=1, backend="single")
    assert "profile  nothing: the training had 6 steps, and the first 5 and one more are left out." in said
    assert "type --profile steps=10,skip=0" in said
    assert not (tmp_path / "profile").exists()  # the earlier run's is with its other files
    assert (tmp_path / "earlier-1" / "profile" / "trace.json.gz").exists()


@requires("horovod")
@pytest.mark.parametrize("backend", ENGINES)
def test_profile_shows_stages(tmp_path: Path, backend: str) -> None:
    options = ("--stages", "2", "--chunks", "2", "--max-steps", "5", "--profile", "steps=3,skip=1")
    train(tmp_path, *options, "--activation-checkpointing", "none", backend=backend)
    events = trace_of(tmp_path)["traceEvents"]
    check_events(events)
    steps = [e["name"] for e in events if e["name"].startswith("step ")]
    assert sorted(steps) == ["step 3", "step 3", "step 4", "step 4", "step 5", "step 5"]


@requires("horovod")
def test_profile_keeps_the_users_horovod_timeline(tmp_path: Path) -> None:
    own, plan = tmp_path / "own.json", ("--max-steps", "3", "--profile", "steps=1,skip=0")
    train(tmp_path / "log", *plan, backend="horovod", HOROVOD_TIMELINE=str(own))
    assert len({span.name for span in read_timeline(own)} & {"ALLREDUCE", "BROADCAST", "ALLGATHER"}) == 3
    names = process_names(trace_of(tmp_path / "log")["traceEvents"])
    assert [name.partition(" (")[0] for name in names] == ["rank 0", "rank 1"]


def test_profile_with_too_large_traces_has_a_breakdown(tmp_path: Path) -> None:
    lines = run_script(tmp_path, "--profile", "steps=2,skip=0", block="large")
    for rank in range(2):
        why = next(line for line in lines if line.startswith(f"rank {rank} is not in it: its trace has "))
        assert why.endswith("Take fewer steps, or less of each")
    assert any(
        line.startswith("rank 1 ") for line in (tmp_path / "0/log/profile/breakdown.txt").read_text().splitlines()
    )
    assert not [*tmp_path.rglob("*.json.gz")]


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


# Figures.


def figures(seconds: Sequence[Sequence[float]], found: dict[str, Counter[str]] | None = None) -> Figures:
    """Return figures by step: data, forward, backward, reduce, step and other."""
    numbers = list(range(1, len(seconds) + 1))
    return Figures("host", numbers, (0, 0), torch.tensor(seconds), found or operators((), bool), None)


def test_waits_names_the_slowest_rank() -> None:
    quick, slow = [0, 1, 1, 5, 1, 0], [3, 1, 1, 2, 1, 0]
    (wait, other) = waits(np.array([[quick, quick, slow], [slow, slow, quick]], dtype=float))
    assert (wait.rank, wait.last, wait.steps, wait.mean_s, wait.part, wait.longer_s) == (0, 1, 2, 2.0, "data", 2.0)
    assert (other.rank, other.last, other.steps, other.mean_s) == (1, 0, 1, 1.0)


def test_breakdown_summarizes_many_ranks() -> None:
    ranks = [figures([[0.1, 0.1, 0.1, 0.1, 0.1, 0.0]])] * 20
    short, whole = breakdown(ranks, whole=False), breakdown(ranks)
    assert not any(line.startswith("rank 3") for line in short)
    assert any(line.startswith("rank 19") for line in whole)
    assert any(line.startswith("least") for line in short)


def test_operators_counts_own_time_only() -> None:
    def call(name: str, ts: float, dur: float, number: int, **more: Any) -> dict[str, Any]:
        event = {"cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": 1, "args": {"External id": number}}
        return event | more

    events = [
        call("linear", 0, 100, 1),
        call("addmm", 20, 60, 2),
        call("t", 5, 10, 3),
        call("copy", 25, 10, 4),
        call("linear", 200, 50, 5),
        call("linear", 0, 7, 6, tid=2),
        {"cat": "kernel", "name": "gemm", "ts": 300, "dur": 40, "args": {"External id": 2}},
        {"cat": "kernel", "name": "other", "ts": 300, "dur": 9, "args": {}},
    ]
    found = operators(events, lambda at: at < 200)
    assert found == {
        "calls": {"linear": 2, "addmm": 1, "t": 1, "copy": 1},
        "host_us": {"linear": 37, "addmm": 50, "t": 10, "copy": 10},
        "device_us": {"linear": 0, "addmm": 40, "t": 0, "copy": 0},
    }
    lines = breakdown([figures([[1.0] * 6], found)])
    assert lines[-5].split() == ["operators,", "own", "time", "CPU", "GPU", "calls"]
    assert lines[-4].split() == ["addmm", "0.05", "0.04", "1"]


HEAD = '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1000}},\n'
TENSOR = '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "w"}},\n'
EVENTS = (
    '{"ph": "E", "ts": 1, "pid": 1},{"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": 1},'
    '{"ph": "X", "name": "1", "ts": 6, "pid": 1, "dur": 0},{"ph": "B", "name": "WAIT", "ts": 7, "pid": 1},'
    '{"ph": "E", "ts": 8, "pid": 1},{"ph": "E", "ts": 9, "pid": 1},{"ph": "B", "name": "LATE", "ts": 10, "pid": 1}'
)


@pytest.mark.parametrize("end", ["]", "", ",\n"])
def test_read_timeline_accepts_a_truncated_file(tmp_path: Path, end: str) -> None:
    file = tmp_path / "timeline.json"
    file.write_text(HEAD + TENSOR + EVENTS + end)
    assert read_timeline(file) == [
        Span("w", "ALLREDUCE", 1_005_000, 1_009_000),
        Span("w", "rank 1 is ready", 1_006_000, 1_006_000),
        Span("w", "WAIT", 1_007_000, 1_008_000),
    ]


def test_read_timeline_accepts_empty_and_refuses_other_files(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    file.write_text("")
    assert read_timeline(file) == []
    for text in ("nothing", '[{"ph": "B"}]', "[1"):
        file.write_text(text)
        with pytest.raises(ValueError, match="timeline|Expecting"):
            read_timeline(file)
