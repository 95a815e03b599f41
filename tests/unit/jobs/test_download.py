"""Downloads end within their time limits, whole or not at all."""

from __future__ import annotations

import socket
import threading
import time
from hashlib import md5
from pathlib import Path

import pytest
from http_server import serving

from hvd_trainer.errors import DataError
from hvd_trainer.jobs import download
from hvd_trainer.jobs.download import RemoteFile, download_missing

CONTENT = b"the data"
MD5 = md5(CONTENT).hexdigest()


def missing() -> None:
    raise DataError("no data")


def fetch(folder: Path, url: str, *, limit_s: float = 60, checksum: str = MD5) -> str:
    """Fetch a file, which must fail; return the error."""
    with pytest.raises(DataError, match="no data, and it cannot be downloaded from here") as caught:
        download_missing(missing, [RemoteFile(url, checksum)], folder, limit_s=limit_s)
    return str(caught.value)


def test_downloads_end_whole_or_leave_nothing(tmp_path: Path) -> None:
    served, folder = tmp_path / "served", tmp_path / "new"
    served.mkdir()
    (served / "data.gz").write_bytes(CONTENT)
    threads = threading.active_count()
    with serving(served) as server:
        assert "it took longer than 0.2 s" in fetch(folder, f"{server}/slow/data.gz", limit_s=0.2)
        assert "Not Found" in fetch(folder, f"{server}/none.gz")
        assert "MD5 hash" in fetch(folder, f"{server}/data.gz", checksum="0" * 32)
        for thread in threading.enumerate():
            if thread.name == "download":
                thread.join(10)
        assert not list(folder.iterdir())
        assert download_missing(missing, [RemoteFile(f"{server}/data.gz", MD5)], folder, limit_s=60)
    assert [file.read_bytes() for file in folder.iterdir()] == [CONTENT]
    assert threading.active_count() <= threads
    assert "refused" in fetch(tmp_path / "other", "http://localhost:9/data.gz")


def test_download_gives_up_on_a_silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        fetch(tmp_path / "new", f"http://127.0.0.1:{silent.getsockname()[1]}/data.gz")
        assert time.monotonic() - started < 5
    assert not list(tmp_path.iterdir())


def test_all_files_together_have_one_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_reach", lambda url: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/data.gz"
        assert "longer than 0.05 s" in fetch(tmp_path, url, limit_s=0.05)
