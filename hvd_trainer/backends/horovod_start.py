"""Start and end Horovod among ranks that have met: the Trainer's, a script's, and that below torch.distributed."""

from __future__ import annotations

import importlib
import io
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hvd_trainer.backends.horovod_waiter import ASYNC_COMPLETION
from hvd_trainer.backends.session import Session
from hvd_trainer.errors import BackendError
from hvd_trainer.launch.world import World, is_elastic
from hvd_trainer.rendezvous import store_client
from hvd_trainer.rendezvous.endpoint import parse_endpoint
from hvd_trainer.rendezvous.ranks import RankInfo, check_world
from hvd_trainer.utils.network import interface_name
from hvd_trainer.utils.process import set_variables
from hvd_trainer.utils.text import INSTALL_HOROVOD

T = TypeVar("T")

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


class Meeting(NamedTuple):
    """Ranks that have met, of which this process is one."""

    world: World
    peers: Sequence[RankInfo]
    store: dist.Store
    """that they share"""
    address: str
    """at which the other ranks reach this one"""

    @classmethod
    def of(cls, session: Session) -> Meeting:
        """Return that of a session which is connected."""
        return cls(session.world, session.peers, session.store, session.address)


def start_horovod(
    hvd: Any,
    init: Callable[[], T],
    meeting: Meeting,
    *,
    timeout_s: float,
    settings: Mapping[str, str],
    interface: str | None = None,
    on_mpi: bool = False,
) -> T:
    """Initialise Horovod among ranks that have met, whichever launcher started them; return what `init` does.

    A collective.

    Args:
        hvd: `horovod.torch`, or its `HorovodBasics`.
        init: `hvd.init` with its arguments.
        timeout_s: how long its ranks may take to connect.
        settings: further variables that it reads at its start.
        interface: the user's choice; None: the network card with the meeting's address.
        on_mpi: whether it learns its world from MPI.

    Raises:
        BackendError: it is initialised already.
        LaunchError: its world is not that of the launcher.
    """
    world = meeting.world
    if hvd.is_initialized():
        check_world(world, "Horovod, already initialised,", hvd.rank(), hvd.size())
        raise BackendError(
            "Horovod is already initialised in this process. Leave hvd.init() to hvd_trainer: take that call out."
        )
    server: dict[str, str] = {}
    place = {"HOROVOD_ELASTIC": "0", "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(timeout_s)))}
    # In elastic mode the last rank of many still has their numbers in its environment.
    if not on_mpi and (world.size > 1 or is_elastic(os.environ)):
        server = _serve(meeting)
        place |= server | _place(meeting, interface)
    with set_variables({**place, **settings}):
        result = init()
        is_dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
    check_world(world, "Horovod", hvd.rank(), hvd.size())
    if is_dynamic:
        _variables.enter_context(set_variables(server))
    return result


_variables = ExitStack()
"""Undoes what is set until Horovod ends: the server where the ranks of a process set that is added later meet."""
_END_LOCK = threading.Lock()


def stop_horovod(hvd: Any) -> None:
    """End Horovod, if it runs, once: joining its thread from two others is undefined behaviour."""
    with _END_LOCK:
        if hvd.is_initialized():
            hvd.shutdown()
        _variables.close()


def _place(meeting: Meeting, interface: str | None) -> dict[str, str]:
    """Return the variables from which Horovod learns this rank's place in the world."""
    world, peers = meeting.world, meeting.peers
    me = peers[world.rank]
    across = [peer for peer in peers if peer.local_rank == world.local_rank]
    interface = interface or interface_name(meeting.address)
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": me.node,
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(across.index(me)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }


def _serve(meeting: Meeting) -> dict[str, str]:
    """Return the variables of a server for Horovod's own rendezvous, which rank 0 starts. A collective.

    Also under horovodrun, which has such a server: a second start in one process would find the first one's
    entries there, and hang if a rank is quick.
    """
    world, store = meeting.world, meeting.store
    key = f"horovod/{store.add(f'horovod/starts/{world.rank}', 1)}"  # a start must not get an earlier one's
    if world.is_first:
        store.set(key, str(store_client.serve(meeting.address)))
    endpoint = parse_endpoint(store.get(key).decode())
    return {
        # Horovod asks for http://ADDRESS:PORT/SCOPE/KEY, whose path begins with the token by this.
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{endpoint.host}:{endpoint.port}/{endpoint.token}/horovod",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(endpoint.port),
    }
