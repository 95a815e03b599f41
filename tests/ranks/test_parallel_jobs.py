"""Documented launches of a model in stages, and those that are refused or killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from combinations import case
from launchers import QUICKEST, launch, requires, start

pytestmark = pytest.mark.warm

TEXTS = (
    *("--dataset", "synthetic", "--synthetic-reviews", "96", "--sequence-length", "16", "--vocabulary", "300"),
    *("--global-batch-size", "16", "--device", "cpu"),
)
# What README.md types, with the chunks that make them comparable: 4 ranks and 2 copies each.
SHAPES = {
    "srun": (4, ["--backend", "horovod", "--stages", "2", "--chunks", "8"]),
    "horovodrun": (2, ["--devices-per-rank", "2", "--chunks", "8"]),
    "torchrun": (4, ["--backend", "ddp", "--stages", "2", "--chunks", "8", "--shard", "optimizer"]),
}


def argv(folder: Path, *more: str, epochs: int = 1) -> list[str]:
    return ["-m", "hvd_trainer.imdb", *TEXTS, "--epochs", str(epochs), "--log-dir", str(folder), *more]


@pytest.mark.long
@requires("horovod", "srun", "horovodrun", "torchrun")
def test_documented_commands_train_the_same_model(tmp_path: Path) -> None:
    files = set()
    for launcher, (size, options) in SHAPES.items():
        result = launch(launcher, size, argv(tmp_path / launcher, *options))
        assert "2 copies of the model, batches in 8 chunks of 1" in result.stdout
        # Where it is cut depends on how long its blocks have taken.
        assert re.search(r"part 1 .* (\w+ to )?head, [\d,]+ parameters, [\d.]+ MB, [\d.]+ ms per", result.stdout)
        files.add((tmp_path / launcher / "model.safetensors").read_bytes())
    assert len(files) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stages", "3"], "--stages 3 does not divide the 2 ranks"),
        (["--stages", "2", "--chunks", "1"], "Type --chunks 2, or --schedule gpipe"),
        (["--stages", "2", "--balance", "3,2"], "Type for instance: --balance 2,2"),
        (["--devices-per-rank", "9", "--chunks", "4"], "makes 9 parts, and the model has only 4 blocks"),
    ],
)
def test_invalid_parallel_options_are_refused(options: list[str], said: str, tmp_path: Path) -> None:
    result = launch(QUICKEST, 2, argv(tmp_path, "--backend", "ddp", *options), check=False)
    assert result.returncode != 0
    assert result.stderr.count(said) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.warm(False)
@pytest.mark.parametrize("backend", [case("ddp", when="long"), case("horovod")])
@requires("torchrun")
def test_killed_stage_is_reported(backend: str, tmp_path: Path) -> None:
    """On Horovod's process sets the other ranks aborted at once: "terminate called", and no report."""
    options = ["--backend", backend, "--stages", "2", "--chunks", "4"]
    with start("torchrun", 2, argv(tmp_path, *options, epochs=200)) as running:
        running.wait_for_output("epoch 2/")
        running.ranks(2)[1].kill()
        result = running.wait()
    assert result.returncode != 0
    assert re.search(r"^failure: rank 1 of 2 on .*: ended without a word", result.stderr, re.MULTILINE)
    assert "terminate called" not in result.stderr
