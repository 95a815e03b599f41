"""MNIST's files, and the digits that stand in for them."""

from __future__ import annotations

import gzip
import math
import sys
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_mnist
import torch
from http_server import serving
from torchvision.datasets import MNIST

from hvd_trainer.backends import Backend
from hvd_trainer.data import LoaderPlan, make_loader
from hvd_trainer.errors import DataError
from hvd_trainer.jobs import images as mnist_module
from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.options import ImageOptions


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "mirrors", ["http://localhost:9/"])


def test_mnist_is_read(mnist_dir: Path, lone_backend: Backend) -> None:
    images = load_images(ImageOptions("mnist", str(mnist_dir)), lone_backend)
    assert images.note is None
    assert (len(images.train), len(images.test)) == (60_000, 10_000)
    assert images.train.inputs.shape == (60_000, 1, 28, 28)
    assert images.train.targets[:5].tolist() == [5, 0, 4, 1, 9]
    batch, _ = next(make_loader(images.train, lone_backend, LoaderPlan(1000)).epoch(0))
    assert abs(float(batch.mean())) < 0.1
    assert abs(float(batch.std()) - 1) < 0.1


def test_torchvision_is_imported_to_download_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes more than a second: one rank of a node let the others wait for it."""
    small_mnist.write(tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    mnist_module.fetch_mnist(tmp_path)
    assert len(mnist_module.load_mnist(tmp_path).test) == 64
    (tmp_path / mnist_module.RAW / LABELS).unlink()
    with pytest.raises(ImportError):
        mnist_module.fetch_mnist(tmp_path)


LABELS = "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[:-1], "cannot be read"),
        (lambda whole: whole + b"\x00", "cannot be read"),
        (lambda whole: b"\x00\x00\x0d\x01" + whole[4:], "cannot be read"),
        (lambda whole: b"junk\n", r"t10k-\* cannot be read \(not in MNIST's format"),
        (lambda whole: b"", "cannot be read"),
        (lambda whole: whole[:-1] + b"\x0a", "has the label 10, and there are 0 to 9"),
    ],
    ids=["truncated", "too long", "magic", "text", "empty", "label"],
)
def test_damaged_mnist_file_is_an_error(damage: Any, words: str, tmp_path: Path, lone_backend: Backend) -> None:
    small_mnist.write(tmp_path)
    raw = tmp_path / mnist_module.RAW
    (raw / LABELS).write_bytes(damage((raw / LABELS).read_bytes()))
    for dataset in ("mnist", "auto"):
        with pytest.raises(DataError, match=f"{raw}.*{words}.* Delete it and download it again"):
            load_images(ImageOptions(dataset, str(tmp_path)), lone_backend)  # type: ignore[arg-type]


@pytest.mark.usefixtures("offline")
def test_missing_mnist_names_what_to_type(tmp_path: Path, lone_backend: Backend) -> None:
    with pytest.raises(DataError) as caught:
        load_images(ImageOptions("mnist", str(tmp_path / "nowhere")), lone_backend)
    for words in ("train-images-idx3-ubyte", "nowhere", "refused", "torchvision", "--data-dir", "--dataset d"):
        assert words in str(caught.value)
    with pytest.raises(DataError, match="wrong"):
        # A folder that was named must have it: digits instead would hide a typing mistake.
        load_images(ImageOptions("auto", str(tmp_path / "wrong")), lone_backend)


@pytest.mark.usefixtures("offline")
def test_dataset_auto_falls_back_to_digits(
    tmp_path: Path, lone_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert mnist_module.DIGITS.with_name("NOTICE").is_file()
    images = load_images(ImageOptions(), lone_backend)
    asked = load_images(ImageOptions("digits"), lone_backend)
    assert torch.equal(asked.train.inputs, images.train.inputs), "who asks for them gets the same"
    assert asked.note is None
    # Five epochs of 1,438 images would be a few steps only.
    assert (len(images.train), len(images.test)) == (12 * 1438, 359)
    assert torch.equal(images.train.inputs[1438:2876], images.train.inputs[:1438])
    assert torch.equal(images.train.targets[1438:2876], images.train.targets[:1438])
    # Those of UCI.
    digits = torch.cat([images.train.targets[:1438], images.test.targets])
    assert digits.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images.train.inputs.dtype == torch.uint8
    assert images.train.inputs.shape[1:] == (1, 28, 28)
    assert images.note is not None
    for words in ("1,438 embedded digits, 12 times each in an epoch", "cannot be downloaded", "--data-dir mnist"):
        assert words in images.note
    assert "\n" not in images.note


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few images, packed as they are published."""
    small_mnist.write(tmp_path / "small")
    resources = []
    for name, _ in MNIST.resources:
        content = gzip.compress((tmp_path / "small" / mnist_module.RAW / name).with_suffix("").read_bytes(), 1)
        (tmp_path / name).write_bytes(content)
        resources.append((name, md5(content).hexdigest()))
    monkeypatch.setattr(MNIST, "resources", resources)
    return tmp_path


def raw_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / mnist_module.RAW).iterdir() if not path.suffix}


def test_mnist_is_downloaded_where_torchvision_puts_it(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    with serving(packed) as server:
        monkeypatch.setattr(MNIST, "mirrors", [f"{server}/"])
        mnist_module.fetch_mnist(folder)
    assert raw_files(folder) == raw_files(tmp_path / "small")
    mnist_module.fetch_mnist(folder)  # finds them there: nobody serves them any more


def test_download_that_ends_early_leaves_no_files(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files grew in place: other nodes read a part of them, and a start that was killed left them cut."""
    (packed / "t10k-labels-idx1-ubyte.gz").unlink()
    with serving(packed) as server:
        monkeypatch.setattr(MNIST, "mirrors", [f"{server}/"])
        with pytest.raises(DataError, match="cannot be downloaded"):
            mnist_module.fetch_mnist(tmp_path / "data")
    assert not list((tmp_path / "data" / mnist_module.RAW).iterdir())


@pytest.mark.usefixtures("offline")
def test_packed_files_are_unpacked_without_a_server(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "data" / mnist_module.RAW
    raw.mkdir(parents=True)
    for name, _ in MNIST.resources:
        (packed / name).rename(raw / name)
    (raw / LABELS).mkdir()
    with pytest.raises(
        DataError, match=f"in {raw}, and its packed files cannot be unpacked there .*Is a directory"
    ):
        mnist_module.fetch_mnist(tmp_path / "data")
    (raw / LABELS).rmdir()
    mnist_module.fetch_mnist(tmp_path / "data")
    assert raw_files(tmp_path / "data") == raw_files(tmp_path / "small")
    assert len(list(raw.iterdir())) == 8


def test_published_files_are_read_and_no_others(tmp_path: Path) -> None:
    """Torchvision prefers the tensors that earlier versions of it kept."""
    small_mnist.write(tmp_path)
    (tmp_path / "MNIST/processed").mkdir()
    for name in ("training.pt", "test.pt"):
        torch.save((torch.zeros(3, 14, 14), torch.zeros(3)), tmp_path / "MNIST/processed" / name)
    assert mnist_module.load_mnist(tmp_path).train.inputs.shape == (640, 1, 28, 28)


@pytest.mark.parametrize("shape", [(64, 14, 14), (63, 28, 28)])
def test_images_of_another_shape_are_an_error(shape: tuple[int, int, int], tmp_path: Path) -> None:
    small_mnist.write(tmp_path)
    file = tmp_path / mnist_module.RAW / "t10k-images-idx3-ubyte"
    file.write_bytes(np.array([2051, *shape], ">i4").tobytes() + bytes(math.prod(shape)))
    with pytest.raises(DataError, match=rf"it has 64 labels for images of the shape \({shape[0]}, .*Delete it"):
        mnist_module.load_mnist(tmp_path)


def test_download_that_is_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in MNIST.resources:
        (tmp_path / name).write_bytes(gzip.compress(b"something else"))
    with serving(tmp_path) as server:
        monkeypatch.setattr(MNIST, "mirrors", [f"{server}/"])
        with pytest.raises(DataError, match="there is no train-images-idx3-ubyte in .* cannot be downloaded"):
            mnist_module.fetch_mnist(tmp_path / "data")
