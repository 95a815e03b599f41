"""Horovod's source and our changes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from install_checks import NO_NETWORK, ROOT
from launchers import requires

from hvd_trainer.horovod_build.build_steps import BuildSteps
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.patches import apply_patches
from hvd_trainer.horovod_build.source import PatchError, Replacement


def test_the_changes_fit_the_published_source(patched: Path) -> None:
    for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        assert "set(CMAKE_CXX_STANDARD 20)" in (patched / path).read_text()
    assert "distutils" not in (patched / "horovod/runner/js_run.py").read_text()
    command = [sys.executable, "-c", "import horovod.hvd_trainer_build as b; print(b.RECORD)"]
    out = subprocess.check_output(command, cwd=patched, text=True)
    assert out.strip() == "{'torch': '2.15.0', 'cuda': None}"


def test_a_source_that_looks_different_is_refused(patched: Path) -> None:
    with pytest.raises(PatchError, match="found 0 times instead of once"):
        apply_patches(patched, 20, {})
    with pytest.raises(PatchError, match=r"cannot change no\.txt"):
        Replacement("no.txt", "a", "b", "a reason").apply(patched)


def test_a_package_with_another_hash_is_not_even_unpacked(
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


def test_a_horovod_without_its_extension_is_not_usable(patched: Path) -> None:
    """Such a one prints a warning, imports all the same, and has no `init`."""
    code = "from hvd_trainer.horovod_build.facts import probe; print(probe().horovod.error)"
    out = subprocess.check_output(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{patched}{os.pathsep}{ROOT}"},
        text=True,
        timeout=120,
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
