"""Downloads are whole, or leave nothing; a silent server is not waited for."""

from __future__ import annotations

import socket
import time
from hashlib import md5
from pathlib import Path

import pytest
from http_server import serving

from hvd_trainer.errors import DataError
from hvd_trainer.jobs import download as module
from hvd_trainer.jobs.download import download

CONTENT = b"the data"
MD5 = md5(CONTENT).hexdigest()


def fail(folder: Path, url: str, checksum: str = MD5) -> str:
    """Download a file, which must fail; return the error."""
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        download(url, checksum, folder)
    return str(caught.value)


def test_downloads_end_whole_or_leave_nothing(tmp_path: Path) -> None:
    served, folder = tmp_path / "served", tmp_path / "new"
    served.mkdir()
    (served / "data.gz").write_bytes(CONTENT)
    with serving(served) as server:
        assert "Not Found" in fail(folder, f"{server}/none.gz")
        assert "refused" in fail(folder, "http://localhost:9/data.gz")
        assert not folder.exists()
        assert "MD5 hash" in fail(folder, f"{server}/data.gz", checksum="0" * 32)
        assert not list(folder.iterdir())
        download(f"{server}/data.gz", MD5, folder)
    assert [file.read_bytes() for file in folder.iterdir()] == [CONTENT]


def test_silent_server_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        assert "timed out" in fail(tmp_path / "new", f"http://127.0.0.1:{silent.getsockname()[1]}/data.gz")
        assert time.monotonic() - started < 5
    assert not list(tmp_path.iterdir())
