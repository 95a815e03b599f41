"""The documentation site: its drawing is up to date, and its strict build refuses what it should."""

from __future__ import annotations

import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents
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


def build(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build the site of a copy of the repository."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: make docs")
    for path in REPOSITORY.glob("[!.]*"):
        if path.name != "build" and not (root / path.name).exists():
            (root / path.name).symlink_to(path)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)


def test_the_strict_build_refuses_broken_links_and_the_network(tmp_path: Path) -> None:
    """That it accepts the pages as they are is what `make docs` shows."""
    shutil.copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs/verify.md").open("a") as page:
        page.writelines(f"\n{line}\n" for line in BROKEN)
    done = build(tmp_path)
    assert f"Aborted with {len(BROKEN)} warnings" in done.stdout
    assert done.returncode == 1
    assert not [complaint for complaint in BROKEN.values() if complaint not in done.stderr]


def test_the_first_command_clones_from_the_one_address() -> None:
    """setup.cfg has it; until then the README says ADDRESS."""
    known = re.search(r"^ +Source = (\S+)$", (REPOSITORY / "setup.cfg").read_text(), re.MULTILINE)
    first = next(command for command in documents.commands() if command.startswith("git clone"))
    assert shlex.split(first)[2] == (known[1] if known else "ADDRESS")


WITH_AN_ADDRESS = "project_urls =\n    Source = https://example.org/owner/hvd_trainer\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site of a repository that has an address."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, root / "docs")
    (root / "setup.cfg").write_text(
        re.sub(r"project_urls =\n(    \S.*\n)*", WITH_AN_ADDRESS, (REPOSITORY / "setup.cfg").read_text())
    )
    build(root, "--quiet").check_returncode()
    return root / "build/site"


WIDER = """() => [document.documentElement, ...document.querySelectorAll(".md-content pre code")]
    .filter(block => block.scrollWidth > block.clientWidth + 1)
    .map(block => block.textContent.trim().slice(0, 60))"""


@pytest.fixture
def opened(site: Path, browser: Any) -> Iterator[Any]:
    """Return a function that opens a page of the site from its folder, at a width, without a network."""
    asked: list[str] = []

    def open_page(name: str, width: int) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{site}/{name}")
        return page

    yield open_page
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


@pytest.mark.long
class TestSite:
    """In a browser, as a reader sees it."""

    def test_outputs_and_commands_do_not_scroll_sideways(self, site: Path, opened: Any) -> None:
        written = {path.with_suffix(".html").name for path in (REPOSITORY / "docs").glob("*.md")}
        wider = {name: opened(name, 1280).evaluate(WIDER) for name in sorted(written)}
        assert not {name: texts for name, texts in wider.items() if texts}

    def test_options_are_readable_on_a_phone(self, opened: Any) -> None:
        cells = opened("options.html", 400).locator(".md-content td")
        ends = cells.evaluate_all("cells => cells.map(cell => cell.getBoundingClientRect().right)")
        assert len(ends) > 100
        assert max(ends) <= 400

    def test_search_finds_a_page_that_is_opened_from_a_folder(self, opened: Any) -> None:
        page = opened("index.html", 1280)
        box = page.locator(".md-search__input")
        box.click()
        # It says so once it has read the index; what is typed before is lost.
        page.get_by_text("Type to start searching").wait_for()
        box.press_sequentially("requeue")
        found = page.locator(".md-search-result__link").filter(has_text="Requeue by Slurm")
        found.first.wait_for(timeout=60_000)

    def test_every_page_leads_to_the_repository(self, opened: Any) -> None:
        link = opened("install.html", 1280).locator("a.md-source").first
        assert link.get_attribute("href") == "https://example.org/owner/hvd_trainer"


def test_members_that_pages_document_exist() -> None:
    """The page on training named a member `check` that was gone."""
    named = re.findall(
        r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", documents.text_of("docs/training.md"), re.M
    )
    assert named
    for path, members in named:
        assert [name for name in members.split(", ") if not hasattr(pkgutil.resolve_name(path), name)] == [], path


def test_layers_name_all_tools() -> None:
    """Six of nine."""
    (line,) = re.findall(r"^    tools +(.*)$", documents.text_of("CONTRIBUTING.md"), re.M)
    tools = {path.stem.replace("_", "-") for path in (REPOSITORY / "hvd_trainer/tools").glob("[a-z]*")}
    assert {*line.split(", ")} == tools
