"""Start Horovod among ranks that have met: as the Trainer's engine, and as a backend of torch.distributed."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hvd_trainer.backends.horovod_waiter import ASYNC_COMPLETION
from hvd_trainer.errors import BackendError
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous import store_client
from hvd_trainer.rendezvous.endpoint import parse_endpoint
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.utils.network import interface_name
from hvd_trainer.utils.text import INSTALL_HOROVOD

WAKE_ON_ENQUEUE = {"HOROVOD_WAKE_ON_ENQUEUE": "1", "HOROVOD_CYCLE_TIME": "20"}
"""For Horovod as `install-horovod` builds it, whose background thread then sleeps until there is work. Other
builds ignore the first variable and must not get the second: their thread looks for work once per cycle, together
with those of all other ranks. With a cycle of 1 ms that costs more than the exchange, most of all with more ranks
than cores."""
MIN_PATCH_SET_WAKE = 18
MIN_PATCH_SET_ELASTIC = 15
MIN_PATCH_SET_BFLOAT16 = 16
"""The first PATCH_SET of `horovod_build` that wakes on enqueue in every process set, lets ranks leave dead ones,
and has bfloat16."""


def build_record() -> dict[str, Any]:
    """Return what `install-horovod` built this Horovod for; {} if it is none of its builds."""
    try:
        build = importlib.import_module("horovod.hvd_trainer_build")
    except ImportError:
        return {}
    return dict(build.RECORD)


def patch_set() -> int:
    """Return the PATCH_SET of `horovod_build` that this Horovod was built with; 0 if it is none of our builds."""
    return int(build_record().get("patch_set", 0))


def import_horovod(
    request: str = "--backend horovod", alternative: str = "train without it: --backend ddp"
) -> ModuleType:
    """Import `horovod.torch`.

    Args:
        request: what asked for Horovod, and `alternative`, what does without: for the error.

    Raises:
        BackendError: it is not installed, or was built for another PyTorch.
    """
    try:
        # A Horovod without its extension prints a message on every rank instead of raising.
        with redirect_stdout(io.StringIO()):
            hvd = importlib.import_module("horovod.torch")
    except ImportError as error:
        raise BackendError(
            f"{request} needs Horovod, which could not be imported ({error}). Type: {INSTALL_HOROVOD}, or "
            f"{alternative}"
        ) from error
    if not hasattr(hvd, "init"):
        raise BackendError(
            f"The Horovod that is installed was built without PyTorch or for another version than "
            f"{torch.__version__}. Type: {INSTALL_HOROVOD}, or {alternative}"
        )
    return hvd


def tuning(environ: Mapping[str, str], *, on_nccl: bool) -> dict[str, str]:
    """Return settings that make Horovod quick, except those that an environment has.

    Args:
        on_nccl: whether Horovod exchanges tensors by NCCL.
    """
    wanted: dict[str, str] = {}
    if environ.get("HOROVOD_AUTOTUNE", "0") == "0":  # it leaves alone what is set
        # Fusing buckets, which are large already, would copy them and sum them in another order.
        wanted["HOROVOD_FUSION_THRESHOLD"] = "0"
        if patch_set() >= MIN_PATCH_SET_WAKE and "HOROVOD_CYCLE_TIME" not in environ:
            wanted |= WAKE_ON_ENQUEUE
    if on_nccl:
        wanted |= ASYNC_COMPLETION
    return {name: value for name, value in wanted.items() if name not in environ}


def serve_horovod(
    world: World, peers: Sequence[RankInfo], store: dist.Store, address: str, interface: str | None
) -> dict[str, str]:
    """Return the variables from which Horovod learns this world, whichever launcher made it. A collective.

    Args:
        address: at which the other ranks reach this one.
        interface: the user's choice, such as that of HOROVOD_GLOO_IFACE; None: the one with that address.
    """
    me = peers[world.rank]
    across = [peer for peer in peers if peer.local_rank == world.local_rank]
    server, port = _rendezvous_address(world, store, address)
    interface = interface or interface_name(address)
    return {
        # In its elastic mode Horovod would ask for its rank by itself, and ask our server, which knows none.
        "HOROVOD_ELASTIC": "0",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": me.node,
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(across.index(me)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }


def _rendezvous_address(world: World, store: dist.Store, address: str) -> tuple[str, int]:
    """Return address and port of a server for Horovod's own rendezvous, which rank 0 starts. A collective.

    Also under horovodrun, which has such a server: a second start in one process would find the first one's
    entries there, and hang if a rank is quick.
    """
    key = f"horovod/{store.add(f'horovod/starts/{world.rank}', 1)}"  # a start must not get an earlier one's
    if world.is_first:
        store.set(key, str(store_client.serve(address)))
    endpoint = parse_endpoint(store.get(key).decode())
    # Horovod asks for http://ADDRESS:PORT/SCOPE/KEY, whose path begins with the token by this.
    return f"{endpoint.host}:{endpoint.port}/{endpoint.token}/horovod", endpoint.port
