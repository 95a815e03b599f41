"""Trials of tools in folders of their own: they find their user's files there, and leave them as they are."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from code_trial import CodeTrial

from hvd_trainer.measure.failure_reason import why_it_failed
from hvd_trainer.measure.own_files import MAX_FILES, in_own_folder
from hvd_trainer.measure.save_kill import Saves
from hvd_trainer.measure.stack_record import describe_frame
from hvd_trainer.measure.start import Start, run_to_end
from hvd_trainer.measure.tool_folder import running
from hvd_trainer.measure.trials import TrialRunner

OLD_S = 1e9
"""Long ago, in seconds since 1970."""


def user_files(folder: Path) -> dict[str, tuple[bytes, float] | None]:
    """Return the content and time of every file, and the names of all folders, but for those of the tool."""
    found = (path for path in folder.rglob("*") if "out" not in path.relative_to(folder).parts)
    return {
        str(path.relative_to(folder)): None if path.is_dir() else (path.read_bytes(), path.stat().st_mtime)
        for path in found
    }


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's working folder, in which a tool is started."""
    folder = tmp_path / "project"
    (folder / "checkpoints").mkdir(parents=True)
    (tmp_path / "shared").mkdir()
    (folder / ".ckpt").mkdir()
    for name in ("log.csv", "model.pt", "checkpoints/last.pt", ".ckpt/last.pt", "../shared/data.txt"):
        (folder / name).write_text("of the user")
    (folder / "library.py").write_text("import pathlib\nNAME = 'library'\n")
    for path in tmp_path.rglob("*"):
        os.utime(path, (OLD_S, OLD_S))
    monkeypatch.chdir(folder)
    # Else all that pytest makes would count as temporary.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return folder


def run_script(user: Path, code: str, *launch: str) -> str:
    """Run a script as a trial of a tool, whose folder is in the user's, and return what it has printed."""
    place = user / "out" / "running"
    (user / "script.py").write_text(code)
    start = in_own_folder(Start([sys.executable, *launch, "script.py", "--to", "{folder}/mine"]), place)
    ended = run_to_end(start, place, place / "output", limit_s=60)
    said = (place / "output").read_text()
    assert ended == 0, said
    return said


WRITES = {
    "append": "open('log.csv', 'a').write('more'); assert open('log.csv').read() == 'of the usermore'",
    "overwrite": "open('log.csv', 'w').write('new'); assert open('log.csv').read() == 'new'",
    "change": "with open('log.csv', 'r+') as f: f.write('OF')\nassert open('log.csv').read() == 'OF the user'",
    "by os.open": "os.open('log.csv', os.O_WRONLY | os.O_TRUNC); assert not os.path.getsize('log.csv')",
    "truncate": "os.truncate('log.csv', 2); assert open('log.csv').read() == 'of'",
    "touch": "os.utime('log.csv', (5, 5)); assert os.stat('log.csv').st_mtime == 5",
    "replace": "open('new', 'w').close(); os.replace('new', 'log.csv'); assert not os.path.getsize('log.csv')",
    "remove": "os.remove('log.csv'); assert not os.path.exists('log.csv')",
    "remove a folder": "shutil.rmtree('checkpoints'); assert not os.path.exists('checkpoints')",
    "rename a folder": "os.rename('checkpoints', 'before'); open('before/last.pt', 'w').write('new')",
    "by a map": "import numpy; numpy.memmap('log.csv', mode='r+')[:] = 1; assert open('log.csv').read(1) == '\\1'",
    "below a hidden folder": "for name in ('first', 'last'): open(f'.ckpt/{name}.pt', 'w').write('new')",
    "below a folder": "for name in ('first', 'last'): open(f'checkpoints/{name}.pt', 'w').write('new')",
    "beside the script": "os.chdir('checkpoints'); open(os.path.dirname(__file__) + '/log.csv', 'w').write('new')",
    "beside the folder": "open('../new.txt', 'w').write('new')",
    "from a subprocess": "subprocess.run([sys.executable, '-c', \"open('log.csv', 'w')\"], check=True)",
    "from processes however they are started": (
        "import multiprocessing\n"
        "def write(): open('log.csv', 'w')\n"
        "for method in ('fork', 'spawn') if __name__ == '__main__' else ():\n"
        "    process = multiprocessing.get_context(method).Process(target=write)\n"
        "    process.start(), process.join()\n"
        "    assert process.exitcode == 0"
    ),
    "where it is told": "assert not os.listdir(os.path.dirname(sys.argv[2])); open(sys.argv[2], 'w').write('new')",
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_a_trial_writes_is_its_own(user: Path, write: str) -> None:
    before = user_files(user.parent)
    run_script(user, f"import os, shutil, subprocess, sys\n{write}\n")
    (user / "script.py").unlink()
    assert user_files(user.parent) == before
    assert not (user / "out" / "running" / "outside").exists()


@pytest.mark.parametrize("run", [[], ["-m", "hvd_trainer", "run", "--backend", "ddp", "--"]])
def test_pytorch_and_safetensors_write_no_file_of_the_user(run: list[str], user: Path) -> None:
    """They open files in C++ and Rust, of which Python does not tell; `run` removed the hooks that do."""
    code = (
        "import torch, safetensors.torch, torch.serialization\n"
        "torch.save({'a': torch.ones(2)}, 'model.pt')\n"
        "safetensors.torch.save_file({'a': torch.ones(2)}, 'log.csv')\n"
        "print(torch.load('model.pt'), safetensors.torch.load_file('log.csv'))\n"
    )
    said = run_script(user, code, *run)
    assert said.count("tensor([1., 1.])") == 2, said
    assert (user / "model.pt").read_text() == (user / "log.csv").read_text() == "of the user"


def test_a_trial_finds_the_files_of_its_user(user: Path) -> None:
    (user / "many").mkdir()
    for number in range(MAX_FILES + 1):
        (user / "many" / str(number)).touch()
    code = (
        "import os, sys, library\n"
        "assert library.NAME == 'library' and __file__.endswith('script.py')\n"
        "print(open('log.csv').read(), open('../shared/data.txt').read(), len(os.listdir('many')))\n"
        "print(sorted(os.listdir('.')), os.environ['PWD'] == os.getcwd())\n"
    )
    said = run_script(user, code)
    assert f"of the user of the user {MAX_FILES + 1}\n" in said
    assert "['.ckpt', 'checkpoints', 'library.py', 'log.csv', 'many', 'model.pt', 'script.py'] True" in said


def test_lines_are_those_of_the_users_files(user: Path) -> None:
    """In a trial, scripts and the package itself are found by links."""
    link = user / "link.py"
    link.symlink_to(user / "library.py")
    frame = describe_frame(compile("f()", str(link), "exec"), 0)
    assert (frame.file, frame.owner) == (str(user / "library.py"), "user")


def trial_of(code: str, number: int) -> CodeTrial:
    return CodeTrial(
        "python", {"n": number}, lambda _: Start([sys.executable, "-c", code]), lambda _: {"steps": 1}
    )


def test_trials_do_not_go_on_with_what_others_have_saved(user: Path) -> None:
    code = "import os; assert not os.path.exists('new.pt'); open('new.pt', 'w')"
    runner = TrialRunner(user / "out")
    assert [runner.run(trial_of(code, number)).state for number in (1, 2)] == ["done", "done"]


def test_a_write_outside_is_named_once(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = user.parent / "elsewhere.txt"
    runner = TrialRunner(user / "out")
    code = f"import time; open({str(new)!r}, 'a').write('x'); open('/dev/null', 'w'); open({str(new)!r}, 'a')"
    assert [runner.run(trial_of(code, number)).state for number in (1, 2)] == ["done", "done"]
    assert new.read_text() == "xx"
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert f"the job writes to {new}, which all trials have in common" in said
    assert "Write {folder} where it is told that path" in said


@pytest.mark.parametrize("inner", ["", "project"])
def test_temporary_files_are_no_writes_outside(
    user: Path, inner: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the tool is started in the folder of temporary files itself, or in one that is in it.

    `NamedTemporaryFile` opens that folder by its own name.
    """
    monkeypatch.setenv("TMPDIR", str(user.parent))
    monkeypatch.chdir(user.parent / inner)
    code = (
        "import tempfile; tempfile.mkstemp(); tempfile.NamedTemporaryFile(); tempfile.TemporaryFile()\n"
        "open(tempfile.gettempdir() + '/elsewhere.txt', 'a').write('x')"
    )
    assert TrialRunner(user / "out").run(trial_of(code, 1)).state == "done"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "change",
    [
        "open({path!r}, 'a')",
        "open({path!r}, 'r+').write('new')",
        "import numpy; numpy.memmap({path!r}, mode='r+')[:] = 0",
        "import os; os.remove({path!r})",
        "import os; open('new', 'w'); os.replace('new', {path!r})",
        "import pathlib, shutil; shutil.rmtree(pathlib.Path({path!r}).parent)",
        "import torch; torch.save([1], {path!r})",
    ],
)
@pytest.mark.parametrize("place", ["checkpoints", ".ckpt"])
def test_no_trial_changes_a_file_that_was_there_before(user: Path, change: str, place: str) -> None:
    """Also where the clock of its disk is ahead."""
    file = user / place / "last.pt"
    os.utime(file, (time.time() + 3600, time.time() + 3600))
    run = TrialRunner(user / "out").run(trial_of(change.format(path=str(file)), 1))
    assert (run.state, file.read_text()) == ("failed", "of the user")
    assert "is a file of yours, and no trial may change it. Write {folder} where" in run.note


def test_a_script_that_resumed_and_had_nothing_left_is_told_so(user: Path) -> None:
    torch.save([1], user / "epoch-3.pt")
    code = "import torch; torch.save([2], 'own.pt'); torch.load('own.pt'); torch.load('epoch-3.pt')"
    trial = CodeTrial("", {}, lambda _: Start([sys.executable, "-c", code]), lambda _: None)
    run = TrialRunner(user / "out").run(trial)
    assert (
        "no optimizer step that counts. Your script resumed from a checkpoint (epoch-3.pt): write {folder}"
        in run.note
    )
    assert why_it_failed(running(user / "out"), 0).endswith("no optimizer step that counts")


def test_trials_may_change_what_they_have_made_outside(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a folder, and what another trial of the same command has renamed."""
    place = str(user.parent / "elsewhere")
    first = (
        f"import os; os.makedirs({place!r}); os.chdir({place!r}); open('a', 'w').write('x'); os.rename('a', 'b')"
    )
    second = f"import shutil; open({place!r} + '/b', 'r+').write('y'); shutil.rmtree({place!r})"
    runner = TrialRunner(user / "out")
    assert [runner.run(trial_of(code, n)).note for n, code in enumerate((first, second))] == ["", ""]
    assert f"the job writes to {place}" in capsys.readouterr().err


SAVES = {
    "open": "open(name, 'wb').write(b'x' * 1000)",
    "torch": "import torch; torch.save(torch.zeros(1000), name)",
    "old torch": "import torch; torch.save(torch.zeros(1000), name, _use_new_zipfile_serialization=False)",
    "safetensors": "import torch, safetensors.torch as st; st.save_file({'a': torch.zeros(1000)}, name)",
    "thread": "import threading as t; t.Thread(target=lambda: open(name, 'wb').write(b'x' * 1000)).start()",
}


@pytest.mark.parametrize(
    ("way", "new"), [*((way, "state") for way in SAVES), ("open", "state.new"), ("torch", "state.new")]
)
def test_no_save_is_too_short_to_be_killed_in(way: str, new: str, user: Path) -> None:
    """Saves that were shorter than a look at the file system were missed: all of a few kilobytes."""
    place = user / "out" / "running"
    saves = Saves(place)
    saves.arm(0.5)
    (place / "armed").rename(place / "later")
    (user / "script.py").write_text(f"""
import os, time

def save(name):
    {SAVES[way]}

for number in range(3):
    print("saving", number, flush=True)
    if number == 2:
        os.rename({str(place / "later")!r}, {str(place / "armed")!r})
    save({new!r})
    time.sleep(0.05)
    os.replace({new!r}, "state")
    if number == 0:
        import shutil; shutil.copy("state", "whole")
print("not killed", flush=True)
""")
    start = in_own_folder(Start([sys.executable, "script.py"]), place)
    assert run_to_end(start, place, place / "output", limit_s=60) == -signal.SIGXFSZ
    assert (place / "output").read_text().splitlines() == [f"saving {number}" for number in range(3)]
    hit = saves.hit()
    assert hit is not None
    assert hit[1] == new
    sizes = {path.name: path.stat().st_size for path in next((place / "files").rglob("whole")).parent.iterdir()}
    # safetensors takes a file of another name, makes room for the whole of it at once, and renames it.
    assert (0 if way == "safetensors" else sizes["whole"] // 2) in sizes.values()
