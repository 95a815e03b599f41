"""CI's scripts, and the form for a GPU's report on GitHub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import REPOSITORY


def program(name: str) -> str:
    """Return the path of a linter that was installed with the test's packages."""
    return str(Path(sys.executable).with_name(name))


@pytest.mark.parametrize("script", ["run", "bare"])
def test_ci_scripts_pass_shellcheck(script: str) -> None:
    file = REPOSITORY / ".ci" / script
    done = subprocess.run([program("shellcheck"), file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert os.access(file, os.X_OK)


def test_ci_run_refuses_an_unknown_argument() -> None:
    done = subprocess.run([REPOSITORY / ".ci/run", "nightlly"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "ci: type .ci/run, or .ci/run nightly\n")


def test_gpu_report_form_follows_its_schema() -> None:
    form = REPOSITORY / ".github/ISSUE_TEMPLATE/gpu-report.yml"
    command = [program("check-jsonschema"), "--builtin-schema", "vendor.github-issue-forms", form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "make gpu-test" in form.read_text()
