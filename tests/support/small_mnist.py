"""A few images in MNIST's format, for scripts that read that."""

from __future__ import annotations

import struct
from pathlib import Path


def write(folder: Path) -> None:
    """Write them as torchvision lays them out."""
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for name, number in (("train", 640), ("t10k", 64)):
        labels = bytes(sample % 10 for sample in range(number))
        images = b"".join(bytes([25 * label]) * 28 * 28 for label in labels)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, number, 28, 28) + images)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, number) + labels)
