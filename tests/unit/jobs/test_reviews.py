"""IMDB's reviews: the archive and its folder, tokens, and their cache."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from hashlib import md5
from pathlib import Path

import fake_imdb
import pytest
import torch
from http_server import serving

from hvd_trainer.backends import Backend
from hvd_trainer.data import LoaderPlan, make_loader
from hvd_trainer.errors import DataError
from hvd_trainer.jobs import download
from hvd_trainer.jobs.options import MIN_VOCABULARY, TextOptions
from hvd_trainer.jobs.reviews import archive as imdb_archive
from hvd_trainer.jobs.reviews import dataset as imdb_module
from hvd_trainer.jobs.reviews import tokenizer as imdb_tokens
from hvd_trainer.jobs.reviews.dataset import Texts, load_texts
from hvd_trainer.jobs.transformer import PADDING

VOCABULARY, LENGTH = 300, 16


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hvd_trainer/data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fake_imdb.write_folder(tmp_path / "unpacked", fake_imdb.reviews()) / imdb_archive.FOLDER


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return fake_imdb.write_archive(tmp_path / "here" / imdb_archive.ARCHIVE, fake_imdb.reviews())


def load(backend: Backend, place: Path, said: list[str] | None = None, length: int = LENGTH) -> Texts:
    return load_texts(
        TextOptions(data_dir=str(place)),
        backend,
        vocabulary=VOCABULARY,
        sequence_length=length,
        say=[].append if said is None else said.append,
    )


def test_archive_and_folder_are_read_alike(folder: Path, archive: Path) -> None:
    for place in (archive, archive.parent, folder, folder.parent):
        reviews = imdb_archive.read(imdb_archive.find(place))
        assert reviews == imdb_archive.read(archive)
    assert len(reviews.texts["train"]) == len(reviews.texts["test"]) == 2 * fake_imdb.EACH
    for text, label in zip(reviews.texts["test"], reviews.labels["test"], strict=True):
        assert any(word in text for word in fake_imdb.WORDS[imdb_archive.LABELS[label]])
    before = imdb_archive.version(folder)
    assert before == imdb_archive.version(folder)
    (folder / "test/neg/0_2.txt").write_text("Another word.")
    assert imdb_archive.version(folder) != before


def test_malformed_reviews_are_counted(folder: Path, cache: Path, lone_backend: Backend) -> None:
    files = {
        "train/pos/100_9.txt": "Beyonc\xe9, d\xe9j\xe0 vu".encode("latin-1"),
        "train/pos/101_9.txt": b"",
        "test/neg/102_1.txt": b" <br /><br/>\n",
        "test/neg/103_1.txt": b"word " * 100_000,
        "test/neg/notes.txt": b"not a review",
        "train/pos/._0_9.txt": b"\0\5\x16\7",
        "train/neg/200_1.txt/a_folder": b"",
        "train/unsup/0_0.txt": b"not labelled",
        "imdb.vocab": b"the\nand\n",
    }
    fake_imdb.write_folder(folder, files)
    os.mkfifo(folder / "train/neg/202_1.txt")
    reviews = imdb_archive.read(folder)
    assert reviews.counts == {"not UTF-8 (read with replacements)": 1, "empty (left out)": 2}
    assert any(text.startswith("Beyonc\ufffd") for text in reviews.texts["train"])
    assert load(lone_backend, folder, length=64).note == (
        "imdb: 25 + 25 reviews (all would be 25,000 + 25,000); 2 empty (left out), "
        "1 not UTF-8 (read with replacements), 1 cut to 64 tokens"
    )


@pytest.mark.parametrize("prefix", ["", "./"])
def test_archive_reads_reviews_only(prefix: str, tmp_path: Path, archive: Path) -> None:
    """The official archive has unlabelled reviews and lists of words, too; `tar czf x ./aclImdb` packs a dot."""
    more = {
        "aclImdb/train/unsup/0_0.txt": b"not labelled",
        "aclImdb/imdb.vocab": b"the\nand\n",
        "aclImdb/train/": b"",
        "aclImdb/train/pos/100_9.txt": bytes(imdb_archive.MAX_REVIEW_BYTES + 1),
    }
    files = {f"{prefix}{name}": raw for name, raw in (fake_imdb.reviews() | more).items()}
    place = fake_imdb.write_archive(tmp_path / "a.tar.gz", files)
    assert imdb_archive.read(place) == imdb_archive.read(archive)


@pytest.mark.parametrize("target", ["large", "nowhere"])
def test_link_in_the_archive_is_no_review(target: str, tmp_path: Path, archive: Path) -> None:
    """A hard link has no size of its own, and its target was read whole; one to nothing was a KeyError."""
    linked = tmp_path / "linked.tar.gz"
    with tarfile.open(archive) as tar, tarfile.open(linked, "w:gz") as copy:
        for member in tar:
            copy.addfile(member, tar.extractfile(member))
        large, link = tarfile.TarInfo("large"), tarfile.TarInfo("aclImdb/train/pos/100_9.txt")
        large.size = imdb_archive.MAX_REVIEW_BYTES + 1
        copy.addfile(large, io.BytesIO(b"x" * large.size))
        link.type, link.linkname = tarfile.LNKTYPE, target
        copy.addfile(link)
    assert imdb_archive.read(linked) == imdb_archive.read(archive)


@pytest.mark.parametrize("name", ["aclImdb/train/pos/100_9.txt", "a" * 200_000])
def test_archive_that_unpacks_to_too_much_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By reviews or by what tar itself reads, such as a name: memory would not be enough."""
    monkeypatch.setattr(imdb_archive, "MAX_UNPACKED_BYTES", 100_000)
    files = fake_imdb.reviews() | {name: b"word " * 30_000}
    place = fake_imdb.write_archive(tmp_path / "a.tar.gz", files)
    with pytest.raises(DataError, match=f"{place} unpacks to more than 100,000 bytes.*Delete it"):
        imdb_archive.read(place)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "checksum", "text"])
def test_damaged_archive_is_refused(damage: str, archive: Path, cache: Path, lone_backend: Backend) -> None:
    whole = bytearray(archive.read_bytes())
    damaged = {"cut": whole[:-1], "empty": b"", "text": b"<html>not found</html>"}.get(damage, whole)
    if damaged is whole:
        whole[-6 if damage == "checksum" else len(whole) // 2] ^= 0xFF
    archive.write_bytes(damaged)
    with pytest.raises(DataError) as caught:
        load(lone_backend, archive.parent)
    assert "\n" not in str(caught.value)
    for words in (str(archive), "damaged or cut short", "Delete it"):
        assert words in str(caught.value)


def test_reviews_are_downloaded_as_the_official_archive(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    with serving(archive.parent) as server:
        monkeypatch.setattr(imdb_module, "URL", f"{server}/{imdb_archive.ARCHIVE}")
        with pytest.raises(DataError, match="cannot be downloaded .*MD5 hash"):
            imdb_module.fetch(folder)
        assert not list(folder.iterdir())
        monkeypatch.setattr(imdb_module, "MD5", md5(archive.read_bytes()).hexdigest())
        imdb_module.fetch(folder)
    assert [file.name for file in folder.iterdir()] == [imdb_archive.ARCHIVE]
    assert imdb_archive.read(imdb_archive.find(folder)) == imdb_archive.read(archive)


def test_label_without_reviews_is_named(tmp_path: Path) -> None:
    files = {name: raw for name, raw in fake_imdb.reviews().items() if "test/pos" not in name}
    place = fake_imdb.write_folder(tmp_path, files) / imdb_archive.FOLDER
    with pytest.raises(DataError, match=r"no reviews in aclImdb/test/pos, but 36 in all.*train/pos/0_9\.txt"):
        imdb_archive.read(place)


def test_missing_reviews_name_what_to_type(
    tmp_path: Path, cache: Path, lone_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imdb_module, "URL", "http://localhost:9/a.tar.gz")
    with pytest.raises(DataError) as caught:
        load(lone_backend, tmp_path / "nowhere")
    for words in ("nowhere", "cannot be downloaded", "refused", "curl -O https://", "--data-dir acl", "synthetic"):
        assert words in str(caught.value)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(download.urllib.request, "urlopen", lambda *args, **options: io.BytesIO())
    with pytest.raises(DataError, match=r"cannot be downloaded \(.*Not a directory"):
        load(lone_backend, tmp_path / "file" / "folder")
    with pytest.raises(DataError, match="there is no file"):
        load(lone_backend, tmp_path / "no.tar.gz")


# Tokens and their cache.


def test_tokenizer_is_trained_on_training_reviews_only(folder: Path) -> None:
    reviews = imdb_archive.read(folder)
    tokens = imdb_tokens.encode(reviews, VOCABULARY, LENGTH)
    pieces = json.loads(tokens.tokenizer)["model"]["vocab"]
    assert pieces[imdb_tokens.PAD] == PADDING
    assert {"train", "test"} & {name.strip("\u0120") for name in pieces} == {"train"}
    assert len(pieces) <= VOCABULARY
    # The same in any process, or nodes with caches of their own would train on different tokens.
    second = imdb_tokens.encode(reviews, VOCABULARY, LENGTH)
    for file, made in ((folder / "one", tokens), (folder / "two", second)):
        imdb_tokens.save(made, file)
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()


def test_token_ids_are_compact_padded_and_keep_both_ends(archive: Path) -> None:
    from tokenizers import Tokenizer

    reviews = imdb_archive.read(archive)
    tokens = imdb_tokens.encode(reviews, VOCABULARY, LENGTH)
    tokenizer = Tokenizer.from_str(tokens.tokenizer)
    assert tokenizer.encode("WONDERFUL<br />film").ids == tokenizer.encode("wonderful film").ids
    assert tokenizer.decode(tokenizer.encode("Caf\xe9 \u4e16").ids) == " caf\xe9 \u4e16"
    assert tokens.ids["train"].dtype == torch.int16
    assert tokens.counts[f"cut to {LENGTH} tokens"] == len(reviews.texts["train"]) + len(reviews.texts["test"])
    for text, row in zip(reviews.texts["test"], tokens.ids["test"].tolist(), strict=True):
        whole = tokenizer.encode(text).ids
        assert row == whole[: LENGTH // 4] + whole[-LENGTH * 3 // 4 :]
    long = imdb_tokens.encode(reviews, 40_000, 400)
    assert long.ids["train"].dtype == torch.int32
    assert long.counts["cut to 400 tokens"] == 0
    for text, row in zip(reviews.texts["train"], long.ids["train"].tolist(), strict=True):
        whole = Tokenizer.from_str(long.tokenizer).encode(text).ids
        assert row == whole + [PADDING] * (400 - len(whole))


def test_tokenizer_accepts_any_letters(tmp_path: Path) -> None:
    odd = {name: "[PAD] \0\t\x7f \u4e16\u754c \U0001f600 e\u0301 [PAD]".encode() for name in fake_imdb.reviews()}
    reviews = imdb_archive.read(fake_imdb.write_folder(tmp_path, odd) / imdb_archive.FOLDER)
    tokens = imdb_tokens.encode(reviews, MIN_VOCABULARY, LENGTH)
    assert int(tokens.ids["test"].min()) > PADDING
    assert int(tokens.ids["test"].max()) < MIN_VOCABULARY


def test_second_start_reads_the_cache(
    folder: Path, cache: Path, lone_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does without the package tokenizers, which is in the extra [imdb]."""
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(DataError, match=r"package tokenizers .*Type: pip install .*\[imdb\]'"):
            load(lone_backend, folder)
    first = load(lone_backend, folder, said)
    (file,) = cache.iterdir()
    (text,) = said
    assert f"keeps them in {file}" in text
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    second = load(lone_backend, folder.parent, said)
    assert len(said) == 1
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert torch.equal(first.test.targets, second.test.targets)
    assert (first.note, first.tokenizer) == (second.note, second.tokenizer)


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_damaged_cache_is_rebuilt(damage: str, folder: Path, cache: Path, lone_backend: Backend) -> None:
    first = load(lone_backend, folder)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"PK\3\4 something else")
    said: list[str] = []
    second = load(lone_backend, folder, said)
    assert "is damaged" in said[0]
    assert "is made again" in said[0]
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert [entry.name for entry in cache.iterdir()] == [file.name]


def test_cache_depends_on_sizes_and_reviews(
    tmp_path: Path, folder: Path, cache: Path, lone_backend: Backend
) -> None:
    load(lone_backend, folder)
    assert load(lone_backend, folder, length=20).train.inputs.shape[1] == 20
    load(lone_backend, fake_imdb.write_folder(tmp_path / "more", fake_imdb.reviews(13)))
    assert len(list(cache.iterdir())) == 3


def test_unwritable_cache_names_another_place(
    tmp_path: Path, folder: Path, lone_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot be kept in .*export XDG_CACHE_HOME=/path"):
        load(lone_backend, folder)


def test_batches_fit_an_embedding(folder: Path, cache: Path, lone_backend: Backend) -> None:
    texts = load(lone_backend, folder)
    for workers in (None, 1):
        loader = make_loader(texts.train, lone_backend, LoaderPlan(10, num_workers=workers))
        ids, labels = next(iter(loader.epoch(0)))
        assert (ids.shape, ids.dtype, labels.dtype) == ((10, LENGTH), torch.int64, torch.int64)
    assert sorted(texts.train.targets.tolist()) == [0] * fake_imdb.EACH + [1] * fake_imdb.EACH


def test_synthetic_tokens_depend_on_the_seed_alone() -> None:
    one, same, other = (imdb_module.synthetic(30, VOCABULARY, LENGTH, seed) for seed in (1, 1, 2))
    assert torch.equal(one.train.inputs, same.train.inputs)
    assert torch.equal(one.test.targets, same.test.targets)
    assert not torch.equal(one.train.inputs, other.train.inputs)
    assert (len(one.train), len(one.test), one.note, one.tokenizer) == (30, 3, None, None)
    assert one.train.inputs.dtype == torch.int16
    assert int(one.train.inputs.min()) >= 1
    assert int(one.train.inputs.max()) < VOCABULARY
