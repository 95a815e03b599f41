"""Read the reviews of the Large Movie Review Dataset v1.0 from its official archive, or from its folder.

    aclImdb/train/pos/0_9.txt      split, label, number and stars; 12,500 of each split and label
    aclImdb/train/unsup/, ...      unlabelled reviews and lists of words: not read

The archive is read without being unpacked, and only if its MD5 is the official one: so no limits are needed for
what could be in it.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hvd_trainer.errors import DataError

ARCHIVE, FOLDER = "aclImdb_v1.tar.gz", "aclImdb"
MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
"""Of the archive."""
SPLITS, LABELS = ("train", "test"), ("neg", "pos")
"""The number of a label is its place."""
REVIEWS_PER_SPLIT = 25_000
REVIEW = re.compile(rf"(?:{FOLDER}/)?((?:{'|'.join(SPLITS)})/(?:{'|'.join(LABELS)})/\d+_\d+\.txt)")
MARKUP = re.compile(r"(<br\s*/?>\s*)+")
"""The only markup in the reviews: ends of lines."""


@dataclass
class Reviews:
    """All reviews by split, in an order that does not depend on the archive's."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    labels: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    counts: Counter[str] = field(default_factory=Counter)
    """how many were not UTF-8, or empty, by these words"""


def find(place: Path) -> Path:
    """Return the archive, or the folder with `train` and `test`, that `place` is or holds.

    Raises:
        DataError: it is and holds neither.
    """
    for archive in (place, place / ARCHIVE):
        if archive.is_file():
            return archive
    for folder in (place / FOLDER, place):
        if all((folder / split).is_dir() for split in SPLITS):
            return folder
    raise DataError(f"there is no {ARCHIVE} and no {FOLDER}/ with train/ and test/ in {place}")


def digest(source: Path) -> str:
    """Return the MD5 of the archive, or of all reviews in the folder and their names.

    Raises:
        DataError: it cannot be read, or it is an archive and not the official one.
    """
    md5 = hashlib.md5(usedforsecurity=False)
    try:
        if source.is_dir():
            for name, raw in sorted(_in_folder(source)):
                md5.update(f"{name} {len(raw)}\n".encode() + raw)
            return md5.hexdigest()
        with source.open("rb") as file:
            while block := file.read(2**20):
                md5.update(block)
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    if md5.hexdigest() != MD5:
        raise DataError(
            f"{source} has the MD5 {md5.hexdigest()}, and the official archive {MD5}: it is damaged or cut short, "
            f"or another one. Delete it and download it again; or unpack it and pass the folder: "
            f"--data-dir {FOLDER}"
        )
    return MD5


def read(source: Path) -> Reviews:
    """Read all reviews of what `find` has found and `digest` has accepted.

    Raises:
        DataError: it cannot be read, or a split or label has no review.
    """
    reviews = Reviews()
    try:
        files = sorted(_in_folder(source) if source.is_dir() else _in_archive(source))
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    for name, raw in files:
        text = raw.decode("utf-8", errors="replace")
        if not MARKUP.sub("", text).strip():
            reviews.counts["empty (left out)"] += 1
            continue
        if text.encode() != raw:
            reviews.counts["not UTF-8 (read with replacements)"] += 1
        split, label, _ = name.split("/")
        reviews.texts[split].append(text)
        reviews.labels[split].append(LABELS.index(label))
    missing = [
        f"{FOLDER}/{split}/{label}"
        for split in SPLITS
        for number, label in enumerate(LABELS)
        if number not in reviews.labels[split]
    ]
    if missing:
        total = sum(map(len, reviews.texts.values()))
        raise DataError(
            f"{source} has no reviews in {', '.join(missing)}, but {total:,} in all. Its files should be "
            f"called such as {FOLDER}/train/pos/0_9.txt: download it again."
        )
    return reviews


def _in_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each review's name from the split on (`train/pos/0_9.txt`), and its content."""
    for file in folder.glob("*/*/*.txt"):
        name = file.relative_to(folder).as_posix()
        if REVIEW.fullmatch(name) and file.is_file():
            yield name, file.read_bytes()


def _in_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    # As a stream: going back would mean to decompress from the beginning again.
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            if (match := REVIEW.fullmatch(member.name)) and (file := tar.extractfile(member)):
                yield match[1], file.read()
