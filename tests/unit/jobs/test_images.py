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

from hvd_trainer.backends import Backend
from hvd_trainer.data import LoaderPlan, make_loader
from hvd_trainer.errors import DataError
from hvd_trainer.jobs import images as mnist_module
from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.options import ImageOptions


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_module, "SERVER", "http://localhost:9/")


def test_mnist_is_read_plain_and_gzipped(mnist_dir: Path, tmp_path: Path, lone_backend: Backend) -> None:
    images = load_images(ImageOptions("mnist", str(mnist_dir)), lone_backend)
    assert images.note is None
    assert (len(images.train), len(images.test)) == (60_000, 10_000)
    assert images.train.inputs.shape == (60_000, 1, 28, 28)
    assert images.train.targets[:5].tolist() == [5, 0, 4, 1, 9]
    batch, _ = next(make_loader(images.train, lone_backend, LoaderPlan(1000)).epoch(0))
    assert abs(float(batch.mean())) < 0.1
    assert abs(float(batch.std()) - 1) < 0.1
    for path in (mnist_dir / "MNIST" / "raw").glob("*-ubyte"):
        with gzip.open(tmp_path / f"{path.name}.gz", "wb", compresslevel=1) as file:
            file.write(path.read_bytes())
    zipped = mnist_module.load_mnist(tmp_path)
    assert torch.equal(zipped.test.inputs, images.test.inputs)
    assert torch.equal(zipped.train.targets, images.train.targets)


LABELS = "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: {LABELS: whole[:-1]}, "expected 10008 bytes"),
        (lambda whole: {LABELS: b"\x00\x00\x0d\x01" + whole[4:]}, "expected 10008 bytes"),
        (lambda whole: {LABELS: whole[:-1] + b"\x0a"}, "has the label 10, and there are 0 to 9"),
        (lambda whole: {f"{LABELS}.gz": gzip.compress(whole)[:-20]}, ""),
        (lambda whole: {f"{LABELS}.gz": gzip.compress(whole)[:50] + b"\xff" * 40 + gzip.compress(whole)[90:]}, ""),
        # By an attacker: it unpacks to far more than it should.
        (lambda whole: {f"{LABELS}.gz": gzip.compress(whole + bytes(10**8), 1)}, "bytes .* found more that begin"),
    ],
    ids=["truncated", "magic", "label", "gz", "zlib", "too much"],
)
def test_damaged_mnist_file_is_named(
    damage: Any, words: str, mnist_dir: Path, tmp_path: Path, lone_backend: Backend
) -> None:
    for path in (mnist_dir / "MNIST" / "raw").glob("*-ubyte"):
        (tmp_path / path.name).symlink_to(path)
    whole = (tmp_path / LABELS).read_bytes()
    (tmp_path / LABELS).unlink()
    ((name, content),) = damage(whole).items()
    (tmp_path / name).write_bytes(content)
    for dataset in ("mnist", "auto"):
        with pytest.raises(DataError, match=f"{tmp_path / name}.*{words}.* Delete it and download it again"):
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
    for name in mnist_module.MD5:
        (served / f"{name}.gz").write_bytes(gzip.compress((mnist_dir / "MNIST/raw" / name).read_bytes(), 1))
    sums = {name: md5((served / f"{name}.gz").read_bytes()).hexdigest() for name in mnist_module.MD5}
    monkeypatch.setattr(mnist_module, "MD5", sums)
    with serving(served) as server:
        monkeypatch.setattr(mnist_module, "SERVER", f"{server}/")
        mnist_module.fetch_mnist(folder)
    for name in mnist_module.MD5:
        assert (folder / "MNIST/raw" / name).read_bytes() == (mnist_dir / "MNIST/raw" / name).read_bytes()
    mnist_module.fetch_mnist(folder)  # finds them there: nobody serves them any more
