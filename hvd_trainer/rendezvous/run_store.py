"""The store of ranks that a process of this package starts on its own machine: `hvd_trainer.run`, and the command.

The parent serves it and passes the endpoint to each rank in a variable. Nothing here waits for torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvd_trainer.launch.world import World, rank_variables
from hvd_trainer.rendezvous import store_client
from hvd_trainer.rendezvous.endpoint import Endpoint
from hvd_trainer.utils.network import LOOPBACK

RUN_STORE = "HVD_TRAINER_STORE"
"""Variable with the store's endpoint."""


@contextmanager
def serve_store() -> Iterator[Endpoint]:
    """Serve the store by which the ranks of `rank_environment` find each other, while the context is open."""
    endpoint = store_client.serve(LOOPBACK)
    try:
        yield endpoint
    finally:
        store_client.release(endpoint)


def rank_environment(rank: int, size: int, endpoint: Endpoint) -> dict[str, str]:
    """Return the variables that make a process a rank on this machine, and with which it finds the others."""
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    return {**rank_variables("run", world), RUN_STORE: str(endpoint)}
