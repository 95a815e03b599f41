"""Make ids of the reviews, and keep them in a cache: to train a tokenizer and to encode takes a minute.

The tokenizer is trained on the training reviews alone. A review that is longer than the sequence keeps its
beginning and, three times as long, its end, where the verdict stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hvd_trainer.errors import DataError
from hvd_trainer.jobs.reviews.archive import MARKUP, SPLITS, Reviews
from hvd_trainer.utils.files import UNREADABLE, atomic_write
from hvd_trainer.utils.text import install_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 3
"""Version of the cache: raise it when other ids are made of the same reviews, or its file has another form."""
PAD = "[PAD]"
"""The name of id 0: no token."""
ENCODE_BATCH = 1000


@dataclass(frozen=True)
class Tokens:
    """The ids and labels of both splits."""

    ids: Mapping[str, Tensor]
    """by split: int16 where the vocabulary allows it, else int32, shape (num_reviews, sequence_length)"""
    labels: Mapping[str, Tensor]
    """by split: uint8, shape (num_reviews,)"""
    counts: Mapping[str, int]
    """how many reviews were empty, not UTF-8, or cut, by these words"""
    tokenizer: str
    """its JSON, as `tokenizers.Tokenizer.from_str` takes it"""


def ids_type(vocabulary: int) -> torch.dtype:
    """Return the smallest type for ids below `vocabulary`."""
    return torch.int16 if vocabulary <= torch.iinfo(torch.int16).max else torch.int32


def encode(reviews: Reviews, vocabulary: int, sequence_length: int) -> Tokens:
    """Train a tokenizer on the training reviews, and make ids of all.

    Args:
        vocabulary: how many ids there are, at most; at least `MIN_VOCABULARY`.
        sequence_length: of every row: shorter reviews are filled up with 0.
    """
    tokenizer = _train_tokenizer(reviews.texts["train"], vocabulary)
    ids, cut = {}, 0
    for split in SPLITS:
        texts = reviews.texts[split]
        rows = torch.zeros(len(texts), sequence_length, dtype=ids_type(vocabulary))
        for row, parts in zip(rows.numpy(), _parts(tokenizer, texts), strict=True):
            if len(parts) > sequence_length:
                beginning = sequence_length // 4
                parts = parts[:beginning] + parts[beginning - sequence_length :]
                cut += 1
            row[: len(parts)] = parts
        ids[split] = rows
    labels = {split: torch.tensor(reviews.labels[split], dtype=torch.uint8) for split in SPLITS}
    counts = {**reviews.counts, f"cut to {sequence_length} tokens": cut}
    return Tokens(ids, labels, counts, tokenizer.to_str())


def _train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train byte-pair encoding: it is the same in any run, and has ids for all letters of any text.

    The library's trainer of word pieces numbers the letters inside of words in random order, and these numbers
    decide between pairs that are equally frequent.
    """
    # Imported here: a start from the cache does without.
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    except ImportError as error:
        raise DataError(
            f"the package tokenizers makes the tokens ({error}). Type: {install_extra('imdb')}"
        ) from error

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(MARKUP.pattern), " "), normalizers.NFC(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A review may contain the letters [PAD].
    tokenizer.encode_special_tokens = True
    return tokenizer


def _parts(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    for start in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.encode_batch(texts[start : start + ENCODE_BATCH]):
            yield encoding.ids


# The cache.


def save(tokens: Tokens, file: Path) -> None:
    """Write the cache, whole or not at all.

    Raises:
        DataError: it cannot be written.
    """
    tensors = {f"{split}.ids": tokens.ids[split] for split in SPLITS}
    tensors |= {f"{split}.labels": tokens.labels[split] for split in SPLITS}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Nodes that share the folder may write at the same time.
        with atomic_write(file) as temporary:
            # One entry: safetensors writes several in random order, and nodes compare their files' hashes.
            facts = json.dumps({"tokenizer": tokens.tokenizer, "counts": tokens.counts})
            save_file(tensors, temporary, {"facts": facts})
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"The tokens cannot be kept in {file.parent}: {error}. Name a folder with space for them: "
            f"export XDG_CACHE_HOME=/path"
        ) from error


def load(file: Path) -> Tokens:
    """Read the cache.

    Raises:
        DataError: it is not there, or damaged.
    """
    try:
        with safe_open(file, "pt") as opened:
            # Copied: the pages of a mapped file that is cut short meanwhile would end the process.
            ids, labels = (
                {split: opened.get_tensor(f"{split}.{kind}").clone() for split in SPLITS}
                for kind in ("ids", "labels")
            )
            facts = json.loads(opened.metadata()["facts"])
        return Tokens(ids, labels, **facts)
    except (*UNREADABLE, SafetensorError) as error:
        raise DataError(f"{file} is damaged: {error}") from error
