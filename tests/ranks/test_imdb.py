"""The IMDB job: its data, tokens and cache, its model, and runs of it on both engines."""

from __future__ import annotations

import http.server
import io
import json
import os
import pickle
import socket
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any

import fake_imdb
import pytest
import torch
import yaml
from launchers import QUICKEST, Result, launch, requires, run_ranks
from torch import nn

from hvd_trainer import backends, parse
from hvd_trainer.backends import Backend, EngineOptions
from hvd_trainer.config.rules import check
from hvd_trainer.data import LoaderPlan, make_loader
from hvd_trainer.errors import DataError, OptionError
from hvd_trainer.jobs import download
from hvd_trainer.jobs.options import MIN_VOCABULARY, PRESETS, ImdbOptions, TextModelOptions, TextOptions, TextSizes
from hvd_trainer.jobs.reviews import archive as imdb_archive
from hvd_trainer.jobs.reviews import dataset as imdb_module
from hvd_trainer.jobs.reviews import tokenizer as imdb_tokens
from hvd_trainer.jobs.reviews.dataset import Texts, load_texts
from hvd_trainer.jobs.transformer import PADDING, transformer

pytestmark = pytest.mark.warm

VOCABULARY, LENGTH = 300, 16
TINY = TextSizes(
    layers=2, d_model=8, heads=2, d_hid=12, dropout=0.0, sequence_length=LENGTH, vocabulary=VOCABULARY
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hvd_trainer/data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fake_imdb.write_folder(tmp_path / "unpacked", fake_imdb.reviews()) / imdb_archive.FOLDER


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an archive that counts as the official one; return its path."""
    file = fake_imdb.write_archive(tmp_path / "here" / imdb_archive.ARCHIVE, fake_imdb.reviews())
    monkeypatch.setattr(imdb_archive, "MD5", md5(file.read_bytes()).hexdigest())
    return file


@pytest.fixture
def alone() -> Iterator[Backend]:
    with backends.create(EngineOptions(backend="single")) as backend:
        yield backend


def load(backend: Backend, place: Path, said: list[str] | None = None, length: int = LENGTH) -> Texts:
    return load_texts(
        TextOptions(data_dir=str(place)),
        backend,
        vocabulary=VOCABULARY,
        sequence_length=length,
        say=[].append if said is None else said.append,
    )


# The archive.


def test_archive_and_folder_are_read_alike(folder: Path, archive: Path) -> None:
    for place in (archive, archive.parent, folder, folder.parent):
        source = imdb_archive.find(place)
        imdb_archive.digest(source)
        found = imdb_archive.read(source)
        assert found == imdb_archive.read(archive)
    assert len(found.texts["train"]) == len(found.texts["test"]) == 2 * fake_imdb.EACH
    for text, label in zip(found.texts["test"], found.labels["test"], strict=True):
        assert any(word in text for word in fake_imdb.WORDS[imdb_archive.LABELS[label]])
    before = imdb_archive.digest(folder)
    assert before == imdb_archive.digest(folder)
    (folder / "test/neg/0_2.txt").write_text("Another word.")
    assert imdb_archive.digest(folder) != before


def test_malformed_reviews_are_counted(folder: Path, cache: Path, alone: Backend) -> None:
    files = {
        "train/pos/100_9.txt": "Beyonc\xe9, d\xe9j\xe0 vu".encode("latin-1"),
        "train/pos/101_9.txt": b"",
        "test/neg/102_1.txt": b" <br /><br/>\n",
        "test/neg/103_1.txt": b"word " * 100_000,
        "test/neg/104_1.txt": b"endless" * 300_000,
        "test/neg/notes.txt": b"not a review",
        "train/pos/._0_9.txt": b"\0\5\x16\7",
        "train/neg/200_1.txt/a_folder": b"",
        "train/unsup/0_0.txt": b"not labelled",
        "imdb.vocab": b"the\nand\n",
    }
    fake_imdb.write_folder(folder, files)
    os.mkfifo(folder / "train/neg/202_1.txt")
    reviews = imdb_archive.read(folder)
    assert reviews.counts == {"not_utf8": 1, "empty": 2, "strange": 4}
    assert any(text.startswith("Beyonc\ufffd") for text in reviews.texts["train"])
    assert max(map(len, reviews.texts["test"])) == imdb_archive.MAX_REVIEW_BYTES
    assert load(alone, folder, length=64).note == (
        "imdb: 25 + 26 reviews (all would be 25,000 + 25,000); 1 not UTF-8 (read with replacements), "
        "2 empty (left out), 4 other files among them (left out; a review is called such as "
        "aclImdb/train/pos/0_9.txt), 2 cut to 64 tokens"
    )


def test_archive_reads_reviews_only(tmp_path: Path) -> None:
    """The official archive has unlabelled reviews and lists of words, too."""
    more = {
        "aclImdb/train/unsup/0_0.txt": b"not labelled",
        "aclImdb/imdb.vocab": b"the\nand\n",
        "aclImdb/train/": b"",
    }
    place = fake_imdb.write_archive(tmp_path / "a.tar.gz", fake_imdb.reviews() | more)
    assert imdb_archive.read(place) == imdb_archive.read(
        fake_imdb.write_archive(tmp_path / "b.tar.gz", fake_imdb.reviews())
    )


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other"])
def test_unofficial_archive_is_refused(damage: str, archive: Path, cache: Path, alone: Backend) -> None:
    """The archive is not even opened; what it unpacks to can be used as a folder."""
    whole = archive.read_bytes()
    middle = len(whole) // 2
    if damage == "other":
        fake_imdb.write_archive(archive, fake_imdb.reviews(13))
    else:
        flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
        archive.write_bytes({"cut": whole[:-1], "empty": b"", "flipped": flipped}[damage])
    with pytest.raises(DataError) as caught:
        load(alone, archive.parent)
    for words in (str(archive), imdb_archive.MD5, "damaged or cut short", "Delete it", "--data-dir aclImdb"):
        assert words in str(caught.value)


def test_label_without_reviews_is_named(tmp_path: Path) -> None:
    files = {name: raw for name, raw in fake_imdb.reviews().items() if "test/pos" not in name}
    place = fake_imdb.write_folder(tmp_path, files) / imdb_archive.FOLDER
    with pytest.raises(DataError, match=r"no reviews in aclImdb/test/pos, but 36 in all.*train/pos/0_9\.txt"):
        imdb_archive.read(place)


def test_missing_reviews_name_what_to_type(
    tmp_path: Path, cache: Path, alone: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imdb_module, "URL", "http://localhost:9/a.tar.gz")
    with pytest.raises(DataError) as caught:
        load(alone, tmp_path / "nowhere")
    for words in (
        "nowhere",
        "cannot be downloaded",
        "refused",
        "curl -O https://",
        "--data-dir aclImdb",
        "synthetic",
    ):
        assert words in str(caught.value)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(download.urllib.request, "urlopen", lambda *args, **options: io.BytesIO())
    with pytest.raises(DataError, match=r"cannot be downloaded from here \(.*Not a directory"):
        load(alone, tmp_path / "file" / "folder")
    with pytest.raises(DataError, match="there is no file"):
        load(alone, tmp_path / "no.tar.gz")


class Server(http.server.BaseHTTPRequestHandler):
    """A server of the archive; slow under /slow."""

    content = b""

    def do_GET(self) -> None:
        self.send_response(404 if self.path.startswith("/none") else 200)
        self.end_headers()
        if self.path.startswith("/slow"):
            for _ in range(100):
                self.wfile.write(b"x" * 2**18)
                if self.server.ended.wait(0.05):  # type: ignore[attr-defined]
                    return
        self.wfile.write(self.content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(archive: Path) -> Iterator[str]:
    Server.content = archive.read_bytes()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as listening:
        listening.ended = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.ended.set()  # type: ignore[attr-defined]
        listening.shutdown()
        thread.join()


def fetch(url: str, folder: Path, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fetch the archive from `url`; return the error."""
    monkeypatch.setattr(imdb_module, "URL", url)
    with pytest.raises(DataError, match="cannot be downloaded from here") as caught:
        imdb_module.fetch(folder, limit_s)
    return str(caught.value)


def test_downloads_end_whole_or_leave_nothing(
    server: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    assert "it took longer than 0.2 s" in fetch(f"{server}/slow/a.tar.gz", folder, 0.2, monkeypatch)
    assert "Not Found" in fetch(f"{server}/none/a.tar.gz", folder, 60, monkeypatch)
    official = imdb_archive.MD5
    monkeypatch.setattr(imdb_archive, "MD5", "0" * 32)
    assert "MD5 hash" in fetch(f"{server}/whole/{imdb_archive.ARCHIVE}", folder, 60, monkeypatch)
    for thread in threading.enumerate():
        if thread.name == "download":
            thread.join(10)
    assert not list(folder.iterdir())
    monkeypatch.setattr(imdb_archive, "MD5", official)
    imdb_module.fetch(folder, 60)
    assert [file.name for file in folder.iterdir()] == [imdb_archive.ARCHIVE]
    assert imdb_archive.read(imdb_archive.find(folder)) == imdb_archive.read(archive)


def test_download_gives_up_on_a_silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/a.tar.gz", tmp_path / "new", 60, monkeypatch)
    assert not list(tmp_path.iterdir())


# Tokens and their cache.


def test_tokenizer_is_trained_on_training_reviews_only(folder: Path) -> None:
    reviews = imdb_archive.read(folder)
    tokens = imdb_tokens.encode(reviews, VOCABULARY, LENGTH)
    pieces = json.loads(tokens.tokenizer)["model"]["vocab"]
    assert pieces[imdb_tokens.PAD] == PADDING
    assert {"train", "test"} & {name.strip("\u0120") for name in pieces} == {"train"}
    assert len(pieces) <= VOCABULARY
    # The same in any process, or nodes with caches of their own would train on different tokens.
    assert tokens.fingerprint() == imdb_tokens.encode(reviews, VOCABULARY, LENGTH).fingerprint()


def test_token_ids_are_compact_padded_and_keep_both_ends(archive: Path) -> None:
    from tokenizers import Tokenizer

    reviews = imdb_archive.read(archive)
    tokens = imdb_tokens.encode(reviews, VOCABULARY, LENGTH)
    tokenizer = Tokenizer.from_str(tokens.tokenizer)
    assert tokenizer.encode("WONDERFUL<br />film").ids == tokenizer.encode("wonderful film").ids
    assert tokenizer.decode(tokenizer.encode("Caf\xe9 \u4e16").ids) == " caf\xe9 \u4e16"
    assert tokens.ids["train"].dtype == torch.int16
    assert tokens.counts["cut"] == len(reviews.texts["train"]) + len(reviews.texts["test"])
    for text, row in zip(reviews.texts["test"], tokens.ids["test"].tolist(), strict=True):
        whole = tokenizer.encode(text).ids
        assert row == whole[: LENGTH // 4] + whole[-LENGTH * 3 // 4 :]
    long = imdb_tokens.encode(reviews, 40_000, 400)
    assert long.ids["train"].dtype == torch.int32
    assert long.counts["cut"] == 0
    for text, row in zip(reviews.texts["train"], long.ids["train"].tolist(), strict=True):
        whole = Tokenizer.from_str(long.tokenizer).encode(text).ids
        assert row == whole + [PADDING] * (400 - len(whole))


def test_tokenizer_accepts_any_letters(tmp_path: Path) -> None:
    odd = {name: "[PAD] \0\t\x7f \u4e16\u754c \U0001f600 e\u0301 [PAD]".encode() for name in fake_imdb.reviews()}
    reviews = imdb_archive.read(fake_imdb.write_folder(tmp_path, odd) / imdb_archive.FOLDER)
    tokens = imdb_tokens.encode(reviews, MIN_VOCABULARY, LENGTH)
    assert int(tokens.ids["test"].min()) > PADDING
    assert int(tokens.ids["test"].max()) < MIN_VOCABULARY


def test_missing_tokenizers_package_is_named(
    folder: Path, cache: Path, alone: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is in the extra [imdb]; a start from the cache does without it."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"package tokenizers .*Type: pip install 'hvd_trainer\[imdb\]'"):
        load(alone, folder)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    first = load(alone, folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert torch.equal(load(alone, folder).train.inputs, first.train.inputs)


def test_second_start_reads_the_cache(
    folder: Path, cache: Path, alone: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    first = load(alone, folder, said)
    (file,) = cache.iterdir()
    assert len(said) == 1
    assert f"keeps them in {file}" in said[0]
    monkeypatch.setattr(imdb_tokens, "encode", None)
    second = load(alone, folder.parent, said)
    assert len(said) == 1
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert torch.equal(first.test.targets, second.test.targets)
    assert (first.note, first.tokenizer) == (second.note, second.tokenizer)
    monkeypatch.undo()


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "other"])
def test_damaged_cache_is_rebuilt(damage: str, folder: Path, cache: Path, alone: Backend) -> None:
    first = load(alone, folder)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    rows = first.test.inputs.numpy().tobytes()
    place = whole.index(rows) + len(rows) // 2
    file.write_bytes(
        {
            "flipped": whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
            "cut": whole[: len(whole) // 2],
            "empty": b"",
            "other": b"PK\3\4 something else",
        }[damage]
    )
    said: list[str] = []
    second = load(alone, folder, said)
    assert "is damaged" in said[0]
    assert "is made anew" in said[0]
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert [entry.name for entry in cache.iterdir()] == [file.name]
    assert file.read_bytes() == whole


def test_cache_depends_on_sizes_and_reviews(tmp_path: Path, folder: Path, cache: Path, alone: Backend) -> None:
    load(alone, folder)
    assert load(alone, folder, length=20).train.inputs.shape[1] == 20
    load(alone, fake_imdb.write_folder(tmp_path / "more", fake_imdb.reviews(13)))
    assert len(list(cache.iterdir())) == 3


def test_unwritable_cache_names_another_place(
    tmp_path: Path, folder: Path, alone: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot be kept in .*export XDG_CACHE_HOME=/path"):
        load(alone, folder)


def load_on_nodes_of_their_own(folders: list[str], caches: str) -> tuple[int, str]:
    """Load as a rank on a node of its own, with a cache of its own; return the ids, or the error."""
    rank = int(os.environ["RANK"])
    os.environ["XDG_CACHE_HOME"] = f"{caches}/cache{rank}"
    socket.gethostname = lambda: f"node{rank}"
    with backends.create(EngineOptions(backend="ddp")) as backend:
        assert backend.world.num_nodes == 2
        try:
            texts = load(backend, Path(folders[rank]))
        except DataError as error:
            return rank, str(error)
        return rank, str(texts.train.inputs.tolist())


def test_nodes_with_different_reviews_are_an_error(tmp_path: Path, folder: Path) -> None:
    """Nodes compare the hashes of their tokens, since each has a cache of its own."""
    other = fake_imdb.write_folder(tmp_path / "other", fake_imdb.reviews(13))
    one, two = run_ranks(
        load_on_nodes_of_their_own, num_processes=2, args=([str(folder), str(folder)], str(tmp_path))
    )
    assert one == two
    assert len(list(tmp_path.glob("cache?/hvd_trainer/data/*.tokens"))) == 2
    for error in run_ranks(
        load_on_nodes_of_their_own, num_processes=2, args=([str(folder), str(other)], str(tmp_path))
    ):
        assert "different reviews" in error
        assert "node0, node1" in error


def test_batches_fit_an_embedding(folder: Path, cache: Path, alone: Backend) -> None:
    texts = load(alone, folder)
    for workers in (None, 1):
        loader = make_loader(texts.train, alone, LoaderPlan(10, num_workers=workers))
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


# The model.


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(1)
    return transformer(TINY)


def some_ids(*lengths: int) -> torch.Tensor:
    ids = torch.randint(2, VOCABULARY, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(3))
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = PADDING
    return ids


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_all_blocks_return_the_same_type(model: nn.Sequential, precision: torch.dtype) -> None:
    """Any block may begin a pipeline stage, in any precision."""
    assert [name for name, _ in model.named_children()] == ["embedding", "layer0", "layer1", "head"]
    ids = some_ids(16, 5, 1)
    *blocks, head = model
    value: Any = ids
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        for block in blocks:
            value = block(value)
            hidden, padding = value
            assert (hidden.shape, hidden.dtype) == ((3, LENGTH, TINY.d_model), torch.float32)
            assert torch.equal(padding, (ids == PADDING).float())
        logits = head(value)
    assert logits.shape == (3, 2)
    loss = nn.functional.cross_entropy(logits.float(), torch.tensor([0, 1, 0]))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.dtype == torch.float32, name


def test_blocks_share_nothing_and_have_no_buffers(model: nn.Sequential) -> None:
    """Tied weights would need both ends in one stage; buffers of floats are averaged over ranks."""
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(places) == len(set(places))
    assert not list(model.buffers())
    ids = some_ids(16, 5)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), model(ids))


def test_padding_does_not_change_the_logits(model: nn.Sequential) -> None:
    ids = some_ids(16, 9, 4, 1)
    together = model(ids)
    for row, length in enumerate((16, 9, 4, 1)):
        alone = model(ids[row : row + 1, :length])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)


def test_text_without_tokens_has_finite_logits(model: nn.Sequential) -> None:
    logits = model(some_ids(0, 16))
    assert torch.equal(logits[0], model.head.classes.bias)
    logits.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_training_and_evaluation_compute_alike(model: nn.Sequential) -> None:
    """nn.TransformerEncoderLayer computes differently in evaluation."""
    ids = some_ids(16, 7)
    trained = model.train()(ids)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), trained)
    dropping = transformer(replace(TINY, dropout=0.5))
    assert not torch.equal(dropping.train()(ids), dropping.eval()(ids))


def test_transformer_learns_with_deterministic_operations(model: nn.Sequential) -> None:
    ids, label = some_ids(6)[:, :6], torch.tensor([1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), label)
            loss.backward()
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss.item() < 0.05
    assert torch.equal(model.embedding.token.weight[PADDING], torch.zeros(TINY.d_model))


# Options.


def test_typed_options_override_the_preset(tmp_path: Path) -> None:
    assert TextModelOptions().sizes == TextSizes(2, 64, 2, 128, 0.2, 256, 8000)
    typed = parse(ImdbOptions, ["--preset", "reference", "--layers", "3", "--lr", "0.5"]).filled()
    reference = PRESETS["reference"]
    assert (typed.network.layers, typed.optimizer.lr) == (3, 0.5)
    assert typed.network.sizes == replace(reference, layers=3)
    file = tmp_path / "job.yaml"
    file.write_text("preset: reference\nheads: 8\n")
    both = parse(ImdbOptions, ["--config", str(file), "--heads", "4"]).filled()
    assert (both.network.heads, both.network.layers, both.optimizer.lr) == (4, 12, 1e-4)


def test_presets_are_complete_and_of_their_size() -> None:
    for name, count in (("small", 595_586), ("reference", 364_732_418)):
        network = TextModelOptions(preset=name)  # type: ignore[arg-type]
        options = ImdbOptions(network=network).filled()
        assert not [value for value in (options.network, options.optimizer) if None in vars(value).values()]
        with torch.device("meta"):
            assert sum(p.numel() for p in transformer(options.network.sizes).parameters()) == count


def test_all_mistakes_are_reported_at_once() -> None:
    wrong = ["--layers=0", "--heads=3", "--dropout=1", "--vocabulary=10", "--lr=0", "--synthetic-reviews=0"]
    options = parse(ImdbOptions, [*wrong, "--dataset=synthetic", "--data-dir=x", "--epochs=0"])
    with pytest.raises(OptionError) as caught:
        check(options)
    for words in (
        "--layers must be 1 or more, not 0",
        "--heads must divide --d-model, and 3 does not divide 64",
        "--dropout must be less than 1, not 1",
        "--vocabulary must be 257 or more, not 10",
        "--lr must be more than 0",
        "--synthetic-reviews must be 1 or more",
        "leave out --data-dir",
        "--epochs must be 1 or more",
    ):
        assert words in str(caught.value)


# The job.

SMALL = "--layers 2 --d-model 16 --heads 2 --d-hid 16 --sequence-length 24 --vocabulary 300 --global-batch-size 8"


def run(backend: str, log_dir: Path, data_dir: Path, *options: str, size: int = 2, check: bool = True) -> Result:
    argv = ["-m", "hvd_trainer.imdb", "--backend", backend, *SMALL.split()]
    argv += ["--epochs", "2", "--log-dir", str(log_dir), "--data-dir", str(data_dir), *options]
    launcher = QUICKEST if size > 1 else "python"
    return launch(launcher, size, argv, env={"XDG_CACHE_HOME": str(log_dir / "cache")}, check=check)


def weights(log_dir: Path) -> bytes:
    return (log_dir / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """The reviews, the log folder and the output of two epochs on two ranks of DDP."""
    folder = tmp_path_factory.mktemp("imdb")
    reviews = fake_imdb.write_folder(folder, fake_imdb.reviews())
    return reviews, folder / "ddp", run("ddp", folder / "ddp", reviews)


def test_run_reports_its_data_and_keeps_options_and_tokenizer(trained: tuple[Path, Path, Result]) -> None:
    _, folder, result = trained
    for words in ("imdb: makes tokens of", "imdb: 24 + 24 reviews", "data     IMDB: 24 samples", "epoch 2/2"):
        assert result.stdout.count(words) == 1, result.stdout
    assert "Traceback" not in result.stderr
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["preset"], config["layers"], config["dropout"], config["lr"]) == ("small", 2, 0.2, 1e-3)
    assert parse(ImdbOptions, ["--config", str(folder / "config.yaml")]).network.layers == 2
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() <= VOCABULARY


@requires("horovod")
def test_both_engines_give_the_same_weights(trained: tuple[Path, Path, Result], tmp_path: Path) -> None:
    reviews, folder, _ = trained
    run("horovod", tmp_path, reviews)
    assert weights(tmp_path) == weights(folder)


def test_resumed_run_gives_the_same_weights(trained: tuple[Path, Path, Result], tmp_path: Path) -> None:
    """The second run takes the tokens from the cache of the first."""
    reviews, folder, _ = trained
    first = run("ddp", tmp_path, reviews, "--epochs", "1")
    second = run("ddp", tmp_path, reviews, "--resume", "auto")
    assert "makes tokens" in first.stdout
    assert "makes tokens" not in second.stdout
    assert "epoch 1/2" not in second.stdout
    assert weights(tmp_path) == weights(folder)


def test_reproducible_runs_agree_on_one_rank_and_two(trained: tuple[Path, Path, Result], tmp_path: Path) -> None:
    reviews = trained[0]
    for size in (1, 2):
        backend = "ddp" if size > 1 else "single"
        run(backend, tmp_path / str(size), reviews, "--reproducible", "2", "--epochs", "1", size=size)
    assert weights(tmp_path / "1") == weights(tmp_path / "2")


def test_damaged_archive_ends_all_ranks_with_one_line(tmp_path: Path, archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-20])
    result = run("ddp", tmp_path / "log", archive, check=False)
    assert result.returncode == 2
    assert result.stderr.count("is damaged or cut short") == 1
    assert "Traceback" not in result.stderr


def test_synthetic_needs_no_data(tmp_path: Path) -> None:
    argv = (
        f"-m hvd_trainer.imdb --backend ddp --dataset synthetic --synthetic-reviews 40 --epochs 1 {SMALL}".split()
    )
    result = launch(QUICKEST, 2, [*argv, "--precision", "bf16"], env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert "data     synthetic: 40 samples to train on, 4 to test on" in result.stdout
    assert not (tmp_path / "cache").exists()


# The real reviews.


@pytest.mark.nightly
def test_small_model_learns_the_real_reviews(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    archive = pytestconfig.rootpath / "../shared/data/imdb" / imdb_archive.ARCHIVE
    if not archive.is_file():
        pytest.skip(f"no {imdb_archive.ARCHIVE} in ../shared/data/imdb")
    # Not the official archive: it was packed again without the unlabelled reviews.
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    argv = [
        "-m",
        "hvd_trainer.imdb",
        *("--backend", "ddp", "--epochs", "1", "--layers", "1", "--sequence-length", "64", "--log-dir"),
    ]
    result = launch(
        "torchrun",
        2,
        [*argv, str(tmp_path / "log"), "--data-dir", str(tmp_path)],
        env={"XDG_CACHE_HOME": str(tmp_path)},
        timeout_s=280,
    )
    assert "imdb: 25,000 + 25,000 reviews; " in result.stdout
    (end,) = [
        json.loads(line)
        for line in (tmp_path / "log/metrics.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "end"
    ]
    assert end["test_accuracy"] > 0.75
