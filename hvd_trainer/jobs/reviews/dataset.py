"""Load the texts of the second job: 50,000 movie reviews from IMDB, or tokens drawn at random to measure speed.

One rank per node downloads the archive if need be, and makes tokens of it if the cache has none; all ranks read
the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hvd_trainer.backends import Backend
from hvd_trainer.data.dataset import TensorData
from hvd_trainer.data.per_node import SharedDataError, next_call, once_per_node, participants
from hvd_trainer.errors import DataError
from hvd_trainer.jobs.download import SILENCE_S, downloading
from hvd_trainer.jobs.options import TextOptions
from hvd_trainer.jobs.reviews import archive
from hvd_trainer.jobs.reviews import tokenizer as imdb_tokens
from hvd_trainer.jobs.reviews.archive import ARCHIVE, REVIEWS_PER_SPLIT, SPLITS
from hvd_trainer.jobs.reviews.tokenizer import Tokens
from hvd_trainer.utils.files import default_data_dir

URL = f"https://ai.stanford.edu/~amaas/data/sentiment/{ARCHIVE}"
MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
PREPARE_S = 1200.0
"""Time for 84 MB to be downloaded and made into tokens, while other ranks wait."""
HOW = (
    f"To get it, type on a machine with internet: curl -O {URL} and then pass the file here: "
    f"--data-dir {ARCHIVE}. Or train on tokens drawn at random: --dataset synthetic"
)


@dataclass(frozen=True)
class Texts:
    """A training and a test set of token ids and labels (0 negative, 1 positive)."""

    train: TensorData
    test: TensorData
    note: str | None = None
    """A line about the reviews for the user; None if there is none."""
    tokenizer: str | None = None
    """The tokenizer that made the ids, as `tokenizers.Tokenizer.from_str` takes it."""


class Ids:
    """Convert compact ids to the int64 that an embedding takes."""

    deterministic = True

    def __call__(self, ids: Tensor) -> Tensor:
        return ids.long()


def load_texts(
    options: TextOptions,
    backend: Backend,
    *,
    vocabulary: int,
    sequence_length: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Texts:
    """Load the data set that the options name, the same on all ranks; prepare it once per node.

    Args:
        vocabulary: how many ids there are; 0 is padding.
        sequence_length: ids per text; inputs are (num_texts, sequence_length).
        say: called with a line about each step that takes time.

    Raises:
        DataError: the reviews are not there, not whole, or cannot be downloaded; or the cache cannot be used.
    """
    if options.dataset == "synthetic":
        return synthetic(options.synthetic_reviews, vocabulary, sequence_length, seed)
    place = Path(options.data_dir).expanduser() if options.data_dir else default_data_dir()
    tokens = _load_tokens(place, backend, vocabulary, sequence_length, say)
    train, test = (TensorData(tokens.ids[split], tokens.labels[split].long(), Ids(), "IMDB") for split in SPLITS)
    return Texts(train, test, _note(tokens), tokens.tokenizer)


def _load_tokens(
    place: Path, backend: Backend, vocabulary: int, sequence_length: int, say: Callable[[str], None]
) -> Tokens:
    """Make tokens of the reviews on one rank of each node, and read them on all. A collective."""
    node, call = backend.session.peers[backend.world.rank].node, next_call(backend, "imdb")

    def prepare() -> None:
        fetch(place)
        file = prepare_tokens(archive.find(place), vocabulary, sequence_length, say)
        tokens = hashlib.sha256(file.read_bytes()).hexdigest()
        backend.session.store.set(f"{call}.{node}", json.dumps({"file": str(file), "tokens": tokens}))

    trouble = once_per_node(backend, prepare, timeout_s=PREPARE_S)
    if trouble:
        raise SharedDataError(trouble[0])
    nodes = dict.fromkeys(participants(backend).values())
    kept = {name: json.loads(backend.session.store.get(f"{call}.{name}")) for name in nodes}
    if len({entry["tokens"] for entry in kept.values()}) > 1:
        raise SharedDataError(
            f"Nodes have different reviews, or made different tokens of them: {', '.join(kept)}. Give all of them "
            f"the same {ARCHIVE}, and the same versions of the packages tokenizers and safetensors."
        )
    return imdb_tokens.load(Path(kept[node]["file"]))


def fetch(place: Path) -> None:
    """Download the archive into the folder `place`, unless the reviews are there.

    Raises:
        DataError: it cannot be downloaded, or not be written there.
    """
    if place.suffix in (".gz", ".tgz") and not place.exists():
        raise DataError(f"there is no file {place}. {HOW}")
    try:
        archive.find(place)
    except DataError as missing:
        import pooch  # takes 0.3 s, and few starts download anything

        pooch.get_logger().setLevel(logging.WARNING)
        downloader = pooch.HTTPDownloader(timeout=SILENCE_S)
        try:
            with downloading(URL):
                pooch.retrieve(URL, f"md5:{MD5}", ARCHIVE, place, downloader=downloader)
        except DataError as error:
            raise DataError(f"{missing}, and {error}. {HOW}") from error


def prepare_tokens(source: Path, vocabulary: int, sequence_length: int, say: Callable[[str], None]) -> Path:
    """Return the cache's file with the tokens of the reviews in `source`; make it, unless it is there and whole.

    Raises:
        DataError: the reviews cannot be read, or the cache cannot be written.
    """
    name = f"imdb-{archive.version(source)}-v{imdb_tokens.FORMAT}-{vocabulary}-{sequence_length}.safetensors"
    file = default_data_dir() / name
    if file.exists():
        try:
            imdb_tokens.load(file)
            return file
        except DataError as error:
            say(f"imdb: {error}, and is made again")
    say(f"imdb: makes tokens of {source}, which takes a minute, and keeps them in {file}")
    imdb_tokens.save(imdb_tokens.encode(archive.read(source), vocabulary, sequence_length), file)
    return file


def _note(tokens: Tokens) -> str:
    """Return `imdb: 25,000 + 25,000 reviews; 2 not UTF-8 (read with replacements), 3,210 cut to 256 tokens`."""
    sizes = [len(tokens.labels[split]) for split in SPLITS]
    note = f"imdb: {' + '.join(f'{size:,}' for size in sizes)} reviews"
    if sizes != [REVIEWS_PER_SPLIT] * len(SPLITS):
        note += f" (all would be {REVIEWS_PER_SPLIT:,} + {REVIEWS_PER_SPLIT:,})"
    counts = ", ".join(f"{count:,} {words}" for words, count in tokens.counts.items() if count)
    return f"{note}; {counts}" if counts else note


def synthetic(count: int, vocabulary: int, sequence_length: int, seed: int) -> Texts:
    """Draw full-length texts of tokens, and labels, at random: the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    dtype = imdb_tokens.ids_type(vocabulary)

    def draw(size: int) -> TensorData:
        shape = (size, sequence_length)
        ids = torch.randint(1, vocabulary, shape, generator=generator, dtype=dtype)
        labels = torch.randint(2, (size,), generator=generator)
        return TensorData(ids, labels, Ids(), "synthetic")

    return Texts(draw(count), draw(max(1, count // 10)))
