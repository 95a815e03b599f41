"""The reviews of the Large Movie Review Dataset v1.0, from its official archive or the folder that it unpacks to.

    aclImdb/train/pos/0_9.txt      split, label, number and stars; 12,500 of each split and label
    aclImdb/train/unsup/, ...      what is not labelled, and lists of words: not read

The archive is never unpacked. Its files are read into memory, so that no name and no link in it can lead anywhere.
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
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from hvd_trainer.errors import DataError

ARCHIVE, FOLDER = "aclImdb_v1.tar.gz", "aclImdb"
SPLITS, LABELS = ("train", "test"), ("neg", "pos")
"""The number of a label is its place."""
WHOLE = 25_000
"""Reviews in each split of the official archive."""
REVIEW_NAME = re.compile(r"\d+_\d+\.txt")
MARKUP = re.compile(r"(<br\s*/?>\s*)+")
"""The only markup in the reviews: ends of lines."""
MOST_BYTES = 2**20
"""Of one review; the longest has 14 kB."""
MOST_TEXT_BYTES = 2**29
"""Of all reviews; the official ones have 66 MB."""
MOST_FILES = 250_000
"""In the archive, or the folders of reviews; officially 100,026."""
MOST_UNPACKED_BYTES, MOST_AT_ONCE_BYTES = 2**30, 2**27
"""Of the archive, and of one file in it with its headers, which are read into memory; officially 300 and 42 MB."""
BLOCK_BYTES = 2**20


Files = Iterator[tuple[str, bytes | None]]
"""Names from the split on (`train/pos/0_9.txt`) and contents; None for a file that is not read."""


@dataclass
class Split:
    """The texts of one split and their labels, in one order whatever the archive's."""

    texts: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


@dataclass
class Reviews:
    """All reviews, and what was wrong with some."""

    train: Split = field(default_factory=Split)
    test: Split = field(default_factory=Split)
    not_utf8: int = 0
    """read with replacement characters"""
    empty: int = 0
    """left out"""
    strange: int = 0
    """files among the reviews that are none by their name or kind, and names that lead out: left out"""


def find(place: Path) -> Path:
    """The archive, or the folder with `train` and `test`, that `place` is or holds.

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
    """The SHA-256 of the archive's bytes, or of all reviews in the folder and their names.

    Raises:
        DataError: it cannot be read.
    """
    sha = hashlib.sha256()
    try:
        if source.is_dir():
            for name, raw in sorted(_in_folder(source)):
                sha.update(f"{name} {len(raw or b'')}\n".encode(errors="surrogateescape") + (raw or b""))
        else:
            with source.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    sha.update(block)
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    return sha.hexdigest()


def read(source: Path) -> Reviews:
    """Reads all reviews of what `find` has found.

    Raises:
        DataError: the archive is damaged or cut short, or a split or label has no review.
    """
    reviews, seen = Reviews(), Counter[tuple[str, str]]()
    try:
        files = _limited(_in_folder(source) if source.is_dir() else _in_archive(source))
    except TooMuchError as error:
        raise DataError(f"{source} {error}, and is not read. Delete it and download it again.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{source} is damaged or cut short: {error}. Delete it and download it again.") from error
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    for name, raw in sorted(files.items()):
        if raw is None:
            reviews.strange += 1
            continue
        split, label, _ = name.split("/")
        seen[split, label] += _add(reviews, split, label, raw)
    missing = [f"{FOLDER}/{split}/{label}" for split in SPLITS for label in LABELS if not seen[split, label]]
    if missing:
        raise DataError(
            f"{source} has no reviews in {', '.join(missing)}, but {seen.total():,} in all. Its files should be "
            f"called such as {FOLDER}/train/pos/0_9.txt: download it again."
        )
    return reviews


class TooMuchError(Exception):
    """There is far more than in the official archive: it may be made to fill the memory."""


class Unpacking:
    """What is unpacked of an archive, up to a limit: a few megabytes may unpack to terabytes."""

    def __init__(self, unzipped: gzip.GzipFile) -> None:
        self._unzipped = unzipped
        self._left = MOST_UNPACKED_BYTES
        self.next_file()

    def next_file(self) -> None:
        self._left_at_once = MOST_AT_ONCE_BYTES

    def read(self, size: int) -> bytes:
        piece = self._unzipped.read(size)
        self._left -= len(piece)
        self._left_at_once -= len(piece)
        if min(self._left, self._left_at_once) < 0:
            raise TooMuchError("unpacks to far more than the reviews")
        return piece


def _limited(files: Files) -> dict[str, bytes | None]:
    """All of them; the last one counts where a name comes twice, as if it were unpacked."""
    found: dict[str, bytes | None] = {}
    size = 0
    for name, raw in files:
        found[name] = raw
        size += len(raw or b"")
        if size > MOST_TEXT_BYTES or len(found) > MOST_FILES:
            raise TooMuchError(f"has more than {MOST_TEXT_BYTES >> 20} MB of reviews, or {MOST_FILES:,} of them")
    return found


def _add(reviews: Reviews, split: str, label: str, raw: bytes) -> int:
    """Adds one review; returns how many were added."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("utf-8", errors="replace")
        reviews.not_utf8 += 1
    if not MARKUP.sub("", text).strip():
        reviews.empty += 1
        return 0
    chosen: Split = getattr(reviews, split)
    chosen.texts.append(text)
    chosen.labels.append(LABELS.index(label))
    return 1


def _in_folder(folder: Path) -> Files:
    for split in SPLITS:
        for label in LABELS:
            place = folder / split / label
            for file in sorted(place.iterdir()) if place.is_dir() else ():
                wanted = bool(REVIEW_NAME.fullmatch(file.name)) and file.is_file()
                yield f"{split}/{label}/{file.name}", _beginning(file) if wanted else None


def _beginning(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(MOST_BYTES)


def _in_archive(archive: Path) -> Files:
    with gzip.open(archive) as opened_archive:
        unzipped = Unpacking(opened_archive)
        # One after the other, as they come: going back would mean to decompress from the beginning again.
        with tarfile.open(fileobj=cast(BinaryIO, unzipped), mode="r|") as tar:
            for number, member in enumerate(tar):
                if number > MOST_FILES:
                    raise TooMuchError(f"has more than {MOST_FILES:,} files")
                unzipped.next_file()
                name = _from_split(member.name)
                if name is None or member.isdir():
                    continue
                opened = tar.extractfile(member) if _is_review(name) and member.isreg() else None
                yield name, None if opened is None else opened.read(MOST_BYTES)
        # The tar's own end is silent about what is cut off behind it; gzip's has a length and a sum.
        while unzipped.read(BLOCK_BYTES):
            unzipped.next_file()


def _from_split(name: str) -> str | None:
    """`aclImdb/train/pos/0_9.txt` from the split on; None outside the folders of reviews. A name that leads out of
    the archive stays as it is, which is no review's."""
    parts = PurePosixPath(name).parts
    if ".." in parts or name.startswith("/"):
        return name
    parts = parts[1:] if parts[:1] == (FOLDER,) else parts
    inside = len(parts) > 2 and parts[0] in SPLITS and parts[1] in LABELS
    return "/".join(parts) if inside else None


def _is_review(name: str) -> bool:
    split, _, rest = name.partition("/")
    label, _, file = rest.partition("/")
    return split in SPLITS and label in LABELS and REVIEW_NAME.fullmatch(file) is not None
