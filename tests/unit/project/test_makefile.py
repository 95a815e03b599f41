"""`make` on a machine that lacks something, and CI's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from install_checks import ROOT, script, tool_folder
from waiting import PATIENCE_S


def make_refuses(tmp_path: Path, *arguments: str, **environment: str) -> str:
    command = ["make", "--no-print-directory", f"VENV={tmp_path / 'venv'}", "setup", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"CXX": ""} | environment, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert not (tmp_path / "venv").exists()
    return done.stderr


def test_make_without_python_names_it(tmp_path: Path) -> None:
    assert "apt-get install python3" in make_refuses(tmp_path, "PYTHON=no-such-python")


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = script(tmp_path / "python3.8", '[ "$1" = -V ] && echo Python 3.8.18 && exit 0\nexit 1')
    message = make_refuses(tmp_path, f"PYTHON={old}")
    assert "3.10 or later is needed" in message
    assert "Python 3.8.18" in message


def test_make_without_a_compiler_names_it(tmp_path: Path) -> None:
    path = tool_folder(tmp_path / "bin", "make", "sh", "rm", "mkdir", "touch")
    message = make_refuses(tmp_path, f"PYTHON={sys.executable}", PATH=path)
    assert "apt-get install g++" in message


def test_make_without_c_headers_names_them(tmp_path: Path) -> None:
    """It was said by the installer of Horovod, after PyTorch had been downloaded."""
    python = script(tmp_path / "python3", f"echo {tmp_path}")
    assert "apt-get install python3-dev" in make_refuses(tmp_path, f"PYTHON={python}", CXX="c++")


def test_ci_run_refuses_an_unknown_argument() -> None:
    done = subprocess.run([f"{ROOT}/.ci/run", "nightlly"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "ci: type .ci/run, or .ci/run nightly\n")
