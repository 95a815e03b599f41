"""This process's part in the job, between `init` and `shutdown`: rank, size, controllers of process sets."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_trainer.backends.engine import Engine
from hvd_trainer.backends.session import Session
from hvd_trainer.errors import PeerError
from hvd_trainer.faults import collectives
from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.hvd.common.commits import CommitFiles
from hvd_trainer.hvd.common.controller import Controller
from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.launch_order import LaunchOrder
from hvd_trainer.hvd.common.request import Kind, Request, Signature
from hvd_trainer.hvd.common.settings import (
    NO,
    Settings,
    engine_options,
    ignored_variables,
    read_settings,
    set_log_level,
)
from hvd_trainer.hvd.common.timeline import Timeline
from hvd_trainer.launch.world import World, lone_process_warning

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "size",
    "start_timeline",
    "stop_timeline",
]

logger = logging.getLogger(__name__)

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
DYNAMIC_TIMELINE = "DYNAMIC"
"""Value of HOROVOD_TIMELINE with which `start_timeline` may be called later; here it always may."""
DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"


class Runtime(Engine):
    """One job, from `init` to `shutdown`.

    Args:
        session: this rank's part in it, which starts and ends this.
        process_sets: ranks of each further process set.

    Attributes:
        commits: of elastic training, if the launcher starts ranks again; else None.
        set_ranks: the ranks of each process set, by its id.
        settings: those of rank 0, once started.
    """

    pins_device = False

    def __init__(
        self, session: Session, environ: Mapping[str, str], process_sets: Sequence[Sequence[int]]
    ) -> None:
        self.session = session
        self.settings = Settings()
        self.commits: CommitFiles | None = None
        self.set_ranks: dict[int, list[int]] = {}
        self._environ, self._process_sets = environ, process_sets
        self._controllers: dict[int, Controller] = {}
        set_log_level(environ)

    def start(self) -> None:
        session, environ = self.session, self._environ
        self.set_ranks.clear()  # of a start among ranks of which one was lost
        self._set_numbers, self._order = itertools.count(), LaunchOrder(self.set_ranks)
        warning = lone_process_warning(session.world, environ)
        if warning:
            logger.warning("%s", warning)
        ignored = ignored_variables(environ)
        if ignored and session.world.is_first:
            logger.warning("Without meaning in Horovod's API on torch.distributed: %s", ", ".join(ignored))
        agent = session.peers[session.world.rank].agent
        self.commits = CommitFiles(agent, session.world.is_first_on_node) if agent else None
        self.settings = _agree(session.store, session.world, read_settings(environ), self._process_sets)
        for ranks in (range(session.world.size), *self._process_sets):
            self._add_set([*ranks])
        activity = session.activity
        activity.warn_wait_s, activity.end_wait_s = self.settings.stall_check_s, self.settings.stall_shutdown_s
        collectives.sources.append(self._calls)
        logger.info("%s, started by %s, with %s", session.world, session.world.launcher, self.settings)
        path = environ.get("HOROVOD_TIMELINE", "")
        if path and path != DYNAMIC_TIMELINE:
            self.start_timeline(path, environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in NO)

    def stop(self, wait: bool) -> None:
        """End together with all other ranks; without them after an error, or if an exchange has failed."""
        if self._calls in collectives.sources:
            collectives.sources.remove(self._calls)
        controller = self._controllers.get(0)
        if wait and controller is not None:
            controller.shutdown()
            if self.commits is not None and len(controller.shut_down_by) == self.world.size:
                self.commits.remove()
        self.stop_timeline()
        for controller in self._controllers.values():
            controller.abort("Horovod has been shut down.")
        self._controllers.clear()

    def _calls(self) -> list[CollectiveCall]:
        """Return what this rank waits for others in."""
        return [exchange for controller in list(self._controllers.values()) for exchange in controller.calls()]

    def abort_collectives(self) -> None:
        for controller in [*self._controllers.values()]:  # other threads add and remove process sets meanwhile
            controller.abort("Another rank has failed or ended.")

    @property
    def world(self) -> World:
        """This process among all."""
        return self.session.world

    @property
    def has_ended(self) -> bool:
        """Whether a rank has shut the job down, or an exchange has failed."""
        controller = self._controllers.get(0)
        return controller is None or controller.ended is not None

    @property
    def has_broken(self) -> bool:
        """Whether an exchange has failed, as one with a lost rank does."""
        controllers = [*self._controllers.values()]
        return any(controller.ended is not None and not controller.shut_down_by for controller in controllers)

    @property
    def local_sizes(self) -> list[int]:
        """The number of ranks on each node."""
        nodes = [peer.node for peer in self.session.peers]
        return [nodes.count(node) for node in dict.fromkeys(nodes)]

    def controller(self, set_id: int) -> Controller:
        """Return a process set's controller.

        Raises:
            ValueError: there is no such set, or this process is not in it.
        """
        controller = self._controllers.get(set_id)
        if controller is None:
            self.ranks_of(set_id)
            raise ValueError(f"Rank {self.world.rank} is not a member of process set {set_id}.")
        return controller

    def ranks_of(self, set_id: int) -> list[int]:
        """Return the global ranks of a process set's members.

        Raises:
            ValueError: there is no such set.
        """
        if set_id not in self.set_ranks:
            raise ValueError("Process set does not exist or has not been registered.")
        return self.set_ranks[set_id]

    def _add_set(self, ranks: list[int]) -> int | None:
        """Register a process set, on all ranks at once; return its id, or None if there is one of these ranks."""
        if ranks in self.set_ranks.values():
            return None
        set_id = next(self._set_numbers)
        self.set_ranks[set_id] = ranks
        if self.world.rank in ranks:
            store = dist.PrefixStore(f"set {set_id}", self.session.store)
            self._controllers[set_id] = Controller(set_id, store, ranks, self.settings, self.session, self._order)
        return set_id

    def change_set(self, kind: str, ranks: Sequence[int]) -> int | None:
        """Add or remove a process set together with all ranks; return its id, or None if nothing was to be done.

        Args:
            kind: `Kind.ADD_SET` or `Kind.REMOVE_SET`.
        """
        name = f"{kind} of ranks {', '.join(map(str, ranks))}"
        action = self._add_set if kind == Kind.ADD_SET else self._remove_set
        request = Request(Signature(kind=kind, name=name, splits=tuple(ranks)), action=lambda _: action([*ranks]))
        result: int | None = self.controller(0).run(request)
        return result

    def _remove_set(self, ranks: list[int]) -> int | None:
        removed = next((set_id for set_id, members in self.set_ranks.items() if members == ranks and set_id), None)
        if removed is not None:
            del self.set_ranks[removed]
            controller = self._controllers.pop(removed, None)
            if controller is not None:
                controller.abort("The process set has been removed.")
        return removed

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Record operations from now on, in a file that rank 0 writes; without one if it cannot be written."""
        self.stop_timeline()
        if not self.world.is_first:
            return
        try:
            self.controller(0).timeline = Timeline(path, mark_cycles)
        except OSError as error:  # the other ranks have begun to train
            logger.warning(
                "There is no timeline, and the training continues: %s. Correct the path in HOROVOD_TIMELINE, or "
                "that of hvd.start_timeline",
                error,
            )

    def stop_timeline(self) -> None:
        """Complete the file, if there is one."""
        controller = self._controllers.get(0)
        if controller is not None and controller.timeline is not None:
            timeline, controller.timeline = controller.timeline, None
            timeline.close()


def _agree(store: dist.Store, world: World, settings: Settings, process_sets: Sequence[Sequence[int]]) -> Settings:
    """Return rank 0's settings, since all ranks must compute the same from them.

    Raises:
        ValueError: this rank was given other process sets than rank 0.
    """
    sets = [list(ranks) for ranks in process_sets]
    if world.is_first:
        store.set("hvd settings", msgspec.json.encode([settings, sets]).decode())
        return settings
    agreed, first_sets = msgspec.json.decode(store.get("hvd settings"), type=tuple[Settings, list[list[int]]])
    if first_sets != sets:
        raise ValueError(
            f"Rank 0 has called hvd.init with process sets {first_sets}, rank {world.rank} with {sets}."
        )
    return agreed


class _State:
    """The job of this process; None before `init` and after `shutdown`."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.elastic: Session | None = None
        """of a job whose ranks change: each `init` but the first begins in its next world"""
        self.is_registered = False
        self.call_at_start: list[Callable[[Session], None]] = []


_state = _State()


def runtime() -> Runtime:
    """Return the job that `init` has started.

    Raises:
        ValueError: there is none.
    """
    if _state.runtime is None:
        raise ValueError(NOT_INITIALIZED)
    return _state.runtime


def controller(set_id: int) -> Controller:
    """Return a process set's controller.

    Raises:
        HorovodInternalError: `init` has not been called.
        ValueError: this process is not in the set.
    """
    if _state.runtime is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _state.runtime.controller(set_id)


def start(process_sets: Sequence[Sequence[int]]) -> bool:
    """Find the other ranks and start, unless that is done already; return whether it was still to be done.

    A collective.

    Raises:
        DismissedError: in an elastic job, there is no place for this process any more.
    """
    if _state.runtime is not None:
        if not _state.runtime.has_ended:
            return False
        shutdown()
    if not _state.is_registered:
        _state.is_registered = True
        atexit.register(shutdown)
        register_optimizer_step_post_hook(_count_step)
        sys.excepthook = functools.partial(_fail, sys.excepthook)
    session = _state.elastic or Session(engine_options(os.environ))
    runtime = Runtime(session, os.environ, process_sets)
    if _state.elastic is None:
        session.start(runtime)
    else:
        session.join_next_world(runtime)
    _state.runtime, _state.elastic = runtime, None if session.driver is None else session
    for function in _state.call_at_start:
        function(session)
    return True


def _count_step(*_: object) -> None:
    if _state.runtime is not None:
        activity = _state.runtime.session.activity
        activity.finish_step(activity.step + 1)


def take_over(at_start: Callable[[Session], None]) -> None:
    """Leave the end of the session of each job that begins from now on, and its steps, to the caller.

    Args:
        at_start: is called with each job's session.
    """
    _state.is_registered = True
    _state.call_at_start.append(at_start)


def _fail(show: Callable[..., object], kind: type[BaseException], error: BaseException, where: Any) -> None:
    """Tell the other ranks that this process ends by an exception, and show it if it is not their doing."""
    failing = _state.runtime
    try:
        _end(error)
    except (PeerError, SystemExit) as peer:
        if isinstance(peer, PeerError) and failing is not None:
            logger.error("[rank %d] error: %s", failing.world.rank, peer)
            return
    show(kind, error, where)


def leave(error: BaseException) -> None:
    """Leave a job in which an exchange has failed, so that `init` begins another; nothing if none has.

    Raises:
        PeerError: there is no other job.
        BaseException: the error, if this rank itself is to blame.
    """
    runtime = _state.runtime
    if runtime is not None and runtime.has_broken:
        runtime.session.activity.blame_collective()
        if not runtime.session.leave(error):
            _end(error)
            raise error
        _state.runtime = None


def commits() -> CommitFiles | None:
    """Return the files with commits of elastic training; None if the launcher starts no rank again."""
    return None if _state.runtime is None else _state.runtime.commits


def hosts_have_changed() -> bool:
    """Return whether horovodrun, in its elastic mode, has told this rank of other hosts."""
    driver = None if _state.runtime is None else _state.runtime.session.driver
    return driver is not None and driver.hosts_changed.is_set()


def listen_to_hosts(listener: Callable[[int, int], object]) -> None:
    """Have a function called whenever horovodrun, in its elastic mode, tells this rank of other hosts."""
    driver = None if _state.runtime is None else _state.runtime.session.driver
    if driver is not None:
        driver.listeners.add(listener)


def shutdown() -> None:
    """End this job together with all other ranks; nothing if there is none."""
    _end(None)


def _end(error: BaseException | None) -> None:
    ending, _state.runtime = _state.runtime, None
    if ending is not None:
        ending.session.end(error)


def is_initialized() -> bool:
    """Return whether `init` has been called, and no rank has shut the job down since."""
    return _state.runtime is not None and not _state.runtime.has_ended


def rank() -> int:
    """Return this process's rank, from 0.

    Raises:
        ValueError: before `init`; so do the functions below.
    """
    return runtime().world.rank


def size() -> int:
    """Return the number of ranks."""
    return runtime().world.size


def local_rank() -> int:
    """Return this process's rank among those of its node."""
    return runtime().world.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return runtime().world.local_size


def cross_rank() -> int:
    """Return this process's number among the ranks of its local rank on all nodes, from 0."""
    return _ranks_across().index(rank())


def cross_size() -> int:
    """Return how many nodes have a rank with this one's local rank."""
    return len(_ranks_across())


def _ranks_across() -> list[int]:
    """Return the ranks that have this one's local rank, on all nodes."""
    return [number for number, peer in enumerate(runtime().session.peers) if peer.local_rank == local_rank()]


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    return len(set(runtime().local_sizes)) == 1


def gloo_enabled() -> bool:
    """Return whether Gloo is used: once initialised, it is."""
    return is_initialized()


def gloo_built() -> bool:
    """Return whether this PyTorch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return NCCL's version as a number, such as 22703 for 2.27.3; 0 if this PyTorch has none."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def cuda_built() -> bool:
    """Return whether this PyTorch was built for NVIDIA's GPUs."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this PyTorch was built for AMD's GPUs."""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Return False: neither MPI, also under mpirun, nor IBM's DDL nor oneCCL is used."""
    return False


mpi_enabled = ddl_built = ccl_built = mpi_built


def mpi_threads_supported() -> bool:
    """Raise ValueError, as Horovod without MPI does."""
    raise ValueError("MPI is not used by this Horovod API: it works on torch.distributed.")


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record operations from now on, in a file for chrome://tracing or Perfetto; rank 0 writes it.

    Args:
        file_path: of the file, which is replaced.
        mark_cycles: whether to record the rounds in which ranks agree on operations, too.

    Raises:
        ValueError: before `init`.
    """
    runtime().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the file of `start_timeline`.

    Raises:
        ValueError: before `init`.
    """
    runtime().stop_timeline()
