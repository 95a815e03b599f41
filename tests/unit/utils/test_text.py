"""Texts for people."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hvd_trainer.utils import text


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, f"pip install -e '{text.SOURCE}[tools]'"),
        ({"url": "https://host/hvd_trainer.whl"}, "pip install 'hvd_trainer[tools]'"),
        ({"url": "file:///a%20b/hvd_trainer", "dir_info": {}}, "pip install '/a b/hvd_trainer[tools]'"),
        ({"url": "file:///x", "dir_info": {"editable": True}}, "pip install -e '/x[tools]'"),
    ],
)
def test_extras_come_from_where_the_package_came(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a clone it said `pip install 'hvd_trainer[tools]'`, which no index has: its own egg-info comes first."""
    known = [None] if origin is None else [None, json.dumps(origin)]
    entries = [SimpleNamespace(read_text=lambda name, said=said: said) for said in known]
    monkeypatch.setattr(text, "distributions", lambda name: entries)
    assert text.install_extra("tools") == command
