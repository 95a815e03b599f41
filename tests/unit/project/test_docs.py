"""The documentation site: its drawing is up to date, and its strict build refuses what it should."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize(
    ("script", "function", "file"),
    [
        ("architecture_graph.py", "drawing", "architecture.svg"),
        ("options_page.py", "page", "options.md"),
        ("migrate_page.py", "page", "migrate.md"),
    ],
)
def test_what_is_made_from_the_source_is_up_to_date(script: str, function: str, file: str) -> None:
    made = runpy.run_path(str(DOCS / script))[function]()
    assert (DOCS / file).read_text() == made, f"type: python docs/{script}"


BROKEN = {
    "[a page](no-such-page.md)": "'no-such-page.md'",
    "[a section](install.md#no-such-section)": "'#no-such-section'",
    "[a file](../hvd_trainer/no_such_file.py)": "no_such_file.py",
    '<script src="https://example.org/x.js"></script>': "verify.md loads something from the network",
}
"""A line of a page -> what the build says of it."""


def test_the_strict_build_refuses_broken_links_and_the_network(tmp_path: Path) -> None:
    """That it accepts the pages as they are is what `make docs` shows."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: make docs")
    for path in REPOSITORY.glob("[!.]*"):
        if path.name not in ("docs", "build"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    with (tmp_path / "docs/verify.md").open("a") as page:
        page.writelines(f"\n{line}\n" for line in BROKEN)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert f"Aborted with {len(BROKEN)} warnings" in done.stdout
    assert done.returncode == 1
    assert not [complaint for complaint in BROKEN.values() if complaint not in done.stderr]
