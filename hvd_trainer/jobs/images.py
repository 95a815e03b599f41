"""Load the images of the main job: MNIST, or a small set of digits where there is no network to download it."""

from __future__ import annotations

import math
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hvd_trainer.backends import Backend
from hvd_trainer.data.dataset import Normalise, TensorData
from hvd_trainer.data.per_node import SharedDataError, on_every_rank, once_per_node
from hvd_trainer.errors import DataError, first_line
from hvd_trainer.jobs.download import downloading
from hvd_trainer.jobs.options import ImageOptions
from hvd_trainer.utils.files import UNREADABLE, default_data_dir

MEAN, STD = 0.1307, 0.3081
CLASSES = 10
DIGITS = Path(__file__).parent / "digits/digits.csv.gz"
SPLITS = ("train", "t10k")
IMAGES, LABELS = "{}-images-idx3-ubyte", "{}-labels-idx1-ubyte"
"""Names of MNIST's files, by the split."""
RAW = "MNIST/raw"
"""Where torchvision has the files, below the folder that it is given."""
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
        return load_digits(options.repeat)
    must = options.dataset == "mnist" or options.data_dir is not None
    trouble = once_per_node(backend, lambda: fetch_mnist(folder))
    if not trouble:
        return on_every_rank(backend, lambda: load_mnist(folder))
    if must:
        raise SharedDataError(f"{trouble[0]}. {HOW}. Or train on the embedded digits: --dataset digits")
    digits = load_digits(options.repeat)
    count = len(digits.train) // options.repeat
    note = f"No MNIST, so this run trains on {count:,} embedded digits, {options.repeat} times each in an epoch: "
    note += f"{trouble[0]}. {HOW}"
    return Images(digits.train, digits.test, note)


def load_mnist(folder: Path) -> Images:
    """Read MNIST from `folder`, where torchvision has put it.

    Raises:
        DataError: a file is cut short, or something else.
    """
    normalise = Normalise(MEAN, STD)
    sets = (_read(folder / RAW, split) for split in SPLITS)
    train, test = (TensorData(images.unsqueeze(1), labels, normalise, "MNIST") for images, labels in sets)
    return Images(train, test)


def _read(raw: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a split, from the files that were published.

    `MNIST()` would prefer the files `MNIST/processed/*.pt` that torchvision wrote before 0.9, if they are there.

    Raises:
        DataError: they are cut short, or something else.
    """
    try:
        images = _read_numbers(raw / IMAGES.format(split), 3)
        labels = _read_numbers(raw / LABELS.format(split), 1).long()
        shape, largest = tuple(images.shape), int(labels.max())
    except UNREADABLE as error:
        reason = first_line(error)
        raise DataError(f"{raw}/{split}-* cannot be read ({reason}). Delete it and download it again.") from error
    trouble = None
    if shape != (len(labels), 28, 28):
        trouble = f"{len(labels)} labels for images of the shape {shape}, and not ({len(labels)}, 28, 28)"
    elif largest >= CLASSES:
        trouble = f"the label {largest}, and there are 0 to {CLASSES - 1}"
    if trouble:
        raise DataError(f"{raw} is not MNIST: it has {trouble}. Delete it and download it again.")
    return images, labels


def _read_numbers(file: Path, dims: int) -> Tensor:
    """Return the numbers in a file of the format IDX: type (8: bytes), dimensions, their lengths, the numbers.

    torchvision has a reader, too, but its import brings all of its models, and makes each start longer.

    Raises:
        ValueError: it has another format, or not as many numbers.
    """
    content, start = np.fromfile(file, np.uint8), 4 + 4 * dims
    if bytes(content[:4]) == bytes([0, 0, 8, dims]) and len(content) >= start:
        shape = content[4:start].view(">u4").tolist()
        if len(content) == start + math.prod(shape):
            return torch.from_numpy(content[start:]).view(shape)
    raise ValueError("not in MNIST's format, or cut short")


def load_digits(repeat: int = 1) -> Images:
    """Return 1,797 handwritten digits of 8x8 pixels in 17 greys, brought to uint8 (N, 1, 28, 28).

    They come with this package (see digits/NOTICE). Every fifth image is for testing: 1,438 to train on, each
    `repeat` times in an epoch, and 359 to test.
    """
    table = torch.from_numpy(np.loadtxt(DIGITS, delimiter=","))  # per row 64 pixels and the digit
    small = table[:, :64].float().view(-1, 1, 8, 8)
    large = interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    pixels = (large * (255 / 16)).round().clamp(0, 255).to(torch.uint8)
    labels = table[:, 64].long()
    is_test = torch.arange(len(labels)) % 5 == 4
    scale = pixels[~is_test].float().div(255)
    normalise = Normalise(round(float(scale.mean()), 4), round(float(scale.std()), 4))
    images, targets = pixels[~is_test].repeat(repeat, 1, 1, 1), labels[~is_test].repeat(repeat)
    train = TensorData(images, targets, normalise, "digits")
    test = TensorData(pixels[is_test], labels[is_test], normalise, "digits")
    return Images(train, test)


def fetch_mnist(folder: Path) -> None:
    """Put the files of MNIST into `folder`, unless they are there: unpack those that are packed, or download them.

    Each takes its place by a rename: other nodes may do the same to the same folder, and a start may be killed.

    Raises:
        DataError: they cannot be downloaded, or not be written there.
    """
    raw = folder / RAW
    names = [name.format(split) for split in SPLITS for name in (IMAGES, LABELS)]
    missing = [name for name in names if not (raw / name).is_file()]
    if not missing:
        return
    # The other ranks wait meanwhile: only what is missing is worth the second.
    from torchvision.datasets import MNIST
    from torchvision.datasets.utils import check_integrity

    packed_here = [packed for packed, md5 in MNIST.resources if check_integrity(raw / packed, md5)]
    is_here = len(packed_here) == len(MNIST.resources)
    try:
        with nullcontext() if is_here else downloading(f"{MNIST.mirrors[0]}{missing[0]}.gz"):
            raw.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=raw) as new:
                unpacked = Path(new, RAW)
                unpacked.mkdir(parents=True)
                for packed in packed_here:
                    copyfile(raw / packed, unpacked / packed)
                MNIST(new, download=True)
                for name in missing:
                    (unpacked / name).replace(raw / name)
    except (DataError, OSError) as error:
        reason = f"its packed files cannot be unpacked there ({error})" if is_here else str(error)
        raise DataError(f"there is no {missing[0]} in {raw}, and {reason}") from error
