"""The IMDB job on both engines; its data and its network are tested in unit/jobs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import fake_imdb
import pytest
import yaml
from digits_job import end_record
from launchers import QUICKEST, Result, in_ranks, launch, requires

from hvd_trainer import backends, parse
from hvd_trainer.backends import EngineOptions
from hvd_trainer.errors import DataError
from hvd_trainer.jobs.options import ImdbOptions, TextOptions
from hvd_trainer.jobs.reviews import archive as imdb_archive
from hvd_trainer.jobs.reviews.dataset import load_texts

pytestmark = pytest.mark.warm


def load_on_nodes_of_their_own(folders: list[str], caches: str) -> str:
    """Load as a rank on a node of its own, with a cache of its own; return the ids, or the error."""
    rank = int(os.environ["RANK"])
    os.environ["XDG_CACHE_HOME"] = f"{caches}/cache{rank}"
    socket.gethostname = lambda: f"node{rank}"
    with backends.create(EngineOptions(backend="ddp")) as backend:
        assert backend.world.num_nodes == 2
        try:
            options = TextOptions(data_dir=folders[rank])
            texts = load_texts(options, backend, vocabulary=300, sequence_length=16, say=print)
        except DataError as error:
            return str(error)
        return str(texts.train.inputs.tolist())


def test_nodes_with_different_reviews_are_an_error(tmp_path: Path) -> None:
    """Nodes compare the hashes of their tokens, since each has a cache of its own."""
    folder = fake_imdb.write_folder(tmp_path / "unpacked", fake_imdb.reviews())
    other = fake_imdb.write_folder(tmp_path / "other", fake_imdb.reviews(13))
    one, two = in_ranks(2, load_on_nodes_of_their_own, [str(folder), str(folder)], str(tmp_path))
    assert one == two
    assert len(list(tmp_path.glob("cache?/hvd_trainer/data/*.safetensors"))) == 2
    for error in in_ranks(2, load_on_nodes_of_their_own, [str(folder), str(other)], str(tmp_path)):
        assert "different reviews" in error
        assert "node0, node1" in error
        assert "tokenizers and safetensors" in error  # both decide what the files have


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

    assert Tokenizer.from_file(str(folder / "model.tokenizer.json")).get_vocab_size() <= 300


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


def test_damaged_archive_ends_all_ranks_with_one_line(tmp_path: Path) -> None:
    archive = fake_imdb.write_archive(tmp_path / imdb_archive.ARCHIVE, fake_imdb.reviews())
    archive.write_bytes(archive.read_bytes()[:-1])
    result = run("ddp", tmp_path / "log", archive, check=False)
    assert result.returncode == 2
    assert result.stderr.count("is damaged or cut short") == 1
    assert "Traceback" not in result.stderr


def test_synthetic_needs_no_data(tmp_path: Path) -> None:
    argv = (
        f"-m hvd_trainer.imdb --backend ddp --dataset synthetic --synthetic-reviews 40 --epochs 1 {SMALL}".split()
    )
    result = launch(QUICKEST, 2, [*argv, "--precision", "bf16"], env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert "data     synthetic: 40 samples to train on, 4 to validate on" in result.stdout
    assert not (tmp_path / "cache").exists()


# The real reviews.


@pytest.mark.long
def test_small_model_learns_the_real_reviews(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    archive = pytestconfig.rootpath / "../shared/data/imdb" / imdb_archive.ARCHIVE
    if not archive.is_file():
        pytest.skip(f"no {imdb_archive.ARCHIVE} in ../shared/data/imdb")
    argv = [
        "-m",
        "hvd_trainer.imdb",
        *("--backend", "ddp", "--epochs", "1", "--layers", "1", "--sequence-length", "64", "--log-dir"),
    ]
    result = launch(
        "torchrun",
        2,
        [*argv, str(tmp_path / "log"), "--data-dir", str(archive)],
        env={"XDG_CACHE_HOME": str(tmp_path)},
        timeout_s=280,
    )
    assert "imdb: 25,000 + 25,000 reviews; " in result.stdout
    assert end_record(tmp_path / "log")["val_accuracy"] > 0.75
