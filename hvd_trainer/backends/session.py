"""This process as one rank among others: it meets them, is watched with them, and leaves with or without them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from hvd_trainer.backends.devices import Devices, choose_devices
from hvd_trainer.backends.malloc import keep_freed_memory
from hvd_trainer.config.checks import flag, range_errors, refuse, switch
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.errors import LaunchError, PeerError, PreemptedError, UserError, first_line
from hvd_trainer.faults import preemption, stack_dump
from hvd_trainer.faults.activity import Activity
from hvd_trainer.faults.elastic import HorovodElasticDriver, RescaleError
from hvd_trainer.faults.failure_report import reporter
from hvd_trainer.faults.grace import wait_for_launcher
from hvd_trainer.faults.monitor import Monitor
from hvd_trainer.faults.monitor_client import MonitorClient
from hvd_trainer.faults.monitor_server import MonitorServer
from hvd_trainer.faults.root_cause import RootCause
from hvd_trainer.launch.slurm import slurm_job
from hvd_trainer.launch.world import World, detect, is_elastic
from hvd_trainer.rendezvous import connect, ranks
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.utils import accelerator, network
from hvd_trainer.utils.process import cpu_ids, start_time

if TYPE_CHECKING:
    from typing_extensions import Self

QUIET_S, LOUD_S = 1.0, 3.0
"""What a launcher takes to end the other ranks when one has failed, which shall end first to be blamed: those that
would print a traceback of their own wait longer."""
BROKEN = (UserError, RuntimeError, OSError)
"""What is raised where ranks that meet or part miss another one: by us, by the engines, at their time limits."""
TORCH_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""By default PyTorch's watchdog over NCCL aborts a process whose neighbour is gone, or whose kernel failed: before
the ranks have found out and said which of them was the first."""
SHARES_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""By which NCCL 2.30 and later lets several ranks use one GPU."""
NEXT_WORLDS = 3
"""How many worlds in a row may fail to come about before a rank gives up."""


class Session(ABC):
    """One rank. Use it as a context manager: it meets the others on entry and parts from them on exit.

    Args:
        options: how gradients are exchanged.
        environ: `os.environ` if None.
        devices: how many it computes on, or which.

    Attributes:
        world: this process among all; complete once started.
        device: where this rank computes.
        devices: the same where it has several; `device` is the first.
        address: at which the other ranks reach this one.
        slurm_job: what Slurm says of this job.
        job: how this job is known if its launcher starts it again.
        activity: what this rank is doing, for reports.
        stopping: whether all ranks have agreed to end, so that a signal need not end this one.
        monitor: of the other ranks; None where there are none.
        driver: horovodrun in its elastic mode; None where ranks do not come and go.

    Raises:
        OptionError: an option is not for this engine.
        LaunchError: the ranks could not meet, or horovodrun in its elastic mode cannot be reached.
    """

    name: ClassVar[str]
    only_for_others: ClassVar[Mapping[str, str]] = {}
    """Options that this engine cannot honour, each with the reason and what to do instead."""

    def __init__(
        self,
        options: EngineOptions | None = None,
        environ: MutableMapping[str, str] | None = None,
        devices: Devices = 1,
    ) -> None:
        self.options = options or EngineOptions()
        self.environ = os.environ if environ is None else environ
        self.check_options()
        self.world: World = detect(self.environ)
        self.slurm_job = slurm_job(self.environ)
        self._wanted = devices
        self.device = torch.device("cpu")
        self.devices = [self.device]
        self.activity = Activity(self.options.startup_timeout_s)
        self._guard = ExitStack()
        self._cause: RootCause | None = None
        self.monitor: Monitor | None = None
        self.driver = HorovodElasticDriver(self.environ) if is_elastic(self.environ) else None
        self.stopping = False

    def check_options(self) -> None:
        """Refuses what this engine cannot do: all mistakes at once.

        Raises:
            OptionError: an option that differs from its default has no meaning on this engine.
        """
        mistakes = []
        for field in fields(EngineOptions):
            value = getattr(self.options, field.name)
            for key in (field.name, f"{field.name}={value}"):
                if value != field.default and key in self.only_for_others:
                    on_or_off = isinstance(value, bool)
                    typed = switch(field.name, value) if on_or_off else f"{flag(field.name)} {value}"
                    mistakes.append(f"{typed} with --backend {self.name}: {self.only_for_others[key]}")
        refuse([*mistakes, *range_errors(self.options)])

    def __enter__(self) -> Self:
        # A second start in one process must not look like the end of the first.
        self.activity = Activity(self.options.startup_timeout_s)
        self._cause, self.stopping = None, False
        try:
            self._meet()
            self._start()
        except dist.DistError as error:
            # PyTorch's own text names keys of the store, which begin with the token.
            lost = LaunchError(f"{self.world} lost the others while they were meeting: {first_line(error)}")
            self._fail(lost)
            raise lost from None
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _meet(self) -> None:
        """Finds the other ranks, and begins to watch over them."""
        if self.driver is not None:
            self.driver.listen()
        chosen = self.options.network_interface
        own = None if chosen is None else network.interface_address(chosen)
        if chosen is not None:
            # NCCL looks when it connects two ranks, which may be later; "=" is for exactly this name.
            self._guard.enter_context(environment({"NCCL_SOCKET_IFNAME": f"={chosen}"}))
        self.store, host = connect.open_store(
            self.world,
            self.environ,
            init_method=self.options.init_method,
            address=own,
            timeout_s=self.options.startup_timeout_s,
        )
        self.devices = choose_devices(self.world, self.options.device, self._wanted)
        self.device = self.devices[0]
        watched = self.world.size > 1
        stacks_fd, status_fd = (stack_dump.register_signal(), self.activity.share()) if watched else (None, None)
        self._guard.callback(self.activity.stop_sharing, status_fd)
        self._guard.callback(stack_dump.unregister_signal, stacks_fd)
        me = self._introduction(stacks_fd, status_fd, own or network.outward_address(host, 1))
        self.peers = ranks.number_virtual_ranks(ranks.exchange_rank_info(self.store, self.world, me))
        self.job = ranks.job_identity(self.peers, self.slurm_job)
        self.world = ranks.resolve_nodes(self.world, self.peers)
        self.address = me.address if self.world.num_nodes > 1 else network.LOOPBACK
        # Groups are made later, too, and Gloo would look up each time what a host's own name leads to.
        self._guard.enter_context(environment(self._gloo_interface()))
        if self.uses_nccl:
            self._refuse_shared_gpu()
            self._guard.enter_context(
                environment({key: value for key, value in TORCH_NCCL.items() if key not in self.environ})
            )
        if accelerator.is_host(self.device):
            keep_freed_memory(self.environ)
        threads = self.options.threads
        if threads is None and "OMP_NUM_THREADS" not in self.environ:
            # horovodrun sets nothing, so that each of four ranks would start a thread per core.
            threads = ranks.cpu_share(self.world, self.peers)
        if threads is not None:
            torch.set_num_threads(threads)
        self._start_monitor()

    def _gloo_interface(self) -> dict[str, str]:
        """The network card for Gloo: that of the address that this rank goes by, unless the user has named one."""
        if "GLOO_SOCKET_IFNAME" in self.environ and self.options.network_interface is None:
            return {}
        interface = network.interface_name(self.address)
        return {"GLOO_SOCKET_IFNAME": interface} if interface else {}

    def _introduction(self, stacks_fd: int | None, status_fd: int | None, address: str) -> RankInfo:
        """What this rank tells the others about itself; the arguments as in `Peer`."""
        return RankInfo(
            host=self.world.host or socket.gethostname(),
            local_rank=self.world.local_rank,
            group=self.world.group,
            backend=self.name,
            cpus=cpu_ids(),
            gpu=self._gpu(),
            agent=_parent_identity() if self.world.launcher == "torchrun" else "",
            pid=os.getpid(),
            start_time=start_time(os.getpid()) if self.world.size > 1 else "",
            past_worlds=0 if self.driver is None else self.driver.past_worlds,
            stacks_fd=stacks_fd,
            status_fd=status_fd,
            address=address,
        )

    def _gpu(self) -> str | None:
        """Return the slot of this rank's GPU, within the host that NCCL is told it is on."""
        slot = accelerator.slot(self.device)
        host = self.environ.get("NCCL_HOSTID")
        return f"{host} {slot}" if slot and host else slot

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None or isinstance(error, PreemptedError):
            self._part(failed=error is not None)
        else:
            self._fail(error)

    def _part(self, failed: bool = False) -> None:
        """Leaves as all ranks do."""
        try:
            if self.monitor is not None:
                self.monitor.report_done()
            self._stop(failed)
        except BaseException as stopping:
            self._fail(stopping)
            raise
        self._stop_monitor()

    def _break(self, error: BaseException) -> RootCause | None:
        """Leaves after an error; returns which rank's error it is, or None if nobody knows."""
        if self.monitor is not None:
            self._cause = self.monitor.report_error(error)
        if self.driver is not None:
            # What the frames of the failed exchange hold keeps its connections open, on which others wait.
            for link in (error, error.__cause__, error.__context__):
                if link is not None:
                    traceback.clear_frames(link.__traceback__)
        self._stop(failed=True)
        self._stop_monitor()
        return self._cause

    def _fail(self, error: BaseException) -> None:
        """Leaves after an error: with another one, if it is only the consequence of what happened elsewhere."""
        cause = self._break(error)
        # Without a text, all ranks have left alike.
        if cause is None or not cause.text or isinstance(error, UserError):
            return
        if cause.rank == self.world.rank:
            if isinstance(error, SystemExit) and cause.reported:
                raise SystemExit(error.code or 1) from error
        elif isinstance(error, Exception | SystemExit):
            if self.world.launcher != "run":
                wait_for_launcher(QUIET_S if reporter.prints_tracebacks else LOUD_S)
            raise PeerError(
                f"{self.world} stopped because rank {cause.rank} failed or ended: see what that said. "
                f"({first_line(error)})"
            ) from error

    def goes_on_after(self, error: Exception) -> bool:
        """Whether this rank goes on among others, where ranks come and go; it is in the next world then.

        Args:
            error: what its training has ended with: `RescaleError`, or what a broken exchange raises.

        Raises:
            DismissedError: there is no place for it in the next world.
            LaunchError: there is no next world.
        """
        if self.driver is None:
            return False
        if isinstance(error, RescaleError):
            # All remember the step that they leave after, and who fails on the way out is not missed.
            with suppress(*BROKEN):
                self._part()
        else:
            broken = self.activity.in_exchange and not isinstance(error, UserError)
            cause = self._break(error)
            if not broken or cause is None or not cause.text or cause.rank == self.world.rank:
                return False
        for attempt in itertools.count(1):
            self.world = self.driver.next_world()
            connect.reset_sessions()
            try:
                self.__enter__()
            except BROKEN:
                # Another rank may have failed on its way to the meeting.
                if attempt == NEXT_WORLDS:
                    raise
            else:
                break
        return True

    def _start_monitor(self) -> None:
        reporter.start_job()
        if self.world.size > 1:
            kind = MonitorServer if self.world.is_first else MonitorClient
            monitor = kind(
                self.world,
                self.peers,
                self.activity,
                startup_s=self.options.startup_timeout_s,
                environ=self.environ,
                # A callback may take as long, and then the exchange with the rank that is gone.
                elastic_timeout_s=None if self.driver is None else 2 * self.options.startup_timeout_s,
                abort_exchanges=self.abort_exchanges,
            )
            monitor.start(self.store, self.address)
            self.monitor = monitor
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                # Launchers end the others so when one rank fails, sometimes before this one has said why.
                heard = preemption.listen_for_signals(self._end_by_signal, signals=(signal.SIGTERM,))
                self._signals = self._guard.enter_context(heard)

    def _end_by_signal(self, number: int) -> None:
        if self.stopping:
            self._signals.granted = True
            return
        if self.monitor is not None:
            self.monitor.finish_report()
        os._exit(128 + number)

    def _stop_monitor(self) -> None:
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.close()
        self._guard.close()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _stop(self, failed: bool) -> None: ...

    @abstractmethod
    def abort_exchanges(self) -> None:
        """Have the device give up what it exchanges with a rank that is gone; called by another thread.

        On CPUs nothing: there the connection that breaks ends the exchange.
        """

    @property
    def uses_nccl(self) -> bool:
        """Whether this engine would move GPU tensors by NCCL or Intel's XCCL, which want one rank per GPU."""
        return False

    def _refuse_shared_gpu(self) -> None:
        """Raise LaunchError if NCCL would refuse this rank's GPU because another rank of the host has it, too."""
        others = ranks.ranks_sharing_gpu(self.world, self.peers)
        if others and self.environ.get(SHARES_GPU) != "1":
            raise LaunchError(
                f"Ranks {', '.join(map(str, sorted([self.world.rank, *others])))} would share one GPU "
                f"({self.device} on {self.peers[self.world.rank].host}), and NCCL allows one rank per GPU. "
                f"{accelerator.count(self.device.type)} GPUs are visible here: start that many ranks per node, or "
                f"train on CPUs with --device cpu. From NCCL 2.30 on, {SHARES_GPU}=1 in the environment lets "
                f"ranks share one"
            )


def _parent_identity() -> str:
    """The parent process, as nothing else is called."""
    parent = os.getppid()
    return f"{parent} {start_time(parent)}"


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets what an engine reads at its start, and takes it back: a later `detect` must see the real launcher."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
