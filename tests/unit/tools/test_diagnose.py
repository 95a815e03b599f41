"""`python -m hvd_trainer diagnose`: what it concludes from stacks and runs that are made up, and its sampler."""

from __future__ import annotations

import ast
import json
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from compared import RAN
from msgspec import structs
from waiting import wait_for

from hvd_trainer.measure import machine, stacks
from hvd_trainer.measure.listener import Step
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.report import Report
from hvd_trainer.measure.stack_record import (
    CallCount,
    Frame,
    LoaderStarts,
    Record,
    StackCount,
    Switches,
    called_expression,
)
from hvd_trainer.measure.stacks import StackSampler
from hvd_trainer.measure.trials import RunRecord
from hvd_trainer.optim import step
from hvd_trainer.tools.diagnose import cli, machine_use
from hvd_trainer.tools.diagnose.actions import find_actions
from hvd_trainer.tools.diagnose.causes import find_causes
from hvd_trainer.tools.diagnose.evidence import ALONE, NO_EXCHANGE, NORMAL, TWICE, Cause, Evidence, Line
from hvd_trainer.tools.diagnose.machine_use import MachineUse, MachineWatch, other_cores
from hvd_trainer.tools.diagnose.profile import RankProfile, mark_lone, read_profiles, together_s
from hvd_trainer.tools.diagnose.python_loops import loop_around
from hvd_trainer.tools.diagnose.report import Diagnosis, conclude
from hvd_trainer.tools.diagnose.roles import IN_TRAINER, role_of
from hvd_trainer.tools.diagnose.speedscope import speedscope
from hvd_trainer.tools.diagnose.switches import find_switches
from hvd_trainer.tools.diagnose.trials import Trials, plan_variants
from hvd_trainer.training import loop

FACTS = {
    **{"batch_size": 32, "threads": 1, "device": "cpu", "in_memory": False, "workers": 0, "passes": 1},
    **{"compression": "none", "parameters": 1_000_000, "bucket_mb": 25.0},
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
LAYER = Frame("/home/train.py", 8, "Net.forward", "", "user")
SHARED = Frame("/home/train.py", 60, "main", "average", "user")
REDUCE = Frame("/home/train.py", 61, "average", "dist.all_reduce", "user")
BARRIER = Frame("/home/train.py", 62, "main", "dist.barrier", "user")
COLLECTIVE = Frame(
    "/v/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce", "work.wait", "library"
)
EVALUATE = Frame("/home/train.py", 63, "<module>", "evaluate", "user")
BATCHES = Frame("/home/train.py", 50, "main", "for x in loader", "user")
ENGINE = Frame("/v/site-packages/torch/autograd/graph.py", 9, "run", "run_backward", "library")


BACKWARD = Frame("/home/train.py", 51, "main", "loss.backward", "user")
MODEL = Path(__file__).parents[2] / "scripts" / "recurrent_model.py"
STEPS_OF_TIME = Frame(str(MODEL), 17, "Recurrent.forward", "torch.tanh", "user")
LAYERS = Frame(str(MODEL), 28, "Deep.forward", "layer", "user")


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


def make_rank(
    *parts: Part,
    elements: int = 100,
    durations_ms: Sequence[float] = (),
    workers: int = 0,
    calls: Mapping[Frame, tuple[str, float, int]] = {},
    **changed: Any,
) -> RankProfile:
    """Return the profile of a rank whose steps are made of parts.

    Args:
        calls: collectives by their lines: the function, the calls of a step, and the bytes of each.
        durations_ms: of steps, which are repeated; empty: all of them take as long as their parts.
        workers: loader processes, which do nothing.
        changed: further fields of the record.
    """
    frames = list(dict.fromkeys(frame for part in parts for frame in part.frames))
    total = sum(part.ms for part in parts if part.thread == "main") / 1000
    stacks = [
        StackCount(
            part.thread,
            part.phase,
            [frames.index(frame) for frame in part.frames],
            *(STEPS * part.ms / 1000 * fraction for fraction in (1, part.cpu, part.queued, part.gil, part.slow)),
            STEPS * part.ms / 1000 * part.queued * part.slow,
            round(STEPS * part.ms / 5),
            STEPS * (part.ms / 1000) ** 2,
        )
        for part in parts
    ]
    known: dict[str, Any] = {
        "durations": [ms / 1000 for ms in durations_ms] * (STEPS // len(durations_ms))
        if durations_ms
        else [total] * STEPS,
        "cpu_s": sum(stack.cpu_s for stack in stacks),
        "queued_s": sum(stack.queued_s for stack in stacks),
        **{"uses_gpu": False, "blocks": STEPS, "seconds": STEPS * total, "elements": elements * STEPS},
        **{"system_s": 0.0, "major_faults": 0, "frames": frames, "stacks": stacks},
        "calls": [
            CallCount(name, frames.index(frame), round(STEPS * count), round(STEPS * count * size))
            for frame, (name, count, size) in calls.items()
        ],
    }
    record = Record(**known | changed)
    idle = Record(**known | {"stacks": []})
    return RankProfile([record], [idle] * workers)


COMPUTE = Part(10, (LOOP, MODULE), cpu=1.0)
CALL = Part(50, (FINISH, CALLBACK), "step")
SHORT = CALL._replace(ms=1)
LOAD = Part(20, (FETCH, DATASET), "data")


def reduce_for(ms: float) -> Part:
    return Part(ms, (LOOP,), "collective")


class Case(NamedTuple):
    """Ranks, and what is demanded of the verdict on them."""

    ranks: tuple[RankProfile, ...]
    """one that stands for two, or all"""
    kind: str
    """of the largest cause; empty: there is none"""
    ms: float = 0.0
    """of a step"""
    advice: str | None = ""
    """the beginning of the best advice about it; None: there is none"""
    shown: str = ""
    """part of the evidence"""
    rank: int | None = None
    known: Mapping[str, Any] = {}
    """further evidence"""

    @property
    def evidence(self) -> Evidence:
        ranks = self.ranks if len(self.ranks) > 1 else self.ranks * 2
        mark_lone(ranks)
        given = {"cores": 8, "facts": FACTS, "is_trainer_job": True} | dict(self.known)
        return Evidence(profiles=ranks, **given)


WAITS, COMPUTES = make_rank(COMPUTE, LOAD), make_rank(COMPUTE, LOAD._replace(cpu=1.0))
QUEUED = make_rank(COMPUTE._replace(ms=40, queued=0.75, cpu=0.25))
SWAPS = make_rank(COMPUTE._replace(ms=40, cpu=0.25), major_faults=40 * STEPS)
BURNING = MachineUse(other_cores=1.0, programs={"burn.py": 1.0})
GIL = make_rank(COMPUTE._replace(ms=40, gil=0.75, cpu=0.25), Part(40, (THREAD,), "", cpu=0.9, thread="prefetch"))
AT_CALLBACK = "train.py:34 Save.on_step_end, time.sleep"
AT_DATA = "train.py:12 Images.__getitem__, decode"
CASES = {
    # It was once "overhead per step, however small the batch is", with the advice to double the batch.
    "a callback of all ranks": Case(
        (make_rank(COMPUTE, CALL),), "callback", 50, AT_CALLBACK, f"50.0 of 60.0 ms: {AT_CALLBACK}; it waits"
    ),
    "data that waits": Case((WAITS,), "data waits", 20, "--workers 3: "),
    "data that computes": Case((COMPUTES,), "data computes", 20, "--workers 3: 6 cores are free"),
    # No core is free: it was once "--workers 3, expected 1.75 times".
    "data that computes on busy cores": Case(
        (COMPUTES,), "data computes", 20, f"make {AT_DATA} cheaper", known={"cores": 2}
    ),
    "data in memory": Case(
        (WAITS,), "data waits", 20, "the data is in memory", known={"facts": FACTS | {"in_memory": True}}
    ),
    "data of a script": Case(
        (WAITS,), "data waits", 20, "num_workers=3 in the DataLoader", known={"facts": {}, "is_trainer_job": False}
    ),
    # It was once "--workers 3", which a loader of its own does not read.
    "data from a loader of its own": Case(
        *((WAITS,), "data waits", 20, "more threads or processes in the data's own loader: it waits"),
        known={"facts": FACTS | {"has_own_loader": True}},
    ),
    # The facts of a job's work come with its end.
    "data of a job that failed": Case((WAITS,), "data waits", 20, "--workers ", known={"facts": {}}),
    # Two loader processes that take 40 ms each: two batches come at once. It was once "hiccups".
    "a loader that is always too slow": Case(
        (make_rank(COMPUTE, LOAD._replace(slow=0.9), durations_ms=(50, 10), workers=2),),
        "data waits",
        20,
        "--workers",
    ),
    "eight loader processes that are too slow": Case(
        (make_rank(COMPUTE, LOAD._replace(slow=0.9), durations_ms=(170, *[10] * 7), workers=8),), "data waits", 20
    ),
    # All ranks come there, and one stays longer.
    "one rank that waits": Case(
        (make_rank(COMPUTE, reduce_for(50), SHORT), make_rank(COMPUTE, CALL)),
        *("slow line", 49, f"{AT_CALLBACK}: rank 1 spends"),
        rank=1,
    ),
    # There DDP waits, in C++.
    "a script that waits in its backward pass for a rank": Case(
        (
            make_rank(COMPUTE, Part(50, (ENGINE,), "backward"), Part(1, (CALLBACK,))),
            make_rank(COMPUTE, Part(50, (CALLBACK,))),
        ),
        *("slow line", 49, f"{AT_CALLBACK}: rank 1 spends"),
        rank=1,
    ),
    # An evaluation on rank 0 was "a rank that is slower at the same work": look at its clock rate and temperature.
    "an evaluation on one rank": Case(
        (
            make_rank(COMPUTE, Part(50, (EVALUATE, REDUCE, MODULE), "after step", cpu=1.0)),
            make_rank(COMPUTE, Part(50, (BARRIER, COLLECTIVE))),
        ),
        *("lone", 50, "train.py:61 average, dist.all_reduce (from train.py:63 <module>): only rank 0 does this"),
        *("only rank 0 does this: 50.0 of 60.0 ms", 0),
    ),
    "what one rank does while others wait in their backward pass": Case(
        (make_rank(COMPUTE, Part(50, (ENGINE,), "backward")), make_rank(COMPUTE, Part(50, (CALLBACK,)))),
        *("lone", 50, f"{AT_CALLBACK}: only rank 1 does this"),
        rank=1,
    ),
    # It was "exchanging gradients", with the advice to exchange less often, or to compress.
    "an all-reduce per parameter": Case(
        (make_rank(COMPUTE, Part(50, (SHARED, REDUCE, COLLECTIVE)), calls={REDUCE: ("all_reduce", 62, 8000)}),),
        *(
            "collective",
            50,
            "train.py:61 average, dist.all_reduce (from train.py:60 main): send them as one tensor, not 62 a",
        ),
        "; 62 calls a step of 8,000 bytes",
    ),
    "a metric per batch": Case(
        (make_rank(COMPUTE, Part(5, (REDUCE, COLLECTIVE)), calls={REDUCE: ("all_reduce", 1, 4)}),),
        *("collective", 5, "train.py:61 average, dist.all_reduce: do this every few steps only"),
        "; a call in each step of 4 bytes",
    ),
    "a metric every fourth batch of a Trainer job": Case(
        (make_rank(COMPUTE, Part(5, (FINISH, CALLBACK, COLLECTIVE)), calls={CALLBACK: ("all_reduce", 0.24, 4)}),),
        *("collective", 5, f"{AT_CALLBACK}: do this every few steps only"),
        "a call every 4.17 steps",
    ),
    "a barrier": Case(
        (make_rank(COMPUTE, Part(5, (BARRIER, COLLECTIVE)), calls={BARRIER: ("barrier", 1, 0)}),),
        *("collective", 5, "train.py:62 main, dist.barrier: leave this barrier out"),
    ),
    # It was a call of the next line: "opt.zero_grad: it takes 85 ms now and then; do it less often".
    "loader processes that are born in each epoch": Case(
        (
            make_rank(
                *(COMPUTE, Part(6, (BATCHES, FETCH), "loader start"), Part(4, (BATCHES, FETCH), "data", slow=1.0)),
                durations_ms=(*[10] * 9, 110),
                starts=LoaderStarts(times=5, processes=10),
            ),
        ),
        *("loader starts", 10, "train.py:50 main, for x in loader: persistent_workers=True"),
        "5 times in 50 steps the loader's processes are started again (10 in all)",
    ),
    # It was "do this every few steps only": what a forward pass computes cannot be left out.
    "a script that computes its forward pass by itself": Case(
        (make_rank(Part(50, (SHARED,), cpu=1.0)),), "computing", 50, None, known={"is_trainer_job": False}
    ),
    "a script that waits before its backward pass": Case(
        (make_rank(COMPUTE, Part(50, (SHARED,))),),
        *("script", 50, "train.py:60 main, average: do this every few steps only"),
        known={"is_trainer_job": False},
    ),
    # Threads in the queue for the one core that all ranks may use: it was "OMP_NUM_THREADS=1, or --threads 1".
    "ranks that are pinned to one core": Case(
        (make_rank(COMPUTE._replace(ms=40, queued=0.75, cpu=0.25), cores=(3,)),),
        *("pinned", 30, "2 ranks may use core 3 only, of 8 (affinity: taskset, numactl"),
        known={"cores": 1, "machine_cores": 8, "facts": FACTS | {"threads": 2}},
    ),
    # Attention over rows that are a twentieth longer: it was "a rank that is slower at the same work".
    "longer rows": Case(
        (make_rank(COMPUTE, reduce_for(1)), make_rank(COMPUTE._replace(ms=11), elements=105)),
        *("more work", 1, "give all ranks the same: rank 1 has 1.05 times the elements"),
        rank=1,
    ),
    "a slower rank that has a little more": Case(
        (make_rank(COMPUTE, reduce_for(20)), make_rank(COMPUTE._replace(ms=30), elements=105)),
        *("slow rank", 20, "look at rank 1's machine"),
        rank=1,
    ),
    "a slower rank whose batches are not seen": Case(
        (make_rank(COMPUTE, reduce_for(20), elements=0), make_rank(COMPUTE._replace(ms=30), elements=0)),
        *(
            "slow rank",
            20,
            "look at rank 1's machine (clock rate, temperature, limits, programs beside it), or at the",
        ),
        *("batches whose size is not seen", 1),
    ),
    "a Python loop in the model": Case(
        (make_rank(Part(50, (LOOP, MODULE, STEPS_OF_TIME), cpu=1.0)),),
        *("loop", 50, f"{STEPS_OF_TIME}: this runs again and again in Python"),
    ),
    "layers of a model": Case((make_rank(Part(50, (LOOP, MODULE, LAYERS), cpu=1.0)),), ""),
    # It was "loss.backward: it takes 500 ms every 10 steps; do it less often, or in a thread or process".
    "slow backward passes now and then": Case(
        (
            make_rank(
                COMPUTE, Part(50, (BACKWARD, ENGINE), "backward", cpu=1.0, slow=1.0), durations_ms=(*[10] * 9, 510)
            ),
        ),
        *(
            "hiccups",
            50,
            "its backward is a part of each step, and takes 500 ms longer every 10 steps: look at what",
        ),
        rank=0,
        known={"is_trainer_job": False},
    ),
    "a slower rank": Case(
        (make_rank(COMPUTE, reduce_for(20)), make_rank(COMPUTE._replace(ms=30))),
        *("slow rank", 20, "look at rank 1's machine", "batches of the same size; its CPU time is 30.0 ms", 1),
    ),
    # A layer that did more on one rank was "slower at the same work"; only its machine was to be looked at.
    "a rank that computes more at a line": Case(
        (
            make_rank(COMPUTE, reduce_for(30), Part(1, (LOOP, MODULE, LAYER), cpu=1.0)),
            make_rank(COMPUTE, Part(31, (LOOP, MODULE, LAYER), cpu=1.0)),
        ),
        *(
            "slow rank",
            30,
            "look at rank 1's machine (clock rate, temperature, limits, programs beside it), or at ",
        ),
        *("30.0 ms more at train.py:8 Net.forward", 1),
    ),
    # It was once "exchanging gradients 56 %", and a rank that is the slowest at 2.4 ms against 2.4.
    "other programs": Case(
        (make_rank(COMPUTE, reduce_for(30)), QUEUED),
        *("programs", 30, "end the other programs on these cores, or move them to others: burn.py 1.0"),
        known={"cores": 2, "machine": BURNING},
    ),
    # What another rank waits meanwhile, with threads in the queue, was counted as waiting for the CPU as well.
    "one rank that waits beside other programs": Case(
        (make_rank(COMPUTE, reduce_for(50), SHORT, queued_s=STEPS * 0.04), make_rank(COMPUTE, CALL)),
        *("slow line", 49, f"{AT_CALLBACK}: rank 1 spends"),
        rank=1,
        known={"cores": 2, "machine": BURNING},
    ),
    # 84 % of a step were those of programs that had kept 0.2 to 0.9 of 2 cores busy.
    "threads that wait for each other more than for other programs": Case(
        (QUEUED,),
        *("contention", 22, "OMP_NUM_THREADS=1, or --threads 1: 2 ranks with 2 threads each are 4 on 2 cores"),
        "they wait for each other: the job itself keeps",
        known={"cores": 2, "facts": FACTS | {"threads": 2}, "machine": MachineUse(other_cores=0.4)},
    ),
    "too many threads": Case(
        (QUEUED,),
        *("contention", 30, "OMP_NUM_THREADS=1, or --threads 1: 2 ranks with 2 threads each are 4 on 1 core"),
        known={"cores": 1, "facts": FACTS | {"threads": 2}},
    ),
    # A thread that is stopped by a limit is in the queue: that is counted once.
    "a limit on the CPU time": Case(
        (QUEUED,), "throttled", 30, "raise the CPU limit", known={"machine": MachineUse(throttled=1.5)}
    ),
    "a hypervisor that gives the cores to others": Case(
        (make_rank(COMPUTE),), "stolen", 2.5, "ask for", known={"cores": 2, "machine": MachineUse(stolen=0.5)}
    ),
    "a thread that holds the GIL": Case(
        (make_rank(COMPUTE, reduce_for(30)), GIL),
        *("gil", 30, "train.py:70 watch, sum: move the thread 'prefetch' of rank 1 to a process"),
        *("waits 30.0 of 40.0 ms for the GIL, which the thread 'prefetch' has: train.py:70", 1),
    ),
    # A thread that has the GIL for some steps makes these slow, one after the other: it was "every 1 steps".
    "a thread that holds the GIL for some steps": Case(
        (
            make_rank(
                COMPUTE._replace(ms=10, gil=0.75, cpu=0.25),
                Part(15, (LOOP, MODULE), "step", slow=1.0),
                Part(10, (THREAD,), "", cpu=0.9, thread="prefetch"),
                durations_ms=(*[10] * 22, *[135] * 3),
            ),
        ),
        *("gil", 8.5, "train.py:70 watch, sum: move the thread 'prefetch'"),
        rank=0,
    ),
    "hiccups": Case(
        (make_rank(COMPUTE, CALL._replace(slow=1.0), durations_ms=(*[10] * 9, 510)),),
        *("hiccups", 50, f"{AT_CALLBACK}: it takes 500 ms every 10 steps"),
        *("every 10 steps a step takes 500.0 ms longer (typical: 10.0 ms)", 0),
    ),
    # Other programs made some steps slow: they were "slow steps now and then", blamed on the line that had no CPU.
    "slow steps whose threads have no CPU": Case(
        (make_rank(COMPUTE, CALL._replace(slow=1.0, queued=0.9), durations_ms=(*[10] * 9, 510)),),
        *("programs", 45, "end the other programs"),
        known={"machine": MachineUse(other_cores=2.0)},
    ),
    "a machine that swaps": Case(
        (SWAPS,), "swap", 30, "the machine swaps", known={"machine": MachineUse(swapped_pages=100_000)}
    ),
    "a line at which the machine swaps": Case(
        (make_rank(COMPUTE, CALL, major_faults=40 * STEPS),),
        *("swap", 50, "the machine swaps"),
        known={"machine": MachineUse(swapped_pages=100_000)},
    ),
    "page faults without a swap": Case((SWAPS,), ""),
}


JOB = MeasuredTrial(job=["train.py"], engine="ddp", ranks=2)


def report_on(evidence: Evidence, **more: Any) -> Report:
    """Return the report on evidence."""
    return conclude(Diagnosis(ran=RAN, evidence=evidence, normal=JOB, **more))


@pytest.mark.parametrize("name", CASES)
def test_verdict_on(name: str) -> None:
    case = CASES[name]
    causes = find_causes(case.evidence)
    assert [cause.kind for cause in causes][:1] == ([case.kind] if case.kind else [])
    if not causes:
        return
    first = causes[0]
    assert (first.seconds, first.rank) == (pytest.approx(case.ms / 1000, rel=0.05), case.rank)
    assert case.shown in first.evidence
    advice = [action for action in find_actions(causes, case.evidence) if action.cause is first]
    if case.advice is None:
        assert advice == []
        assert report_on(case.evidence).verdicts[0].details[1:] == ["Nothing is known that makes this cheaper."]
        return
    assert advice[0].text.startswith(case.advice)
    assert "--batch-size" not in advice[0].text or case.kind == "swap"
    assert sum(cause.seconds for cause in causes) <= 1.02 * case.evidence.step_s, "a sample of time counts twice"


def test_what_changes_no_number_comes_first() -> None:
    """Exchanging less often, which changes the batch, stood above the line to mend."""
    script = Part(8, (SHARED,))
    rank = make_rank(COMPUTE, script, reduce_for(40))
    runs = runs_of(58, 18, 18, 36, 0)
    evidence = Evidence(profiles=[rank, rank], cores=8, facts={}, runs=runs, line=LINE)
    verdicts = report_on(evidence).verdicts
    assert [verdict.text.partition(",")[0] for verdict in verdicts] == [
        "A loss: your own code between the batches",
        "The largest loss: exchanging gradients",
    ]
    made = find_actions(find_causes(evidence), evidence)
    assert [action.changes_numbers for action in made] == [False, True]


@pytest.mark.parametrize(
    ("source", "loop"),
    [
        ("for t in range(n):\n        x = f(x)", 2),
        ("for t in range(self.steps):\n        x = f(x)", 2),
        ("while x.any():\n        x = f(x)", 2),
        ("y = [\n        f(part) for part in x]", 2),
        ("for layer in self.layers:\n        x = layer(x)", None),
        ("for n, layer in enumerate(self.blocks.values()):\n        x = layer(x)", None),
        ("for n in range(len(self.layers)):\n        x = self.layers[n](x)", None),
        ("if x:\n        x = f(x)", None),
        ("for t in range(n): pass\n    if x:\n        x = f(x)", None),
    ],
)
def test_loops_over_layers_are_no_loops(source: str, loop: int | None, tmp_path: Path) -> None:
    file = tmp_path / f"model-{abs(hash(source))}.py"
    file.write_text(f"def forward(self, x, n, f):\n    {source}\n")
    assert loop_around(str(file), len(file.read_text().splitlines())) == loop


def test_causes_that_go_on_at_once_are_said_to() -> None:
    """Rank 0 waits at a line for 30 ms, and rank 1, which has more to do, in the queue for as long."""
    busy = make_rank(COMPUTE._replace(ms=40, queued=0.75, cpu=0.25))
    evidence = Evidence(profiles=[make_rank(COMPUTE, CALL._replace(ms=30)), busy], cores=8, facts=FACTS)
    assert any(text.startswith("Together the losses are 150% of a step") for text in report_on(evidence).notes)


# What the differences between runs show.


def runs_of(
    step_ms: float, without_ms: float, alone_ms: float, twice_ms: float, backward_ms: float
) -> dict[str, Any]:
    """Return the figures of three rounds."""

    def figures(ms: float) -> list[dict[str, Any]]:
        s = ms / 1000
        return [
            {"mean_s": s, "step_s": s, "apart_s": s, "compute_s": s, "parts": {"backward": backward_ms / 1000}}
        ] * 3

    kinds = (NORMAL, NO_EXCHANGE, ALONE, TWICE)
    return dict(zip(kinds, map(figures, (step_ms, without_ms, alone_ms, twice_ms)), strict=True))


@pytest.mark.parametrize(
    ("figures", "machine"),
    [
        # It was once "expected 2.25 times" from 78.6 against 78.5 ms.
        ((78.6, 78.5, 78.5, 157, 40), MachineUse()),
        # Twice the batch was faster: "--batch-size 1024: twice the samples for a step that takes 0% longer".
        ((78.6, 78.5, 78.5, 70, 40), MachineUse(other_cores=0.1)),
    ],
)
def test_nothing_is_advised_from_a_difference_within_the_noise(
    figures: tuple[float, float, float, float, float], machine: MachineUse
) -> None:
    rank = make_rank(COMPUTE._replace(ms=78.6))
    runs = runs_of(*figures)
    evidence = Evidence(profiles=[rank, rank], cores=8, facts=FACTS, runs=runs, line=LINE, machine=machine)
    assert find_causes(evidence) == []
    (verdict,) = report_on(evidence).verdicts
    assert verdict.text.startswith("Nothing takes more than a twentieth")


def test_interval_of_few_runs_is_students() -> None:
    """It was 5 % however few runs there were, and however much they differed."""
    runs = {NORMAL: [{"step_s": 0.010}, {"step_s": 0.012}], NO_EXCHANGE: [{"step_s": 0.008}]}
    evidence = Evidence(profiles=[make_rank(COMPUTE)], runs=runs)
    value, error = evidence.figure(NORMAL)
    assert (value, 2 * error) == (pytest.approx(0.011), pytest.approx(12.706 * 0.001414 / 2**0.5, rel=0.01))
    # By the spread of the runs that were repeated.
    assert evidence.figure(NO_EXCHANGE)[1] == pytest.approx(error * 2**0.5 * 0.008 / 0.011)
    once = replace(evidence, runs={label: each[:1] for label, each in runs.items()})
    assert once.figure(NORMAL)[1] == float("inf")


def test_a_collective_costs_what_the_last_rank_to_arrive_spends_in_it() -> None:
    """It was all that a rank waited for another, which is not gone without it: 1.69 times was promised for 1.4."""

    def rank(first: int, *seconds: float) -> RankProfile:
        profile = make_rank(
            COMPUTE, Part(10, (REDUCE, COLLECTIVE)), calls={REDUCE: ("all_reduce", len(seconds) / STEPS, 4)}
        )
        profile.records[0].calls[0].first, profile.records[0].calls[0].seconds = first, list(seconds)
        return profile

    ranks = rank(7, 0.010, 0.002, 0.009, 0.001), rank(6, 0.5, 0.001, 0.010, 0.003)
    assert together_s(ranks, REDUCE) == pytest.approx((0.001 + 0.002 + 0.003) / 3)
    assert together_s(ranks, BARRIER) is None


def test_all_runs_are_sampled_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the normal run was, and what that costs was a part of the exchange."""
    normal = MeasuredTrial(label=NORMAL, job=("train.py",), engine="ddp", ranks=2)
    trials, asked = Trials(normal, tmp_path / "out", 60), []

    def keep(trial: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(trial.record)
        return SimpleNamespace(state="failed")

    monkeypatch.setattr(trials.runner, "run", keep)
    for label in (NORMAL, NO_EXCHANGE, ALONE):
        trials.run(replace(normal, label=label), 10)
    assert asked == [{"sample_stacks": True}] * 3


def test_what_the_budget_does_not_suffice_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning named a second normal run that the budget had ended, nor further runs that it left out."""
    normal = MeasuredTrial(label=NORMAL, job=("train.py",), engine="ddp", ranks=2)
    trials = Trials(normal, tmp_path / "out", 0.001)
    killed = RunRecord({}, 2, "killed", 1.0, "had not ended after 1 s (--budget-s)")
    trials.runner.last[killed.key, 1] = replace(killed, state="done")
    with monkeypatch.context() as context:
        context.setattr(trials.runner, "run", lambda *args, **kwargs: killed)
        trials.run(normal, 10)

    def run_once(*_: Any) -> RunRecord:
        trials.profiles.append([make_rank(COMPUTE, reduce_for(20))] * 2)
        trials.figures[NORMAL] = [{"step_s": 0.03, "work": FACTS}]
        return replace(killed, state="done", seconds=9.0)

    monkeypatch.setattr(trials, "run", run_once)
    assert trials.measure() == ""
    assert trials.runner.warnings == [
        "a further run (normal) has failed: had not ended after 1 s (--budget-s)",
        "--budget-s 0.001 did not suffice for further runs, which would explain the rest. Type --budget-s 0.002",
    ]


def test_a_trainer_job_is_known_before_it_has_come_to_its_end(tmp_path: Path) -> None:
    """Where the first run failed, the advice was that for a script."""
    normal = MeasuredTrial(label=NORMAL, job=("train.py",), engine="ddp", ranks=1)
    for on_trainer in (True, False):
        trials = Trials(normal, tmp_path / "out", 60)
        trials.profiles.append([make_rank(COMPUTE, on_trainer=on_trainer)])
        assert trials.evidence().is_trainer_job is on_trainer


def test_no_gain_above_that_of_the_run_without_the_exchange() -> None:
    """1.69 times was promised where no exchange at all gave 1.4."""
    rank = make_rank(COMPUTE, reduce_for(20))
    exchange = Cause("exchange", 0.02, 0.001, "", details={"latency_s": 0.02, "bandwidth_s": 0.0})
    evidence = Evidence(profiles=[rank, rank], cores=8, facts=FACTS, runs=runs_of(30, 22, 10, 12, 0))
    assert find_actions([exchange], evidence)[0].speed == pytest.approx(30 / 22)


def test_the_jobs_own_largest_cause_has_advice_behind_other_programs() -> None:
    """Nothing else was named where other programs had been at work."""
    evidence = Evidence(profiles=[make_rank(COMPUTE)] * 2, cores=2, facts=FACTS)
    waits = {"function": "all_reduce", "calls": 9.99, "bytes": 8.0}
    kinds = ("programs", "callback", "metric", "loss")
    causes = [Cause(kind, 0.005, 0.0, "", details={"programs": ""}) for kind in kinds]
    causes[1:1] = [Cause("collective", 0.0049, 0.0, "", details=waits)]
    advice = find_actions(causes, evidence)
    assert [action.cause.kind for action in advice] == ["collective", "programs", "callback"]
    assert "not 10 a step" in advice[0].text, "the first step's calls are not counted"


def test_other_programs_are_what_the_ranks_have_not_used() -> None:
    """Of a run that was killed, programs counted as little as those that were there the whole time."""
    busy = make_rank(COMPUTE, machine_s=STEPS * 0.018, cores=(0, 1))
    assert other_cores([busy, busy]) == 0
    idle = make_rank(COMPUTE._replace(cpu=0.5), machine_s=STEPS * 0.018, cores=(0, 1))
    assert other_cores([idle, idle]) == pytest.approx(0.8)
    # Ranks on cores of their own see only these.
    apart = [make_rank(COMPUTE._replace(cpu=0.5), machine_s=STEPS * 0.009, cores=(n,)) for n in (0, 1)]
    assert other_cores(apart) == pytest.approx(0.8)


def test_each_of_two_causes_of_one_kind_has_advice_of_its_own() -> None:
    """Under each stood what to do about both."""
    parts = [Part(20, (SHARED, REDUCE, COLLECTIVE)), Part(10, (BARRIER, COLLECTIVE))]
    rank = make_rank(COMPUTE, *parts, calls={REDUCE: ("all_reduce", 62, 8000), BARRIER: ("barrier", 1, 0)})
    first, second = report_on(Evidence(profiles=[rank, rank], cores=8, facts=FACTS)).verdicts
    assert [text for text in first.details if text.startswith("To do: ")] == first.details[1:2]
    assert "send them as one tensor" in first.details[1]
    assert [text for text in second.details if text.startswith("To do: ")] == second.details[1:2]
    assert "leave this barrier out" in second.details[1]


def test_a_rank_without_a_record_leaves_none_to_compare(tmp_path: Path) -> None:
    """Where rank 0 had ended before its first record, what rank 1 did was told of rank 0."""
    file = tmp_path / "stacks" / "rank-1.json"
    file.parent.mkdir()
    file.write_bytes(msgspec.json.encode(make_rank(COMPUTE).records[0]))
    assert read_profiles(tmp_path, 2) == []
    shutil.copy(file, file.with_name("rank-0.json"))
    assert len(read_profiles(tmp_path, 2)) == 2


def test_the_last_line_proves_the_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `compare` of the same job and ranks, with the value that the option has now, and the advised one."""
    job = tmp_path / "train.py"
    job.touch()

    def measure(trials: Trials) -> str:
        trials.profiles.append([make_rank(COMPUTE, LOAD, on_trainer=True)] * 2)
        return ""

    monkeypatch.setattr(Trials, "measure", measure)
    words = ["--threads", "2", "--backend", "ddp", "--out", str(tmp_path / "out"), "--", str(job), "--lr", "1 2"]
    assert cli.main(words) == 0
    said = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    compare = "compare --np 2 --backend ddp --steps 133 --threads 2 --vary workers=0,3"
    assert said["advice"] == [f"python -m hvd_trainer {compare} -- {job} --lr '1 2'"]


def test_switches_are_told_with_their_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n# set_detect_anomaly(\ntorch.autograd.set_detect_anomaly(True)\n")
    frame = Frame(str(script), 9, "main", "step", "user")
    on = Switches(
        anomaly=0.9,
        deterministic=True,
        threads=4,
        float64=1.0,
        needless_search=True,
        variables={"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    rank = make_rank(COMPUTE, Part(0, (frame,)), switches=on)
    evidence = Evidence(profiles=[rank, rank], cores=4)
    told = {switch.kind: switch for switch in find_switches(evidence)}
    assert list(told) == ["anomaly", "deterministic", "threads", "float64", "search", "variable"]
    assert told["anomaly"].where == "train.py:3"
    assert "2 ranks with 4 threads each are 8 on 4 cores: OMP_NUM_THREADS=2" in told["threads"].text
    assert "find_unused_parameters=False" in told["search"].text
    # What waits for a GPU costs nothing on a CPU.
    assert (
        told["variable"].text
        == "TORCH_DISTRIBUTED_DEBUG=DETAIL is for a search only: unset TORCH_DISTRIBUTED_DEBUG"
    )
    first = report_on(evidence).verdicts[0]
    assert first.text.startswith("On in every step: train.py:3: anomaly detection is on")
    assert not list(find_switches(Evidence(profiles=[make_rank(COMPUTE)] * 2, cores=4)))


def test_exchange_and_overhead_are_differences_between_runs() -> None:
    rank = make_rank(COMPUTE, reduce_for(20))
    runs = runs_of(30, 10, 10, 12, 0)
    given: dict[str, Any] = {"cores": 8, "facts": FACTS, "is_trainer_job": True}
    evidence = Evidence(profiles=[rank, rank], runs=runs, line=LINE, **given)
    exchange, overhead = find_causes(evidence)
    assert (exchange.kind, exchange.seconds) == ("exchange", pytest.approx(0.02))
    assert (overhead.kind, overhead.seconds) == ("overhead", pytest.approx(0.008))
    # 1 ms of latency and 4 ms for 4 MB at 1 GB/s.
    assert exchange.details["latency_s"] == pytest.approx(0.004)
    advice = find_actions([exchange, overhead], evidence)
    # The last two gain the same but for rounding, in which versions of Python differ.
    wanted = ["accumulate=1,4", "compression=none,fp16", "batch-size=32,64"]
    assert [action.vary for action in advice] == wanted
    assert [action.speed for action in advice] == pytest.approx([2, 15 / 11, 15 / 11])


OVERLAPS = {
    # 40 MB at 1 GB/s: 40 ms after a backward pass of 80 ms, where the last 4 of 10 MB could be all that is left.
    "one bucket": ({"bucket_mb": 64.0}, 120, 8, "--bucket-mb 4: 10 buckets of gradients"),
    # Ten buckets, and the exchange takes as long as if none of it were hidden.
    "gradients in another order": ({"bucket_mb": 4.0}, 120, 8, "the order of gradients"),
    "a script of Horovod's API": ({"uses_hvd": True, "bucket_mb": 64.0}, 120, 8, "--fusion-threshold-mb 4 of "),
    "an exchange that is hidden": ({"bucket_mb": 4.0}, 84, 8, None),
    "no core to exchange on": ({"bucket_mb": 64.0}, 120, 2, None),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_lack_of_overlap(name: str) -> None:
    facts, step_ms, cores, advised = OVERLAPS[name]
    cpu = 2.0 if cores == 2 else 1.0
    rank = make_rank(Part(80, (LOOP, MODULE), cpu=cpu), reduce_for(step_ms - 80))
    evidence = Evidence(
        profiles=[rank, rank],
        cores=cores,
        is_trainer_job="uses_hvd" not in facts,
        facts=FACTS | facts | {"parameters": 10_000_000},
        runs=runs_of(step_ms, 80, 80, 160, 80),
        line=Line(0.0001, 1e9),
    )
    found = {cause.kind: cause for cause in find_causes(evidence)}
    assert ("overlap" in found) == (advised is not None)
    if advised is not None:
        assert found["overlap"].seconds == pytest.approx(0.036, abs=0.001)
        assert "exchange" not in found, "a sample of time counts twice"
        (action,) = find_actions(list(found.values()), evidence)
        assert action.text.startswith(advised)
        assert action.speed == pytest.approx(120 / 84, abs=0.02)


def test_a_batch_that_does_not_fit_the_memory_is_not_advised() -> None:
    overhead = Cause("overhead", 0.008, 0.0001, "", details={"more_s": 0.002})
    facts = FACTS | {"memory_share": 0.6}
    assert find_actions([overhead], Evidence(profiles=[make_rank(COMPUTE)], cores=8, facts=facts)) == []


def test_line_fits_latency_and_bandwidth() -> None:
    pairs = [[size, 0.0005 + size / 2e9] for size in (1024, 65536, 2**20, 2**24)]
    line = Line.through(pairs)
    assert (line.latency_s, line.bytes_per_s) == (pytest.approx(0.0005), pytest.approx(2e9))
    assert line.parts(4e6, 2) == (pytest.approx(0.001), pytest.approx(0.002))
    assert Line.through([[1024, 0.002], [2048, 0.001]]).bytes_per_s > 0


def test_runs_with_parts_left_out_are_planned_only_for_what_is_unexplained() -> None:
    normal = MeasuredTrial(label=NORMAL, job=("train.py",), engine="ddp", ranks=2)
    given: dict[str, Any] = {"cores": 5, "facts": FACTS | {"threads": 4}, "is_trainer_job": True}
    assert plan_variants(Evidence(profiles=[make_rank(COMPUTE, CALL)] * 2, **given), normal) == []
    evidence = Evidence(profiles=[make_rank(COMPUTE, reduce_for(10))] * 2, **given)
    variants = plan_variants(evidence, normal)
    assert [its.label for its in variants] == [NO_EXCHANGE, ALONE, TWICE, NORMAL]
    assert [its.threads for its in variants] == [None, 2, 2, None]
    assert variants[2].options == {"global_batch_size": None, "batch_size": 64}
    variants = plan_variants(replace(evidence, is_trainer_job=False), normal)
    assert [its.label for its in variants] == [NO_EXCHANGE, NORMAL]
    # Other programs explained enough of a step, and no run was made for what is behind them.
    queued = make_rank(COMPUTE._replace(ms=60, queued=0.8, cpu=0.1), reduce_for(20))
    beside = Evidence(profiles=[queued] * 2, **given | {"cores": 2}, machine=MachineUse(other_cores=1.5))
    assert [cause.kind for cause in find_causes(beside)][:1] == ["programs"]
    assert plan_variants(beside, normal)[0].label == NO_EXCHANGE


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/job\n", "job/cpu.stat", "throttled_usec {us}\n"),
        ("2:cpu,cpuacct:/job\n", "cpu/job/cpu.stat", "throttled_time {us}000\n"),
    ],
)
def test_throttling_by_recorded_figures(
    own: str, file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups that count are those of the doctor's quota."""
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path)
    (tmp_path / "own").write_text(own)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text.format(us=1_000_000))
    watch = MachineWatch()
    (tmp_path / file).write_text(text.format(us=1_500_000))
    watch._began = time.monotonic() - 1
    assert watch.end().throttled == pytest.approx(0.5, rel=0.1)


def test_programs_are_named_by_what_they_used() -> None:
    """Of 1.2 busy cores 0.1 had a name: the processes of a build are short, and may begin meanwhile."""
    loop = ["bash", "-c", f"while :; do {sys.executable} -ISc 'sum(range(3_000_000))'; done"]
    with Popen(loop) as before, ExitStack() as both:
        both.callback(before.kill)
        watch = MachineWatch()
        during = both.enter_context(Popen(loop))
        both.callback(during.kill)
        ends = {f"(process {process.pid})" for process in (before, during)}
        wait_for(lambda: all(any(name.endswith(end) for name in watch.end().programs) for end in ends))


def test_swap_and_steal_by_recorded_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = [SimpleNamespace(sin=4096 * 100, sout=4096 * 10), SimpleNamespace(sin=4096 * 5000, sout=4096 * 5110)]
    monkeypatch.setattr(machine_use.psutil, "swap_memory", lambda: swapped.pop(0))
    times = machine_use.psutil.cpu_times(percpu=True)
    stolen = [core._replace(steal=core.steal + 0.5) for core in times]
    given = [times, stolen]
    monkeypatch.setattr(machine_use.psutil, "cpu_times", lambda percpu: given.pop(0))
    # What is taken from cores that the ranks may not use was their loss, too.
    monkeypatch.setattr(machine, "cpu_ids", lambda: (0,))
    watch = MachineWatch()
    watch._began = time.monotonic() - 1
    use = watch.end()
    assert (use.swapped_pages, use.stolen) == (10_000, pytest.approx(0.5, rel=0.1))


# The sampler.


def test_called_expression() -> None:
    assert called_expression("time.sleep(0.05)") == "time.sleep"
    assert called_expression("  self.client.get(\n  url)[0]") == "self.client.get"
    assert called_expression("a + b") == called_expression("for x in") == ""
    # Python tells all lines of a loop: it was a call of the next line.
    head = "for x, y in loader(1)"
    assert (
        called_expression(f"{head}:\n    opt.zero_grad()")
        == called_expression(f"{head}:")
        == "for (x, y) in loader(1)"
    )


def nap() -> None:
    time.sleep(0.02)


def spin() -> None:
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass


def test_sampler_counts_lines_with_their_cpu_time(tmp_path: Path) -> None:
    sampler = StackSampler(tmp_path / "stacks" / "rank-0.json")
    sampler.on_start(torch.device("cpu"), on_trainer=True)
    for _ in range(25):
        sampler.phase = "data"
        nap()
        sampler.phase = "forward"
        spin()
        sampler.on_step_end(Step(1, 0.1))
    sampler.stop()
    (profile,) = read_profiles(tmp_path, 1)
    # A look that comes late on a busy machine finds more steps of the warm-up over.
    assert 15 <= profile.steps <= 20, "the warm-up counts"
    roles = profile.roles()
    assert roles["data"].own == pytest.approx(0.02, rel=0.5)
    assert roles["data"].cpu < 0.2 * roles["data"].own
    spun = roles["own forward"]
    assert spun.cpu > 0.6 * (spun.wall - spun.queued)
    places = {str(frame) for stack in profile.main() for frame in stack.frames}
    assert any(place.endswith("nap, time.sleep") and place.startswith("test_diagnose.py:") for place in places)


def loop_between_tensors() -> None:
    for _ in range(100):
        total = 0.0
        for number in range(2500):
            total += number % 1.7
        torch.tensor([total] * 64)


def test_loop_of_python_is_seen_where_operations_release_the_gil(tmp_path: Path) -> None:
    """Nearly half of a loop's looks were at the operation behind it, which takes a tenth of its time."""
    sampler = StackSampler(tmp_path / "stacks" / "rank-0.json")
    sampler.on_start(torch.device("cpu"), on_trainer=True)
    sampler.phase = "forward"
    for _ in range(80):
        loop_between_tensors()
        sampler.on_step_end(Step(1, 0.1))
    sampler.stop()
    (profile,) = read_profiles(tmp_path, 1)
    first = loop_between_tensors.__code__.co_firstlineno
    looks = Counter({first + 3: 0, first + 4: 0, first + 5: 0})
    for stack in profile.main():
        looks[stack.frames[-1].line] += stack.looks
    assert looks[first + 3] + looks[first + 4] > 3 * looks[first + 5], looks


def test_sampler_leaves_its_own_time_in_the_queue_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside busy programs it was most of the time, and counted as the exchange's."""
    sampler = StackSampler(tmp_path / "stacks" / "rank-0.json")

    def glob(pattern: str) -> list[Path]:
        """Write how long each thread was in the queue: the sampler's always since the beginning."""
        for thread in threading.enumerate():
            file = tmp_path / str(thread.native_id) / "schedstat"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"0 {time.perf_counter_ns() if thread.name == 'stack sampler' else 7} 1")
        return list(tmp_path.glob(pattern))

    monkeypatch.setattr(stacks, "Path", lambda name: SimpleNamespace(glob=glob, write_text=len))
    sampler.on_start(torch.device("cpu"), on_trainer=True)
    for _ in range(8):
        nap()
        sampler.on_step_end(Step(1, 0.1))
    sampler.stop()
    (profile,) = read_profiles(tmp_path, 1)
    assert profile.queued_s == pytest.approx(0, abs=1e-6)


def test_role_of_a_stack() -> None:
    user = Frame("/home/train.py", 5, "main", "loader", "user")
    optimizer = Frame("/v/site-packages/torch/optim/sgd.py", 5, "SGD.step", "sgd", "library")
    horovod = Frame("/v/site-packages/horovod/torch/optimizer.py", 5, "synchronize", "synchronize", "library")
    assert role_of("step", (user, optimizer), in_trainer=False) == "update"
    assert role_of("step", (user, optimizer, horovod), in_trainer=False) == "exchange"
    assert role_of("forward", (user, MODULE), in_trainer=False) == "model"
    # Lightning's optimizer computes the loss in a closure.
    assert role_of("forward", (user, optimizer, MODULE, user), in_trainer=False) == "model"
    assert role_of("forward", (user,), in_trainer=False) == "own forward"
    assert role_of("after step", (user,), in_trainer=False) == "script"
    assert role_of("after step", (user, MODULE), in_trainer=False) == "script"
    assert role_of("step", (FINISH, CALLBACK, MODULE), in_trainer=True) == "callback"
    assert role_of("collective", (LOOP,), in_trainer=True) == "exchange"
    # The Trainer counts metrics before it leaves the phase in which the exchange has ended.
    metric = Frame("/x/hvd_trainer/optim/step.py", 149, "TrainStep.count", "meter.add", "hvd_trainer")
    assert role_of("collective", (LOOP, metric), in_trainer=True) == "metric"
    # A loader's process that was forked has the stack of the loader that started it.
    started = Frame(
        "/v/torch/utils/data/dataloader.py", 9, "_MultiProcessingDataLoaderIter.__init__", "w.start", "library"
    )
    assert role_of("worker", (started, DATASET), in_trainer=True) == "worker"


def test_calls_that_give_roles_are_in_the_trainer() -> None:
    """A slow loss was no cause any more when its call had another name."""
    files = [Path(module.__file__ or "").read_text() for module in (loop, step)]
    nodes = [node for text in files for node in ast.walk(ast.parse(text))]
    assert {*IN_TRAINER} <= {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


# The report.


def test_blamed_line_is_shown_between_its_neighbours(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("".join(f"line {number}\n" for number in range(1, 41)))
    script = Part(50, (LOOP, structs.replace(CALLBACK, file=str(file))), "callback")
    first = report_on(Evidence(profiles=[make_rank(COMPUTE, script)] * 2)).answer
    assert first.badge == "83% OF A STEP"
    assert first.source is not None
    assert first.source.line == 34
    assert first.source.lines == [(number, f"line {number}") for number in range(31, 38)]


def test_bars_show_where_the_causes_are_on_each_rank() -> None:
    bars = report_on(Evidence(profiles=[make_rank(COMPUTE, LOAD), make_rank(COMPUTE, reduce_for(20))])).bars
    assert bars is not None
    loading, waiting = (dict(bar.parts) for bar in bars.bars)
    assert loading == pytest.approx({"forward": 10, "fetching data": 20})
    assert waiting == pytest.approx({"forward": 10, "exchange, and waiting for other ranks": 20})
    assert bars.marked == ["exchange, and waiting for other ranks", "fetching data"]


def test_bars_hold_the_queue_that_an_exchange_waits_for() -> None:
    """The headline said 122.3 ms, and the bar 112.0: threads that carry an exchange out were in the first only."""
    ranks = [make_rank(COMPUTE, reduce_for(30), queued_s=STEPS * 0.02)] * 2
    report = report_on(Evidence(profiles=ranks, cores=2, machine=BURNING))
    assert "are in the queue for a CPU for 20.0 of 40.0 ms" in str(report.answer)
    assert report.bars is not None
    for bar in report.bars.bars:
        parts = {"forward": 10, "exchange, and waiting for other ranks": 10, "waiting for a CPU": 20}
        assert dict(bar.parts) == pytest.approx(parts)


@pytest.mark.parametrize("name", CASES)
def test_bars_add_up_to_the_step(name: str) -> None:
    """Headline, bar and table had three times of one step, and a cause could have no colour."""
    evidence = CASES[name].evidence
    bars = report_on(evidence).bars
    assert bars is not None
    for bar, profile in zip(bars.bars, evidence.profiles, strict=True):
        assert bar.size == pytest.approx(1000 * profile.step_s, rel=0.01)
    causes = find_causes(evidence)
    assert bool(bars.marked or "In all parts" in bars.text) == bool(causes)
    assert ("In all parts" in bars.text) == any(cause.kind in ("stolen", "swap") for cause in causes)


def test_what_the_runs_warned_of_is_in_the_report() -> None:
    """It said nothing of other programs, of runs that had failed, or of too few."""
    runs = {label: figures[:1] for label, figures in runs_of(30, 22, 10, 12, 0).items()}
    evidence = Evidence(profiles=[make_rank(COMPUTE, reduce_for(20))] * 2, facts=FACTS, runs=runs)
    told, failure = ["a run alone has failed: out of memory"], "The job ended early: ValueError"
    report = report_on(evidence, warnings=told, failure=failure)
    assert (report.answer.text, report.warnings[:1]) == (failure, told)
    assert report.warnings[1].startswith("each kind of run was made once")


def test_a_difference_within_the_noise_is_said_to_be() -> None:
    """It was "nothing takes more than a twentieth of a step", however much the runs differed."""
    runs = runs_of(30, 20, 30, 60, 0)
    for figures in runs.values():  # of three runs one takes five times as long
        figures[0] = {name: 5 * value for name, value in figures[0].items() if name != "parts"}
    evidence = Evidence(profiles=[make_rank(COMPUTE._replace(ms=30))] * 2, cores=8, facts=FACTS, runs=runs)
    (verdict,) = report_on(evidence).verdicts
    assert verdict.state == "unsure"
    assert verdict.text.startswith("Within the noise, in ms of a step: exchanging gradients (")


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
