"""`python -m hvd_trainer diagnose`: what it concludes from stacks and runs, and its verdict on planted causes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launchers import SUPPORT, launch, requires, start

from hvd_trainer.errors import OptionError
from hvd_trainer.observe.stacks import StackSampler, called_expression
from hvd_trainer.tools.diagnose import cli
from hvd_trainer.tools.diagnose.actions import find_actions
from hvd_trainer.tools.diagnose.causes import ALONE, NO_EXCHANGE, NORMAL, TWICE, Cause, Evidence, Line, find_causes
from hvd_trainer.tools.diagnose.cli import Options, plan_trials
from hvd_trainer.tools.diagnose.flame_graph import render, speedscope
from hvd_trainer.tools.diagnose.machine_use import MachineUse
from hvd_trainer.tools.diagnose.profile import Frame, RankProfile, RawStack, Record, read_profiles, role_of
from hvd_trainer.tools.diagnose.report import Report, sentences
from hvd_trainer.tools.runner.command import with_options

JOB = SUPPORT / "planted_job.py"
FACTS = {
    "batch_size": 32,
    "threads": 1,
    "device": "cpu",
    "in_memory": False,
    "workers": 0,
    "passes": 1,
    "compression": "none",
    "parameters": 1_000_000,
}
LINE = Line(0.001, 1e9)
STEPS = 50

LOOP = Frame("/x/hvd_trainer/training/loop.py", 83, "TrainingLoop._train_epoch", "run.step", "hvd_trainer")
FINISH = Frame("/x/hvd_trainer/training/loop.py", 133, "f", "callback.on_step_end", "hvd_trainer")
MODULE = Frame("/v/site-packages/torch/nn/modules/module.py", 9, "Module._call_impl", "forward_call", "library")
FETCH = Frame("/v/site-packages/torch/utils/data/dataloader.py", 7, "next", "self.data", "library")
CALLBACK = Frame("/home/train.py", 34, "Save.on_step_end", "time.sleep", "user")
DATASET = Frame("/home/train.py", 12, "Images.__getitem__", "decode", "user")
THREAD = Frame("/home/train.py", 70, "watch", "sum", "user")


class Part(NamedTuple):
    """Milliseconds of each step that a rank has a stack."""

    ms: float
    frames: tuple[Frame, ...]
    phase: str = "forward"
    cpu: float = 0.0
    """fraction on a CPU"""
    queued: float = 0.0
    gil: float = 0.0
    thread: str = "main"
    slow: float = 0.0


def make_rank(*parts: Part, elements: int = 100, step_ms: float | None = None, **changed: Any) -> RankProfile:
    """Return the profile of a rank whose steps are made of parts."""
    frames = list(dict.fromkeys(frame for part in parts for frame in part.frames))
    total = sum(part.ms for part in parts if part.thread == "main") if step_ms is None else step_ms
    stacks = [
        RawStack(
            part.thread,
            part.phase,
            [frames.index(frame) for frame in part.frames],
            *(STEPS * part.ms / 1000 * fraction for fraction in (1, part.cpu, part.queued, part.gil, part.slow)),
            STEPS * (part.ms / 1000) ** 2,
        )
        for part in parts
    ]
    cpu = sum(stack.cpu_s for stack in stacks)
    known: dict[str, Any] = {
        "durations": [total / 1000] * STEPS,
        "cpu_s": cpu,
        "major_faults": 0,
        "queued_s": sum(stack.queued_s for stack in stacks),
    }
    known |= changed
    record = Record(
        pid=1,
        uses_gpu=False,
        blocks=STEPS,
        seconds=STEPS * total / 1000,
        elements=elements * STEPS,
        preempted=0,
        frames=frames,
        stacks=stacks,
        **known,
    )
    return RankProfile([record])


COMPUTE = Part(10, (LOOP, MODULE), cpu=1.0)
CALL = Part(50, (FINISH, CALLBACK), "step")
LOAD = Part(20, (FETCH, DATASET), "data")


def reduce_for(ms: float) -> Part:
    return Part(ms, (LOOP,), "reduce")


def causes_of(*ranks: RankProfile, **known: Any) -> list[Cause]:
    return find_causes(Evidence(profiles=ranks, cores=8, facts=FACTS, **known))


def verdict(*ranks: RankProfile, cores: int = 8, **known: Any) -> list[str]:
    """Return cause and advice of the largest loss."""
    evidence = Evidence(profiles=ranks, cores=cores, facts=FACTS | known.pop("facts", {}), **known)
    causes = find_causes(evidence)
    return [cause.kind for cause in causes], [action.text for action in find_actions(causes, evidence)]


# What the stacks show.


def test_a_callback_of_all_ranks_is_named_with_its_line() -> None:
    """It was once "overhead per step, however small the batch is", with the advice to double the batch."""
    rank = make_rank(COMPUTE, CALL)
    (cause,) = causes_of(rank, rank)
    assert (cause.kind, cause.seconds) == ("callback", pytest.approx(0.05))
    assert cause.evidence.startswith("50.0 of 60.0 ms: train.py:34 Save.on_step_end, time.sleep; it waits")
    kinds, advice = verdict(rank, rank)
    assert advice[0].startswith("train.py:34 Save.on_step_end")
    assert not any("--batch-size" in text for text in advice)


def test_data_that_waits_and_data_that_computes_get_different_advice() -> None:
    waits = make_rank(COMPUTE, LOAD)
    computes = make_rank(COMPUTE, LOAD._replace(cpu=1.0))
    kinds, advice = verdict(waits, waits)
    assert kinds == ["data waits"]
    assert advice[0].startswith("--workers 3: ")
    kinds, advice = verdict(computes, computes)
    assert kinds == ["data computes"]
    assert advice[0].startswith("--workers 3: 6 cores are free")
    # No core is free: it was once "--workers 3, expected 1.75 times".
    kinds, advice = verdict(computes, computes, cores=2)
    assert kinds == ["data computes"]
    assert advice[0].startswith("make train.py:12 Images.__getitem__, decode cheaper")
    kinds, advice = verdict(waits, waits, facts={"in_memory": True})
    assert advice[0].startswith("the data is in memory")


def test_data_of_a_script_is_advised_in_the_words_of_the_loader() -> None:
    rank = make_rank(COMPUTE, LOAD)
    evidence = Evidence(profiles=[rank, rank], cores=8, facts={})
    (action,) = find_actions(find_causes(evidence), evidence)
    assert action.text.startswith("num_workers=3 in the DataLoader")
    assert not action.can_be_tried


def test_data_of_a_trainer_job_that_failed_is_advised_in_its_options() -> None:
    """The facts of a job's work come with its end; without them, the advice was that for a script."""
    rank = make_rank(COMPUTE, LOAD)
    evidence = Evidence(profiles=[rank, rank], cores=8, is_trainer_job=True)
    assert find_actions(find_causes(evidence), evidence)[0].text.startswith("--workers ")


def test_one_rank_that_waits_at_a_line_is_to_blame_for_the_others() -> None:
    ranks = make_rank(COMPUTE, reduce_for(50)), make_rank(COMPUTE, CALL)
    cause = causes_of(*ranks)[0]
    assert (cause.kind, cause.rank) == ("slow line", 1)
    assert str(cause.where) == "train.py:34 Save.on_step_end, time.sleep"


def test_a_script_waits_for_a_slow_rank_in_its_backward_pass() -> None:
    """There DDP waits, in C++."""
    engine = Frame("/v/site-packages/torch/autograd/graph.py", 9, "run", "run_backward", "library")
    waits = make_rank(COMPUTE, Part(50, (engine,), "backward"))
    ranks = waits, make_rank(COMPUTE, Part(50, (CALLBACK,)))
    cause = causes_of(*ranks)[0]
    assert (cause.kind, cause.rank, cause.seconds) == ("slow line", 1, pytest.approx(0.05))


def test_more_work_is_told_from_a_slower_rank() -> None:
    """Rank 1 computes for 30 ms, rank 0 for 10 of them."""
    waits = make_rank(COMPUTE, reduce_for(20), elements=100)
    for elements, kind in ((300, "more work"), (100, "slow rank")):
        cause = causes_of(waits, make_rank(COMPUTE._replace(ms=30), elements=elements))[0]
        assert (cause.kind, cause.rank, cause.seconds) == (kind, 1, pytest.approx(0.02))
    assert "for batches of the same size; its CPU time is 30.0 ms" in cause.evidence


def test_a_rank_that_computes_more_at_a_line_is_asked_what_it_does_there() -> None:
    """A layer that did more on one rank was "slower at the same work"; only its machine was to be looked at."""
    layer = Part(30, (LOOP, MODULE, Frame("/home/train.py", 8, "Net.forward", "", "user")), cpu=1.0)
    kinds, advice = verdict(make_rank(COMPUTE, reduce_for(30)), make_rank(COMPUTE, layer))
    assert kinds[0] == "slow rank"
    assert "or at what it has to do more than the others at train.py:8 Net.forward" in advice[0]


def test_time_in_the_queue_is_other_programs_or_the_ranks_themselves() -> None:
    """It was once "exchanging gradients 56 %", and a rank that is the slowest at 2.4 ms against 2.4."""
    slowed = make_rank(COMPUTE._replace(ms=40, queued=0.75, cpu=0.25))
    waits = make_rank(COMPUTE, reduce_for(30))
    machine = MachineUse(other_cores=1.0, programs={"burn.py": 1.0})
    kinds, advice = verdict(waits, slowed, cores=2, machine=machine)
    assert kinds[0] == "programs"
    assert advice[0].endswith("move them to others: burn.py 1.0")
    facts = {"threads": 2}
    kinds, advice = verdict(slowed, slowed, cores=1, facts=facts)
    assert kinds[0] == "contention"
    assert advice[0].startswith("OMP_NUM_THREADS=1: 2 ranks with 2 threads each are 4 on 1 core")


def test_a_thread_that_holds_the_gil_is_named() -> None:
    holder = Part(40, (THREAD,), "", cpu=0.9, thread="prefetch")
    rank = make_rank(COMPUTE._replace(ms=40, gil=0.75, cpu=0.25), holder)
    causes = causes_of(make_rank(COMPUTE, reduce_for(30)), rank)
    assert causes[0].kind == "gil"
    assert "waits 30.0 of 40.0 ms for the GIL, which the thread 'prefetch' has: train.py:70" in causes[0].evidence


def test_hiccups_have_a_period_and_a_size() -> None:
    durations = [0.51 if number % 10 == 9 else 0.01 for number in range(STEPS)]
    part = CALL._replace(ms=50, slow=1.0)
    rank = make_rank(COMPUTE, part, durations=durations)
    cause = causes_of(rank, rank)[0]
    assert (cause.kind, cause.seconds) == ("hiccups", pytest.approx(0.05))
    assert cause.evidence.startswith("every 10 steps a step takes 500.0 ms longer (typical: 10.0 ms)")
    assert str(cause.where).startswith("train.py:34")


def test_a_swapping_machine_is_told_from_one_with_slow_lines() -> None:
    rank = make_rank(COMPUTE._replace(ms=40, cpu=0.25), major_faults=40 * STEPS)
    machine = MachineUse(swapped_pages=100_000)
    assert [cause.kind for cause in causes_of(rank, rank, machine=machine)] == ["swap"]
    assert causes_of(rank, rank) == []


def test_nothing_is_advised_from_a_difference_within_the_noise() -> None:
    """It was once "expected 2.25 times" from 78.6 against 78.5 ms."""
    rank = make_rank(COMPUTE._replace(ms=78.6))
    runs = {
        NORMAL: [{"step_s": 0.0786}],
        NO_EXCHANGE: [{"step_s": 0.0785, "compute_s": 0.0785}],
        ALONE: [{"step_s": 0.0785, "compute_s": 0.0785}],
        TWICE: [{"step_s": 0.1570, "compute_s": 0.1570}],
    }
    evidence = Evidence(profiles=[rank, rank], cores=8, facts=FACTS, runs=runs, line=LINE)
    assert find_causes(evidence) == []
    report = Report(evidence=evidence, causes=[], advice=[], backend="ddp")
    assert sentences(report)[-1].startswith("Nothing takes more than a twentieth")


# What the differences between runs show.


def test_exchange_and_overhead_are_differences_between_runs() -> None:
    rank = make_rank(COMPUTE, reduce_for(20))
    runs = {
        NORMAL: [{"step_s": 0.03}] * 3,
        NO_EXCHANGE: [{"step_s": 0.01, "compute_s": 0.01}] * 3,
        ALONE: [{"step_s": 0.01, "compute_s": 0.01}] * 3,
        TWICE: [{"step_s": 0.012, "compute_s": 0.012}] * 3,
    }
    evidence = Evidence(profiles=[rank, rank], cores=8, facts=FACTS, runs=runs, line=LINE)
    exchange, overhead = find_causes(evidence)
    assert (exchange.kind, exchange.seconds) == ("exchange", pytest.approx(0.02))
    assert (overhead.kind, overhead.seconds) == ("overhead", pytest.approx(0.008))
    # 1 ms of latency and 4 ms for 4 MB at 1 GB/s.
    assert exchange.details["latency_s"] == pytest.approx(0.004)
    advice = [action.text.partition(":")[0] for action in find_actions([exchange, overhead], evidence)]
    assert advice == ["--accumulate 4", "--batch-size 64", "--compression fp16"]
    speeds = [action.speed for action in find_actions([exchange, overhead], evidence)]
    assert speeds == sorted(speeds, reverse=True)


def test_a_batch_that_does_not_fit_the_memory_is_not_advised() -> None:
    rank = make_rank(COMPUTE)
    overhead = Cause(kind="overhead", seconds=0.008, error=0.0001, evidence="", details={"more_s": 0.002})
    facts = FACTS | {"memory_share": 0.6}
    assert find_actions([overhead], Evidence(profiles=[rank], cores=8, facts=facts)) == []


def test_line_fits_latency_and_bandwidth() -> None:
    pairs = [[size, 0.0005 + size / 2e9] for size in (1024, 65536, 2**20, 2**24)]
    line = Line.through(pairs)
    assert (line.latency_s, line.bytes_per_s) == (pytest.approx(0.0005), pytest.approx(2e9))
    assert line.parts(4e6, 2) == (pytest.approx(0.001), pytest.approx(0.002))
    assert Line.through([[1024, 0.002], [2048, 0.001]]).bytes_per_s > 0


def test_runs_with_parts_left_out_are_planned_only_for_what_is_unexplained() -> None:
    explained = make_rank(COMPUTE, CALL)
    options = Options(np=2)
    evidence = Evidence(profiles=[explained] * 2, cores=5, facts=FACTS | {"threads": 4})
    assert plan_trials(dataclasses.replace(evidence, is_trainer_job=True), options) == []
    rank = make_rank(COMPUTE, reduce_for(10))
    evidence = Evidence(profiles=[rank] * 2, cores=5, facts=FACTS | {"threads": 4})
    trials = plan_trials(dataclasses.replace(evidence, is_trainer_job=True), options)
    assert [trial.name for trial in trials] == [NO_EXCHANGE, ALONE, TWICE, "one thread per rank", NORMAL]
    assert [trial.threads for trial in trials] == [None, 2, 2, 1, None]
    assert trials[2].options == ("--global-batch-size", "None", "--batch-size", "64")
    assert [trial.name for trial in plan_trials(evidence, options)] == [NO_EXCHANGE, NORMAL]


def test_with_options_replaces_options_of_the_job() -> None:
    job = ["train.py", "--epochs", "3", "--batch-size=8", "--leave-out", "data", "exchange", "--lr", "1"]
    words = ["--epochs", "9", "--batch_size", "16", "--leave-out", "data"]
    assert with_options(job, words) == ["train.py", "--lr", "1", *words]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--np", "1", "--budget", "0"], "--np must be 2 or more.*; --budget must"),
        ([], "Name the job behind --"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    job = ["--", "-m", "hvd_trainer.mnist"] if arguments else []
    with pytest.raises(OptionError, match=message):
        cli.main(["--out", str(tmp_path / "out"), *arguments, *job])
    assert not (tmp_path / "out").exists()


# The sampler.


def test_called_expression() -> None:
    assert called_expression("time.sleep(0.05)") == "time.sleep"
    assert called_expression("  self.client.get(\n  url)[0]") == "self.client.get"
    assert called_expression("a + b") == called_expression("for x in") == ""


def nap() -> None:
    time.sleep(0.02)


def spin() -> None:
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass


def test_sampler_counts_lines_with_their_cpu_time(tmp_path: Path) -> None:
    sampler = StackSampler(tmp_path / "stacks" / "rank-0.json")
    sampler.start()
    for _ in range(25):
        sampler.phase = "data"
        nap()
        sampler.phase = "forward"
        spin()
        sampler.end_step()
    sampler.stop()
    (profile,) = read_profiles(tmp_path)
    assert profile.steps == 20, "the warm-up counts"
    roles = profile.roles()
    assert roles["data"].own == pytest.approx(0.02, rel=0.5)
    assert roles["data"].cpu < 0.2 * roles["data"].own
    spun = roles["script"]
    assert spun.cpu > 0.6 * (spun.wall - spun.queued)
    places = {frame.place + " " + frame.name + " " + frame.call for s in profile.main() for frame in s.frames}
    assert any(place.endswith("nap time.sleep") and place.startswith("test_diagnose.py:") for place in places)


def test_role_of_a_stack() -> None:
    user = Frame("/home/train.py", 5, "main", "loader", "user")
    optimizer = Frame("/v/site-packages/torch/optim/sgd.py", 5, "SGD.step", "sgd", "library")
    horovod = Frame("/v/site-packages/horovod/torch/optimizer.py", 5, "synchronize", "synchronize", "library")
    assert role_of("step", (user, optimizer), in_trainer=False) == "update"
    assert role_of("step", (user, optimizer, horovod), in_trainer=False) == "exchange"
    assert role_of("forward", (user, MODULE), in_trainer=False) == "model"
    assert role_of("forward", (user,), in_trainer=False) == "script"
    assert role_of("step", (FINISH, CALLBACK, MODULE), in_trainer=True) == "callback"
    assert role_of("reduce", (LOOP,), in_trainer=True) == "exchange"
    # The Trainer counts metrics before it leaves the phase in which the exchange has ended.
    metric = Frame("/x/hvd_trainer/optim/step.py", 149, "TrainStep.count", "meter.add", "hvd_trainer")
    assert role_of("reduce", (LOOP, metric), in_trainer=True) == "metric"


# The page and the file for speedscope.


@pytest.mark.parametrize("width", [390, 1200])
def test_page_in_a_browser(browser: Any, tmp_path: Path, width: int) -> None:
    """A box is as wide as its share; nothing is wider than the window, nothing is loaded, nothing goes wrong."""
    ranks = make_rank(COMPUTE, CALL), make_rank(COMPUTE, reduce_for(50))
    (tmp_path / "diagnosis.html").write_text(render(ranks, "train.py <b>", ["a callback, 83% of a step"]))
    page = browser.new_page(viewport={"width": width, "height": 800})
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: trouble.append(request.url))
    page.goto((tmp_path / "diagnosis.html").as_uri())
    assert trouble == [(tmp_path / "diagnosis.html").as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".flame").count() == 2
    whole = page.locator(".flame").first.bounding_box()
    box = page.get_by_text("Save.on_step_end train.py:34").first.bounding_box()
    assert box["width"] / whole["width"] == pytest.approx(50 / 60, abs=0.02)
    assert "50.00 ms a step, 83.3%" in page.get_by_text("time.sleep").first.get_attribute("title")


def test_speedscope_file_has_a_profile_per_rank() -> None:
    ranks = make_rank(COMPUTE, CALL), make_rank(COMPUTE, reduce_for(50))
    made = speedscope(ranks, "train.py")
    assert made["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert [profile["name"] for profile in made["profiles"]] == ["rank 0", "rank 1"]
    names = [frame["name"] for frame in made["shared"]["frames"]]
    for profile in made["profiles"]:
        assert profile["type"] == "sampled"
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] == pytest.approx(sum(profile["weights"])) == pytest.approx(STEPS * 0.06)
        assert max(map(max, profile["samples"])) < len(names)
    assert [names[number] for number in made["profiles"][0]["samples"][1]][-1] == "Save.on_step_end"


# Planted causes.


class Planted(NamedTuple):
    """A cause in `planted_job.py`, and what is demanded of the verdict."""

    planted: str
    kind: str
    advice: str
    """part of the advice"""
    options: tuple[str, ...] = ("--batch-size", "32", "--workers", "0")
    rank: int | None = None
    line: bool = True
    budget: int = 60
    script: str = "planted_job.py"

    @property
    def job(self) -> list[str]:
        """The words behind `--`."""
        if self.script == JOB.name:
            return [str(JOB), "--planted", self.planted, *self.options]
        return [str(SUPPORT / self.script), self.planted]


PLANTED = (
    # Run on each push.
    Planted("callback", "callback", "do this every few steps only"),
    Planted("update", "update", "update all parameters at once"),
    Planted("gil", "gil", "move the thread 'prefetch' of rank 1 to a process", rank=1),
    Planted("decode", "data computes", "cheaper, or store its results"),
    Planted("other programs", "programs", "end the other programs", line=False),
    # At night.
    Planted("disk", "data waits", "--workers"),
    Planted("worker decode", "data computes", "cheaper", ("--batch-size", "32", "--workers", "1")),
    Planted("page faults", "data waits", "--workers"),
    Planted("forward", "model", "the model waits there in each forward pass"),
    Planted("loss", "loss", "by operations on whole tensors", ("--batch-size", "512")),
    Planted("backward", "backward", "it runs in each backward pass"),
    Planted("metric", "metric", "compute this metric less often"),
    Planted("computing callback", "callback", "do this every few steps only"),
    Planted("callback of one rank", "slow line", "rank 1 spends its time there", rank=1),
    Planted("callback hiccups", "hiccups", "do it less often"),
    Planted("data hiccups", "hiccups", "do it less often"),
    Planted("one rank has more", "more work", "give all ranks the same", rank=1, line=False),
    Planted("slow rank", "slow rank", "look at rank 1's machine", ("--batch-size", "512"), rank=1, line=False),
    Planted("overhead", "overhead", "--batch-size", ("--batch-size", "4"), line=False, budget=170),
)
SCRIPT = "planted_script.py"
SCRIPTS = (
    Planted("logging", "script", "do this every few steps only", script=SCRIPT),
    Planted("update", "update", "update all parameters at once", script=SCRIPT),
    Planted("disk", "data waits", "num_workers=", script=SCRIPT),
    Planted("decode", "data computes", "cheaper, or store its results", script=SCRIPT),
    Planted("one rank", "slow line", "rank 1 spends its time there", rank=1, script=SCRIPT),
)
EACH_PUSH = 5


@contextmanager
def other_programs(planted: str) -> Iterator[None]:
    """Keep the first core busy with two other programs, if that is what is planted."""
    core = min(os.sched_getaffinity(0))
    burn = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
    count = 2 if planted == "other programs" else 0
    burning = [subprocess.Popen([sys.executable, "-c", burn, str(core)]) for _ in range(count)]
    try:
        yield
    finally:
        for program in burning:
            program.kill()
            program.wait()


def line_of(planted: str, file: Path) -> int:
    """Return the number of the line with a planted cause."""
    lines = file.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# planted: {planted}"))


def diagnose_job(
    planted: Planted, backend: str, tmp_path: Path, *, options: Sequence[str] = (), inside: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """Diagnose a job with a planted cause; return the diagnosis and the output."""
    tool = ["-m", "hvd_trainer", "diagnose", "--backend", backend, "--out", str(tmp_path / "out")]
    words = [*tool, "--budget", str(planted.budget), *options, "--", *planted.job]
    if inside:
        code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
        words = ["-c", code, *inside, sys.executable, *words]
    with other_programs(planted.planted):
        said = launch("python", 1, words, timeout_s=planted.budget + 60, check=False).stdout
    result: dict[str, Any] = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    return result, said


def check(planted: Planted, result: Mapping[str, Any], said: str) -> None:
    """Check cause, line and advice; other programs of this machine may be a cause, too."""
    causes = [c for c in result["causes"] if c["kind"] == planted.kind or c["kind"] not in OF_THE_MACHINE]
    assert causes, said
    cause = causes[0]
    assert cause["kind"] == planted.kind, said
    if planted.rank is not None:
        assert cause["rank"] == planted.rank, said
    if planted.line:
        number = line_of(planted.planted.removeprefix("worker "), SUPPORT / planted.script)
        assert number in (cause["line"]["frame"]["line"], cause["line"]["entry"]["line"]), said
        assert f"{planted.script}:{number} " in said
    assert any(planted.advice in action["text"] for action in result["advice"]), said


OF_THE_MACHINE = ("programs", "contention", "throttled")


def cases() -> list[Any]:
    """Return each planted cause on both engines: on one of them on each push, if it is among the first."""
    found = []
    for number, planted in enumerate((*PLANTED, *SCRIPTS)):
        for place, backend in enumerate(("ddp", "horovod")):
            marks = [requires("horovod")] if backend == "horovod" else []
            if number >= EACH_PUSH or number % 2 != place:
                marks.append(pytest.mark.nightly)
            found.append(
                pytest.param(planted, backend, id=f"{planted.script}, {planted.planted}, {backend}", marks=marks)
            )
    return found


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_advice_is_tried(tmp_path: Path) -> None:
    """64 ms to wait for a batch, which loader processes do meanwhile."""
    disk = next(planted for planted in PLANTED if planted.planted == "disk")
    result, said = diagnose_job(disk._replace(budget=300), "ddp", tmp_path, options=("--try",))
    (tried,) = [one for one in result["tried"] if one["action"]["cause"] == "data waits"]
    assert tried["after"] > 1.3 * tried["before"], said
    assert "tried --workers" in said


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_too_many_threads_are_found(tmp_path: Path) -> None:
    """Six on the one core that three ranks may use."""
    batch = ("--batch-size", "4096")
    threads = Planted("nothing", "contention", "OMP_NUM_THREADS=1", batch, line=False, budget=170)
    core = str(min(os.sched_getaffinity(0)))
    options = ("--np", "3", "--threads", "2")
    result, said = diagnose_job(threads, "ddp", tmp_path, options=options, inside=["taskset", "-c", core])
    texts = [action["text"] for action in result["advice"] if action["cause"] == "contention"]
    assert texts == [
        "OMP_NUM_THREADS=1: 3 ranks with 2 threads each are 6 on 1 core, and wait for each other's turn"
    ], said


@pytest.fixture
def slow_network() -> Iterator[list[str]]:
    """A network of its own with 200 Mbit/s: commands run inside if they are put behind this."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {' and '.join(missing) or 'its rights'}: apt-get install iproute2")
    name = f"hvd-diagnose-{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        limit = ["tbf", "rate", "200mbit", "burst", "256kb", "latency", "400ms"]
        slow = subprocess.run([*inside, "tc", "qdisc", "add", "dev", "lo", "root", *limit], check=False)
        if slow.returncode != 0:
            pytest.skip("this kernel cannot limit a network's rate: modprobe sch_tbf")
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_slow_network_is_found(slow_network: list[str], tmp_path: Path) -> None:
    network = Planted("nothing", "exchange", "--accumulate 4", line=False, budget=170)
    result, said = diagnose_job(network, "ddp", tmp_path, inside=slow_network)
    assert next(c["kind"] for c in result["causes"] if c["kind"] not in OF_THE_MACHINE) == "exchange", said
    assert result["exchange"]["bytes_per_s"] < 50e6
    texts = [action["text"].partition(":")[0] for action in result["advice"]]
    assert {"--accumulate 4", "--compression fp16"} <= set(texts)


@pytest.mark.timeout(120)
def test_a_job_that_fails_has_a_verdict_from_what_it_did_until_then(tmp_path: Path) -> None:
    job = Planted("callback, then failure", "callback", "do this every few steps only")
    result, said = diagnose_job(job, "ddp", tmp_path)
    assert "The job ended early when it was run normal: ValueError: planted" in result["note"], said
    assert result["causes"][0]["kind"] == "callback", said


@pytest.mark.timeout(120)
def test_ctrl_c_ends_with_a_verdict(tmp_path: Path) -> None:
    """An interrupted diagnosis lost what ten of its twelve runs had shown."""
    job = [str(JOB), "--planted", "callback", "--batch-size", "32"]
    words = ["-m", "hvd_trainer", "diagnose", "--backend", "ddp", "--out", str(tmp_path / "out"), "--", *job]
    with start("python", 1, words) as diagnosis:
        deadline = time.monotonic() + 90
        while not list((tmp_path / "out").glob("running/log/stacks/*1.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        diagnosis.popen.send_signal(signal.SIGINT)
        result = diagnosis.wait(30)
    assert result.returncode == 130, result.stderr
    assert "Interrupted. What follows is from the runs until then." in result.stdout
    found = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert found["causes"], result.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("planted", "backend"), cases())
def test_planted_cause_is_found(planted: Planted, backend: str, tmp_path: Path) -> None:
    result, said = diagnose_job(planted, backend, tmp_path)
    check(planted, result, said)
