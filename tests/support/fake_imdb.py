"""A few dozen made-up reviews, laid out as the Large Movie Review Dataset, for tests of its loader and its job."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

EACH = 12
WORDS = {"pos": ("wonderful", "moving", "brilliant"), "neg": ("dreadful", "boring", "stupid")}


def reviews(each: int = EACH) -> dict[str, bytes]:
    """Return so many made-up reviews of each split and label, by their names in the archive."""
    files = {}
    for split in ("train", "test"):
        for label, words in WORDS.items():
            for number in range(each):
                word, other = words[number % 3], words[(number + 1) % 3]
                text = f"A {word} film.<br /><br />I saw it {number} times, {split}ing my patience. How {other}!"
                files[f"aclImdb/{split}/{label}/{number}_{9 if label == 'pos' else 2}.txt"] = text.encode()
    return files


def write_archive(path: Path, files: Mapping[str, bytes]) -> Path:
    """Pack files into `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb", compresslevel=1) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def write_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write files below `path`."""
    for name, raw in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(raw)
    return path
