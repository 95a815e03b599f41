"""CI's scripts, and the form for a GPU's report on GitHub."""

from __future__ import annotations

import os
import subprocess

import pytest
from launchers import REPOSITORY


@pytest.mark.parametrize("script", [".ci/run", ".ci/bare", "docker/hvd-ssh", "docker/hvd-mnist"])
def test_scripts_can_be_executed(script: str) -> None:
    """What they hold is the concern of `make lint`."""
    assert os.access(REPOSITORY / script, os.X_OK)


def test_ci_run_refuses_an_unknown_argument() -> None:
    done = subprocess.run([REPOSITORY / ".ci/run", "nightlly"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "ci: type .ci/run, or .ci/run nightly\n")


def test_gpu_report_form_names_the_command() -> None:
    assert "make gpu-test" in (REPOSITORY / ".github/ISSUE_TEMPLATE/gpu-report.yml").read_text()
