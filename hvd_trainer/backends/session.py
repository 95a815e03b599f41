"""This process as one rank among others, from the rendezvous to the end; for the Trainer, `hvd` and scripts alike.

start             connect         find the other ranks, learn their hosts and GPUs, choose this rank's devices
                  prepare_nccl    for engines that use NCCL: refuse a GPU that another rank has, too
                  monitoring      from here on a rank that fails or hangs ends the job; in elastic mode, the world
                  Engine.start
end               monitoring      tell how this rank ends, and after an error wait for the root cause
                  Engine.stop
                  close           end monitoring and undo what `connect` has set in this process
leave             the same in elastic mode, where the rank may have a place in the next world
join_next_world   take that place, and start there
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import ClassVar

import torch
import torch.distributed as dist

from hvd_trainer.backends.devices import choose_devices, visible_gpus
from hvd_trainer.backends.engine import Engine
from hvd_trainer.backends.malloc import keep_freed_memory
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.errors import LaunchError, PeerError, PreemptedError, UserError, first_line
from hvd_trainer.faults import preemption, stack_dump
from hvd_trainer.faults.activity import COLLECTIVE, Activity
from hvd_trainer.faults.elastic import HorovodElasticDriver, RescaleError
from hvd_trainer.faults.failure_report import reporter, wait_for_launcher
from hvd_trainer.faults.monitor import Monitor, MonitorSettings
from hvd_trainer.faults.monitor_client import MonitorClient
from hvd_trainer.faults.monitor_server import MonitorServer
from hvd_trainer.faults.root_cause import RootCause
from hvd_trainer.faults.script_watch import phase_raised_in
from hvd_trainer.launch.slurm import slurm_job
from hvd_trainer.launch.world import World, find_world, is_elastic
from hvd_trainer.rendezvous import connect, ranks
from hvd_trainer.rendezvous.join import group_hint
from hvd_trainer.rendezvous.ranks import JobIdentity, RankInfo
from hvd_trainer.rendezvous.shared_stores import shared_stores
from hvd_trainer.utils import accelerator, network
from hvd_trainer.utils.process import cpu_ids, set_variables, start_time

logger = logging.getLogger(__name__)
SILENT_GRACE_S = 1.0
TRACEBACK_GRACE_S = 3.0
"""How long a rank that another one has failed waits for its launcher to end it. Launchers blame the rank that ends
first, so a rank whose traceback would be printed waits longer."""
TORCH_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""By default PyTorch's NCCL watchdog aborts a process whose peer has died or whose kernel has failed, before the
monitor has found and printed the root cause."""
SHARES_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Set to 1, it lets several ranks use one GPU, from NCCL 2.30 on."""

LOST_RANK_ERRORS = (UserError, RuntimeError, OSError)
"""Raised where ranks meet or part and one is missing: by us, by the engines, at their time limits."""
MAX_FAILED_WORLDS = 3
"""How many worlds in a row may fail to come about before a rank gives up."""


class Session:
    """One rank's membership in the job.

    Args:
        options: the engine's options, of which those on devices, network, threads and time limits are used.
        environ: `os.environ` if None.
        devices: how many devices this rank computes on, or their names.

    Attributes:
        world: this process's rank and the number of ranks; with nodes once connected.
        devices: where this rank computes; the CPU until connected.
        peers: one `RankInfo` per rank, in rank order; empty until connected.
        address: at which the other ranks reach this one.
        slurm_job: what Slurm's variables tell of this job.
        job: identifies this job across restarts by its launcher.
        activity: step and phase of this rank, for failure reports.
        has_trained: set when this process has begun to train, in this world or an earlier one.
        stopping: set when all ranks have agreed to stop, so that a signal need not end this one.
        ending: how and where this rank has come to its end, for reports; empty: after its last line.
        monitor: the health monitor; None when there is no other rank, or none is being monitored.
        root_cause: the failure that ended this world, once the monitor has found one.
        driver: horovodrun's elastic driver; None when the number of ranks is fixed.

    Raises:
        LaunchError: the launcher's variables contradict each other, or say nothing of horovodrun's driver.
    """

    _own_threads: ClassVar[int] = torch.get_num_threads()
    """CPU threads by PyTorch's choice, or by an earlier session's: another number is the program's"""

    def __init__(
        self, options: EngineOptions, environ: MutableMapping[str, str] | None = None, devices: int = 1
    ) -> None:
        self.options = options
        self.environ = os.environ if environ is None else environ
        self.world: World = find_world(self.environ)
        self.slurm_job = slurm_job(self.environ)
        self.job = JobIdentity(frozenset(), frozenset())
        self.driver = HorovodElasticDriver(self.environ) if is_elastic(self.environ) else None
        self.devices = [torch.device("cpu")]
        self.peers: list[RankInfo] = []
        self.address = network.LOOPBACK
        self.activity = Activity(options.startup_timeout_s)
        self.monitor: Monitor | None = None
        self.root_cause: RootCause | None = None
        self.stopping = self.has_trained = False
        self.ending = ""
        self._num_calls, self._has_left = 0, False
        self._requested_devices = devices
        self._engine = Engine()
        self._store: dist.Store | None = None
        self._signals: preemption.StopRequest | None = None
        self._cleanup = ExitStack()

    @property
    def device(self) -> torch.device:
        """The first of `devices`."""
        return self.devices[0]

    @property
    def store(self) -> dist.Store:
        """The key-value store that all ranks share, once connected."""
        assert self._store is not None, "the ranks have not met"
        return self._store

    def start(self, engine: Engine) -> None:
        """Meet the other ranks, and start an engine among them, which stops when this session ends. A collective.

        Raises:
            BackendError: the engine cannot work here.
            LaunchError: the ranks could not meet, or their engines would not work together.
        """
        _import_without_group()
        self._engine = engine
        try:
            self.connect()
            if engine.pins_device:
                accelerator.set_current(self.device)
            if engine.uses_nccl:
                self.prepare_nccl(keeps_timeouts=engine.keeps_timeouts)
            self._begin_monitoring()
            engine.start()
        except dist.DistError as error:
            # PyTorch's own text names keys of the store, which begin with the token.
            text = f"{self.world} lost the others while they were meeting: {first_line(error)}"
            lost = LaunchError(text + group_hint())
            self.end(lost)
            raise lost from None
        except BaseException as error:
            self.end(error)
            raise

    def connect(self) -> None:
        """Find the other ranks and exchange what each knows of itself. A collective.

        Raises:
            LaunchError: the ranks could not meet, or horovodrun's elastic driver cannot be reached.
            BackendError: there is no such device.
        """
        # A second start in one process must not be taken for the end of the first.
        self.activity = Activity(self.options.startup_timeout_s)
        self.root_cause, self.stopping = None, False
        self._num_calls, self._has_left = 0, False
        if self.driver is not None:
            self.driver.listen()
        interface = self.options.network_interface
        own_address = None if interface is None else network.interface_address(interface)
        if interface is not None:
            # NCCL reads it when it first connects two ranks. "=" asks for exactly this name.
            self._cleanup.enter_context(set_variables({"NCCL_SOCKET_IFNAME": f"={interface}"}))
        self._store, host = connect.open_store(
            self.world,
            self.environ,
            address=own_address,
            timeout_s=self.options.startup_timeout_s,
        )
        me = self._rank_info(own_address or network.outward_address(host, 1))
        self.world, self.peers = ranks.meet(self._store, self.world, me)
        self.devices = choose_devices(self.world, self.options.device, self._requested_devices)
        if self.world.is_first and (warning := ranks.one_per_node_warning(self.world, self.peers)):
            logger.warning("warning: %s", warning)
        self.job = ranks.job_identity(self.peers, self.slurm_job)
        self.address = me.address if self.world.num_nodes > 1 else network.LOOPBACK
        # Set until the end, because groups are made later, too: Gloo would resolve the host's own name for each.
        self._cleanup.enter_context(set_variables(self._gloo_interface()))
        if accelerator.is_host(self.device):
            keep_freed_memory(self.environ)
        self._set_threads()

    def _rank_info(self, address: str) -> RankInfo:
        """Return what this rank tells the others, and open the descriptors by which they can inspect it."""
        monitored = self.world.size > 1
        stacks_fd, status_fd = (stack_dump.register_signal(), self.activity.share()) if monitored else (None, None)
        self._cleanup.callback(self.activity.close)
        self._cleanup.callback(stack_dump.unregister_signal, stacks_fd)
        return RankInfo(
            host=self.world.host or socket.gethostname(),
            local_rank=self.world.local_rank,
            group=self.world.group,
            backend=self.options.backend,
            cpus=cpu_ids(),
            gpus=tuple(map(self._gpu_name, visible_gpus(self.options.device))),
            num_devices=self._requested_devices,
            agent=_parent_identity() if self.world.launcher == "torchrun" else "",
            pid=os.getpid(),
            start_time=start_time(os.getpid()) if monitored else "",
            thread=stack_dump.follow_thread(),
            past_worlds=0 if self.driver is None else self.driver.past_worlds,
            stacks_fd=stacks_fd,
            status_fd=status_fd,
            address=address,
        )

    def _gpu_name(self, device: torch.device) -> str:
        """Return the PCI slot of a GPU, with the host that NCCL is told it is on."""
        return " ".join([*filter(None, [self.environ.get("NCCL_HOSTID")]), str(accelerator.slot(device))])

    def _gloo_interface(self) -> dict[str, str]:
        """Return Gloo's variable for the network card of `address`; empty if the user has chosen one."""
        if "GLOO_SOCKET_IFNAME" in self.environ and self.options.network_interface is None:
            return {}
        interface = network.interface_name(self.address)
        return {"GLOO_SOCKET_IFNAME": interface} if interface else {}

    def _set_threads(self) -> None:
        threads = self.options.threads
        is_chosen = "OMP_NUM_THREADS" in self.environ or torch.get_num_threads() != Session._own_threads
        if threads is None and not is_chosen:
            # horovodrun sets nothing, so that each of four ranks would start a thread per core.
            threads = ranks.cpu_share(self.world, self.peers)
        if threads is not None:
            torch.set_num_threads(threads)
            Session._own_threads = threads

    def prepare_nccl(self, *, keeps_timeouts: bool = False) -> None:
        """Refuse a GPU that NCCL would refuse, and leave failed peers to the monitor.

        Args:
            keeps_timeouts: leave the time limits of groups to PyTorch, and with them failed peers.

        Raises:
            LaunchError: another rank of this host has the same GPU.
        """
        others = ranks.ranks_sharing_gpu(self.world, self.peers)
        if others and self.environ.get(SHARES_GPU) != "1":
            raise LaunchError(
                f"Ranks {', '.join(map(str, sorted([self.world.rank, *others])))} would share one GPU "
                f"({self.device} on {self.peers[self.world.rank].host}), and NCCL allows one rank per GPU. "
                f"{accelerator.count(self.device.type)} GPUs are visible here: start that many ranks per node, or "
                f"train on CPUs with --device cpu. From NCCL 2.30 on, {SHARES_GPU}=1 in the environment lets "
                f"ranks share one"
            )
        wanted = {} if keeps_timeouts else TORCH_NCCL
        # torchrun sets the first to 1, too, so that 1 is nobody's choice.
        changed = {name: value for name, value in wanted.items() if self.environ.get(name, "1") == "1"}
        self._cleanup.enter_context(set_variables(changed))

    def _begin_monitoring(self) -> None:
        """Start the health monitor, and the listener for the signal by which launchers end ranks. A collective."""
        reporter.start_job()
        if self.world.size == 1:
            return
        settings = MonitorSettings(
            world=self.world,
            peers=self.peers,
            activity=self.activity,
            environ=self.environ,
            startup_s=self.options.startup_timeout_s,
            # A callback may take as long, and so may the exchange with the dead rank that follows it.
            elastic_timeout_s=None if self.driver is None else 2 * self.options.startup_timeout_s,
            abort_collectives=self._engine.abort_collectives,
        )
        monitor = (
            MonitorServer(settings, self.store, self.address)
            if self.world.is_first
            else MonitorClient(settings, self.store)
        )
        monitor.start()
        self.monitor = monitor
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # When one rank fails, launchers end the others by it, sometimes before the one has said why.
            listening = preemption.listen_for_signals(self._exit_on_signal, self.activity, (signal.SIGTERM,))
            self._signals = self._cleanup.enter_context(listening)

    def _exit_on_signal(self, number: int) -> None:
        if self.stopping:
            if self._signals is not None:
                self._signals.granted = True
            return
        if self.monitor is not None:
            self.monitor.finish_report()
        os._exit(128 + number)

    @contextmanager
    def common_call(self) -> Iterator[None]:
        """Mark the block as one that all ranks execute. A rank that leaves it by an error may catch that.

        Its next collectives would be taken for those that other ranks have begun inside, so they wait: at the
        start of the next such block, and at the end of the session.
        """
        self._wait_until_everyone_left()
        try:
            yield
        except BaseException as error:
            self._leave_call(error)
            raise
        self._leave_call(None)

    def _leave_call(self, error: BaseException | None) -> None:
        if self.monitor is not None:
            self._has_left = error is not None
            self.monitor.report_left(self._num_calls, error)
            self._num_calls += 1

    def _wait_until_everyone_left(self) -> None:
        """Return when all ranks have left the block that this one has left by an error.

        If others wait in it, the monitor ends the job, and this process.
        """
        if self.monitor is not None and self._has_left:
            with self.activity.waiting():
                self.monitor.everyone_left.wait()
        self._has_left = False

    def wait_for_others(self) -> None:
        """Return when all ranks have come to their end."""
        if self.monitor is not None:
            self.monitor.everyone_is_done.wait()

    def end(self, error: BaseException | None = None) -> None:
        """End as all ranks do, or after an error without them; again, do nothing.

        Args:
            error: to be raised on by the caller, unless this raises another one in its place.

        Raises:
            PeerError: another rank is to blame for the error, and its own output says why.
            SystemExit: this rank is, and the monitor has printed why.
        """
        self._end(error)
        if error is not None:
            self._raise_root_cause(error)

    def _end(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, PreemptedError):
            with ExitStack() as ending:
                ending.callback(self.close)
                ending.callback(self._engine.stop, wait=False)
                self._report(error)
            return
        try:
            if error is None:
                self._wait_until_everyone_left()
            if self.monitor is not None:
                self.monitor.report_done(self.ending)
            self._engine.stop(wait=error is None)
        except BaseException as stopping:
            self.end(stopping)
            raise
        self.close()

    def _report(self, error: BaseException) -> None:
        """Tell the monitor why this rank fails, and wait until it has found the root cause."""
        if phase_raised_in(error) == COLLECTIVE:
            self.activity.blame_collective()
        if self.monitor is not None:
            self.root_cause = self.monitor.report_error(error)
        if self.driver is not None:
            # The frames of the failed exchange keep its connections open, on which other ranks wait.
            for link in (error, error.__cause__, error.__context__):
                if link is not None:
                    traceback.clear_frames(link.__traceback__)

    @property
    def _failed_elsewhere(self) -> bool:
        """Whether another rank's failure is the root cause."""
        cause = self.root_cause
        return cause is not None and bool(cause.text) and cause.rank != self.world.rank

    def _raise_root_cause(self, error: BaseException) -> None:
        """Raise another error in place of one that only follows from another rank's failure; else return."""
        cause = self.root_cause
        # Without a text, all ranks have left alike.
        if cause is None or not cause.text or isinstance(error, UserError):
            return
        if not self._failed_elsewhere:
            if isinstance(error, SystemExit) and cause.reported:
                raise SystemExit(error.code or 1) from error
        elif isinstance(error, Exception | SystemExit):
            if not reporter.parent_reports:
                wait_for_launcher(SILENT_GRACE_S if reporter.prints_tracebacks else TRACEBACK_GRACE_S)
            raise PeerError(
                f"{self.world} stopped because rank {cause.rank} failed or ended: see what that said. "
                f"({first_line(error)})"
            ) from error

    def close(self) -> None:
        """End monitoring, and undo what `connect` and `prepare_nccl` have set in this process."""
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.close()
        self._cleanup.close()

    def leave(self, error: BaseException) -> bool:
        """End this world if ranks come and go; return whether this rank may join the next world.

        Args:
            error: `RescaleError`, or that of a broken exchange. If this rank may not, it stands.
        """
        if self.driver is None:
            return False
        if isinstance(error, RescaleError):
            # All ranks keep the state of the step after which they leave: one that fails now is not missed.
            with suppress(*LOST_RANK_ERRORS):
                self.end()
            return True
        self._end(error)
        return self._failed_elsewhere and self.activity.in_collective and not isinstance(error, UserError)

    def join_next_world(self, engine: Engine) -> None:
        """Take this process's place in the next world, and start an engine among the ranks of that.

        Raises:
            DismissedError: there is no place for it.
            LaunchError: there is no next world.
        """
        assert self.driver is not None
        for attempt in itertools.count(1):
            self.world = self.driver.next_world()
            shared_stores.reset_sessions()
            try:
                self.start(engine)
                return
            except LOST_RANK_ERRORS:
                # Another rank may have failed on its way to the meeting.
                if attempt == MAX_FAILED_WORLDS:
                    raise


def _import_without_group() -> None:
    """Import a module, which DDP needs, as if torch.distributed had no default group.

    The module's functions keep that of the moment in their default arguments. One that is never freed leaves
    Gloo's threads running at exit, which aborted 3 to 13 % of runs ("terminate called without an active
    exception").
    """
    world = dist.distributed_c10d._world
    default, world.default_pg = world.default_pg, None
    try:
        import torch.distributed.nn.functional  # noqa: F401
    finally:
        world.default_pg = default


def _parent_identity() -> str:
    """Return number and start time of the parent process, which together are unique on this machine."""
    parent = os.getppid()
    return f"{parent} {start_time(parent)}"
