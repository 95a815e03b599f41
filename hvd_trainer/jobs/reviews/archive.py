"""Read the reviews of the Large Movie Review Dataset v1.0 from its archive, or from its folder.

    aclImdb/train/pos/0_9.txt      split, label, number and stars; 12,500 of each split and label
    aclImdb/train/unsup/, ...      unlabelled reviews and lists of words: not read

The archive is read without being unpacked.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hvd_trainer.errors import DataError, first_line

ARCHIVE, FOLDER = "aclImdb_v1.tar.gz", "aclImdb"
SPLITS, LABELS = ("train", "test"), ("neg", "pos")
"""The number of a label is its place."""
REVIEWS_PER_SPLIT = 25_000
REVIEW = re.compile(rf"(?:\./)?(?:{FOLDER}/)?((?:{'|'.join(SPLITS)})/(?:{'|'.join(LABELS)})/\d+_\d+\.txt)")
MARKUP = re.compile(r"(<br\s*/?>\s*)+")
"""The only markup in the reviews: ends of lines."""
MAX_REVIEW_BYTES = 2**20
"""The longest has 14 kB."""
MAX_UNPACKED_BYTES = 2**30
"""The published archive has a third of it; a small file can unpack to more than there is memory."""


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


def version(source: Path) -> str:
    """Return a hash of the names, sizes and times of the archive, or of all reviews in the folder.

    Raises:
        OSError: they cannot be read.
    """
    files = _in_folder(source) if source.is_dir() else [(source.name, source)]
    stats = ((name, path.stat()) for name, path in sorted(files))
    text = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(source: Path) -> Reviews:
    """Read all reviews of what `find` has found.

    Raises:
        DataError: it cannot be read, or a split or label has no review.
    """
    try:
        if source.is_dir():
            files = [(name, path.read_bytes()) for name, path in _in_folder(source)]
        else:
            files = list(_in_archive(source))
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(
            f"{source} cannot be read ({first_line(error)}): it is damaged or cut short. Delete it and download "
            f"it again."
        ) from error
    reviews = Reviews()
    for name, raw in sorted(files):
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


def _in_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each review's name from the split on (`train/pos/0_9.txt`), and its file."""
    for file in folder.glob("*/*/*.txt"):
        name = file.relative_to(folder).as_posix()
        if REVIEW.fullmatch(name) and file.is_file():
            yield name, file


class _Unpacked(gzip.GzipFile):
    """The decompressed archive; reading more than the limit raises DataError."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() + max(size or 0, 0) > MAX_UNPACKED_BYTES:
            raise DataError(
                f"{self.name} unpacks to more than {MAX_UNPACKED_BYTES:,} bytes, so it is not {ARCHIVE}. "
                f"Delete it and download it again."
            )
        return super().read(size)


def _in_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each review's name from the split on, and its content.

    Links and sparse files are left out: they can be much longer than what the archive has of them.
    """
    with _Unpacked(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
        for member in tar:
            match = REVIEW.fullmatch(member.name)
            is_plain = member.isreg() and not member.issparse() and member.size <= MAX_REVIEW_BYTES
            if match and is_plain and (file := tar.extractfile(member)):
                yield match[1], file.read()
        while unpacked.read(2**20):  # until its checksum
            pass
