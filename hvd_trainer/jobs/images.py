"""Load the images of the main job: MNIST, or a small set of handwritten digits where there is no network.

MNIST's files are found where torchvision puts them; reading them does without its import, which takes a second.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hvd_trainer.backends import Backend
from hvd_trainer.data.dataset import Normalise, TensorData
from hvd_trainer.data.per_node import SharedDataError, on_every_rank, once_per_node
from hvd_trainer.errors import DataError
from hvd_trainer.jobs.download import download
from hvd_trainer.jobs.options import ImageOptions
from hvd_trainer.utils.files import default_data_dir, open_regular

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", 60_000),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte", 10_000),
}
MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
"""Of the files as the server has them, packed by gzip."""
MEAN, STD = 0.1307, 0.3081
CLASSES = 10
DIGITS = Path(__file__).parent / "digits/digits.csv.gz"
STAND_IN_TIMES = 12
"""How often an epoch trains on each of the digits in MNIST's place: on 4 ranks once would be 3 steps."""
SERVER = "https://ossci-datasets.s3.amazonaws.com/mnist/"
HOW = (
    'To get MNIST, type on a machine with internet: python -c "import torchvision; '
    "torchvision.datasets.MNIST('mnist', download=True)\" and then pass the folder here: --data-dir mnist"
)


@dataclass(frozen=True)
class Images:
    """A training and a test set."""

    train: TensorData
    test: TensorData
    note: str | None = None
    """Why they are not the set that was looked for; None if they are."""


def load_images(options: ImageOptions, backend: Backend) -> Images:
    """Load the data set that the options name, the same on all ranks; download it once per node.

    Raises:
        DataError: MNIST was asked for and is not there, not whole, or cannot be downloaded.
    """
    folder = Path(options.data_dir).expanduser() if options.data_dir else default_data_dir()
    if options.dataset == "digits":
        return load_digits()
    must = options.dataset == "mnist" or options.data_dir is not None
    trouble = once_per_node(backend, lambda: fetch_mnist(folder))
    if not trouble:
        return on_every_rank(backend, lambda: load_mnist(folder))
    if must:
        raise SharedDataError(f"{trouble[0]}. {HOW}. Or train on the embedded digits: --dataset digits")
    digits = load_digits(times=STAND_IN_TIMES)
    count = len(digits.train) // STAND_IN_TIMES
    note = f"No MNIST, so this run trains on {count:,} embedded digits, {STAND_IN_TIMES} times each in an epoch: "
    note += f"{trouble[0]}. {HOW}"
    return Images(digits.train, digits.test, note)


def load_mnist(folder: Path) -> Images:
    """Read MNIST from `folder`, which holds `MNIST/raw/*-ubyte` or the files themselves, gzipped or not.

    Raises:
        DataError: a file is missing, cut short, or something else.
    """
    sets = {}
    for split, (images_name, labels_name, count) in FILES.items():
        images = read_idx(_find(folder, images_name), (count, 28, 28))
        labels = read_idx(_find(folder, labels_name), (count,))
        if (largest := int(labels.max())) >= CLASSES:
            raise DataError(
                f"{_find(folder, labels_name)} is not MNIST: it has the label {largest}, and there are 0 to "
                f"{CLASSES - 1}. Delete it and download it again."
            )
        sets[split] = TensorData(images.unsqueeze(1), labels.long(), Normalise(MEAN, STD), "MNIST")
    return Images(sets["train"], sets["test"])


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Read a file of unsigned bytes in the IDX format of MNIST's authors, as uint8 of the given shape.

    Raises:
        DataError: the file is not of that format, or not of that shape.
    """
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    expected = len(header) + torch.Size(shape).numel()
    try:
        with open_regular(path) as file:
            # One byte more than expected shows that it is too long: a few bytes can unpack to any number.
            raw = (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Delete it and download it again.") from error
    if not raw.startswith(header) or len(raw) != expected:
        raise DataError(
            f"{path} is not MNIST: expected {expected} bytes that begin with {header.hex()}, found "
            f"{'more' if len(raw) > expected else len(raw)} that begin with {raw[: len(header)].hex()}. Delete it "
            f"and download it again."
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=len(header)).view(shape)


def load_digits(times: int = 1) -> Images:
    """Return 1,797 handwritten digits of 8x8 pixels in 17 greys, brought to uint8 (N, 1, 28, 28).

    They come with this package (see digits/NOTICE). Every fifth image is for testing: 1,438 to train on, each
    `times` times in an epoch, and 359 to test.
    """
    table = torch.from_numpy(np.loadtxt(DIGITS, delimiter=","))  # per row 64 pixels and the digit
    small = table[:, :64].float().view(-1, 1, 8, 8)
    large = interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    pixels = (large * (255 / 16)).round().clamp(0, 255).to(torch.uint8)
    labels = table[:, 64].long()
    is_test = torch.arange(len(labels)) % 5 == 4
    scale = pixels[~is_test].float().div(255)
    normalise = Normalise(round(float(scale.mean()), 4), round(float(scale.std()), 4))
    images, targets = pixels[~is_test].repeat(times, 1, 1, 1), labels[~is_test].repeat(times)
    train = TensorData(images, targets, normalise, "digits")
    test = TensorData(pixels[is_test], labels[is_test], normalise, "digits")
    return Images(train, test)


def _find(folder: Path, name: str) -> Path:
    for place in (folder / "MNIST" / "raw", folder / "raw", folder):
        for path in (place / name, place / f"{name}.gz"):
            if path.is_file():
                return path
    raise DataError(f"there is no {name} in {folder}")


def fetch_mnist(folder: Path) -> None:
    """Download MNIST to where torchvision puts it below `folder`, unless it is there.

    Raises:
        DataError: it cannot be downloaded, or not be written there.
    """
    try:
        for name in MD5:
            _find(folder, name)
    except DataError as missing:
        import pooch  # as in `download`

        for name, md5 in MD5.items():
            try:
                download(f"{SERVER}{name}.gz", md5, folder / "MNIST/raw", pooch.Decompress(name=name))
            except DataError as error:
                raise DataError(f"{missing}, and {error}") from error
