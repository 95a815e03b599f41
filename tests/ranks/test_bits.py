"""The same bits: on both engines, on all ranks, after a stop, and with `--reproducible` on any ranks.

The jobs are those of bit_jobs.py.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import bit_jobs
import digits_job
import pytest
import torch
from bit_jobs import JOBS, NOTED, NUM, ODD, OF_ONE_PROCESS, linear, run
from combinations import case
from launchers import QUICKEST, in_ranks, launch, requires
from torch import Tensor
from trainings import fit, options_of, signs

from hvd_trainer import Callback, EngineOptions, OptionError, backends
from hvd_trainer.optim.reproducible import TreeSum, deterministic_algorithms
from hvd_trainer.utils.tensors import pairwise_sum

pytestmark = [requires("horovod"), pytest.mark.warm]

STOPPED = [("ddp", 4), ("horovod", 3)]
"""Runs that are also stopped. Two ranks hide in which order values are added: a + b = b + a."""
Outcome = dict[str, Any]


@cache
def trained(backend: str, size: int) -> list[dict[str, list[Outcome]]]:
    """Return by rank and job the outcomes of an undisturbed run, and of those that were stopped."""
    names = [*(JOBS if size > 1 else OF_ONE_PROCESS)]
    with tempfile.TemporaryDirectory(prefix="hvd-bits-") as folder:
        args = (backend, folder, names, (backend, size) in STOPPED)
        return in_ranks(size, bit_jobs.outcomes, *args, timeout_s=550)


def bits(outcome: Outcome) -> Outcome:
    """Return what all ranks have alike."""
    return {name: outcome[name] for name in ("weights", "records", "others")}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("size", [3, 4])
def test_engines_and_ranks_have_the_same_bits(size: int, name: str) -> None:
    """The order of sums matters, too: Horovod's buckets are laid out as DDP's."""
    runs = {engine: [rank[name][0] for rank in trained(engine, size)] for engine in ("ddp", "horovod")}
    if (size, name) == (3, "bfloat16 on the wire"):  # DDP divides a gradient after rounding it, and Horovod before
        runs["ddp"] = []
    first, *others = (bits(outcome) for ranks in runs.values() for outcome in ranks)
    assert others == [first] * len(others)
    if name.startswith("bfloat16"):
        assert first["records"][-1][0] < 1.0, "the loss"


def test_loader_processes_see_what_a_callback_changes() -> None:
    one, other = (trained("ddp", 3)[0][name][0] for name in ("callback", "callback and workers"))
    assert bits(one) == bits(other)


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.cuts])
@pytest.mark.parametrize(("backend", "size"), STOPPED)
def test_resumed_run_ends_with_the_same_bits(backend: str, size: int, name: str) -> None:
    for rank in trained(backend, size):
        whole, *resumed = ({**bits(outcome), "optimizer": outcome["optimizer"]} for outcome in rank[name])
        assert resumed == [whole] * len(JOBS[name].cuts)


@pytest.mark.parametrize("name", NOTED)
@pytest.mark.parametrize(("backend", "size"), STOPPED)
def test_resumed_run_trains_each_sample_once_per_epoch(backend: str, size: int, name: str) -> None:
    """The resumed run continues the second epoch after 2 steps of 5, and must repeat no sample."""
    seen = Counter(sample for rank in trained(backend, size) for sample in rank[name][1]["seen"])
    # Ranks that have no equal shares train on some samples twice in each epoch; of a stream of samples on each
    # once, and of one of batches they leave the last out.
    left_out = ODD % size if "stream of batches" in name else 0
    per_epoch = ODD - left_out if "stream" in name else NUM
    assert sum(seen.values()) == 2 * per_epoch - 2 * bit_jobs.GLOBAL_BATCH
    assert set(seen.values()) <= {1, 2, 3}
    assert len(seen) == ODD - left_out


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest |a - b| / |b| over all tensors, as norms."""
    return max(float((ours[k] - theirs[k]).norm() / theirs[k].norm()) for k in theirs)


@pytest.mark.parametrize("name", OF_ONE_PROCESS)
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_ranks_train_the_weights_of_one_process(backend: str, name: str) -> None:
    """The global batch in one process differs by the order of sums only: 1e-5 after 20 steps."""
    (alone,) = trained("single", 1)
    for rank in trained(backend, 4):  # three would train on one sample twice in each epoch
        assert relative_difference(rank[name][0]["state"], alone[name][0]["state"]) < 1e-5


class SeesBuckets(Callback):
    """A callback that sees that DDP got its argument."""

    def on_step_end(self, run: Any, result: Any) -> None:
        assert run.backend.name != "ddp" or not run.backend._ddp.gradient_as_bucket_view


@pytest.mark.parametrize(
    ("backend", "kwargs", "variables"),
    [("ddp", {"gradient_as_bucket_view": False}, {}), ("horovod", None, {"HOROVOD_CACHE_CAPACITY": "0"})],
)
def test_speed_options_change_no_bit(backend: str, kwargs: Any, variables: dict[str, str], tmp_path: Path) -> None:
    how = {"callbacks": [SeesBuckets()], "ddp_kwargs": kwargs, "workers": 1, "prefetch": 4}
    ranks = in_ranks(3, run, backend, str(tmp_path), JOBS["adamw"].make, env=variables, **how)
    assert {rank["weights"] for rank in ranks} == {trained(backend, 3)[0]["adamw"][0]["weights"]}


def test_prefetch_needs_loader_processes() -> None:
    with pytest.raises(OptionError, match="--prefetch 4 is for loader processes, .* add --workers 2"):
        fit(options_of(prefetch=4), linear(), signs(4))


# With --reproducible.

VIRTUAL = 4
REPRODUCIBLE: dict[str, dict[str, Any]] = {
    **{"memory": {}, "random transform": {}, "workers": {"workers": 1}, "fp16": {}},
    **{"scheduler, clipping, accumulation": {"global_batch_size": 32}, "weights": {"global_batch_size": 32}},
    **{"weighted loader": {}, "loader of buckets": {}},
}


def reproduced(backend: str, folder: str, name: str = "memory", **part: Any) -> tuple[str, str]:
    """Return the weights and the optimizer's state."""
    outcome = run(backend, folder, JOBS[name].make, reproducible=VIRTUAL, **REPRODUCIBLE[name], **part)
    return outcome["weights"], outcome["optimizer"]


def all_reproduced(backend: str, folder: str) -> dict[str, tuple[str, str]]:
    return {name: reproduced(backend, f"{folder}/{name}", name) for name in REPRODUCIBLE}


@cache
def reference() -> dict[str, tuple[str, str]]:
    """Return the results of one process, which computes all virtual ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return dict(*in_ranks(1, all_reproduced, "single", folder))


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("ddp", 2),
        ("horovod", 4),
        *(case(*world, when="long") for world in (("horovod", 2), ("ddp", 4), ("ddp", 1))),
    ],
)
def test_reproducible_bits_do_not_depend_on_engine_and_ranks(backend: str, size: int, tmp_path: Path) -> None:
    """The jobs have dropout, batch norm, transforms, loader processes, accumulation, clipping and fp16."""
    assert in_ranks(size, all_reproduced, backend, str(tmp_path)) == [reference()] * size


@pytest.mark.parametrize(
    ("before", "after"), [(("horovod", 4), ("ddp", 2)), (("single", 1), ("horovod", 2))], ids=str
)
def test_reproducible_bits_do_not_depend_on_interruption(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    """It stops inside the second epoch, 2 steps after the last save."""
    parts = str(tmp_path / "first"), str(tmp_path / "second")
    in_ranks(before[1], reproduced, before[0], parts[0], save_every_steps=9, stop_after=11)
    resumed = in_ranks(after[1], reproduced, after[0], parts[1], resume=parts[0])
    assert resumed == [reference()["memory"]] * after[1]


def sums(backend_name: str) -> list[bool]:
    """Return whether sums over ranks are those of the tree, for tensors gathered whole and in slices."""
    with backends.create(EngineOptions(backend=backend_name)) as backend:  # type: ignore[arg-type]
        are_equal = []
        for length in (1, 7, 300_001):
            generator = torch.Generator().manual_seed(length)
            everyone = list(torch.randn(backend.world.size, length, generator=generator))
            own = backend.collectives.tree_sum(everyone[backend.world.rank].clone())
            are_equal.append(own.equal(pairwise_sum(everyone)))
        return are_equal


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_sums_over_ranks_follow_the_tree(backend: str) -> None:
    assert in_ranks(4, sums, backend) == [[True] * 3] * 4


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_sums_within_a_rank_follow_the_tree(count: int) -> None:
    leaves = [torch.randn(50) for _ in range(count)]
    tree = TreeSum()
    for leaf in leaves:
        tree.add([leaf])
    assert tree.total()[0].equal(pairwise_sum(leaves))


def test_deterministic_algorithms_do_not_fill_new_tensors() -> None:
    """PyTorch's deterministic mode writes NaN into each new tensor first."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_algorithms(torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory == filling


def test_reproducible_needs_ranks_that_divide_it() -> None:
    result = launch(QUICKEST, 3, digits_job.argv("ddp", extra=["--reproducible", "4"]), check=False)
    assert result.returncode != 0
    assert "--reproducible 4 runs on 1, 2, 4 ranks" in result.stderr


@pytest.mark.long
def test_job_equals_the_plain_example(tmp_path: Path, mnist_dir: Path) -> None:
    """An epoch of MNIST at 2 ranks, dropout included, on both engines and by hand: the same file, byte for byte.

    The two scripts are compared with each other in test_examples_plain.py.
    """
    words = "--epochs 1 --batch-size 512 --lr 0.01 --optimizer sgd --max-norm 1.0 --accumulate 2 --seed 3"
    options = [*words.split(), "--data-dir", str(mnist_dir)]
    hand = tmp_path / "hand.safetensors"
    launch(QUICKEST, 2, ["examples/mnist/plain_ddp.py", *options, "--save", str(hand)], timeout_s=200)
    for backend in ("ddp", "horovod"):
        folder = tmp_path / backend
        argv = ["-m", "hvd_trainer.mnist", "--backend", backend, *options, "--log-dir", str(folder)]
        launch(QUICKEST, 2, argv, timeout_s=200)
        assert (folder / "model.safetensors").read_bytes() == hand.read_bytes(), backend
