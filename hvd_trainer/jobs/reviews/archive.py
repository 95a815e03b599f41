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
REVIEW_NAME = re.compile(r"\d+_\d+\.txt")
MARKUP = re.compile(r"(<br\s*/?>\s*)+")
"""The only markup in the reviews: ends of lines."""
MAX_REVIEW_BYTES = 2**20
"""Of a file in a folder, the beginning of which is read; the longest review has 14 kB."""

Files = Iterator[tuple[str, bytes | None]]
"""Names from the split on (`train/pos/0_9.txt`) and contents; None for a file that is no review by its name."""


@dataclass
class Reviews:
    """All reviews by split, in an order that does not depend on the archive's."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    labels: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    counts: Counter[str] = field(default_factory=Counter)
    """how many were not_utf8 (read with replacement characters), empty, or strange: files among the reviews that
    are none by their name or kind; the last two are left out"""


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
    """Return the MD5 of the archive, or the SHA-256 of all reviews in the folder and their names, in hex.

    Raises:
        DataError: it cannot be read, or it is an archive and not the official one.
    """
    sha = hashlib.sha256()
    try:
        if source.is_dir():
            for name, raw in sorted(_in_folder(source)):
                sha.update(f"{name} {len(raw or b'')}\n".encode(errors="surrogateescape") + (raw or b""))
            return sha.hexdigest()
        import pooch  # takes 0.3 s, and a folder is read without it

        found: str = pooch.file_hash(source, alg="md5")
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    if found != MD5:
        raise DataError(
            f"{source} has the MD5 {found}, and the official archive {MD5}: it is damaged or cut short, or "
            f"another one. Delete it and download it again; or unpack it and pass the folder: --data-dir {FOLDER}"
        )
    return found


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
        _add(reviews, name, raw)
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


def _add(reviews: Reviews, name: str, raw: bytes | None) -> None:
    """Add one review, or count why it is none."""
    if raw is None:
        reviews.counts["strange"] += 1
        return
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("utf-8", errors="replace")
        reviews.counts["not_utf8"] += 1
    if not MARKUP.sub("", text).strip():
        reviews.counts["empty"] += 1
        return
    split, label, _ = name.split("/")
    reviews.texts[split].append(text)
    reviews.labels[split].append(LABELS.index(label))


def _in_folder(folder: Path) -> Files:
    for split in SPLITS:
        for label in LABELS:
            place = folder / split / label
            for file in place.iterdir() if place.is_dir() else ():
                content = None
                if REVIEW_NAME.fullmatch(file.name) and file.is_file():
                    with file.open("rb") as opened:
                        content = opened.read(MAX_REVIEW_BYTES)
                yield f"{split}/{label}/{file.name}", content


def _in_archive(archive: Path) -> Files:
    # As a stream: going back would mean to decompress from the beginning again.
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            folder, _, name = member.name.partition("/")
            split, label, file = [*name.split("/"), "", ""][:3]
            if folder == FOLDER and split in SPLITS and label in LABELS and REVIEW_NAME.fullmatch(file):
                opened = tar.extractfile(member)
                assert opened is not None
                yield name, opened.read()
