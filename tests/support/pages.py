"""Open a page that a tool has written in a real browser, and look for what keeps people from reading it."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

AXE = "axe-core@4.10.3"
"""The package of npm that tests a page's accessibility."""


def open_page(browser: Any, file: Path, width: int, scheme: str) -> Any:
    """Open a page in a window of that width, light or dark.

    Check that the answer is seen without scrolling, that nothing is wider than the window, and that nothing is
    loaded or goes wrong.
    """
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: trouble.append(request.url))
    page.goto(file.as_uri())
    assert trouble == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for part in page.locator("header .badge, h1").all():
        box = part.bounding_box()
        assert box["y"] + box["height"] < 800
    return page


def fetch_axe(folder: Path) -> str:
    """Return the script of axe-core, which npm fetches; skip the test where it cannot."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on this machine: apt-get install npm")
    packed = subprocess.run(
        [npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=120
    )
    if packed.returncode != 0:
        pytest.skip(f"npm cannot fetch {AXE}: {packed.stderr.strip()[-200:]}")
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def find_barriers(page: Any, axe: str) -> list[str]:
    """Return what axe-core finds wrong on a page, each with the first element that has it."""
    page.evaluate(axe)
    found = page.evaluate("axe.run().then(its => its.violations)")
    return [f"{it['id']}: {it['help']}: {it['nodes'][0]['html']}" for it in found]
