"""Test `python -m hvd_trainer parity` on scripts that are not built on the Trainer."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
import torch
from launchers import SCRIPTS, launch, requires
from torch import nn

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.parity.pair import Pair
from hvd_trainer.tools.parity.traced_runs import check_traced_job, parse_engines
from hvd_trainer.tools.parity.traces import Trace, read_trace
from hvd_trainer.tools.probe.options import ProbeOptions
from hvd_trainer.tools.probe.trace import ScriptTrace

HOROVOD, DDP = str(SCRIPTS / "faulty_horovod.py"), str(SCRIPTS / "faulty_ddp.py")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@cache
def trace_run(folder: Path, engine: str, script: str, *words: str) -> Trace:
    """Run 7 steps of a script, of which an epoch has 4, and read the trace."""
    log = folder / "-".join([engine, Path(script).stem, *words])
    command = ["-m", "hvd_trainer", "run", "-np", "2", "--backend", engine, "--", script, *words]
    launch("python", 1, command, env=ProbeOptions(log_dir=str(log), max_steps=7, trace_steps=7).variables())
    found = read_trace(engine, log)
    assert found is not None
    return found


def compare_engines(folder: Path, script: str, *words: str) -> Pair:
    return Pair.compare(*(trace_run(folder, engine, script, *words) for engine in ("horovod", "ddp")))


FAULTS = {
    "rate": ("learning rate", 1, "", "horovod multiplies the learning rate by its number of ranks"),
    "no sampler": ("samples", 1, "", "all ranks of horovod train on the same samples"),
    "no set_epoch": ("samples", 5, "", "horovod goes through its data in the same order in each epoch"),
    "no exchange": ("gradients", 1, "0.weight", "horovod does not average its gradients"),
    "sum": ("gradients", 1, "0.weight", "horovod adds up the gradients of 2 ranks, and ddp takes their mean"),
    "one rank": ("loss", 4, "rank 1", "the same gradients, and other weights after the update"),
    "seed by rank on both": ("parameters", 0, "0.weight", "nothing has made the ranks of horovod start alike"),
}


@requires("horovod")
@pytest.mark.parametrize("fault", FAULTS)
def test_mistake_in_a_horovod_script_is_found(folder: Path, fault: str) -> None:
    """On Horovod only, unless the fault says on both: then the ranks of each engine differ among each other."""
    quantity, step, name, cause = FAULTS[fault]
    both = fault.endswith("on both")
    ddp = trace_run(folder, "ddp", HOROVOD, *(("--fault", fault) if both else ()))
    pair = Pair.compare(trace_run(folder, "horovod", HOROVOD, "--fault", fault), ddp)
    first = pair.findings[0]
    assert (first.quantity, first.when.step, first.name) == (quantity, step, name)
    assert cause in "\n".join(pair.details())
    assert pair.verdict().startswith(
        "the ranks of horovod and ddp differ among" if both else "horovod and ddp differ"
    )


@requires("horovod")
def test_statistics_of_batch_norm_that_ddp_does_not_send_are_found(folder: Path) -> None:
    """The script has no seed: as it is, both engines draw the same weights all the same."""
    assert compare_engines(folder, DDP).verdict() == "horovod and ddp: the same bits through 7 steps"
    pair = Pair.compare(trace_run(folder, "horovod", DDP, "buffers"), trace_run(folder, "ddp", DDP))
    first = pair.findings[0]
    assert (first.quantity, first.when.step, first.name) == ("buffers", 2, "1.running_mean")
    assert "the statistics of batch norm are treated unlike" in "\n".join(pair.details())


@requires("horovod")
@pytest.mark.parametrize(
    ("name", "library", "parameter"),
    [
        ("horovod_mnist", "torch", "conv.weight"),
        ("torch_ddp", "torch", "0.weight"),
        ("with_accelerate", "accelerate", "0.weight"),
        ("with_fabric", "lightning_fabric", "0.weight"),
        ("with_lightning", "pytorch_lightning", "layers.0.weight"),
    ],
)
def test_script_computes_the_same_bits_on_both_engines(
    folder: Path, name: str, library: str, parameter: str
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library.replace('_', '-')}")
    pair = compare_engines(folder, str(SCRIPTS / f"{name}.py"))
    assert pair.verdict() == "horovod and ddp: the same bits through 7 steps"
    for trace in (pair.one, pair.other):
        step = trace.steps[-1]
        assert trace.loss(step) > 0
        assert parameter in trace.lines(step)[0]["checksums"]["gradients"], "without the wrappers' names"
        assert [len(trace.samples(when)) for when in trace.steps] == [32] * 7


@requires("horovod")
def test_parity_of_a_script_from_the_command_to_the_exit_code(tmp_path: Path) -> None:
    argv = ["-m", "hvd_trainer", "parity", "--out", str(tmp_path), "--steps", "3", "--", HOROVOD]
    result = launch("python", 1, [*argv, "--fault", "sum"], check=False)
    assert result.returncode == 1
    assert "First: the gradients (6 of 6 differ)." in result.stdout
    assert "To do: divide by the number of ranks, once" in result.stdout
    script = tmp_path / "nothing.py"
    script.write_text("import torch\n")
    argv[-1] = str(script)
    result = launch("python", 1, argv, check=False)
    assert result.returncode == 2
    assert "it ended, and no optimizer has made a step after backward() on 2 ranks in it" in result.stdout


def test_words_of_a_script_are_its_own() -> None:
    assert check_traced_job([HOROVOD, "--resume", "auto", "--max-steps", "2"], 20) == 20
    with pytest.raises(OptionError, match="single takes the ranks' batches together by options of the Trainer"):
        parse_engines("ddp,single", [HOROVOD])


def test_step_takes_the_batch_that_was_fetched_first(tmp_path: Path) -> None:
    """Accelerate fetches a batch ahead; and an evaluation leaves batches that no backward pass uses."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = ScriptTrace(tmp_path, 0, 1, 3)
    training, evaluation = nn.Identity(), nn.Identity()  # stand for iterators

    def step() -> None:
        loss = model(torch.ones(1, 2)).sum()
        trace.on_backward(loss)
        loss.backward()
        trace.before_step(optimizer)
        optimizer.step()
        trace.on_step_end(optimizer)

    batches = [torch.full((2, 2), float(n)) for n in range(5)]
    for batch in batches[:2]:
        trace.on_batch(batch, training)
    step()
    trace.on_batch(batches[2], training)
    step()
    trace.on_batch(batches[3], evaluation)
    trace.on_batch(batches[4], training)
    step()
    found = read_trace("ddp", tmp_path)
    assert found is not None
    direct = ScriptTrace(tmp_path / "direct", 0, 1, 3)
    trace = direct
    for batch in (batches[0], batches[1], batches[4]):
        trace.on_batch(batch, training)
        step()
    expected = read_trace("ddp", tmp_path / "direct")
    assert expected is not None
    assert [found.samples(when) for when in found.steps] == [expected.samples(when) for when in expected.steps]
