"""Data sets of many kinds in one process, and which errors name invalid ones."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
from collections import UserDict
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import data_checks
import psutil
import pytest
import torch
import trainings
from data_checks import Batches, SizedBatches, Stream, numbers
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from hvd_trainer import Callback, RunView
from hvd_trainer.backends import Backend
from hvd_trainer.data import DataShard, LoaderPlan, make_loader, samples_in
from hvd_trainer.data.batch import collated_samples, first_samples, to_device
from hvd_trainer.errors import DataError, OptionError
from hvd_trainer.faults import preemption
from hvd_trainer.measure.stacks import count_elements


def fit(
    data: Any, test: Any = None, model: nn.Module | None = None, epochs: int = 1, **more: Any
) -> list[dict[str, Any]]:
    """Train a line on `data` in this process."""
    model = model or nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    options = trainings.options_of(epochs=epochs, batch_size=4)
    return trainings.fit(options, model, data, test, optimizer=optimizer, loss=mean_square, **more).epochs


def mean_square(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    return ((outputs.squeeze(1) - (targets["id"] if isinstance(targets, dict) else targets)) ** 2).mean()


class Sized(Dataset[Any]):
    def __init__(self, sample: Any, count: int) -> None:
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.sample


class OnePass(Batches):
    """Gives the batches that are left."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.rest = super().batches(DataShard(0, 1), 0)

    def batches(self, shard: DataShard, epoch: int | None) -> Iterator[Any]:
        return self.rest


class Overstated(SizedBatches):
    """Says that it has one more sample than it gives."""

    def __len__(self) -> int:
        return self.count + 1


class Bucketed(Dataset[Any]):
    """A data set that has batches for a sampler."""

    def __init__(self) -> None:
        self.batches = [[0, 1], [2, 3]]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), float(index)


BAD = [
    (lambda: Dataset(), "Dataset: a data set has __len__ and __getitem__"),
    (lambda: [], "The data set (list) is empty"),
    (lambda: Stream(0), "Stream gave fewer samples"),
    (lambda: Batches(0), "Batches gave a rank no batch in epoch 1: give each of the 1 shards some"),
    (lambda: Batches(8, 2), "a batch of 2 samples, and a rank's batch has 4: make batches of 4, or change"),
    (lambda: OnePass(8), "OnePass gave a rank no batch in epoch 2"),
    (lambda: SizedBatches(0), "SizedBatches has 0 samples, fewer than its shards (1): give it more, or start f"),
    (lambda: Overstated(7), "Overstated gave a batch of 3 samples after 4, where 4 were due: by its length of 8,"),
    (lambda: Batches, "Cannot load batches from a type"),
    (lambda: Sized({"image": torch.zeros(1), "label": 1}, 8), "found"),
    (lambda: Sized((torch.zeros(1), 1, 2), 8), "but is a tuple of 3"),
    (lambda: Sized(("a", "b"), 8), "A batch should hold tensors"),
]


@pytest.mark.parametrize(("make", "words"), BAD, ids=[words for _, words in BAD])
def test_invalid_data_set_is_named(make: Any, words: str) -> None:
    """A dictionary of two keys was unpacked into its keys, and a model was trained on the word 'image'."""
    with pytest.raises(DataError) as caught:
        fit(make(), model=ToFloat(), epochs=2)
    wanted = "but is a dict with image, label. Let the data set give pairs" if words == "found" else words
    assert wanted in str(caught.value)


def test_source_with_a_length_has_warmup_and_decay() -> None:
    options = {"epochs": 2, "batch_size": 4, "warmup_epochs": 0.5, "lr_decay": "linear"}
    rates: list[float] = []

    class Rates(Callback):
        def on_step_end(self, run: RunView, result: Any) -> None:
            rates.append(run.rate.last)

    model = ToFloat()
    how = {"optimizer": torch.optim.SGD(model.parameters(), lr=1e-4), "loss": mean_square, "callbacks": [Rates()]}
    trainings.fit(trainings.options_of(**options), model, SizedBatches(14), **how)
    # Half an epoch of warm-up, in which a step is 4/14 of one, then down to 0 over the samples that are left.
    assert [21e4 * rate for rate in rates] == pytest.approx([84 / 11, 168 / 11, 20, 16, 14, 10, 6, 2])
    with pytest.raises(OptionError, match="--warmup-epochs needs a data set that knows its length"):
        trainings.fit(trainings.options_of(**options), model, Batches(14), **how)


def test_data_set_with_batches_is_no_source_of_batches() -> None:
    assert fit(Bucketed())[0]["samples"] == 4


def test_unequal_tensors_are_refused() -> None:
    with pytest.raises(DataError, match="3 inputs and 2 targets"):
        data_checks.TensorData(torch.zeros(3, 1), torch.zeros(2))


def test_tensor_dataset_list_and_stream_train_alike() -> None:
    whole = numbers(8)
    kinds: list[Any] = [whole, TensorDataset(whole.inputs, whole.targets), [whole[i] for i in range(8)]]
    losses = []
    for data in kinds:
        torch.manual_seed(0)
        losses.append(fit(data, data)[0]["val_loss"])
    assert losses[0] == losses[1] == losses[2]
    assert fit([(x.float(), y) for x, y in Stream(8)], Stream(8), model=ToFloat())[0]["samples"] == 8
    losses.clear()
    for kind in (Stream, Batches):
        torch.manual_seed(0)
        losses.append(fit(kind(8), kind(8), model=ToFloat())[0]["val_loss"])
    assert losses[0] == losses[1]


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


def test_inputs_may_be_mappings_that_are_no_dictionaries() -> None:
    """Tokenizers give such: their tensors were neither counted, nor cut to size, nor moved to a GPU."""
    inputs = UserDict({"x": torch.zeros(3, 2)})
    assert samples_in((inputs, torch.zeros(3))) == 3
    assert count_elements((inputs, torch.zeros(3))) == 9
    part, moved = first_samples((inputs, torch.zeros(3)), 2)[0], to_device((inputs, 1), torch.device("meta"))[0]
    assert type(part) is type(moved) is UserDict, "a model may ask for its attributes"
    assert (len(part["x"]), moved["x"].is_meta, len(inputs["x"])) == (2, True, 3)


def test_objects_move_their_own_tensors() -> None:
    """A PackedSequence was made again with lengths that were moved, which PyTorch refuses; a graph stayed."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    graph = SimpleNamespace(to=lambda device: f"on {device}")
    moved, graphs = to_device((packed, {"graphs": [graph]}), torch.device("meta"))
    assert (moved.data.is_meta, moved.batch_sizes.is_cpu) == (True, True)
    assert graphs == {"graphs": ("on meta",)}


class Shifted(data_checks.TensorData):
    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs + 1000, targets


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_reads_its_own_samples(workers: int, lone_backend: Backend) -> None:
    """Its tensors were taken as they are."""
    data = Shifted(torch.zeros(4, 1), torch.zeros(4))
    loader = make_loader(data, lone_backend, LoaderPlan(4, num_workers=workers))
    assert [inputs.unique().tolist() for inputs, _ in loader.epoch(0)] == [[1000.0]]


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1), torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_samples_of_a_subset_do_not_depend_on_the_batch_size(workers: int, lone_backend: Backend) -> None:
    """A subset gives several samples at once, and only the first of a batch was seeded."""
    found = []
    for data, batch_size in ((Noisy(), 4), (Subset(Noisy(), range(16)), 4), (Subset(Noisy(), range(16)), 7)):
        batches = make_loader(data, lone_backend, LoaderPlan(batch_size, num_workers=workers)).epoch(0)
        found.append({int(i): float(x) for xs, targets in batches for x, i in zip(xs, targets, strict=True)})
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 16


def test_first_samples_are_taken_at_any_depth() -> None:
    """Lists were left whole: inputs of 3 samples and targets of 5."""
    x = torch.zeros(5, 2)
    boxes = [{"boxes": torch.zeros(number, 4)} for number in (1, 0, 5, 2, 3)]
    batch = {"a": [x, [x, {"b": [x]}]], "names": list("abcde")}, [x, boxes, (tuple("abcde"), list("abcde"))]
    inputs, targets = first_samples(batch, 3)
    tensors = (inputs["a"][0], inputs["a"][1][0], inputs["a"][1][1]["b"][0], targets[0])
    assert [len(tensor) for tensor in tensors] == [3, 3, 3, 3]
    assert (inputs["names"], targets[2]) == (list("abc"), (tuple("abc"), list("abc")))
    assert [len(each["boxes"]) for each in targets[1]] == [1, 0, 5]


def as_pair(samples: list[dict[str, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([[sample["x"]] for sample in samples])
    return x, x.squeeze(1)


@pytest.fixture
def fork_server() -> Iterator[None]:
    """Start processes as Python does from 3.14 on."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
    # As Python's own tests do: the next test may want a server of its own. It waits for its processes, of which a
    # test that has failed may have left some.
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    for process in psutil.Process(server._forkserver_pid).children():
        process.kill()
    server._stop()


@pytest.mark.usefixtures("fork_server")
def test_what_cannot_be_sent_to_loader_processes_is_named(lone_backend: Backend) -> None:
    samples = [{"x": float(i)} for i in range(5)]

    def batches(num_workers: int, collate: Any, data: Any = samples) -> list[Any]:
        plan = LoaderPlan(2, num_workers=num_workers)
        return list(make_loader(data, lone_backend, plan, collate=collate).epoch(0))

    with pytest.raises(DataError, match=r"lambda.*top of a module.*--workers 0.*set_start_method"):
        batches(1, lambda samples: as_pair(samples))
    with pytest.raises(DataError, match="cannot pickle '_thread.lock' object"):
        batches(1, None, data=[threading.Lock(), threading.Lock()])
    assert len(batches(0, lambda samples: as_pair(samples))) == len(batches(1, as_pair)) == 3


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("number", preemption.SIGNALS)
def test_a_signal_to_all_processes_leaves_the_loader(number: signal.Signals, lone_backend: Backend) -> None:
    """A scheduler sends it to the group of processes, in which a fork server is, too: the rank has yet to save."""
    before = set(psutil.Process().children())
    batches = make_loader(list(numbers(40)), lone_backend, LoaderPlan(2, num_workers=1)).epoch(0)
    next(batches)
    started = set(psutil.Process().children()) - before
    everyone = started | {child for each in started for child in each.children()}
    # By another process: SIGTERM from the rank itself ends a loader process.
    code = f"import os, sys; [os.kill(int(pid), {int(number)}) for pid in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", code, *(str(process.pid) for process in everyone)], check=True)

    assert len(list(batches)) == 19
    assert all(process.is_running() for process in started)


def test_batch_norm_on_one_sample_is_an_error() -> None:
    """9 samples in batches of 4 leave one for the last batch, which has no variance."""
    model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fit(numbers(9), model=model)
    assert fit(numbers(8), numbers(1), model=model)[0]["val_loss"] >= 0


FORK_SERVER = """
import multiprocessing, sys

def say():
    print("PyTorch is", "imported" if "torch" in sys.modules else "absent", flush=True)

if __name__ == "__main__":
    import hvd_trainer.data
    multiprocessing.set_start_method("forkserver")
    process = multiprocessing.Process(target=say)
    process.start()
    process.join()
"""


def test_loader_processes_of_a_fork_server_have_pytorch(tmp_path: Path) -> None:
    """Where the main module imports it in a function, each process did, in 3 s instead of 0.1 s."""
    script = tmp_path / "script.py"
    script.write_text(FORK_SERVER)
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert done.stdout == "PyTorch is imported\n"


@pytest.mark.parametrize(
    ("inputs", "targets", "samples"),
    [
        ((5, 3), (5,), 5),  # three of eight were dropped
        ((5, 8), (5, 8), 8),  # (T, N), with fewer steps of time than samples
        ((9, 8), (9, 8), 8),
        ((5, 8, 2), (5, 8), 8),
        ((40,), (40,), 8),  # packed
        ((2, 20), (2, 20), 2),  # packed to rows
        ((5, 8), (5,), 5),  # dropped, and texts as long as the batch
        ((8, 3), (5,), 8),  # such as one target per box
        ((0, 3), (0,), 0),
        ([(3, 4), (3, 5)] * 4, [(3,), (2,)] * 4, 8),  # images of three colours
        (([(3, 4), (3, 5)] * 4, (3,)), [(3,)] * 8, 8),
        ([(3, 4)] * 5, [{"boxes": (3, 4)}] * 5, 5),  # with boxes of each, three dropped
        ([(5, 3), (5,)], (5,), 5),  # two fields
        (((9, 8), (8,)), ((40,), (8,)), 8),  # two fields each, sequences before samples
        (((40,), (8,)), ((40,), (8,)), 8),
    ],
)
def test_samples_that_a_collate_has_left(inputs: Any, targets: Any, samples: int) -> None:
    """The lists of images were counted as three samples."""
    assert collated_samples((zeros(inputs), zeros(targets)), 8) == samples


def zeros(shapes: Any) -> Any:
    """Return tensors for nested shapes."""
    if isinstance(shapes, dict):
        return {name: zeros(shape) for name, shape in shapes.items()}
    is_shape = isinstance(shapes, tuple) and all(isinstance(size, int) for size in shapes)
    return torch.zeros(shapes) if is_shape else [zeros(shape) for shape in shapes]
