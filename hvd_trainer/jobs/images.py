"""Load the images of the main job: MNIST by torchvision, or a small set of digits where there is no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
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
STAND_IN_TIMES = 12
"""How often an epoch trains on each of the digits in MNIST's place: on 4 ranks once would be 3 steps."""
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
    """Read MNIST from `folder`, where torchvision has put it.

    Raises:
        DataError: a file is cut short, or something else.
    """
    from torchvision.datasets import MNIST  # takes a second, and the embedded digits do without

    try:
        sets = [MNIST(folder, train=is_train) for is_train in (True, False)]
    except UNREADABLE as error:
        raise DataError(
            f"MNIST in {folder / RAW} cannot be read ({first_line(error)}). Delete it and download it again."
        ) from error
    if (largest := max(int(mnist.targets.max()) for mnist in sets)) >= CLASSES:
        raise DataError(
            f"{folder / RAW} is not MNIST: it has the label {largest}, and there are 0 to {CLASSES - 1}. Delete "
            f"it and download it again."
        )
    normalise = Normalise(MEAN, STD)
    train, test = (TensorData(mnist.data.unsqueeze(1), mnist.targets, normalise, "MNIST") for mnist in sets)
    return Images(train, test)


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


def fetch_mnist(folder: Path) -> None:
    """Let torchvision download MNIST to `folder`, unless it is there.

    Raises:
        DataError: it cannot be downloaded, or not be written there.
    """
    from torchvision.datasets import MNIST

    missing = [packed for packed, _ in MNIST.resources if not (folder / RAW / packed).with_suffix("").is_file()]
    if missing:
        try:
            with downloading(MNIST.mirrors[0] + missing[0]):
                MNIST(folder, download=True)
        except DataError as error:
            name = missing[0].removesuffix(".gz")
            raise DataError(f"there is no {name} in {folder / RAW}, and {error}") from error
