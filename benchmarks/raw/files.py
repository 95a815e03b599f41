"""Data read from files during training: JPEGs in a folder per class, and tokens in mapped shards."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, interpolate
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

NUM_IMAGES, NUM_DIFFERENT, SIZE, CROP = 20_000, 400, 256, 224
NUM_SHARDS, SHARD_TOKENS, LENGTH = 8, 2_048_000, 512
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_AUGMENT = [v2.RandomResizedCrop(CROP, antialias=True), v2.RandomHorizontalFlip()]


class Small(nn.Module):
    """A linear layer on a part of an image (3x224x224), or on all tokens: a step of hardly any arithmetic."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stride = CROP // 14 if kind == "images" else 1
        self.linear = nn.Linear(3 * 14 * 14 if kind == "images" else LENGTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        part = x[..., :: self.stride, :: self.stride] if x.dim() == 4 else x.float() / 2**16
        return self.linear(part.flatten(1))


def data_set(folder: Path, kind: str, *, pixels: bool = False) -> Dataset[Any]:
    """One of both, which `make` has written to `folder`.

    ``pixels``: images are bytes, read by torchcodec, which `normalise` converts as a batch; else each is read
    by Pillow, torchvision's default, and normalised by itself.
    """
    if kind == "tokens":
        return Tokens(folder / kind)
    if pixels:
        from torchcodec.decoders import decode_image

        return ImageFolder(folder / kind, v2.Compose(_AUGMENT), loader=decode_image)
    floats = [v2.PILToTensor(), *_AUGMENT, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return ImageFolder(folder / kind, v2.Compose(floats))


def normalise(pixels: Tensor) -> Tensor:
    """A batch of bytes as floats of mean 0 and deviation 1, by channel, in one operation."""
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    return batch_norm(pixels.float(), 255 * mean, (255 * std) ** 2, eps=0)


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Windows of LENGTH tokens in mapped files of 16-bit numbers; the target is the next token's last digit."""

    def __init__(self, folder: Path) -> None:
        self.shards = [np.load(file, mmap_mode="r") for file in sorted(folder.glob("*.npy"))]
        self.windows = (SHARD_TOKENS - 1) // LENGTH

    def __len__(self) -> int:
        return self.windows * len(self.shards)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        places = [divmod(index, self.windows) for index in indices]
        rows = [self.shards[shard][window * LENGTH : (window + 1) * LENGTH + 1] for shard, window in places]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return list(zip(tokens[:, :-1], tokens[:, -1] % 10, strict=True))


def make(folder: Path, kind: str) -> None:
    """Write a data set once."""
    done = folder / kind / ".complete"
    if done.exists():
        return
    makers: dict[str, Callable[[Path], None]] = {"images": _make_images, "tokens": _make_tokens}
    makers[kind](folder / kind)
    done.touch()


def _make_images(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    different = [_encoded(generator) for _ in range(NUM_DIFFERENT)]
    for number in range(10):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
    for number in range(NUM_IMAGES):
        (folder / str(number % 10) / f"{number:05}.jpg").write_bytes(different[number % NUM_DIFFERENT])


def _encoded(generator: torch.Generator) -> bytes:
    """A JPEG of noise at three scales, about as large as a photograph of this size."""
    scales = [torch.rand((1, 3, side, side), generator=generator) for side in (4, 32, SIZE)]
    planes = [interpolate(noise, size=(SIZE, SIZE), mode="bilinear") for noise in scales]
    image = (planes[0] * 0.5 + planes[1] * 0.35 + planes[2] * 0.15)[0].mul(255).byte()
    file = io.BytesIO()
    v2.functional.to_pil_image(image).save(file, "jpeg", quality=90)
    return file.getvalue()


def _make_tokens(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(NUM_SHARDS):
        np.save(folder / f"{number}.npy", generator.integers(0, 2**16, SHARD_TOKENS, dtype=np.uint16))
