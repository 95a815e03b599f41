"""Test `python -m hvd_trainer parity` on real runs of Trainer jobs and scripts, with mistakes planted in them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from combinations import case
from launchers import QUICKEST, SCRIPTS, SUPPORT, launch, requires
from torch import nn

from hvd_trainer.measure.listener import Step
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.trace import Trace as Recorder
from hvd_trainer.tools.parity.causes import find_causes
from hvd_trainer.tools.parity.comparison import Pair
from hvd_trainer.tools.parity.report import details, verdict
from hvd_trainer.tools.parity.traced_runs import global_batch_options
from hvd_trainer.tools.parity.traces import EVENTS, Moment, Trace, read_trace

pytestmark = pytest.mark.warm

DIGITS = ("-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1")
TRAINER = str(SUPPORT / "parity_job.py")
HOROVOD, DDP = str(SCRIPTS / "faulty_horovod.py"), str(SCRIPTS / "faulty_ddp.py")
BASE = ("--batch-size", "32", "--batch-norm", "--non-finite", "skip")
BOTH = ["horovod", "ddp"]
ON = {"sent buffers": ["ddp"], "seed by rank on both": BOTH, "clipping": BOTH}
"""Engines that are told of a mistake; of others only Horovod is."""
FAULTS = [
    # Each is planted once: what shows alike in a script and in a Trainer job, in one of them.
    (TRAINER, "fake step", "parameters", 0, "0.weight", "horovod has made a step before training"),
    (TRAINER, "wrong shard", "samples", 1, "", "all ranks of horovod train on the same samples"),
    (TRAINER, "sent buffers", "buffers", 2, "1.running_mean", "one side sends them round while it trains (as DDP"),
    (TRAINER, "other start", "parameters", 0, "0.weight", "the weights were drawn from other random numbers"),
    (HOROVOD, "compression", "set-up", 0, "the type in which gradients are sent", "sets itself up by the engine"),
    (HOROVOD, "batch", "samples", 1, "", "or a batch size, or the end of an epoch, follows"),
    (HOROVOD, "dropout", "loss", 1, "rank 0, pass 1", "dropout (3) after one side has drawn random numbers more"),
    (
        HOROVOD,
        "clipping",
        "gradients",
        1,
        "0.weight",
        "ddp clips the gradients to a norm of 0.1, and horovod does",
    ),
    (HOROVOD, "rate", "learning rate", 1, "", "horovod multiplies the learning rate by its number of ranks"),
    (HOROVOD, "no set_epoch", "samples", 5, "", "horovod goes through its data in the same order in each epoch"),
    (HOROVOD, "no exchange", "gradients", 1, "0.weight", "horovod does not average its gradients"),
    (HOROVOD, "seed by rank on both", "parameters", 0, "0.weight", "nothing has made the ranks of horovod start"),
    (DDP, "buffers", "buffers", 2, "1.running_mean", "the statistics of batch norm are treated unlike"),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@cache
def trace_run(
    folder: Path, engine: str, job: str, *words: str, ranks: int = 2, fault: str = "", accumulate: int = 1
) -> Trace:
    """Run 7 steps on an engine, with the mistake if it is planted there, and read the trace.

    An epoch of the Trainer job has 5 steps, and one of the scripts 4.
    """
    log = folder / "-".join([engine, Path(job).stem, str(ranks), *(word.strip("-") for word in words), fault])
    log /= str(accumulate)
    if job == TRAINER:
        options = {"accumulate": accumulate} if accumulate > 1 else {}
        env = Message(log_dir=str(log), max_steps=7, trace_steps=7, options=options).variables()
        words = ("--backend", engine, "--log-dir", str(log / "own"), *words)
        launch(QUICKEST, ranks, [job, *words], env=env | {"FAULT": f"{engine}: {fault}"})
    else:
        given = [*(["--fault"] if fault and job == HOROVOD else []), *([fault] if fault else [])]
        argv = ["-m", "hvd_trainer", "run", "-np", str(ranks), "--backend", engine, "--", job, *words, *given]
        launch("python", 1, argv, env=Message(log_dir=str(log), max_steps=7, trace_steps=7).variables())
    trace = read_trace(engine, log)
    assert trace is not None
    return trace


def compare_engines(folder: Path, job: str, *words: str, fault: str = "") -> Pair:
    engines = {name: fault if name in ON.get(fault, ["horovod"]) else "" for name in ("horovod", "ddp")}
    return Pair.compare(
        *(trace_run(folder, name, job, *words, fault=planted) for name, planted in engines.items())
    )


@requires("horovod")
@pytest.mark.parametrize(("job", "fault", "quantity", "step", "name", "cause"), FAULTS)
def test_planted_mistake_is_found(
    folder: Path, job: str, fault: str, quantity: str, step: int, name: str, cause: str
) -> None:
    """Find on real engines where a mistake begins, and what it is."""
    pair = compare_engines(folder, job, *(BASE if job == TRAINER else ()), fault=fault)
    first = pair.findings[0]
    assert (first.quantity, first.when.step, first.name) == (quantity, step, name)
    assert cause in "\n".join(details(pair))
    assert len(find_causes(pair)) == 1
    among = "the ranks of horovod and ddp differ among" if fault.endswith("on both") else "horovod and ddp differ"
    assert verdict(pair).text.startswith(among)


TWO_PATHS = """
import horovod.torch as hvd
import torch

torch.manual_seed(1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())
if hvd.__name__ == "horovod.torch":
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
else:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


@requires("horovod")
def test_script_that_takes_another_path_on_each_engine_is_told_so(tmp_path: Path) -> None:
    """Libraries ask for the backend's name; the advice was to call hvd.broadcast_optimizer_state on both sides."""
    script = tmp_path / "train.py"
    script.write_text(TWO_PATHS)
    pair = compare_engines(tmp_path, str(script))
    (cause,) = find_causes(pair)
    assert "by hvd.DistributedOptimizer on horovod, by DistributedDataParallel on ddp" in cause.text
    assert {finding.quantity for finding in pair.findings} == {"set-up", "optimizer"}


@requires("horovod")
@pytest.mark.parametrize("options", [(*BASE, "--accumulate", "2", "--max-norm", "0.1"), ("--stages", "2")])
def test_trainer_job_computes_the_same_bits_on_both_engines(folder: Path, options: tuple[str, ...]) -> None:
    pair = compare_engines(folder, TRAINER, *options)
    assert verdict(pair).text == "horovod and ddp: the same bits through 7 steps"
    kinds = pair.one.ranks[0][Moment(1, 1)].line["checksums"]
    assert set(kinds) == {"gradients", "parameters", "optimizer", "buffers"}
    assert all(kinds[kind] for kind in ("gradients", "parameters", "optimizer"))


@requires("horovod")
@pytest.mark.parametrize(
    ("name", "library", "parameter", "samples"),
    [
        ("horovod_mnist", "torch", "conv.weight", 32),
        ("torch_ddp", "torch", "0.weight", 32),
        ("faulty_ddp", "torch", "0.weight", 16),  # without a seed: the weights are the same all the same
        ("with_accelerate", "accelerate", "0.weight", 32),
        case("with_fabric", "lightning_fabric", "0.weight", 32, when="long"),
        case("with_lightning", "pytorch_lightning", "layers.0.weight", 32, when="long"),
    ],
)
def test_script_computes_the_same_bits_on_both_engines(
    folder: Path, name: str, library: str, parameter: str, samples: int
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library.replace('_', '-')}")
    pair = compare_engines(folder, str(SCRIPTS / f"{name}.py"))
    assert verdict(pair).text == "horovod and ddp: the same bits through 7 steps"
    for trace in (pair.one, pair.other):
        step = trace.steps[-1]
        assert trace.loss(step) > 0
        assert parameter in trace.lines(step)[0]["checksums"]["gradients"], "without the wrappers' names"
        assert [len(trace.samples(when)) for when in trace.steps] == [samples] * 7


def test_one_process_is_within_1e_5(folder: Path) -> None:
    """Train the whole global batch in one process; with virtual ranks it has the same bits, batch norm or not."""
    ranks = trace_run(folder, "ddp", TRAINER, "--batch-size", "32")
    single = trace_run(folder, "single", TRAINER, "--batch-size", "32", ranks=1, **global_batch_options(ranks))
    pair = Pair.compare(ranks, single)
    assert pair.same
    assert Pair.compare(ranks, single, asked=1e-5).same
    assert max(pair.gaps.values()) < 1e-6
    (cause,) = find_causes(Pair.compare(ranks, single, asked=0))
    assert cause.text.startswith("sums are taken in another order (fp32, on 2 and 1 ranks)")
    words = (*BASE, "--reproducible", "2")
    both = trace_run(folder, "ddp", TRAINER, *words), trace_run(folder, "single", TRAINER, *words, ranks=1)
    assert verdict(Pair.compare(*both)).text == "ddp and single: the same bits through 7 steps"
    plain = trace_run(folder, "single", TRAINER, *BASE, "--accumulate", "2", ranks=1)
    assert "with --reproducible N in the job" in "\n".join(
        details(Pair.compare(trace_run(folder, "ddp", TRAINER, *BASE), plain))
    )


def test_tracing_changes_no_bits(tmp_path: Path, folder: Path) -> None:
    trace = trace_run(folder, "ddp", TRAINER, *BASE)
    log = next(folder.glob("ddp-parity_job-2-batch-size-32-batch-norm-non-finite-skip-"))
    launch(QUICKEST, 2, [TRAINER, "--backend", "ddp", "--log-dir", str(tmp_path), "--max-steps", "7", *BASE])
    assert (log / "1" / "own" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert [EVENTS[when.event] for when in trace.moments].count("evaluation") == 2
    assert [len(trace.lines(when)[0]["samples"]) for when in trace.steps] == [32, 32, 32, 32, 24, 32, 32]
    epoch = sum((trace.samples(when) for when in trace.steps[:5]), start=Counter[str]())
    assert len(epoch) == epoch.total() == 304
    assert trace.start["batch_norm"] == ["1"]
    assert trace.start["shapes"]["0.weight"] == "float32 [16, 8]"
    assert not trace.start["checksums"].get("optimizer")


def test_step_takes_the_batch_that_was_fetched_first(tmp_path: Path) -> None:
    """Accelerate fetches a batch ahead; and an evaluation leaves batches that no backward pass uses."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training, evaluation = nn.Identity(), nn.Identity()  # stand for iterators
    batches = [torch.full((2, 2), float(n)) for n in range(5)]

    def traced(name: str, steps: Sequence[Sequence[tuple[int, nn.Module]]]) -> Trace:
        trace = Recorder(tmp_path / name, 0, 1, 3)
        for fetched in steps:
            for number, loader in fetched:
                trace.on_batch(batches[number], loader)
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            trace.on_pass()
            trace.before_update(optimizer, again=False)
            optimizer.step()
            trace.on_step_end(Step(2, 0.1, (loss.detach(),)))
        written = read_trace("ddp", tmp_path / name)
        assert written is not None
        return written

    ahead = traced("ahead", [[(0, training), (1, training)], [(2, training)], [(3, evaluation), (4, training)]])
    direct = traced("direct", [[(0, training)], [(1, training)], [(4, training)]])
    assert [ahead.samples(when) for when in ahead.steps] == [direct.samples(when) for when in direct.steps]


@requires("horovod")
@pytest.mark.parametrize(
    ("job", "options", "code", "texts"),
    [
        case(DIGITS, ("--steps", "7"), 0, ["horovod and ddp: the same bits through 7 steps"], when="long"),
        case(
            *((TRAINER, "--batch-size", "32"), ("--steps", "3", "--backend", "horovod,ddp,single"), 1),
            [
                "First: the learning rate: 0.05 on horovod, 0.1 on ddp.",
                "ddp multiplies the learning rate by its number of ranks",
                "horovod and single: alike through 3 steps",
            ],
            when="long",
        ),
        (
            *((HOROVOD, "--fault", "sum"), ("--steps", "3"), 1),
            ["First: the gradients (6 of 6 differ).", "To do: divide by that number, once"],
        ),
    ],
    ids=["digits", "mistake", "script"],
)
def test_parity_from_the_command_to_the_exit_code(
    tmp_path: Path, job: Sequence[str], options: Sequence[str], code: int, texts: Sequence[str]
) -> None:
    argv = ["-m", "hvd_trainer", "parity", "--out", str(tmp_path), *options, "--", *job]
    result = launch("python", 1, argv, env={"FAULT": "ddp: scaled rate"}, check=False)
    assert result.returncode == code, result.stdout
    assert not [text for text in texts if text not in result.stdout], result.stdout
    assert re.match(r"\d runs of \d+ steps of 2 ranks .*\n.* s\), about \d+ s left\n", result.stdout), (
        result.stdout
    )
    kept = json.loads((tmp_path / "parity.json").read_text())
    assert kept["same"] == (code == 0)
    assert {run["state"] for run in kept["runs"]} == {"done"}
    assert {len(pair["losses"]) for pair in kept["pairs"]} == {int(options[1])}
    assert not list(tmp_path.rglob("checkpoints"))


@requires("horovod")
def test_failed_runs_are_named(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import torch\n")
    argv = ["-m", "hvd_trainer", "parity", "--out", str(tmp_path / "out"), "--", str(script)]
    result = launch("python", 1, argv, check=False)
    assert result.returncode == 2
    for engine in ("horovod", "ddp"):
        assert f"{engine} failed: it took no optimizer step that counts" in result.stdout
