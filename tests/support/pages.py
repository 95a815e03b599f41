"""Open a page that a tool has written in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_page(browser: Any, file: Path, width: int) -> Any:
    """Open a page; check that nothing is wider than the window, nothing is loaded and nothing goes wrong."""
    page = browser.new_page(viewport={"width": width, "height": 800})
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: trouble.append(request.url))
    page.goto(file.as_uri())
    assert trouble == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    return page
