"""Data: which samples each rank takes, over real ranks, and which errors name invalid data."""

from __future__ import annotations

import functools
import gzip
import http.server
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import data_checks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from data_checks import BATCH, FEW, NUM, STREAMS, Stream, numbers
from launchers import QUICKEST, requires, run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hvd_trainer import Trainer, TrainerOptions, backends
from hvd_trainer.backends import Backend, EngineOptions
from hvd_trainer.config.options import TrainOptions
from hvd_trainer.data import LoaderPlan, make_loader, samples_in
from hvd_trainer.data.per_node import SharedDataError, on_every_rank, once_per_node
from hvd_trainer.data.shard import epoch_order
from hvd_trainer.errors import DataError
from hvd_trainer.jobs import download
from hvd_trainer.jobs import images as mnist_module
from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.options import ImageOptions
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo

WORLDS = [
    pytest.param(("ddp", "python", 1), id="ddp-1"),
    pytest.param(("ddp", QUICKEST, 3), id="ddp-3"),
    pytest.param(("horovod", QUICKEST, 2), id="horovod-2", marks=requires("horovod")),
]


@pytest.fixture(scope="module", params=WORLDS)
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank of one launch reported."""
    backend, launcher, size = request.param
    folder = str(tmp_path_factory.mktemp("once"))
    return run_ranks(
        data_checks.report, num_processes=size, launcher=launcher, args=(backend, folder), timeout_s=120
    )


def step_of(facts: list[Any], number: int) -> list[int]:
    """Return the samples of all ranks in one step, in the order of the epoch."""
    parts = [batches[number] for batches in facts]
    return [sample for row in zip(*parts, strict=True) for sample in row]


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
        for path in range(2):
            ids = sorted(i for rank in facts for i in rank["evaluation"][count][path])
            assert ids == list(range(count))


def test_streams_are_sharded_and_end_together(facts: list[dict[str, Any]]) -> None:
    """Slices are those of a map-style data set, whatever the workers; fewer samples than ranks are left over."""
    size = len(facts)
    for count, workers in STREAMS:
        for number, (epoch, consumed) in enumerate(((0, 0), (1, 0), (1, 2))):
            mine = [rank["streams"][f"{count}/{workers}"][number] for rank in facts]
            expected = [i + 100 * epoch for i in range(consumed, count)]
            assert len({tuple(map(len, batches)) for batches in mine}) == 1, "ranks of unequal steps hang"
            found = [i for step in range(len(mine[0])) for i in step_of(mine, step)]
            assert found == expected[: len(expected) // size * size]


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
        env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    )
    firsts = [rank for rank, facts in enumerate(found) if facts["first"]]
    assert len(firsts) == 2
    assert {path.name for path in tmp_path.glob("by-*")} == {f"by-{rank}" for rank in firsts}
    assert all(len(facts["failed"]) == 2 for facts in found), "the trouble of both nodes reaches all ranks"


# One process: kinds of data, and bad ones.


@pytest.fixture
def alone() -> Iterator[Backend]:
    with backends.create(EngineOptions(backend="single")) as backend:
        yield backend


def trainer(**train: Any) -> Trainer:
    return Trainer(
        TrainerOptions(
            engine=EngineOptions(backend="single"), train=TrainOptions(**{"epochs": 1, "batch_size": 4, **train})
        )
    )


def fit(data: Any, test: Any = None, model: nn.Module | None = None, **options: Any) -> list[dict[str, Any]]:
    """Train a line on `data` for one epoch in this process."""
    model = model or nn.Linear(1, 1)
    with trainer() as mine:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return mine.fit(model, optimizer, mean_square, data, test, **options).epochs


def mean_square(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    return ((outputs.squeeze(1) - (targets["id"] if isinstance(targets, dict) else targets)) ** 2).mean()


class OfNothing(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise IndexError


class Sized(OfNothing):
    def __init__(self, sample: Any, count: int) -> None:
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.sample


BAD = [
    (lambda: DataLoader(numbers(4)), "Give the data set, not a DataLoader"),
    (lambda: OfNothing(), "OfNothing: a data set has __len__ and __getitem__"),
    (lambda: 7, "Cannot load batches from a int"),
    (lambda: [], "The data set (list) is empty"),
    (lambda: TensorDataset(torch.zeros(0, 1), torch.zeros(0)), "The data set (TensorDataset) is empty"),
    (lambda: Stream(0), "Stream gave fewer samples"),
    (lambda: Sized({"image": torch.zeros(1), "label": 1}, 8), "found"),
    (lambda: Sized((torch.zeros(1), 1, 2), 8), "but is a tuple of 3"),
    (lambda: Sized(("a", "b"), 8), "A batch should hold tensors"),
]


@pytest.mark.parametrize(("make", "words"), BAD, ids=[words for _, words in BAD])
def test_invalid_data_set_is_named(make: Any, words: str) -> None:
    """A dictionary of two keys was unpacked into its keys, and a model was trained on the word 'image'."""
    with pytest.raises(DataError) as caught:
        fit(make())
    wanted = "but is a dict with image, label. Let the data set give pairs" if words == "found" else words
    assert wanted in str(caught.value)


def test_unequal_tensors_are_refused() -> None:
    with pytest.raises(DataError, match="3 inputs and 2 targets"):
        data_checks.TensorData(torch.zeros(3, 1), torch.zeros(2))


def test_tensor_dataset_list_and_stream_train_alike() -> None:
    whole = numbers(8)
    kinds: list[Any] = [whole, TensorDataset(whole.inputs, whole.targets), [whole[i] for i in range(8)]]
    losses = []
    for data in kinds:
        torch.manual_seed(0)
        losses.append(fit(data, data)[0]["test_loss"])
    assert losses[0] == losses[1] == losses[2]
    assert fit([(x.float(), y) for x, y in Stream(8)], Stream(8), model=ToFloat())[0]["samples"] == 8


class ToFloat(nn.Linear):
    """A line that takes integers, or a dictionary or tuple of inputs."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, inputs: Any) -> torch.Tensor:
        if isinstance(inputs, dict):
            inputs = inputs["x"]
        elif isinstance(inputs, tuple):
            inputs = inputs[1]
        return super().forward(inputs.float())


def test_inputs_may_be_dictionaries_and_tuples() -> None:
    pairs = [({"name": f"sample {i}", "x": torch.tensor([float(i)])}, i) for i in range(6)]
    assert fit(pairs, pairs, model=ToFloat())[0]["samples"] == 6
    tuples = [(("text", torch.tensor([float(i)])), {"id": i}) for i in range(6)]
    assert fit(tuples, tuples, model=ToFloat())[0]["samples"] == 6
    assert samples_in(({"names": ["a", "b"], "x": torch.zeros(2, 3)}, torch.zeros(2))) == 2


def test_collate_makes_the_pair() -> None:
    def collate(samples: list[dict[str, float]]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([[sample["x"]] for sample in samples])
        return x, x.squeeze(1)

    assert fit([{"x": float(i)} for i in range(5)], collate=collate)[0]["samples"] == 5


def test_batch_norm_on_one_sample_is_an_error() -> None:
    """9 samples in batches of 4 leave one for the last batch, which has no variance."""
    model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fit(numbers(9), model=model)
    assert fit(numbers(8), numbers(1), model=model)[0]["test_loss"] >= 0


# MNIST's files.


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_module, "SERVER", "http://localhost:9/")


def test_mnist_is_read_plain_and_gzipped(mnist_dir: Path, tmp_path: Path, alone: Backend) -> None:
    images = load_images(ImageOptions("mnist", str(mnist_dir)), alone)
    assert images.note is None
    assert (len(images.train), len(images.test)) == (60_000, 10_000)
    assert images.train.inputs.shape == (60_000, 1, 28, 28)
    assert images.train.targets[:5].tolist() == [5, 0, 4, 1, 9]
    batch, _ = next(make_loader(images.train, alone, LoaderPlan(1000)).epoch(0))
    assert abs(float(batch.mean())) < 0.1
    assert abs(float(batch.std()) - 1) < 0.1
    for path in (mnist_dir / "MNIST" / "raw").glob("*-ubyte"):
        with gzip.open(tmp_path / f"{path.name}.gz", "wb", compresslevel=1) as file:
            file.write(path.read_bytes())
    zipped = mnist_module.load_mnist(tmp_path)
    assert torch.equal(zipped.test.inputs, images.test.inputs)
    assert torch.equal(zipped.train.targets, images.train.targets)


@pytest.mark.parametrize("damage", ["truncated", "magic", "label", "gz", "zlib"])
def test_damaged_mnist_file_is_named(damage: str, mnist_dir: Path, tmp_path: Path, alone: Backend) -> None:
    for path in (mnist_dir / "MNIST" / "raw").glob("*-ubyte"):
        shutil.copy(path, tmp_path)
    name = "t10k-labels-idx1-ubyte"
    path, whole = tmp_path / name, (tmp_path / name).read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[:-1])
    elif damage == "magic":
        path.write_bytes(b"\x00\x00\x0d\x01" + whole[4:])
    elif damage == "label":
        path.write_bytes(whole[:-1] + b"\x0a")
    else:
        path.unlink()
        packed = gzip.compress(whole)
        path = path.with_name(f"{name}.gz")
        path.write_bytes(packed[:-20] if damage == "gz" else packed[:50] + b"\xff" * 40 + packed[90:])
    for dataset in ("mnist", "auto"):
        with pytest.raises(DataError) as caught:
            load_images(ImageOptions(dataset, str(tmp_path)), alone)  # type: ignore[arg-type]
        assert str(path) in str(caught.value)
        assert "Delete it and download it again" in str(caught.value)


@pytest.mark.usefixtures("offline")
def test_missing_mnist_names_what_to_type(tmp_path: Path, alone: Backend) -> None:
    with pytest.raises(DataError) as caught:
        load_images(ImageOptions("mnist", str(tmp_path / "nowhere")), alone)
    for words in (
        "train-images-idx3-ubyte",
        "nowhere",
        "refused",
        "torchvision",
        "--data-dir",
        "--dataset digits",
    ):
        assert words in str(caught.value)
    with pytest.raises(DataError, match="wrong"):
        # A folder that was named must have it: digits instead would hide a typing mistake.
        load_images(ImageOptions("auto", str(tmp_path / "wrong")), alone)


def test_digits_are_those_of_uci() -> None:
    """The file is checked by its sums: scikit-learn, from which it was taken, is not needed any more."""
    table = np.loadtxt(mnist_module.DIGITS, delimiter=",")
    assert table.shape == (1797, 65)
    assert (table[:, :64].min(), table[:, :64].max(), table[:, :64].sum()) == (0, 16, 561718)
    assert np.bincount(table[:, 64].astype(int)).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert mnist_module.DIGITS.with_name("NOTICE").is_file()


@pytest.mark.usefixtures("offline")
def test_dataset_auto_falls_back_to_digits(
    tmp_path: Path, alone: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = load_images(ImageOptions(), alone)
    # Three epochs of 1,438 images would be a few steps only.
    assert (len(images.train), len(images.test)) == (20 * 1438, 359)
    assert torch.equal(images.train.inputs[1438:2876], images.train.inputs[:1438])
    assert torch.equal(images.train.targets[1438:2876], images.train.targets[:1438])
    assert images.train.inputs.dtype == torch.uint8
    assert images.train.inputs.shape[1:] == (1, 28, 28)
    assert images.note is not None
    for words in ("1,438 embedded digits, 20 times each in an epoch", "cannot be downloaded", "--data-dir mnist"):
        assert words in images.note
    assert "\n" not in images.note


def fetch(folder: Path, limit_s: float) -> str:
    """Fetch MNIST, which must fail; return the error."""
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        mnist_module.fetch_mnist(folder, limit_s)
    return str(caught.value)


def test_download_gives_up_on_a_silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(mnist_module, "SERVER", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        monkeypatch.setattr(download, "CONNECT_S", 0.5)
        started = time.monotonic()
        fetch(tmp_path, 60)
        assert time.monotonic() - started < 5
    assert not list(tmp_path.iterdir())


def test_download_has_one_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the server has answered, all files together have one time limit."""
    threads = threading.active_count()
    monkeypatch.setattr(download, "_reach", lambda url: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(mnist_module, "SERVER", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert "longer than 0.05 s" in fetch(tmp_path, 0.05)
    monkeypatch.setattr(mnist_module, "SERVER", "http://localhost:9/")
    assert "refused" in fetch(tmp_path, 60)
    # One thread may still wait for the silent server.
    assert threading.active_count() <= threads + 1


def test_mnist_is_downloaded_where_torchvision_puts_it(
    mnist_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, folder = tmp_path / "served", tmp_path / "data"
    served.mkdir()
    for name in mnist_module.MD5:
        (served / f"{name}.gz").write_bytes(gzip.compress((mnist_dir / "MNIST/raw" / name).read_bytes(), 1))
    sums = {name: md5((served / f"{name}.gz").read_bytes()).hexdigest() for name in mnist_module.MD5}
    monkeypatch.setattr(mnist_module, "MD5", sums)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(mnist_module, "SERVER", f"http://127.0.0.1:{listening.server_port}/")
        mnist_module.fetch_mnist(folder, 60)
        listening.shutdown()
        thread.join()
    for name in mnist_module.MD5:
        assert (folder / "MNIST/raw" / name).read_bytes() == (mnist_dir / "MNIST/raw" / name).read_bytes()
    mnist_module.fetch_mnist(folder, 60)  # finds them there: nobody serves them any more


def test_once_per_node_does_not_wait_for_training_ranks() -> None:
    """In elastic mode the others have read their data long before; MNIST met them in an exchange of theirs."""

    def fails() -> None:
        raise DataError("damaged")

    peers = [RankInfo("node", 0, "ddp", (0,), past_worlds=1), RankInfo("node", 1, "ddp", (0,))]
    backend = SimpleNamespace(
        world=World(1, 2, 1, 2), session=SimpleNamespace(peers=peers, store=dist.HashStore())
    )
    assert on_every_rank(backend, lambda: "loaded", timeout_s=1) == "loaded"  # type: ignore[arg-type]
    with pytest.raises(SharedDataError, match="damaged"):
        on_every_rank(backend, fails, timeout_s=1)  # type: ignore[arg-type]
    assert once_per_node(backend, lambda: None, timeout_s=1) == []  # type: ignore[arg-type]
