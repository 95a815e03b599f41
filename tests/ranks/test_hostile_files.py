"""Files by an attacker: each ends in one clear error, in little memory and time, and destroys nothing."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoints
import digits_job
import msgspec
import pytest
import torch
import trainings
from launchers import QUICKEST, launch
from safetensors.torch import save_file
from torch import nn

from hvd_trainer import parse
from hvd_trainer.checkpoint import storage as checkpoint
from hvd_trainer.errors import CheckpointError, OptionError
from hvd_trainer.horovod_build import wheel
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.measure.figures import are_figures
from hvd_trainer.measure.tool_folder import MARKER, locked_folder, make_inner
from hvd_trainer.measure.trials import RunRecord, read_runs
from hvd_trainer.observe.run_log import MAX_LINE_BYTES, _drop_later
from hvd_trainer.utils.serialization import flatten, to_json

pytestmark = pytest.mark.warm

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")

# Checkpoints. Whoever makes one can give it the checksums that it needs.


def sealed(path: Path, state: Any, **content: bytes) -> Path:
    """Write a checkpoint with this state, or with other bytes as its `tensors` or `tree`."""
    path.mkdir(parents=True, exist_ok=True)
    tree, tensors = flatten(state)
    files = {"tensors": path / checkpoint.TENSORS, "tree": path / checkpoint.TREE}
    save_file(tensors, files["tensors"])
    files["tree"].write_bytes(to_json(tree))
    for name, replaced in content.items():
        files[name].write_bytes(replaced)
    known = {name: checkpoint._sync(file) for name, file in files.items()}
    manifest = checkpoint.Manifest(format=checkpoint.FORMAT, number=0, step=1, epoch=0, figures={}, **known)
    resealed(path, msgspec.to_builtins(manifest))
    return path


def resealed(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the checksum that it needs."""
    own = checkpoint._digest(manifest)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"self": own}))


def claiming(**changes: Any) -> bytes:
    """Return safetensors whose header says something else of their 12 bytes."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(12)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param({"tensors": claiming(shape=[10**12])}, "Safetensor", id="shape"),
        pytest.param({"tensors": claiming(data_offsets=[0, 10**12])}, "Safetensor", id="offsets"),
        pytest.param({"tensors": claiming(dtype="O")}, "Safetensor", id="type"),
        pytest.param({"tensors": b""}, "Safetensor", id="empty"),
        pytest.param({"tensors": (2**63).to_bytes(8, "little")}, "Safetensor", id="header"),
        pytest.param({"tensors": b"PK\3\4" + bytes(100)}, "Safetensor", id="archive"),
        pytest.param({"tree": b""}, "Expecting value", id="no tree"),
        pytest.param({"tree": b"{" * 100_000}, "Expecting property name", id="torn tree"),
        pytest.param({"tree": b'{"a":' * 100_000}, "RecursionError", id="deep"),
        pytest.param({"tree": b"\xff" * 9}, "codec can't decode", id="no text"),
        pytest.param({"tree": b'{"a":' + b"9" * 5000 + b"}"}, "Exceeds the limit", id="digits"),
        pytest.param({"tree": b"[1,2]"}, "refers to the tensor 'a'", id="list"),
        pytest.param({"tree": b'[{"$tensor":"a"}]'}, "no state by names", id="no names"),
        pytest.param({"tree": b'{"$dict":[[1,{"$tensor":"a"}]]}'}, "no state by names", id="numbered"),
        pytest.param({"tree": b'{"x":{"$tensor":"b"}}'}, "KeyError: 'b'", id="no such tensor"),
        pytest.param({"tree": b'{"x":[{"$tensor":"a"},{"$tensor":"a"}]}'}, "KeyError: 'a'", id="twice"),
        pytest.param({"tree": b'{"x":{"$system":{"$tensor":"a"}}}'}, "KeyError: '.system'", id="code"),
    ],
)
def test_malformed_state_is_refused(tmp_path: Path, content: dict[str, bytes], words: str) -> None:
    """No content of a state can run code or take more memory than its files: see test_serialization.py."""
    path = sealed(tmp_path / "step-000000001", {"a": torch.zeros(3)}, **content)
    with pytest.raises(CheckpointError, match=f"step-000000001 is not a whole checkpoint: its state: .*{words}"):
        checkpoints.load(path)


def test_empty_state_is_loaded(tmp_path: Path) -> None:
    assert checkpoints.load(sealed(tmp_path / "c", {})) == {}


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.TENSORS, checkpoint.TREE])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.timeout(30)
def test_special_files_are_not_read(name: str, kind: str, tmp_path: Path) -> None:
    """A pipe was waited for without limit, and /dev/zero was read into memory."""
    path = sealed(tmp_path / "checkpoints/step-000000001", {"a": 1})
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "device":
        (path / name).symlink_to("/dev/zero")
    else:
        (path / name).mkdir()
    with pytest.raises(CheckpointError, match="step-000000001"):
        checkpoint.restore(tmp_path, "auto")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"number": 2**60}, "Expected `int` <= 9007199254740991"),
        ({"number": 10**30}, "Expected `int` <= 9007199254740991"),
        ({"step": float("inf")}, "JSON is malformed"),
        ({"figures": {"val_loss": float("nan")}}, "JSON is malformed"),
        ({"figures": {"val_loss": "low"}}, "Expected `float`"),
        ({"tree": {"bytes": -1, "sha256": ""}}, "Expected `int` >= 0"),
        ({"tensors": {"bytes": 1}}, "required field `sha256`"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_manifest_with_wrong_types_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """The checkpoint after one with an endless number would have had a name too long for a folder."""
    path = sealed(tmp_path / "step-000000001", {"a": 1})
    manifest = json.loads((path / checkpoint.MANIFEST).read_text()) | change
    del manifest["self"]
    resealed(path, manifest)
    with pytest.raises(
        CheckpointError, match=f"step-000000001 is not a whole checkpoint: manifest.json: .*{words}"
    ):
        checkpoints.load(path)


def test_prune_removes_links_and_not_their_targets(tmp_path: Path) -> None:
    """A checkpoint that was moved to another disk, with a link in its place, ended the run that pruned it."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for step in (1, 2):
        checkpoints.save(folder, {"at": step}, step=step)
    (folder / "step-000000001").rename(elsewhere)
    (folder / "step-000000001").symlink_to(elsewhere)
    (folder / ".step-000000003.7").symlink_to(elsewhere)
    (folder / ".step-000000004.7").write_text("")
    checkpoint.prune(folder, keep=1, best=None)
    assert [path.name for path in folder.iterdir()] == ["step-000000002"]
    assert checkpoints.load(elsewhere) == {"at": 1}


def rank(state: dict[str, Any]) -> dict[str, Any]:
    return state["ranks"][0]


def fit(folder: Path, **options: Any) -> None:
    """Train a few steps in this process."""
    wanted = trainings.options_of(batch_size=4, log_dir=str(folder), **options)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters())
    trainings.fit(wanted, model, trainings.signs(12), trainings.signs(4), optimizer=optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log folder of two steps."""
    folder = tmp_path_factory.mktemp("saved")
    fit(folder, epochs=1, save_every_steps=2, save_every_epochs=None, max_steps=2)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda s: s.update(model=7), id="model"),
        pytest.param(lambda s: s.update(model=[1]), id="model list"),
        pytest.param(lambda s: s["model"].update({"weight": "x"}), id="weight"),
        pytest.param(lambda s: s.update(progress=[]), id="progress"),
        pytest.param(lambda s: s["progress"].update(step="many"), id="step"),
        pytest.param(lambda s: s["progress"].update(epoch=float("nan")), id="epoch"),
        pytest.param(lambda s: s["progress"].update(consumed=-1), id="consumed"),
        pytest.param(lambda s: s["progress"].update(samples=10**400), id="samples"),
        pytest.param(lambda s: s["progress"].update(state_dict=1), id="method"),
        pytest.param(lambda s: s["progress"].update(figures={"val_loss": "low"}), id="figures"),
        pytest.param(lambda s: s.update(kinds=3), id="kinds"),
        pytest.param(lambda s: s.update(data="all"), id="data"),
        pytest.param(lambda s: s.update(ranks=5), id="ranks"),
        pytest.param(lambda s: s.update(ranks=[[]]), id="rank"),
        pytest.param(lambda s: rank(s).update(random={"cpu": torch.zeros(3)}), id="random"),
        pytest.param(lambda s: rank(s)["random"].update(python=(3, (1, 2), None)), id="python"),
        pytest.param(lambda s: rank(s)["random"].update(numpy=("MT19937", [1.5], 0, 0, 0.0)), id="numpy"),
        pytest.param(lambda s: rank(s).update(buffers={"no.such": torch.zeros(1)}), id="buffer"),
        pytest.param(lambda s: rank(s).update(metrics={"names": 1}), id="metrics"),
        pytest.param(lambda s: rank(s)["metrics"].update(samples="all"), id="metric samples"),
        pytest.param(lambda s: rank(s)["metrics"].update(sums=[]), id="metric sums"),
        pytest.param(lambda s: s.update(optimizer=None), id="optimizer"),
        pytest.param(lambda s: s["optimizer"].update(state=[]), id="optimizer state"),
        pytest.param(lambda s: s["optimizer"].update(param_groups=[]), id="groups"),
        pytest.param(lambda s: s["optimizer"]["param_groups"][0].update(lr="fast"), id="rate"),
    ],
)
def test_state_with_wrong_types_is_refused(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    """One value of an otherwise valid state has another type: a clear error, and nothing is lost."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "checkpoints").iterdir()
    state = checkpoints.load(path)
    change(state)
    sealed(path, state)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"(does not fit|metrics are none).*--resume none"):
        fit(tmp_path, resume="auto", max_steps=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert checkpoints.load(path).keys() == state.keys()


@pytest.mark.parametrize("who", ["all", "rank 1"])
def test_hostile_checkpoint_ends_all_ranks(who: str, tmp_path: Path) -> None:
    """If only one rank's part was malformed, the others began to train and waited for it."""
    argv = digits_job.argv("ddp", tmp_path / "log", ["--save-every-steps", "1"])
    launch(QUICKEST, 2, argv)
    path = max((tmp_path / "log/checkpoints").iterdir())
    state = checkpoints.load(path)
    if who == "all":
        state["optimizer"]["param_groups"][0]["lr"] = "fast"
    else:
        state["ranks"][1]["random"]["cpu"] = torch.zeros(3)
    sealed(tmp_path / "hostile", state)
    result = launch(QUICKEST, 2, [*argv, "--resume", str(tmp_path / "hostile")], check=False, timeout_s=60)
    said = result.stdout + result.stderr
    assert result.returncode != 0
    assert said.count("error: The checkpoint does not fit: ") == 1, said
    assert "Traceback" not in said
    assert digits_job.end_record(tmp_path / "log")["step"] == 3, "the run that was there is as it was"


# Options.


def yaml_laughs(link: str) -> str:
    text = "a: &a {epochs: 1}\n"
    for old, new in pairwise("abcdefgh"):
        ten = ", ".join([f"*{old}"] * 10)
        text += f"{new}: &{new} {link.format(ten)}\n"
    return text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epochs: !!python/object/apply:os.system [exit]", "could not determine a constructor"),
        ("epochs: !!python/name:os.system", "could not determine a constructor"),
        (yaml_laughs("[{}]"), "has an alias"),
        (yaml_laughs("{{<<: [{}]}}"), "has an alias"),
        (f"epochs: {'[' * 50_000}", "nested too deeply"),
        (f"epochs: {'x' * 200_000}", "more than 100,000 bytes"),
        ("epochs: 1\nepochs: 2", "has 'epochs' 2 times"),
        ("batch-size: 1\nbatch_size: 2", "has 'batch_size' 2 times"),
        (f"epochs: {'9' * 5000}", "cannot be read: Exceeds the limit"),
        (f"epochs: 0x{'f' * 5000}", "'epochs' should be one value"),
        ("epochs: {a: 1}", "'epochs' should be one value"),
        ("epochs: [[1]]", "'epochs' should be one value"),
        ("epochs: 2001-99-99", "cannot be read: month"),
        ("epochs: !!timestamp x", "not what its tag says"),
        ("epochs: !!bool maybe", "not what its tag says"),
        ("? [a]\n: 1", "unhashable"),
        (b"epochs: \xff\xfe", "cannot be read"),
        (b"epochs: \0", "cannot be read"),
    ],
)
@pytest.mark.timeout(30)
def test_hostile_yaml_is_refused(content: str | bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match="job.yaml") as caught:
        parse(MnistOptions, ["--config", str(file)])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_endless_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="more than 100,000 bytes"):
        parse(MnistOptions, ["--config", "/dev/zero"])
    file = tmp_path / "job.yaml"
    file.write_text("log_dir: 2026-11-23\n")  # which YAML takes for a date
    assert parse(MnistOptions, ["--config", str(file)]).log.log_dir == "2026-11-23"


# Log folders, and those of the tools.


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "failures/rank-0.json", "profile", "profile/rank-0.json"]
)
def test_log_folder_with_links_is_refused(name: str, tmp_path: Path) -> None:
    """A run in a folder from an archive with links in it wrote into the links' targets."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    log = tmp_path / "log"
    (log / name).parent.mkdir(parents=True)
    (log / name).symlink_to(mine)
    with pytest.raises(OptionError, match=rf"--log-dir .* cannot be written to: .*{name} is a link"):
        fit(log, epochs=1, resume="auto")
    assert mine.read_text() == "precious"


@pytest.mark.parametrize("name", [".job", "config.yaml", "run.json"])
def test_links_in_place_of_files_that_are_replaced_are_not_followed(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    log = tmp_path / "log"
    log.mkdir()
    (log / name).symlink_to(mine)
    fit(log, epochs=1)
    assert mine.read_text() == "precious"
    assert not (log / name).is_symlink()


@pytest.mark.timeout(60)
def test_log_folder_with_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OptionError, match=r"metrics\.jsonl is a link, or no file"):
        fit(tmp_path, epochs=1, resume="auto")


def test_hostile_lines_of_metrics_jsonl_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = b'{"event": "step", "step": 3}\n'
    hostile = [b"[" * 100_000, b'{"a":' * 100_000, b"x" * (3 * MAX_LINE_BYTES), b"\xff\xfe", b"9" * 5000]
    file.write_bytes(good + b"\n".join(hostile) + b"\n" + good + b'{"event": "step", "st')
    _drop_later(file, 3, 0)
    assert file.read_bytes() == good * 2


WORK = {"on_trainer": True, "steps": 3, "rates": [[0.1, 3]]}
FIGURES = {"work": WORK, "first_step_at": 1.0, "step_s": 0.5}


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        "9" * 5000,
        '"text"',
        "{}",
        json.dumps({"identity": {}, "round": "1", "state": "done", "seconds": 1.0, "figures": FIGURES}),
        json.dumps({"identity": {}, "round": 1, "state": "won", "seconds": 1.0, "figures": FIGURES}),
        json.dumps({"identity": [], "round": 1, "state": "done", "seconds": 1.0, "figures": FIGURES}),
        json.dumps({"identity": {}, "round": 1, "state": "done", "seconds": float("nan"), "figures": FIGURES}),
        *(
            json.dumps({"identity": {}, "round": 1, "state": "done", "seconds": 1.0, "figures": FIGURES | changed})
            for changed in (
                {"work": None},
                {"work": WORK | {"steps": 10**12, "rates": [[0.1, 10**12]]}},
                {"work": WORK | {"rates": [[0.1, 2]]}},
                {"work": WORK | {"steps": "3"}},
                {"work": WORK | {"samples": "many"}},
                {"work": {"steps": 3, "rates": [[0.1, 3]]}},
                {"step_s": 0},
                {"step_s": "fast"},
                {"first_step_at": float("nan")},
                {"parts": {"data": "1"}},
                {"weights": 3},
            )
        ),
    ],
)
def test_malformed_run_is_left_out(line: str, tmp_path: Path) -> None:
    """A malformed line in a folder of results is left out like one that a kill has torn."""
    good = RunRecord({"a": 1}, 1, "done", 1.0, figures=FIGURES)
    (tmp_path / "runs.jsonl").write_text(f"{json.dumps(asdict(good))}\n{line}\n{json.dumps(asdict(good))}\n")
    assert read_runs(tmp_path, are_figures) == [good, good]


def test_results_folder_with_links_is_refused(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("precious")
    out.mkdir()
    (out / MARKER).symlink_to(mine)
    with pytest.raises(OptionError, match=rf"--out .*{MARKER} is a link"), locked_folder(out, "compare"):
        pass
    (out / MARKER).unlink()
    with locked_folder(out, "compare"):
        make_inner(out / "failed")
    (out / "failed/1.txt").symlink_to(mine)
    with pytest.raises(OptionError, match=r"--out .*1\.txt is a link"), locked_folder(out, "compare"):
        pass
    (out / "made").mkdir()
    os.mkfifo(out / "made" / MARKER)  # from which one would read for ever
    with pytest.raises(OptionError, match="made was not made by this tool"):
        make_inner(out / "made")
    (out / "made" / MARKER).unlink()
    (out / "failed").rename(out / "running")  # as a killed run may have left it
    with locked_folder(out, "compare"):
        assert not (out / "running").exists()
    assert mine.read_text() == "precious"
    (out / MARKER).write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="it belongs to another tool"), locked_folder(out, "compare"):
        pass


# Built wheels: code that is run.


NAME = "horovod-for-this"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "cache/wheels"
    with wheel.lock_wheels(folder):
        pass
    (folder / NAME).mkdir(0o755)
    (folder / NAME / "horovod-0.28.1.whl").write_text("")
    return folder


def cached(wheels: Path) -> Path | None:
    with wheel.lock_wheels(wheels):
        return wheel.cached_wheel(wheels, NAME)


def test_own_wheels_are_used_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with wheel.lock_wheels(tmp_path / "cache/wheels"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "cache/wheels").stat().st_mode) == 0o755
    assert cached(tmp_path / "cache/wheels") is None


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        (".", 0o775),
        (".", 0o757),
        (NAME, 0o775),
        (f"{NAME}/horovod-0.28.1.whl", 0o664),
        (f"{NAME}/horovod-0.28.1.whl", 0o646),
    ],
)
def test_wheel_writable_by_others_is_refused(place: str, mode: int, wheels: Path) -> None:
    assert cached(wheels) is not None
    (wheels / place).chmod(mode)
    with pytest.raises(InstallError, match=r"(?s)only you may write.*other users may write to .*type: "):
        cached(wheels)


@needs_root
@pytest.mark.parametrize("place", [".", NAME, f"{NAME}/horovod-0.28.1.whl"])
def test_wheel_of_another_user_is_refused(place: str, wheels: Path) -> None:
    os.chown(wheels / place, 12345, 12345)
    with pytest.raises(InstallError, match=r"belongs to another user \(number 12345\)"):
        cached(wheels)


def test_wheel_behind_a_link_is_refused(wheels: Path, tmp_path: Path) -> None:
    (wheels / NAME).rename(tmp_path / "planted")
    (wheels / NAME).symlink_to(tmp_path / "planted")
    with pytest.raises(InstallError, match="is a link"):
        cached(wheels)
