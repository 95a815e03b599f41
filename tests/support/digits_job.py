"""The smallest real job: one epoch of the embedded digits, three steps of the global batch."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from launchers import QUICKEST, Job, launch, start
from records import lines

DIGITS = ("--dataset", "digits", "--repeat", "1")
OPTIONS = [*DIGITS, "--epochs", "1", "--batch-size", "256"]


def train(log_dir: Path, *options: str, ranks: int = 2, backend: str = "ddp") -> str:
    """Train on the 1,438 digits, with 128 a rank in a step; return what is printed."""
    job = ["-m", "hvd_trainer.mnist", *DIGITS, "--backend", backend, "--log-dir", str(log_dir)]
    return launch(QUICKEST, ranks, [*job, *options]).stdout


def argv(backend: str | None, log_dir: Path | None = None, extra: Sequence[str] = ()) -> list[str]:
    """Return what follows `python`; without a backend the job takes its default."""
    return [
        *("-m", "hvd_trainer.mnist", *OPTIONS),
        *(() if backend is None else ("--backend", backend)),
        *(() if log_dir is None else ("--log-dir", str(log_dir))),
        *extra,
    ]


def end_record(log_dir: Path) -> dict[str, Any]:
    """Return the `end` line of metrics.jsonl; fail unless the job ended once and one rank wrote."""
    (end,) = lines(log_dir, "end")
    return end


def weights(log_dir: Path) -> bytes:
    return (log_dir / "model.safetensors").read_bytes()


def by_hand(
    rank: int, size: int, *, local: tuple[int, int] | None = None, **more: str | None
) -> dict[str, str | None]:
    """Return the variables of a rank that no launcher starts."""
    places = {} if local is None else dict(zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, strict=True))
    numbers = {"RANK": rank, "WORLD_SIZE": size, **places}
    return {**{name: str(number) for name, number in numbers.items()}, **more}


@contextmanager
def started_by_hand(
    argv: Sequence[str], *, local: tuple[int, int] | None = None, **more: str | None
) -> Iterator[list[Job]]:
    """Start two ranks by hand."""
    with ExitStack() as stack:
        environs = [by_hand(rank, 2, local=local, **more) for rank in (0, 1)]
        yield [stack.enter_context(start("python", 1, argv, env=environ)) for environ in environs]


def free_port() -> str:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def world_of(backend: str) -> tuple[int, tuple[int, int, int, int, int, int, str, int]]:
    """Start the engine, sum the ranks' numbers and return the whole world; for `run_ranks`."""
    import torch

    from hvd_trainer import backends

    engine = backends.create(backends.EngineOptions(backend=backend))  # type: ignore[arg-type]
    for _ in range(2):  # a process may train several times, each time as a session of its own
        with engine:
            world = engine.world
            total = engine.collectives.all_reduce(torch.tensor([float(world.rank)])).item()
            assert total == world.size * (world.size - 1) / 2
    w = world
    numbers = (w.rank, w.size, w.local_rank, w.local_size, w.node_rank, w.num_nodes, w.launcher)
    return w.rank, (*numbers, torch.get_num_threads())
