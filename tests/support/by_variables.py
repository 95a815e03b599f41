"""Start ranks by nothing but environment variables: ``by_variables.py SIZE [NAME=TEXT ...] -- ARGV``.

``{rank}`` and ``{size}`` in a text are a rank's numbers; an empty text is no variable. Without texts the ranks get
the four variables of ``init_process_group("env://")``. Nothing ends the other ranks when one fails.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

FOUR = {"RANK": "{rank}", "WORLD_SIZE": "{size}", "MASTER_ADDR": "127.0.0.1"}


def main(size: int, words: list[str]) -> int:
    """Start the ranks, and return the first exit code that is not 0."""
    split = words.index("--")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = {"MASTER_PORT": str(listener.getsockname()[1])}
    texts = {**FOUR, **port, **dict(word.split("=", 1) for word in words[:split])}
    ranks = []
    for rank in range(size):
        own = {name: text.format(rank=rank, size=size) for name, text in texts.items() if text}
        ranks.append(subprocess.Popen([sys.executable, *words[split + 1 :]], env={**os.environ, **own}))
    return next((code for code in [rank.wait() for rank in ranks] if code), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
