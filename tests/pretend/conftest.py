"""Build the pretend device before the first test: a process of a test has less time than that may take."""

from __future__ import annotations

import pytest

from pretend import build


@pytest.fixture(scope="session", autouse=True)
def _library() -> None:
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    build.build()
