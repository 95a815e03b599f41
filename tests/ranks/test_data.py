"""Data: which samples each rank takes, over real ranks, and which errors name invalid data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import data_checks
import parts_of_data
import pytest
import torch.distributed as dist
from data_checks import BATCH, FEW, NUM, STREAMS, WAYS
from digits_job import free_port
from launchers import in_ranks, requires, run_ranks

from hvd_trainer import backends
from hvd_trainer.backends import EngineOptions
from hvd_trainer.data.per_node import SharedDataError, on_every_rank, once_per_node
from hvd_trainer.data.shard import epoch_order
from hvd_trainer.errors import DataError
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo

WORLDS = [("ddp", 1), ("ddp", 3), pytest.param(("horovod", 2), marks=requires("horovod"))]


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank of one launch reported."""
    backend, size = request.param
    return in_ranks(size, data_checks.report, backend, str(tmp_path_factory.mktemp("once")))


def step_of(facts: list[Any], number: int) -> list[int]:
    """Return the samples of all ranks in one step, in the order of the epoch."""
    parts = [batches[number] for batches in facts]
    return [sample for row in zip_longest(*parts) for sample in row if sample is not None]


def test_all_loaders_give_the_same_batches(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        assert rank["training"]["memory"] == rank["training"]["loader"] == rank["training"]["workers"]


def test_steps_are_slices_of_the_epochs_order(facts: list[dict[str, Any]]) -> None:
    size = len(facts)
    for number, (epoch, consumed) in enumerate(((0, 0), (1, 0), (1, 9))):
        mine = [rank["training"]["memory"][number] for rank in facts]
        order = epoch_order(NUM, seed=5, epoch=epoch)[consumed:].tolist()
        assert len({len(batches) for batches in mine}) == 1
        for step in range(len(order) // (size * BATCH)):
            assert step_of(mine, step) == order[step * size * BATCH : (step + 1) * size * BATCH]
        # The last step repeats the first samples of the whole epoch where it does not divide.
        taken = {i for batches in mine for batch in batches for i in batch}
        assert taken - set(order) <= set(epoch_order(NUM, seed=5, epoch=epoch)[: size - 1].tolist())
        assert taken >= set(order)


def test_evaluation_counts_every_sample_once(facts: list[dict[str, Any]]) -> None:
    for count in (FEW, NUM):
        for path in range(3):
            ids = sorted(i for rank in facts for i in rank["evaluation"][count][path])
            assert ids == list(range(count))


@pytest.mark.parametrize("kind", ["streams", "sources", "sized sources"])
def test_streams_are_sharded_and_end_together(facts: list[dict[str, Any]], kind: str) -> None:
    """Slices are those of a map-style data set, whatever the workers; fewer samples than ranks are left over."""
    size = len(facts)
    # A source of batches goes on after whole steps.
    later = 2 if kind == "streams" else BATCH * size
    for count, workers in STREAMS:
        for number, (epoch, consumed) in enumerate(((0, 0), (1, 0), (1, later))):
            mine = [rank[kind][count, workers][number] for rank in facts]
            expected = [i + 100 * epoch for i in range(consumed, count)]
            assert len({len(batches) for batches in mine}) == 1, "ranks of unequal steps hang"
            found = [i for step in range(len(mine[0])) for i in step_of(mine, step)]
            rest = len(expected) % (BATCH * size if kind == "streams" else size)
            assert found == expected[: len(expected) - (rest if rest < size else 0)]


@pytest.mark.parametrize("way", WAYS)
def test_streams_that_shard_themselves_lose_no_sample(facts: list[dict[str, Any]], way: str) -> None:
    """A stream that gives each worker or rank a part of its own lost the others' parts: 16 of 64 samples."""
    for workers in (0, 2, 4):
        for rank in facts:
            assert not rank["sharding"][way, workers][2], "counts what all ranks have taken"
        for number in range(2):
            found = sorted(i for rank in facts for i in rank["sharding"][way, workers][number])
            assert found == list(range(24 * len(facts)))


@pytest.mark.parametrize("head", [0, 1, 9])
@pytest.mark.parametrize("way", ["rank", "both"])
def test_ranks_that_read_other_samples_are_refused(facts: list[dict[str, Any]], way: str, head: int) -> None:
    """Ranks whose parts began with equal samples lost those of the others in silence."""
    for rank in facts:
        errors = rank["undeclared"][way, head]
        assert len(errors) == (2 if len(facts) > 1 else 0), "of the training and of the evaluation"
        assert all("Parts gives each rank other samples" in text for text in errors)


@pytest.mark.parametrize(("backend", "size"), [("ddp", 3), pytest.param("horovod", 2, marks=requires("horovod"))])
def test_ranks_that_are_given_parts_of_the_data_are_refused(backend: str, size: int) -> None:
    """Each rank trained on its share of its own part, with the exit code 0."""
    for rank in in_ranks(size, parts_of_data.report, backend):
        for name, (_, what) in parts_of_data.PARTS.items():
            for argument, text in zip(("train_data", "val_data", "data"), rank[name], strict=True):
                assert text.startswith(f"{argument} "), (name, text)
                assert what in text, name
                assert "random_split(..., generator=torch.Generator().manual_seed(0))" in text
        assert "val_data is TensorDataset on rank 1 and None on rank 0" in rank["no data on rank 0"]
        assert rank["alike"] == dict.fromkeys(parts_of_data.ALIKE, "nothing")


def test_loader_processes_that_read_other_samples_are_refused(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        assert len(rank["by process"]) == 2
        assert all("PartsOfProcesses gives each loader process other" in text for text in rank["by process"])


def test_a_collate_that_drops_is_counted_by_what_it_was_given(facts: list[dict[str, Any]]) -> None:
    """Each rank counted its own: the learning rate differed by rank, and a resume skipped a wrong number."""
    size = len(facts)
    for kind in ("list", "stream"):
        counts = [rank["dropped"][kind] for rank in facts]
        assert sum(taken for _, _, taken in counts[0]) == 24
        assert all([taken for _, _, taken in each] == [taken for _, _, taken in counts[0]] for each in counts)
        for step in zip(*counts, strict=True):
            assert {mean for _, mean, _ in step} == {sum(samples for samples, _, _ in step) / size}
        assert sum(samples for each in counts for samples, _, _ in each) == 19


def test_stream_shorter_than_the_ranks_is_an_error_on_all(facts: list[dict[str, Any]]) -> None:
    assert all("Stream gave fewer samples than there are ranks" in rank["too short"] for rank in facts)


def test_random_numbers_differ_between_samples(facts: list[dict[str, Any]]) -> None:
    """With one generator seed for all, worker 0 of each rank augmented its samples like worker 0 of the others."""
    seeds = [seed for rank in facts for batch in rank["seeds"] for seed in batch]
    assert len(set(seeds)) == len(seeds) == 8


def test_once_per_node_runs_on_one_rank(facts: list[dict[str, Any]]) -> None:
    firsts = [rank["once"]["first"] for rank in facts]
    assert firsts == [True] + [False] * (len(facts) - 1)
    for rank in facts:
        assert rank["once"]["done"] == []
        assert rank["once"]["failed"] == ["ValueError: rank 0: no space"]
        assert rank["once"]["late"] == ("waited" if rank["once"]["first"] else "")


def only_once(backend_name: str, folder: str) -> tuple[int, dict[str, Any]]:
    with backends.create(EngineOptions(backend=backend_name)) as backend:  # type: ignore[arg-type]
        return backend.world.rank, data_checks.once(backend, Path(folder))


@pytest.mark.long
@requires("srun")
@pytest.mark.usefixtures("slurm")
def test_once_per_node_runs_once_on_each_of_two_nodes(tmp_path: Path) -> None:
    found = run_ranks(
        only_once,
        num_processes=4,
        launcher="srun",
        options=["-N", "2"],
        args=("ddp", str(tmp_path)),
        # The two nodes of the tests' cluster are one machine, whose names stand in no directory.
        env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()},
    )
    firsts = [rank for rank, facts in enumerate(found) if facts["first"]]
    assert len(firsts) == 2
    assert {path.name for path in tmp_path.glob("by-*")} == {f"by-{rank}" for rank in firsts}
    assert all(len(facts["failed"]) == 2 for facts in found), "the trouble of both nodes reaches all ranks"


def test_once_per_node_does_not_wait_for_training_ranks() -> None:
    """In elastic mode the others have read their data long before; MNIST met them in an exchange of theirs."""

    def fails() -> None:
        raise DataError("damaged")

    peers = [RankInfo("node", 0, "ddp", (0,), past_worlds=1), RankInfo("node", 1, "ddp", (0,))]
    session = SimpleNamespace(peers=peers, store=dist.HashStore(), has_trained=False)
    backend = SimpleNamespace(world=World(1, 2, 1, 2), session=session)
    assert on_every_rank(backend, lambda: "loaded", timeout_s=1) == "loaded"  # type: ignore[arg-type]
    with pytest.raises(SharedDataError, match="damaged"):
        on_every_rank(backend, fails, timeout_s=1)  # type: ignore[arg-type]
    assert once_per_node(backend, lambda: None, timeout_s=1) == []  # type: ignore[arg-type]


def test_ranks_that_have_trained_prepare_data_with_those_that_joined_them() -> None:
    """Where some had been in another world, they did not load, and ended in an IndexError."""
    peers = [RankInfo("node", 0, "ddp", (0,), past_worlds=1), RankInfo("node", 1, "ddp", (0,))]
    store = dist.HashStore()
    backends_ = [
        SimpleNamespace(
            world=World(rank, 2, rank, 2), session=SimpleNamespace(peers=peers, store=store, has_trained=True)
        )
        for rank in range(2)
    ]
    backends_[1].session.has_trained = False
    on_every_rank(backends_[1], lambda: "its own", timeout_s=1)  # type: ignore[arg-type]
    backends_[1].session.has_trained = True
    with ThreadPoolExecutor() as ranks:
        loads = [ranks.submit(on_every_rank, its, lambda: "loaded", timeout_s=5) for its in backends_]  # type: ignore[arg-type]
        assert [load.result() for load in loads] == ["loaded"] * 2
