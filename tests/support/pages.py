"""Open a page that a tool has written in a real browser, and look for what keeps people from reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe


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


def find_barriers(page: Any) -> list[str]:
    """Return what axe-core finds wrong on a page, each with the first element that has it."""
    violations = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {one['nodes'][0]['html']}" for one in violations]
