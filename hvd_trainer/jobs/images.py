"""The images of the main job: MNIST, or scikit-learn's handwritten digits where there is no network.

MNIST's files are found where torchvision puts them. torchvision downloads and checks them, in a process of
its own with a time limit; reading them needs no torchvision, whose import alone takes a second of every start.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hvd_trainer.backends import Backend
from hvd_trainer.data.dataset import Normalise, TensorData
from hvd_trainer.data.per_node import SharedDataError, everywhere, once_per_node
from hvd_trainer.errors import DataError
from hvd_trainer.jobs.options import ImageOptions
from hvd_trainer.utils.files import open_regular

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", 60_000),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte", 10_000),
}
MEAN, STD = 0.1307, 0.3081
CLASSES = 10
PROBE_S, QUICK_S, PATIENT_S = 5.0, 15.0, 240.0
"""Time limits: to reach the server at all; to download where digits will do; to download where they will not."""
SERVER = "https://ossci-datasets.s3.amazonaws.com/mnist/"
HOW = (
    'To get MNIST, type on a machine with internet: python -c "import torchvision; '
    "torchvision.datasets.MNIST('mnist', download=True)\" and then pass the folder here: --data-dir mnist"
)


@dataclass(frozen=True)
class Images:
    """A training and a test set, and how they came to be chosen."""

    train: TensorData
    test: TensorData
    note: str | None = None
    """What the user should know, said once; None if there is nothing."""


def default_data_dir() -> Path:
    """The cache folder for data sets."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hvd_trainer" / "data"


def load_images(options: ImageOptions, backend: Backend) -> Images:
    """Loads the data set that the options name, the same on all ranks; downloads it once per node.

    Raises:
        DataError: MNIST was asked for and is not there, not whole, or cannot be downloaded.
    """
    folder = Path(options.data_dir).expanduser() if options.data_dir else default_data_dir()
    if options.dataset == "digits":
        return load_digits()
    must = options.dataset == "mnist" or options.data_dir is not None
    patience = PATIENT_S if must else QUICK_S
    trouble = once_per_node(backend, lambda: fetch_mnist(folder, patience), timeout_s=patience + 60)
    if not trouble:
        return _load_everywhere(folder, backend)
    if must:
        raise SharedDataError(f"{trouble[0]}. {HOW}. Or train on the embedded digits: --dataset digits")
    digits = load_digits()
    note = f"No MNIST, so this run trains on scikit-learn's {len(digits.train):,} digits: {trouble[0]}. {HOW}"
    return Images(digits.train, digits.test, note)


def _load_everywhere(folder: Path, backend: Backend) -> Images:
    """Reads MNIST on each rank; where one of them cannot, all raise, and none waits for it."""
    read: list[Images] = []
    trouble = everywhere(backend, lambda: read.append(load_mnist(folder)))
    if trouble:
        raise SharedDataError(trouble[0])
    return read[0]


def load_mnist(folder: Path) -> Images:
    """Reads MNIST from `folder`, which holds `MNIST/raw/*-ubyte` or the files themselves, gzipped or not.

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
    """Reads a file of unsigned bytes in the IDX format of MNIST's authors: uint8 of the given shape.

    Raises:
        DataError: the file is not of that format, or not of that shape.
    """
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    expected = len(header) + torch.Size(shape).numel()
    try:
        with open_regular(path) as file:
            # No more than shows that it is too long: a few bytes may unpack to any number.
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


def load_digits() -> Images:
    """scikit-learn's 1,797 handwritten digits, 8x8 pixels of 17 greys, brought to uint8 1x28x28.

    Every fifth image is for testing: 1,438 to train on and 359 to test.
    """
    table = torch.from_numpy(_digits_table())
    small = table[:, :64].float().view(-1, 1, 8, 8)
    large = interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    pixels = (large * (255 / 16)).round().clamp(0, 255).to(torch.uint8)
    labels = table[:, 64].long()
    is_test = torch.arange(len(labels)) % 5 == 4
    scale = pixels[~is_test].float().div(255)
    normalise = Normalise(round(float(scale.mean()), 4), round(float(scale.std()), 4))
    train = TensorData(pixels[~is_test], labels[~is_test], normalise, "digits")
    test = TensorData(pixels[is_test], labels[is_test], normalise, "digits")
    return Images(train, test)


def _digits_table() -> Any:
    """What `sklearn.datasets.load_digits` reads: 64 pixels and the digit per row, as float64 (1797, 65).

    Read from its file, because each rank would import scikit-learn for it: 1.3 s against 0.1 s.
    """
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    file = Path(folders[0] if folders else "") / "datasets/data/digits.csv.gz"
    if not file.is_file():
        raise DataError("The digits come with scikit-learn, which has none here. Type: pip install scikit-learn")
    return np.loadtxt(file, delimiter=",")


def _find(folder: Path, name: str) -> Path:
    for place in (folder / "MNIST" / "raw", folder / "raw", folder):
        for path in (place / name, place / f"{name}.gz"):
            if path.is_file():
                return path
    raise DataError(f"there is no {name} in {folder}")


def fetch_mnist(folder: Path, patience_s: float) -> str | None:
    """Makes sure that MNIST is in `folder`; returns what is wrong if it cannot.

    Args:
        patience_s: how long a download may take, in seconds.
    """
    try:
        for images_name, labels_name, _ in FILES.values():
            _find(folder, images_name)
            _find(folder, labels_name)
        return None
    except DataError as error:
        missing = str(error)
    unreachable = _unreachable(SERVER + FILES["test"][1] + ".gz")
    if unreachable is not None:
        return f"{missing}, and it cannot be downloaded from here ({unreachable})"
    code = "import sys, torchvision; torchvision.datasets.MNIST(sys.argv[1], download=True)"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-c", code, str(folder)], check=True, capture_output=True, timeout=patience_s
        )
    except OSError as error:
        return f"{missing}, and it cannot be written there ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"{missing}, and the download took longer than {patience_s:g} s"
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {error.returncode}"]
        return f"{missing}, and the download failed ({said[-1]})"
    return None


def _unreachable(url: str) -> str | None:
    """Why nothing answers at `url`, or None: within seconds, also where the name server never answers.

    Looking a name up has no time limit of its own, so that it is done in a thread that may be left behind.
    """
    answer = [f"no answer in {PROBE_S:.0f} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=PROBE_S):
                answer[0] = ""
        except (urllib.error.URLError, OSError) as error:
            answer[0] = str(getattr(error, "reason", error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_S)
    return answer[0] or None
