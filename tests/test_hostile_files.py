"""Files from a stranger: each ends in one clear error, in little memory and time, and destroys nothing."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import stat
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import digits_job
import fake_imdb
import numpy as np
import pytest
import torch
from launchers import QUICKEST, launch
from test_checkpoint import fit

from hvd_trainer import parse
from hvd_trainer.checkpoint import storage as checkpoint
from hvd_trainer.errors import CheckpointError, DataError, OptionError
from hvd_trainer.horovod_build import wheel
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.jobs import images as mnist_module
from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.jobs.reviews import archive as imdb_archive
from hvd_trainer.jobs.reviews import tokenizer
from hvd_trainer.observe.run_log import MAX_LINE_BYTES, _drop_later
from hvd_trainer.tools.runner.runs import Run, locked_folder, read_runs
from hvd_trainer.tools.runner.step_stats import are_figures

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")

# Checkpoints. Whoever makes one can give it the checksums that it needs.


def sealed(path: Path, content: bytes | dict[str, Any]) -> Path:
    """A checkpoint with this state, or these bytes in its place."""
    path.mkdir(parents=True, exist_ok=True)
    file = path / checkpoint.STATE
    torch.save(content, file) if isinstance(content, dict) else file.write_bytes(content)
    with file.open("rb") as written:
        known = checkpoint._fingerprint(written)
    manifest = asdict(checkpoint.Manifest(checkpoint.FORMAT, 0, 1, 0, {}, **known))
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"self": checkpoint._digest_of(manifest)}))
    return path


def archive(state: Any, *, packed: bool = False, program: bytes | None = None) -> bytes:
    """What `torch.save` writes, repacked, or with other opcodes for its unpickler."""
    saved, made = io.BytesIO(), io.BytesIO()
    torch.save(state, saved)
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(made, "w", kind, compresslevel=1) as target:
        for entry in source.infolist():
            is_program = program is not None and entry.filename.endswith("data.pkl")
            target.writestr(entry.filename, program if is_program else source.read(entry))  # type: ignore[arg-type]
    return made.getvalue()


def opcodes(body: bytes) -> bytes:
    return archive({"a": torch.zeros(2)}, program=b"\x80\x02" + body + b".")


def laughs() -> bytes:
    """Ten lists of ten times the list before: a few hundred bytes for 10^11 numbers."""
    body = b"X\x01\x00\x00\x000]q\x00" + b"K\x01a" * 10
    for number in range(1, 11):
        name = b"X\x01\x00\x00\x00" + bytes([ord("0") + number])
        body += name + b"]q" + bytes([number]) + (b"h" + bytes([number - 1]) + b"a") * 10
    return b"}(" + body + b"u"


def of_shape(size: int, stride: int) -> Any:
    """A tensor that claims a size, in a storage of one number."""

    class Claims:
        def __reduce__(self) -> Any:
            storage = torch.zeros(1).storage()
            return torch._utils._rebuild_tensor_v2, (storage, 0, (size,), (stride,), False, OrderedDict())

    return {"model": {"w": Claims()}}


def older_form() -> bytes:
    saved = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, saved, _use_new_zipfile_serialization=False)
    return saved.getvalue()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(lambda: archive({"a": torch.zeros(2**24)}, packed=True), "unpacks to more", id="bomb"),
        pytest.param(lambda: archive([1, 2]), "no state by names", id="list"),
        pytest.param(lambda: archive({1: 2}), "no state by names", id="numbered"),
        pytest.param(older_form, "no archive of PyTorch's", id="older form"),
        pytest.param(lambda: b"", "no archive of PyTorch's", id="empty"),
        pytest.param(lambda: b"PK\3\4" + bytes(100), "not a zip", id="no archive"),
        pytest.param(lambda: opcodes(b"h\x05"), "KeyError: 5", id="memo"),
        pytest.param(lambda: opcodes(b"a"), "IndexError", id="stack"),
        pytest.param(lambda: opcodes(b"}X\x01\x00\x00\x00a" + b"]" * 9999 + b"a" * 9998 + b"s"), "", id="deep"),
        pytest.param(lambda: opcodes(b"}q\x00X\x01\x00\x00\x00ah\x00s"), "unfolds to more|Recursion", id="cycle"),
        pytest.param(lambda: opcodes(laughs()), "unfolds to more", id="laughs"),
        pytest.param(lambda: of_shape(10**12, 1), "", id="shape"),
        pytest.param(lambda: of_shape(10**12, 0), "unfolds to more", id="one number"),
        pytest.param(lambda: {"a": torch.zeros(10**6, 10**6, device="meta")}, "without contents", id="meta"),
        pytest.param(lambda: {"a": bytearray(10**4)}, None, id="bytes"),
    ],
)
def test_a_state_that_is_none(tmp_path: Path, content: Callable[[], Any], words: str | None) -> None:
    """Nothing in it is run, and it takes no more memory than it has bytes: else it was not for this program."""
    path = sealed(tmp_path / "step-000000001", content())
    if words is None:
        assert len(checkpoint.load(path)["a"]) == 10**4
        return
    with pytest.raises(CheckpointError, match=f"step-000000001 is not a whole checkpoint: .*({words})"):
        checkpoint.load(path)


@pytest.mark.filterwarnings("ignore:.*pickle protocol.*:UserWarning")
def test_no_opcodes_do_harm(tmp_path: Path) -> None:
    """Changed at random: PyTorch's unpickler raises errors of all kinds, which once were tracebacks."""
    draws = random.Random(1)
    with zipfile.ZipFile(io.BytesIO(archive({"a": torch.zeros(3), "b": [1, (2.5, "x")]}))) as source:
        name = next(name for name in source.namelist() if name.endswith("data.pkl"))
        program = source.read(name)
    refused = 0
    for _ in range(300):
        changed = bytearray(program)
        for _ in range(draws.randint(1, 3)):
            changed[draws.randrange(len(changed))] = draws.randrange(256)
        try:
            checkpoint.load(sealed(tmp_path / "c", archive({"a": torch.zeros(3)}, program=bytes(changed))))
        except CheckpointError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.STATE])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.timeout(30)
def test_what_is_no_file_is_not_read(name: str, kind: str, tmp_path: Path) -> None:
    """A pipe was waited for without limit, and of /dev/zero all was read into memory."""
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
    "change", [{"number": 2**60}, {"step": float("inf")}, {"figures": {"test_loss": float("nan")}}]
)
def test_a_manifest_of_endless_numbers(tmp_path: Path, change: dict[str, Any]) -> None:
    """The next one's number would have been one more, in a name too long for a folder."""
    path = sealed(tmp_path / "step-000000001", {"a": 1})
    manifest = json.loads((path / checkpoint.MANIFEST).read_text()) | change
    del manifest["self"]
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"self": checkpoint._digest_of(manifest)}))
    with pytest.raises(CheckpointError, match="are not all numbers"):
        checkpoint.load(path)


def test_old_ones_are_removed_and_never_what_they_link_to(tmp_path: Path) -> None:
    """One that was moved to another disk, with a link in its place, once ended the run that removed it."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for step in (1, 2):
        checkpoint.save(folder, {"at": step}, step=step, epoch=0)
    (folder / "step-000000001").rename(elsewhere)
    (folder / "step-000000001").symlink_to(elsewhere)
    (folder / ".step-000000003.7").symlink_to(elsewhere)
    (folder / ".step-000000004.7").write_text("")
    checkpoint.prune(folder, keep=1, best=None)
    assert [path.name for path in folder.iterdir()] == ["step-000000002"]
    assert checkpoint.load(elsewhere) == {"at": 1}


def of_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(state: dict[str, Any]) -> dict[str, Any]:
        change(state)
        return state

    return changed


def rank(state: dict[str, Any]) -> dict[str, Any]:
    return state["ranks"][0]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda s: s.update(model=7), id="model"),
        pytest.param(lambda s: s.update(model=[1]), id="model list"),
        pytest.param(lambda s: s["model"].update({"first.weight": "x"}), id="weight"),
        pytest.param(lambda s: s.update(progress=[]), id="progress"),
        pytest.param(lambda s: s["progress"].update(step="many"), id="step"),
        pytest.param(lambda s: s["progress"].update(epoch=float("nan")), id="epoch"),
        pytest.param(lambda s: s["progress"].update(consumed=-1), id="consumed"),
        pytest.param(lambda s: s["progress"].update(samples=10**400), id="samples"),
        pytest.param(lambda s: s["progress"].update(state_dict=1), id="method"),
        pytest.param(lambda s: s["progress"].update(figures={"test_loss": "low"}), id="figures"),
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
def test_a_state_of_other_kinds(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """All has its name, and one thing is not what it should be: a clear error, and nothing is lost."""
    fit(tmp_path, epochs=1, save_every_steps=2, save_every_epochs=None, max_steps=2)
    (path,) = (tmp_path / "checkpoints").iterdir()
    state = checkpoint.load(path)
    change(state)
    sealed(path, state)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"(does not fit|metrics are none).*--resume none"):
        fit(tmp_path, resume="auto", max_steps=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert checkpoint.load(path).keys() == state.keys()


@pytest.mark.parametrize("who", ["all", "rank 1"])
def test_all_ranks_end_over_a_hostile_checkpoint(who: str, tmp_path: Path) -> None:
    """Also where only what one rank would have read is none: the others once began to train, and waited for it."""
    argv = digits_job.argv("ddp", tmp_path / "log", ["--save-every-steps", "1"])
    launch(QUICKEST, 2, argv)
    path = max((tmp_path / "log/checkpoints").iterdir())
    state = checkpoint.load(path)
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
def test_options_in_hostile_yaml(content: str | bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match="job.yaml") as caught:
        parse(MnistOptions, ["--config", str(file)])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_options_from_a_device(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="more than 100,000 bytes"):
        parse(MnistOptions, ["--config", "/dev/zero"])
    file = tmp_path / "job.yaml"
    file.write_text("log_dir: 2026-11-23\n")  # which YAML takes for a date
    assert parse(MnistOptions, ["--config", str(file)]).log.log_dir == "2026-11-23"


# Log folders, and those of the tools.


@pytest.mark.parametrize("name", [".lock", ".job", "metrics.jsonl", "config.yaml", "run.json", "steps/rank-0.npz"])
def test_a_log_folder_from_elsewhere_leads_nowhere(name: str, tmp_path: Path) -> None:
    """Unpacked from an archive with links in it: a run that went on there wrote into what they lead to."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    log = tmp_path / "log"
    (log / name).parent.mkdir(parents=True)
    (log / name).symlink_to(mine)
    with pytest.raises(OptionError, match=rf"--log-dir .* cannot be written to: .*{name} is a link"):
        fit(log, epochs=1, resume="auto")
    assert mine.read_text() == "precious"


@pytest.mark.timeout(60)
def test_a_log_folder_with_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OptionError, match=r"metrics\.jsonl is a link, or no file"):
        fit(tmp_path, epochs=1, resume="auto")


def test_metrics_of_any_length_and_depth(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = b'{"event": "step", "step": 3}\n'
    hostile = [b"[" * 100_000, b'{"a":' * 100_000, b"x" * (3 * MAX_LINE_BYTES), b"\xff\xfe", b"9" * 5000]
    file.write_bytes(good + b"\n".join(hostile) + b"\n" + good + b'{"event": "step", "st')
    _drop_later(file, 3, 0)
    assert file.read_bytes() == good * 2


FIGURES = {"work": {"steps": 3, "rates": [[0.1, 3]]}, "first_step_at": 1.0, "step_s": 0.5}


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
                {"work": {"steps": 10**12, "rates": [[0.1, 10**12]]}},
                {"work": {"steps": 3, "rates": [[0.1, 2]]}},
                {"work": {"steps": "3", "rates": [[0.1, 3]]}},
                {"step_s": 0},
                {"step_s": "fast"},
                {"first_step_at": float("nan")},
                {"parts": {"data": 1}},
                {"curve": [[1]]},
                {"percentiles_s": [None]},
                {"weights": 3},
            )
        ),
    ],
)
def test_a_line_that_is_no_run(line: str, tmp_path: Path) -> None:
    """Of a folder of results from elsewhere: it is left out like one that a kill has torn."""
    good = Run({"a": 1}, 1, "done", 1.0, figures=FIGURES)
    (tmp_path / "runs.jsonl").write_text(f"{json.dumps(asdict(good))}\n{line}\n{json.dumps(asdict(good))}\n")
    assert read_runs(tmp_path, are_figures) == [good, good]


def test_results_from_elsewhere_lead_nowhere(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("precious")
    out.mkdir()
    (out / ".lock").symlink_to(mine)
    with pytest.raises(OptionError, match=r"--out .*\.lock is a link"), locked_folder(out):
        pass
    (out / ".lock").unlink()
    (out / "failed").mkdir()
    (out / "failed/1.txt").symlink_to(mine)
    with pytest.raises(OptionError, match=r"--out .*1\.txt is a link"), locked_folder(out):
        pass
    (out / "failed").rename(out / "running")  # as a killed run may have left it
    with locked_folder(out):
        assert not (out / "running").exists()
    assert mine.read_text() == "precious"


# Data.


def test_mnist_that_unpacks_to_anything(mnist_dir: Path, tmp_path: Path) -> None:
    for path in (mnist_dir / "MNIST/raw").glob("*-ubyte"):
        (tmp_path / path.name).symlink_to(path)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.unlink()
    labels.with_suffix(".gz").write_bytes(gzip.compress(whole + bytes(10**8), 1))
    with pytest.raises(DataError, match="is not MNIST: expected 10008 bytes .* found more that begin"):
        mnist_module.load_mnist(tmp_path)
    labels.write_bytes(whole[:-1] + b"\xc8")
    with pytest.raises(DataError, match=r"has the label 200, and there are 0 to 9\. Delete it"):
        mnist_module.load_mnist(tmp_path)


def pax(size: int) -> bytes:
    """The head of an extended header, which tarfile reads into memory whole."""
    return fake_imdb.member("pax", tarfile.XHDTYPE, size=size).tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(lambda: pax(2**32), "unpacks to far more", id="header"),
        pytest.param(lambda: fake_imdb.member("x", size=2**32).tobuf(), "unpacks to far more", id="file"),
        pytest.param(
            lambda: b"".join(fake_imdb.member(f"{n}").tobuf() for n in range(60)), "50 files", id="files"
        ),
        pytest.param(
            lambda: b"".join(
                fake_imdb.member(f"aclImdb/train/pos/{n}_9.txt", size=2**20).tobuf() + bytes(2**20)
                for n in range(7)
            ),
            "MB of reviews",
            id="reviews",
        ),
    ],
)
def test_reviews_that_unpack_to_anything(
    content: Callable[[], bytes], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are lower here than those of the official archive, by which this takes half a minute."""
    for name, limit in {
        "MOST_UNPACKED_BYTES": 2**24,
        "MOST_AT_ONCE_BYTES": 2**23,
        "MOST_TEXT_BYTES": 2**22,
        "MOST_FILES": 50,
    }.items():
        monkeypatch.setattr(imdb_archive, name, limit)
    file = tmp_path / imdb_archive.ARCHIVE
    file.write_bytes(gzip.compress(content() + bytes(2**25), 1))
    with pytest.raises(DataError, match=f"{words}.*, and is not read. Delete it"):
        imdb_archive.read(file)


VOCABULARY, LENGTH = 300, 16


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    archive = fake_imdb.write_archive(tmp_path / imdb_archive.ARCHIVE, fake_imdb.reviews())
    file = tmp_path / "cache.npz"
    tokenizer.save(tokenizer.encode(imdb_archive.read(archive), VOCABULARY, LENGTH), file)
    tokenizer.load(file, VOCABULARY, LENGTH)
    return file


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_ids", np.full((24, LENGTH), VOCABULARY, np.int16)),
        ("train_ids", np.full((24, LENGTH), -1, np.int16)),
        ("test_ids", np.zeros((24, LENGTH + 1), np.int16)),
        ("test_ids", np.zeros((24, LENGTH), np.float32)),
        ("test_labels", np.full(24, 2, np.uint8)),
        ("test_labels", np.zeros(0, np.uint8)),
        ("train_ids", np.array([{"a": 1}], object)),
        ("about", np.frombuffer(b"[" * 10_000, np.uint8)),
        ("about", np.frombuffer(b'{"counts": {"cut": "all"}, "tokenizer": ""}', np.uint8)),
    ],
)
def test_a_cache_of_other_things(name: str, value: Any, tokens: Path) -> None:
    with np.load(tokens) as arrays:
        content = dict(arrays) | {name: value}
    np.savez(tokens, **content)
    with pytest.raises(DataError, match="cache.npz is damaged"):
        tokenizer.load(tokens, VOCABULARY, LENGTH)


def test_a_cache_that_unpacks_to_anything(tokens: Path) -> None:
    with np.load(tokens) as arrays:
        content = dict(arrays) | {"train_ids": np.zeros((10**6, LENGTH), np.int16)}
    np.savez_compressed(tokens, **content)
    with pytest.raises(DataError, match="is packed, and would unpack to more"):
        tokenizer.load(tokens, VOCABULARY, LENGTH)


# Built wheels: code that is run.


class Key:
    """A BuildKey as far as `cached_wheel` uses it."""

    name = "horovod-for-this"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "cache/wheels"
    with wheel.lock_wheels(folder):
        pass
    (folder / Key.name).mkdir(0o755)
    (folder / Key.name / "horovod-0.28.1.whl").write_text("")
    return folder


def cached(wheels: Path) -> Path | None:
    with wheel.lock_wheels(wheels):
        return wheel.cached_wheel(wheels, Key())  # type: ignore[arg-type]


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
        ("..", 0o777),
        (Key.name, 0o775),
        (f"{Key.name}/horovod-0.28.1.whl", 0o664),
        (f"{Key.name}/horovod-0.28.1.whl", 0o646),
    ],
)
def test_a_wheel_that_others_could_have_written_is_refused(place: str, mode: int, wheels: Path) -> None:
    assert cached(wheels) is not None
    (wheels / place).chmod(mode)
    with pytest.raises(InstallError, match=r"(?s)only you may write.*other users may write to .*type: "):
        cached(wheels)
    (wheels / place).chmod(0o1777 if place == ".." else 0o755)
    assert cached(wheels) is not None, "in a sticky folder, such as /tmp, others cannot replace it"


@needs_root
@pytest.mark.parametrize("place", [".", "..", Key.name, f"{Key.name}/horovod-0.28.1.whl"])
def test_a_wheel_of_another_user(place: str, wheels: Path) -> None:
    os.chown(wheels / place, 12345, 12345)
    with pytest.raises(InstallError, match=r"belongs to another user \(number 12345\)"):
        cached(wheels)


def test_a_wheel_by_a_link(wheels: Path, tmp_path: Path) -> None:
    (wheels / Key.name).rename(tmp_path / "planted")
    (wheels / Key.name).symlink_to(tmp_path / "planted")
    with pytest.raises(InstallError, match="is a link"):
        cached(wheels)
