"""Downloads begin once the server has answered; a silent server is not waited for."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from http_server import serving

from hvd_trainer.errors import DataError
from hvd_trainer.jobs import download as module
from hvd_trainer.jobs.download import downloading


def fail(url: str, folder: Path) -> str:
    """Download a file to a new folder, which must fail before it is made; return the error."""
    with pytest.raises(DataError, match="cannot be downloaded") as caught, downloading(url):
        folder.mkdir()
    assert not folder.exists()
    return str(caught.value)


def test_download_begins_once_the_server_has_answered(tmp_path: Path) -> None:
    served, folder = tmp_path / "served", tmp_path / "new"
    served.mkdir()
    (served / "data.gz").write_bytes(b"the data")
    with serving(served) as server:
        assert "Not Found" in fail(f"{server}/none.gz", folder)
        assert "refused" in fail("http://localhost:9/data.gz", folder)
        with downloading(f"{server}/data.gz"):
            folder.mkdir()
        with pytest.raises(DataError, match="downloaded .another hash"), downloading(f"{server}/data.gz"):
            raise ValueError("another hash")
    assert folder.is_dir()


def test_silent_server_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in fail(f"http://127.0.0.1:{silent.getsockname()[1]}/data.gz", tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_download_that_stalls_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision sets no limit: one that a server no longer fed was waited for without end."""
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    (tmp_path / "data.gz").write_bytes(b"the data")

    def receive(url: str, address: tuple[str, int]) -> None:
        with downloading(url), socket.create_connection(address) as stalled:
            assert stalled.gettimeout() == 0.5
            stalled.recv(1)

    with (
        serving(tmp_path) as server,
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(DataError, match="timed out"),
    ):
        receive(f"{server}/data.gz", silent.getsockname())
    assert socket.getdefaulttimeout() is None
