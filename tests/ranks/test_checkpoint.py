"""Checkpoints on the disk: what is loaded, refused, kept and pruned, and which errors name what does not fit."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import digits_job
import pytest
import torch
import trainings
from hypothesis import given, settings
from hypothesis import strategies as st
from launchers import launch, start
from records import lines
from safetensors.torch import load_file
from torch import nn

from hvd_trainer import TensorData, cli
from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.storage import Manifest
from hvd_trainer.config.figures import BestFigure
from hvd_trainer.errors import CheckpointError, OptionError
from hvd_trainer.observe.run_log import _drop_later

pytestmark = pytest.mark.warm

STATE = {"model": {"w": torch.arange(3.0)}, "progress": {"step": 7}}


def save(folder: Path, step: int, state: Any = None, **figures: float) -> Path:
    return checkpoints.save(folder, STATE if state is None else state, step=step, figures=figures)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# On the disk.


def test_saved_checkpoint_loads_equal(tmp_path: Path) -> None:
    path = save(tmp_path, 7, loss=1.5)
    assert path.name == "step-000000007"
    loaded = checkpoints.load(path)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])
    manifest = storage.read_manifest(path)
    assert (manifest.number, manifest.step, manifest.epoch, manifest.figures) == (0, 7, 0, {"loss": 1.5})
    assert names(tmp_path) == [path.name], "nothing temporary is left"


def test_newest_checkpoint_is_the_one_saved_last(tmp_path: Path) -> None:
    """A run that was taken back to step 200 and trains on must not resume from its earlier step 300."""
    for step in (300, 200, 300):
        save(tmp_path, step, {"at": [step, len(names(tmp_path))]})
    assert names(tmp_path) == ["step-000000200", "step-000000300", "step-000000300.2"]
    (tmp_path / "step-000000300.2").rename(tmp_path / "mine")
    found = storage.restore(None, str(tmp_path))
    assert found.opened is not None
    assert found.opened.state() == {"at": [300, 2]}
    storage.prune(tmp_path, keep=2, best=None)
    assert names(tmp_path) == ["mine", "step-000000200"]


@pytest.mark.parametrize(
    ("figure", "best"),
    [
        ("min:val_loss", 2),
        ("max:val_accuracy", 3),
        ("max:val_loss", 5),
        ("min:val_accuracy", 1),
        ("min:other", None),
        (None, None),
    ],
)
def test_prune_keeps_the_best(figure: str | None, best: int | None, tmp_path: Path) -> None:
    for step, loss, accuracy in (
        (1, 0.5, 0.1),
        (2, 0.3, 0.7),
        (3, 0.4, 0.9),
        (4, float("nan"), 0.2),
        (5, 0.6, 0.2),
    ):
        save(tmp_path, step, val_loss=loss, val_accuracy=accuracy)
    (tmp_path / ".step-000000009.77").mkdir()  # a save that was killed
    storage.prune(tmp_path, keep=1, best=None if figure is None else BestFigure.parse(figure))
    steps = sorted({5} | ({best} if best else set()))
    assert names(tmp_path) == [f"step-{step:09d}" for step in steps]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: _flip(p / "state.safetensors"), id="flipped"),
        pytest.param(lambda p: _flip(p / "state.json"), id="flipped-tree"),
        pytest.param(lambda p: _flip(p / "manifest.json"), id="flipped-manifest"),
        pytest.param(lambda p: _cut(p / "state.safetensors"), id="cut"),
        pytest.param(lambda p: _cut(p / "state.json"), id="cut-tree"),
        pytest.param(lambda p: (p / "manifest.json").unlink(), id="no-manifest"),
        pytest.param(lambda p: (p / "manifest.json").write_text("{"), id="torn-manifest"),
        pytest.param(lambda p: (p / "manifest.json").write_text("[]"), id="foreign-manifest"),
        pytest.param(lambda p: (p / "state.safetensors").unlink(), id="no-state"),
        pytest.param(lambda p: (p / "state.json").unlink(), id="no-tree"),
    ],
)
def test_damaged_checkpoint_is_refused_and_an_older_one_loaded(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, 1, {**STATE, "progress": {"step": 1}})
    newest = save(tmp_path, 2)
    damage(newest)
    with pytest.raises(CheckpointError, match="step-000000002"):
        checkpoints.load(newest)
    found = storage.restore(None, str(tmp_path))
    assert found.opened is not None
    assert found.opened.state()["progress"] == {"step": 1}
    assert any("step-000000002" in line for line in found.notes), "what was refused is said"
    with pytest.raises(CheckpointError, match="step-000000002"):
        storage.restore(None, str(newest))


def test_older_format_is_refused_in_one_line(tmp_path: Path) -> None:
    """Format 2 was state.pt, a pickle: no code that could read it is left."""
    path = tmp_path / "step-000000001"
    path.mkdir()
    (path / "state.safetensors").write_bytes(b"PK")
    manifest = {"format": 2, "number": 0, "step": 1, "epoch": 0, "figures": {}, "bytes": 2, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest | {"self": storage._digest(manifest)}))
    for asked in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"step-000000001 has format 2, but this version reads 3\."):
            storage.restore(None, str(asked))


def test_auto_resume_refuses_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        _flip(save(tmp_path / "checkpoints", step) / "state.safetensors")
    with pytest.raises(CheckpointError, match=r"step-000000002 is damaged.*step-000000001 .*--resume none"):
        storage.restore(tmp_path, "auto")
    with pytest.raises(CheckpointError, match="none is not a checkpoint: there is no such folder"):
        storage.restore(tmp_path, str(tmp_path / "none"))
    (tmp_path / "new" / "failures").mkdir(parents=True)  # of a start that came to nothing
    assert storage.restore(tmp_path / "new", "auto").opened is None


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
FIELDS = st.sampled_from([*Manifest.__struct_fields__, "more"])


@settings(max_examples=300, deadline=None)
@given(
    changes=st.dictionaries(FIELDS, ANY_JSON, max_size=3), removed=st.sets(FIELDS, max_size=2), fits=st.booleans()
)
def test_any_manifest_is_read_or_refused(
    changes: dict[str, Any], removed: set[str], fits: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any content, also with a valid checksum, is read as it should be, or refused by name."""
    path = tmp_path_factory.getbasetemp() / "step-000000001"
    path.mkdir(exist_ok=True)
    file = {"bytes": 1, "sha256": "0"}
    content = {"format": 3, "number": 0, "step": 1, "epoch": 0, "figures": {}, "tensors": file, "tree": file}
    content = {name: value for name, value in (content | changes).items() if name not in removed}
    own = storage._digest(content) if fits else "0"
    (path / "manifest.json").write_text(json.dumps(content | {"self": own}))
    try:
        manifest = storage.read_manifest(path)
    except CheckpointError:
        return
    assert fits
    assert manifest.step >= 0


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=300))
def test_any_bytes_as_manifest_are_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "step-000000002"
    path.mkdir(exist_ok=True)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="step-000000002"):
        storage.read_manifest(path)


def test_save_names_what_it_cannot_save(tmp_path: Path) -> None:
    """An object in a state was pickled when it was saved, and refused only when it was loaded."""

    class Schedule:
        pass

    endless: dict[str, Any] = {}
    endless["again"] = endless
    old = save(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"cannot be saved: scheduler/steps/1 is of type .*Schedule\. A checkp"
    ):
        save(tmp_path, 2, {"scheduler": {"steps": [0, Schedule()]}})
    with pytest.raises(CheckpointError, match="cannot be saved: it is nested too deeply"):
        save(tmp_path, 2, endless)
    assert names(tmp_path) == [old.name], "nothing temporary is left"


def test_full_disk_leaves_old_checkpoints(small_disk: Path) -> None:
    old = save(small_disk, 1)
    with pytest.raises(CheckpointError, match=r"No space left.*Older ones are intact"):
        save(small_disk, 2, {"model": torch.zeros(5_000_000)})
    assert names(small_disk) == [old.name]
    checkpoints.load(old)


# In a run.


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


def fit(folder: Path, *, width: int = 3, optimizer: Any = torch.optim.Adam, num: int = 12, **options: Any) -> None:
    """Train a few steps in this process."""
    options = {"epochs": 2, "batch_size": 4, "log_dir": str(folder), "log_every": 1, "quiet": False, **options}
    model, data = Net(width), TensorData(torch.ones(num, 2), torch.zeros(num).long())
    its = optimizer(model.parameters(), lr=0.1)
    trainings.fit(trainings.options_of(**options), model, data, data, optimizer=its)


def test_save_options_choose_when_and_what_is_kept(tmp_path: Path) -> None:
    fit(tmp_path / "default")
    assert names(tmp_path / "default/checkpoints") == ["step-000000003", "step-000000006"]
    fit(tmp_path / "steps", save_every_steps=2, save_every_epochs=None, keep=2, keep_best=None)
    assert names(tmp_path / "steps/checkpoints") == ["step-000000004", "step-000000006"]
    fit(tmp_path / "seconds", save_every_s=1e-9, save_every_epochs=None, keep=100)
    assert "step-000000001" in names(tmp_path / "seconds/checkpoints")
    fit(tmp_path / "epochs", epochs=5, save_every_epochs=2, keep=100)
    assert names(tmp_path / "epochs/checkpoints") == ["step-000000006", "step-000000012", "step-000000015"]
    fit(tmp_path / "never", save_every_epochs=None)
    assert not (tmp_path / "never/checkpoints").exists()


def events(folder: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in lines(folder)]


def test_resume_drops_records_after_the_checkpoint(tmp_path: Path, logged: Callable[[], str]) -> None:
    fit(tmp_path)
    before = events(tmp_path)
    assert lines(tmp_path)[-1]["saves"] == 2
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 5, "torn')
    fit(tmp_path, resume=str(tmp_path / "checkpoints/step-000000003"))
    assert events(tmp_path) == before
    said = logged()
    assert "resume   restored model, optimizer, random\nresume   at epoch 2, after 3 steps" in said
    with pytest.raises(OptionError, match="nothing is left to train"):
        fit(tmp_path, resume="auto")
    assert "at epoch 3, after 6 steps" in logged()


def test_new_run_moves_the_earlier_run_aside(tmp_path: Path, logged: Callable[[], str]) -> None:
    for _ in range(3):
        fit(tmp_path, epochs=1)
        (tmp_path / "failures").mkdir()  # a report of this run, and not of the next one
    assert f"the run that was in {tmp_path} is now in {tmp_path}/earlier-2" in logged()
    for folder in (tmp_path, tmp_path / "earlier-1", tmp_path / "earlier-2"):
        assert events(folder)[-1] == ("end", 3)
        assert names(folder / "checkpoints") == ["step-000000003"]


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200) | st.lists(ANY_JSON, max_size=4).map(lambda v: json.dumps(v).encode()))
def test_any_content_of_metrics_jsonl_is_survived(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    good = b'{"event": "step", "step": 3}\n'
    file.write_bytes(good + content)
    _drop_later(file, 3, 0)
    assert file.read_bytes().startswith(good)


def test_resume_lists_what_does_not_fit(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1)
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, width=5, resume="auto")
    assert "first.weight is float32 [3, 2], and here float32 [5, 2]; first.bias is" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"its optimizer is Adam, not SGD .*--resume-partial optimizer"):
        fit(tmp_path, optimizer=torch.optim.SGD, resume="auto")
    assert names(tmp_path / "checkpoints") == ["step-000000003"], "nothing was touched"


def test_resume_partial_names_what_is_reset(tmp_path: Path, logged: Callable[[], str]) -> None:
    fit(tmp_path, epochs=1)
    fit(tmp_path, optimizer=torch.optim.SGD, resume="auto", resume_partial=("optimizer",))
    assert "resume   restored model, random\nresume   reset: optimizer\n" in logged()


def test_resume_inside_an_epoch_of_other_data_is_refused(tmp_path: Path, logged: Callable[[], str]) -> None:
    fit(tmp_path, save_every_steps=5, save_every_epochs=None)
    with pytest.raises(CheckpointError, match=r"samples 12 \(here 16\).*--resume-partial data"):
        fit(tmp_path, num=16, resume="auto")
    fit(tmp_path, num=16, resume="auto", resume_partial=("data",))
    assert "reset: data (the epoch begins again)" in logged()


def test_failed_write_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "serialize_file", full)
    with pytest.raises(CheckpointError, match=r"No checkpoint could be written to .*No space left") as raised:
        fit(tmp_path)
    assert "intact" not in str(raised.value), "there are no older ones"
    assert not any(thread.name.startswith("checkpoint-writer") for thread in threading.enumerate())


# As a user starts it.


def test_export_writes_loadable_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights load in a plain module, and are those of the end of the run."""
    fit(tmp_path)
    assert cli.main(["export", str(tmp_path), str(tmp_path / "weights.safetensors")]) == 0
    assert f"from {tmp_path}/checkpoints/step-000000006" in capsys.readouterr().out
    weights, last = (load_file(tmp_path / f"{name}.safetensors") for name in ("weights", "model"))
    assert weights.keys() == last.keys()
    assert all(torch.equal(weights[name], last[name]) for name in last)
    Net().load_state_dict(load_file(tmp_path / "weights.safetensors"))
    older = str(tmp_path / "checkpoints/step-000000003")
    assert cli.main(["export", older, str(tmp_path / "older.safetensors")]) == 0
    older_weights = load_file(tmp_path / "older.safetensors")
    assert not any(torch.equal(older_weights[name], last[name]) for name in last if name.endswith("weight"))
    assert cli.main(["export", str(tmp_path / "nothing")]) == 2
    assert cli.main(["export", older, str(tmp_path / "no/folder")]) == 2
    assert cli.main(["export", older, str(tmp_path / "weights.safetensors")]) == 0, "it is an export"
    assert cli.main(["export", older, str(tmp_path / "model.safetensors")]) == 2, "it is not"
    assert load_file(tmp_path / "model.safetensors").keys() == last.keys()
    said = capsys.readouterr().err
    assert len(re.findall("^error: ", said, re.MULTILINE)) == 3
    assert "there is no such folder. Name a checkpoint or a log folder" in said


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    """Start a job that saves after each step, in `tmp_path / "log"`."""
    extra = ["--epochs", "100000", "--save-every-steps", "1", "--workers", "1"]
    with start("python", 1, digits_job.argv("single", tmp_path / "log", extra)) as job:
        job.wait_for_output("epoch 1/")
        yield job


@pytest.mark.warm(False)
def test_second_job_on_one_folder_is_refused(running: Any, tmp_path: Path) -> None:
    second = launch("python", 1, digits_job.argv("single", tmp_path / "log"), check=False)
    assert second.returncode == 2
    assert f"another job is using it (process {running.popen.pid} on" in second.stderr
    running.popen.send_signal(signal.SIGKILL)
    running.popen.wait()
    # Its loader process may live on for seconds, and must not hold the folder.
    third = launch("python", 1, digits_job.argv("single", tmp_path / "log", ["--epochs", "1", "--resume", "auto"]))
    assert "resume   restored model, optimizer, random" in third.stdout
    assert not list((tmp_path / "log/checkpoints").glob(".*")), "what the kill left of a save is gone"


def test_job_ends_when_the_disk_fills_up(small_disk: Path) -> None:
    """3.3 of 4 MB are taken: two checkpoints of 0.27 MB fit, and a third does not."""
    (small_disk / "filler").write_bytes(os.urandom(3_350_000))
    result = launch("python", 1, digits_job.argv("single", small_disk / "log", ["--epochs", "9"]), check=False)
    assert result.returncode == 2, result.stderr
    assert "Older ones are intact" in result.stderr
    assert "Traceback" not in result.stderr
    whole, refused = storage.find_checkpoints(small_disk / "log/checkpoints")
    assert whole
    assert not refused
    assert all(checkpoints.load(path) for _, path in whole)
