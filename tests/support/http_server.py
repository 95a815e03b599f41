"""A server of files on this machine, for tests of downloads."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the files in a folder, and a large one slowly below /slow; yield the address."""
    ended = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file, is_slow = folder / self.path[1:], self.path.startswith("/slow")
            self.send_response(200 if is_slow or file.is_file() else 404)
            self.end_headers()
            while is_slow and not ended.wait(0.05):
                self.wfile.write(b"x" * 2**18)
            if file.is_file():
                self.wfile.write(file.read_bytes())

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        ended.set()
        listening.shutdown()
        thread.join()
