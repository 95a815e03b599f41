"""Start the ranks of a row, as torchrun does by its variables, and collect what each returns."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.idioms.idiom import Idiom
from benchmarks.idioms.libraries import BY_NAME
from benchmarks.idioms.rows import ROWS

LIMIT_S = 90.0
"""for one start of all ranks"""
GRACE_S = 15.0
"""for the other ranks, once one has failed"""


@dataclass(frozen=True)
class Start:
    """What a rank is started with.

    Attributes:
        library: its name in the table.
        way: how the library is used, for rows where its documentation names an option.
        loader_processes: of each rank.
        folder: for checkpoints, shared by all ranks and starts of a row.
        is_reference: one training, undisturbed.
        part: 1 and 2 of a training that is resumed; 0: whole.
    """

    library: str
    row: str
    way: str
    size: int
    loader_processes: int
    folder: Path
    is_reference: bool = False
    part: int = 0
    rank: int = 0
    port: int = 0

    @property
    def marker(self) -> Path:
        """The file that is there once an evaluation has begun."""
        return self.folder / "evaluating"

    @property
    def saved(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "saved"

    def make(self) -> Idiom:
        """Return model, data and the rest, as a process has them when it starts."""
        idiom = ROWS[self.row]()
        if self.part == 1:
            idiom.epochs //= 2
        if self.is_reference:
            idiom.trainings = 1
        if idiom.is_terminated:
            idiom.model.marker = self.marker
        return idiom


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a start ended.

    Attributes:
        values: of each rank, in order; empty if a rank failed.
        error: the first failed rank's last line; empty: all ended well.
        is_hung: whether ranks had to be killed, and none has failed.
        ended_s: seconds from the SIGTERM to the end of the last rank.
        is_saved: whether a checkpoint was written after the SIGTERM.
    """

    values: tuple[tuple[float, ...], ...]
    error: str = ""
    is_hung: bool = False
    ended_s: float = 0.0
    is_saved: bool = False


def run_rank(start: Start) -> None:
    """Train in this process, and write the values, or the error, to a file."""
    place = {"RANK": start.rank, "LOCAL_RANK": start.rank, "GROUP_RANK": 0, "ROLE_RANK": start.rank}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), start.size)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": start.port, "TORCHELASTIC_RUN_ID": "idioms"}
    os.environ.update({name: str(value) for name, value in (place | sizes | names).items()})
    # A child of a fork server would start its loader processes by another one.
    multiprocessing.set_start_method("fork", force=True)
    os.chdir(start.folder)
    output = os.open(f"{start.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    try:
        module = importlib.import_module(f"benchmarks.idioms.{BY_NAME[start.library].module}")
        result["values"] = module.train(start)
    except BaseException as error:
        result["error"] = f"{type(error).__name__}: {first_sentence(str(error))}"
        result["time"] = time.time()
        traceback.print_exc()
        raise
    finally:
        Path(f"{start.rank}.json").write_text(json.dumps(result))


def first_sentence(text: str) -> str:
    """Return an error's first line, up to its first full stop."""
    line = next(iter(text.strip().splitlines()), "")
    return line.partition(". ")[0].rstrip(".")


def run(start: Start) -> Outcome:
    """Start all ranks, once or, to resume, twice; return how the last start ended."""
    parts = (1, 2) if ROWS[start.row].resumes and not start.is_reference else (start.part,)
    for part in parts:
        outcome = _run_once(replace(start, part=part))
        if outcome.error:
            break
    return outcome


def _run_once(start: Start) -> Outcome:
    start.folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=run_rank, args=(replace(start, rank=rank, port=port),))
        for rank in range(start.size)
    ]
    for rank in ranks:
        rank.start()
    try:
        signalled = _wait(ranks, start)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    saved = [
        path
        for path in start.folder.rglob("*")
        if {"saved", "checkpoints"} & {*path.parts} and signalled and path.stat().st_mtime > signalled
    ]
    return _outcome(start, signalled, bool(saved))


def _wait(ranks: list[BaseProcess], start: Start) -> float:
    """Wait for all ranks, and return when they got a SIGTERM, or 0."""
    began = time.monotonic()
    limit, signalled = LIMIT_S, 0.0
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < began + limit:
        time.sleep(0.02)
        if any(rank.exitcode for rank in ranks):
            limit = min(limit, time.monotonic() - began + GRACE_S)
        if ROWS[start.row].is_terminated and not signalled and start.marker.exists():
            signalled = time.time()
            for rank in ranks:
                os.kill(rank.pid or 0, signal.SIGTERM)
    return signalled


def _outcome(start: Start, signalled: float, is_saved: bool) -> Outcome:
    results = [_read(start.folder / f"{rank}.json") for rank in range(start.size)]
    ended_s = time.time() - signalled if signalled else 0.0
    failed = sorted((r for r in results if "error" in r), key=lambda r: r["time"])
    if failed:
        return Outcome((), failed[0]["error"], False, ended_s, is_saved)
    if not all("values" in r for r in results):
        return Outcome((), f"no end within {LIMIT_S:.0f} s", True, ended_s, is_saved)
    return Outcome(tuple(tuple(r["values"]) for r in results), "", False, ended_s, is_saved)


def _read(path: Path) -> dict[str, Any]:
    """Return a rank's result, and remove it; one that was killed has none."""
    if not path.exists():
        return {}
    result = json.loads(path.read_text())
    path.unlink()
    return dict(result)


def prepare(modules: Iterable[str]) -> None:
    """Import modules once, for all ranks."""
    multiprocessing.set_forkserver_preload([*modules])
