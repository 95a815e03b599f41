"""Which edits make a measured run stale: real runs, and what is repeated after an edit."""

from __future__ import annotations

import os
import py_compile
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from code_trial import CodeTrial

from hvd_trainer.measure import stale
from hvd_trainer.measure.stale import digest_of_files
from hvd_trainer.measure.start import Start
from hvd_trainer.measure.trials import TrialRunner

JOB = {
    "train.py": "import sys\nsys.path.insert(0, 'src')\nimport library.model, helper\nopen('own.yaml')\n",
    "helper.py": "import importlib\nimportlib.import_module('lo' + 'ng_name')\n",
    "long_name.py": "",
    "own.yaml": "lr: 0.1",
    "src/library/__init__.py": "from . import x\n",
    "src/library/model.py": "from .deep.layer import Layer\n",
    "src/library/x.py": "",
    "src/library/deep/layer.py": "class Layer: pass\n",
    "other.py": "",
    "venv/site-packages/installed.py": "",
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which a tool is started, on a machine whose temporary files are elsewhere."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.chdir(folder)
    return folder


def run(*words: str) -> set[str]:
    """Run a script as a tool does, and return the names of the user's files that its record has."""
    runner, trial = TrialRunner(Path("out").resolve()), trial_of(*words)
    record = runner.run(trial)
    assert (record.state, record.note) == ("done", "")
    assert TrialRunner(runner.folder).is_done(trial.identity, 1)
    return {Path(name).name for name in record.read}


def trial_of(*words: str) -> CodeTrial:
    return CodeTrial("", {"words": words}, lambda _: Start([sys.executable, *words]), lambda _: {"steps": 1})


def is_done(*words: str) -> bool:
    """Return whether the command would take the run that is there."""
    return TrialRunner(Path("out").resolve()).is_done(trial_of(*words).identity, 1)


def test_edit_of_a_file_that_a_run_has_read_makes_it_stale(user: Path) -> None:
    """Also of a module two imports away, in a src folder, or with a computed name, and of a file that it opens."""
    write(user, JOB)
    words = ("-c", "import runpy; runpy.run_path('train.py')")
    read = run(*words)
    assert read == {Path(name).name for name in JOB} - {"other.py", "installed.py"}
    (user / "other.py").write_text("changed = True\n")
    assert is_done(*words)
    for name in JOB.keys() - {"other.py", "venv/site-packages/installed.py"}:
        text = (user / name).read_text()
        (user / name).write_text(text + "changed = True\n")
        assert not is_done(*words), name
        (user / name).unlink()
        assert not is_done(*words), name
        (user / name).write_text(text)
        assert is_done(*words), name


def test_compiled_modules_count_as_their_source(user: Path) -> None:
    write(user, {"helper.py": ""})
    py_compile.compile("helper.py")
    assert run("-c", "import sys; sys.path.insert(0, ''); import helper") == {"helper.py"}


def test_modules_on_pythonpath_count(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(user.parent, {"lib/shared.py": "", "lib/site-packages/tool.py": ""})
    monkeypatch.setenv("PYTHONPATH", f"{user.parent}/lib:{user.parent}/lib/site-packages")
    assert run("-c", "import shared, tool") == {"shared.py"}


def test_a_failed_run_is_tried_again_after_an_edit(user: Path) -> None:
    write(user, {"own.yaml": "wrong"})
    trial = trial_of("-c", "assert open('own.yaml').read() == 'right'")
    assert TrialRunner(user / "out").run(trial).state == "failed"
    assert TrialRunner(user / "out").has_failed(trial)
    (user / "own.yaml").write_text("right")
    runner = TrialRunner(user / "out")
    assert not runner.has_failed(trial)
    assert runner.run(trial).state == "done"


def test_a_run_is_stale_if_a_file_was_edited_during_it(user: Path) -> None:
    """It had read the old one, and was recorded with the new one."""
    write(user, {"own.yaml": "", "long-before.yaml": ""})
    edit = f"open('own.yaml'); open('long-before.yaml'); os.system('sleep 0.05; echo x > {user}/own.yaml')"
    record = TrialRunner(user / "out").run(trial_of("-c", f"import os; {edit}"))
    assert [stale.has_changed({name: then}) for name, then in record.read.items()] == [False, True]
    assert not is_done("-c", f"import os; {edit}")


def test_files_of_a_disk_with_another_clock_make_no_run_stale(user: Path) -> None:
    """A file dated in the future counted as written while it was read, so that no run came to its end."""
    write(user, {"own.yaml": ""})
    os.utime(user / "own.yaml", (time.time() + 3600, time.time() + 3600))
    assert run("-c", "open('own.yaml')") == {"own.yaml"}
    assert is_done("-c", "open('own.yaml')")


def test_what_a_run_writes_does_not_make_it_stale(user: Path) -> None:
    """Nor do temporary files, and not the thousands of samples that come after its code."""
    write(user, {f"data/{number}.txt": "" for number in range(600)})
    log = user.parent / "log"
    code = f"open({str(log)!r}, 'a').write('x'); open({str(log)!r}).read(); open('new', 'w'); open('new')"
    code += "\nimport tempfile; name = tempfile.mkstemp()[1]; open(name)"
    code += "\nfor number in range(600): open(f'data/{number}.txt')"
    assert len(run("-c", code)) == 500
    assert is_done("-c", code)


def test_records_from_elsewhere_may_name_anything(tmp_path: Path) -> None:
    """A pipe, a folder, a file of the kernel from which one reads for ever, no file: the run is stale."""
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), str(tmp_path), "/dev/zero", "/proc/kmsg", "no\0name", "", "missing"):
        assert stale.has_changed({name: "abc"}), name


def test_edit_of_this_package_makes_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"package.py": ""})
    monkeypatch.setattr(stale, "PACKAGE", tmp_path)
    find = stale.digest_of_package.__wrapped__
    before = find()
    (tmp_path / "package.py").write_text("changed = True\n")
    assert find() != before


def test_files_among_the_words_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `--config` of a job is a part of it; a file too large to read is known by its size and time."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"own.yaml": "lr: 1", "data": ""})
    before = digest_of_files(["--config=own.yaml", "--data", "data", "--lr", "1"])
    assert list(before) == ["data", "own.yaml"]
    (tmp_path / "own.yaml").write_text("lr: 2")
    after = digest_of_files(["--config", "own.yaml", "data"])
    assert (after["own.yaml"] != before["own.yaml"], after["data"]) == (True, before["data"])
    monkeypatch.setattr(stale, "MAX_BYTES", 0)
    (tmp_path / "own.yaml").write_text("lr: 3")
    assert digest_of_files(["own.yaml"])["own.yaml"] != after["own.yaml"]
