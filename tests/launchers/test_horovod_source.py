"""Horovod's published source and the patches to it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from install_checks import NO_NETWORK, ROOT
from launchers import requires
from waiting import PATIENCE_S

from hvd_trainer.horovod_build.build_steps import BuildSteps
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.patch_set import PATCHES, PatchError, apply_patches


def test_patches_apply_to_the_published_source(patched: Path) -> None:
    for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        assert "set(CMAKE_CXX_STANDARD 20)" in (patched / path).read_text()
    assert "distutils" not in (patched / "horovod/runner/js_run.py").read_text()
    assert not [path for path in patched.rglob("*") if path.suffix in (".orig", ".rej", ".invalid")]
    command = [sys.executable, "-c", "import horovod.hvd_trainer_build as b; print(b.RECORD)"]
    out = subprocess.check_output(command, cwd=patched, text=True)
    assert out.strip() == "{'torch': '2.15.0', 'cuda': None}"


PATCHED_FILE = "horovod/common/timeline.cc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # patch(1) would accept both: the first with an offset, the second with fuzz.
        (lambda text: "\n" + text, r"03-is-quick[^$]*hunk no\.1 doesn't match"),
        (lambda text: text.replace("active_.exchange(0)", "active_.store(0)"), "03-is-quick[^$]*hunk no"),
        (lambda text: "", "03-is-quick[^$]*premature end of source file"),
        (None, "03-is-quick[^$]*source/target file does not exist"),
    ],
)
def test_patches_refuse_a_different_source(
    published: Path, tmp_path: Path, change: Callable[[str], str] | None, message: str
) -> None:
    source = tmp_path / published.name
    shutil.copytree(published, source)
    file = source / PATCHED_FILE
    if change is None:
        file.unlink()
    else:
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(PatchError, match=f"cannot apply {message}"):
        apply_patches(source, published.parent / "tools", cxx_standard=20, record={})


def test_patches_refuse_a_patched_source(patched: Path, published: Path) -> None:
    """patch-ng alone reports success when a patch is applied a second time."""
    with pytest.raises(PatchError, match=r"cannot apply 01-[^$]*already patched"):
        apply_patches(patched, published.parent / "tools", cxx_standard=20, record={})


@pytest.mark.parametrize("path", sorted(PATCHES.iterdir()), ids=lambda path: path.name)
def test_patches_begin_with_their_reasons(path: Path) -> None:
    header, *_ = path.read_text(encoding="utf-8").partition("\n--- a/")
    assert re.fullmatch(r"\d\d-[a-z0-9-]+\.patch", path.name)
    assert re.match(r"Description: [A-Z].+\n( .+\n)+Origin: vendor\n", header)


def test_package_with_another_hash_is_not_unpacked(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    sdist = published.with_name(f"{published.name}.tar.gz")
    (index / sdist.name).write_bytes(sdist.read_bytes() + b"\0")
    for name, value in (NO_NETWORK | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}).items():
        monkeypatch.setenv(name, value)
    steps = BuildSteps(tmp_path, tmp_path / "log")
    with pytest.raises(InstallError, match="sha256 differs"):
        steps.fetch_source()
    assert not list(tmp_path.glob("horovod-0.28.1*"))


def test_horovod_without_its_extension_is_not_usable(patched: Path) -> None:
    """A Horovod without its extension prints a warning, can be imported, and has no `init`."""
    code = "from hvd_trainer.horovod_build.facts import probe; print(probe().horovod.error)"
    out = subprocess.check_output(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{patched}{os.pathsep}{ROOT}"},
        text=True,
        timeout=PATIENCE_S,
    )
    assert "no PyTorch extension" in out


@requires("horovod")
def test_horovodrun_knows_its_controllers_without_pytorch() -> None:
    """As published it imports PyTorch twice to learn this, before it starts a rank: 2.7 s of 3.1 s here."""
    ask = "import sys; sys.modules['torch'] = None; from horovod.common.util import *"
    printed = subprocess.check_output(
        [sys.executable, "-c", f"{ask}; print(gloo_built(), mpi_built())"], text=True
    )
    assert printed in ("True False\n", "True True\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-np 0 true", "-np 0: the number of processes must be 1 or more"),
        ("-np 3 -H localhost:2 --gloo true", "Requested more processes (3) than there are available slots (2)"),
        ("-np 2 --hostfile missing true", "No such file or directory: 'missing'"),
        ("-np 2 --fusion-threshold-mb -1 true", "fusion_threshold_mb=-1"),
        # Each rank printed its environment, in which secrets may be.
        ("-np 2", "name the command to run"),
    ],
)
def test_horovodrun_says_in_one_line_what_is_wrong(words: str, said: str, patched: Path) -> None:
    """It ended with exit code 0, or in a traceback."""
    command = [sys.executable, "-m", "horovod.runner.launch", *words.split()]
    environ = os.environ | {"PYTHONPATH": str(patched)}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("horovodrun: ")
    assert said in line
