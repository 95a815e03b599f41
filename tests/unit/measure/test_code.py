"""Which edits make a measured run stale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hvd_trainer.measure import code
from hvd_trainer.measure.code import digest_of_code, digest_of_files, own_files

JOB = {
    "train.py": "import library.model\nfrom helper import f\nfrom hvd_trainer import Trainer\n",
    "helper.py": "def f(): pass\n",
    "library/__init__.py": "from . import x\n",
    "library/model.py": "from .deep.layer import Layer\n",
    "library/x.py": "",
    "library/deep/layer.py": "class Layer: pass\n",
    "other.py": "",
}
USED = ["helper.py", "layer.py", "__init__.py", "model.py", "x.py", "train.py"]


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("job", [["train.py", "--lr", "1"], ["-m", "train"]])
def test_edit_of_imported_code_makes_another_digest(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a module two imports away; one that is not imported may change."""
    write(tmp_path, JOB)
    monkeypatch.chdir(tmp_path)
    assert sorted(file.name for file in own_files(job)) == sorted(USED)
    before = digest_of_code(job)
    (tmp_path / "other.py").write_text("changed = True\n")
    assert digest_of_code(job) == before
    for name in JOB.keys() - {"other.py"}:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "changed = True\n")
        assert digest_of_code(job) != before, name
        (tmp_path / name).write_text(text)
    assert digest_of_code(job) == before


def test_all_modules_count_where_names_are_computed(tmp_path: Path) -> None:
    files = {"train.py": "import importlib\nimportlib.import_module('mo' + 'del')\n", "model.py": ""}
    write(tmp_path, {**files, ".venv/lib/site-packages/torch.py": "", "venv/site-packages/x.py": ""})
    assert [file.name for file in own_files([str(tmp_path / "train.py")])] == ["model.py", "train.py"]


def test_modules_on_pythonpath_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"job/train.py": "import shared\n", "lib/shared.py": ""})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    assert [file.name for file in own_files([str(tmp_path / "job/train.py")])] == ["train.py", "shared.py"]


def test_edit_of_this_package_makes_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"train.py": "", "package.py": ""})
    monkeypatch.setattr(code, "_package_files", lambda: (tmp_path / "package.py",))
    job = [str(tmp_path / "train.py")]
    before = digest_of_code(job)
    (tmp_path / "package.py").write_text("changed = True\n")
    assert digest_of_code(job) != before
    assert own_files(["-m", "hvd_trainer.mnist"]) == []


def test_files_among_the_words_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `--config` of a job is a part of it; a file too large to read is known by its size and time."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"own.yaml": "lr: 1", "data": ""})
    before = digest_of_files(["--config=own.yaml", "--data", "data", "--lr", "1"])
    assert list(before) == ["data", "own.yaml"]
    (tmp_path / "own.yaml").write_text("lr: 2")
    after = digest_of_files(["--config", "own.yaml", "data"])
    assert (after["own.yaml"] != before["own.yaml"], after["data"]) == (True, before["data"])
    monkeypatch.setattr(code, "MAX_BYTES", 0)
    assert digest_of_files(["own.yaml"])["own.yaml"] != after["own.yaml"]


def test_only_its_own_package_counts_of_an_installed_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"site-packages/tool/__init__.py": "", "site-packages/tool/run.py": "import tool.x, torch\n"})
    write(tmp_path, {"site-packages/tool/x.py": "", "site-packages/torch/__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    assert [file.name for file in own_files(["-m", "tool.run"])] == ["__init__.py", "run.py", "x.py"]
