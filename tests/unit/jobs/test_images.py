"""MNIST's files, and the digits that stand in for them."""

from __future__ import annotations

import gzip
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


LABELS = "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[:-1], "cannot be read"),
        (lambda whole: whole + b"\x00", "cannot be read"),
        (lambda whole: b"\x00\x00\x0d\x01" + whole[4:], "cannot be read"),
        (lambda whole: b"", "cannot be read"),
        (lambda whole: whole[:-1] + b"\x0a", "has the label 10, and there are 0 to 9"),
    ],
    ids=["truncated", "too long", "magic", "empty", "label"],
)
def test_damaged_mnist_file_is_an_error(
    damage: Any, words: str, mnist_dir: Path, tmp_path: Path, lone_backend: Backend
) -> None:
    raw = tmp_path / mnist_module.RAW
    raw.mkdir(parents=True)
    for path in (mnist_dir / mnist_module.RAW).glob("*-ubyte"):
        (raw / path.name).symlink_to(path)
    whole = (raw / LABELS).read_bytes()
    (raw / LABELS).unlink()
    (raw / LABELS).write_bytes(damage(whole))
    for dataset in ("mnist", "auto"):
        with pytest.raises(DataError, match=f"{raw}.*{words}.* Delete it and download it again"):
            load_images(ImageOptions(dataset, str(tmp_path)), lone_backend)  # type: ignore[arg-type]


@pytest.mark.usefixtures("offline")
def test_missing_mnist_names_what_to_type(tmp_path: Path, lone_backend: Backend) -> None:
    with pytest.raises(DataError) as caught:
        load_images(ImageOptions("mnist", str(tmp_path / "nowhere")), lone_backend)
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
        load_images(ImageOptions("auto", str(tmp_path / "wrong")), lone_backend)


def test_digits_are_those_of_uci() -> None:
    """The file is checked by its sums: scikit-learn, from which it was taken, is not needed any more."""
    table = np.loadtxt(mnist_module.DIGITS, delimiter=",")
    assert table.shape == (1797, 65)
    assert (table[:, :64].min(), table[:, :64].max(), table[:, :64].sum()) == (0, 16, 561718)
    assert np.bincount(table[:, 64].astype(int)).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert mnist_module.DIGITS.with_name("NOTICE").is_file()


@pytest.mark.usefixtures("offline")
def test_dataset_auto_falls_back_to_digits(
    tmp_path: Path, lone_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = load_images(ImageOptions(), lone_backend)
    # Five epochs of 1,438 images would be a few steps only.
    assert (len(images.train), len(images.test)) == (12 * 1438, 359)
    assert torch.equal(images.train.inputs[1438:2876], images.train.inputs[:1438])
    assert torch.equal(images.train.targets[1438:2876], images.train.targets[:1438])
    assert images.train.inputs.dtype == torch.uint8
    assert images.train.inputs.shape[1:] == (1, 28, 28)
    assert images.note is not None
    for words in ("1,438 embedded digits, 12 times each in an epoch", "cannot be downloaded", "--data-dir mnist"):
        assert words in images.note
    assert "\n" not in images.note


def test_mnist_is_downloaded_where_torchvision_puts_it(
    mnist_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, folder = tmp_path / "served", tmp_path / "data"
    served.mkdir()
    resources = []
    for name, _ in MNIST.resources:
        content = gzip.compress((mnist_dir / mnist_module.RAW / name).with_suffix("").read_bytes(), 1)
        (served / name).write_bytes(content)
        resources.append((name, md5(content).hexdigest()))
    monkeypatch.setattr(MNIST, "resources", resources)
    with serving(served) as server:
        monkeypatch.setattr(MNIST, "mirrors", [f"{server}/"])
        mnist_module.fetch_mnist(folder)
    for path in (mnist_dir / mnist_module.RAW).glob("*-ubyte"):
        assert (folder / mnist_module.RAW / path.name).read_bytes() == path.read_bytes()
    mnist_module.fetch_mnist(folder)  # finds them there: nobody serves them any more


def test_download_that_is_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in MNIST.resources:
        (tmp_path / name).write_bytes(gzip.compress(b"something else"))
    with serving(tmp_path) as server:
        monkeypatch.setattr(MNIST, "mirrors", [f"{server}/"])
        with pytest.raises(DataError, match="there is no train-images-idx3-ubyte in .* cannot be downloaded"):
            mnist_module.fetch_mnist(tmp_path / "data")
