"""The contract between the trainer and an engine, documented once.

Everything above this layer sees a plain module, a plain optimizer and the methods of `Backend`. Every
difference between Horovod and DDP stays inside the subclasses: nothing above asks which one it has, and the
numbers are the same on both.

The module `backends/ddp.py` is the "parallel" backend in the sense of standing beside Horovod's; model
parallelism is another thing and not in this folder.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer import peers, preemption, rendezvous
from hvd_trainer.backends.options import EngineOptions
from hvd_trainer.backends.same_model import parameters_of
from hvd_trainer.ending import stand_by
from hvd_trainer.errors import (
    BackendError,
    LaunchError,
    OptionError,
    PeerError,
    PreemptedError,
    UserError,
    first_line,
)
from hvd_trainer.launch import World, cpu_ids, detect, slurm_job, started
from hvd_trainer.peers import Peer
from hvd_trainer.watch import Activity, Hub, Spoke, Station, failure, stacks

GATHERED_WHOLE_BYTES = 2**20
"""Up to so many bytes in all, one exchange of whole tensors is quicker than two of slices."""

ReduceOp = Literal["sum", "mean", "max", "min"]
T = TypeVar("T")
QUIET_S, LOUD_S = 1.0, 3.0
"""What a launcher takes to end the other ranks when one has failed, which shall end first to be blamed: those that
would print a traceback of their own wait longer."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    skipped: bool = False
    """True if the update was left out, on all ranks: the gradient was not finite."""
    grad_norm: Tensor | None = None
    """Norm of the averaged gradient before clipping; None unless it was asked for, or to clip."""


class Backend(ABC):
    """One engine. Use it as a context manager: it starts on entry and ends, on all ranks, on exit.

    Attributes:
        name: `horovod`, `ddp` or `single`.
        world: this process among all; complete once started.
        device: where this rank computes.
        version: the engine and its version, for the banner.
        slurm_job: what Slurm says of this job.
        job: how this job is known if its launcher starts it again.
        activity: what this rank is doing, for reports.
        stopping: whether all ranks have agreed to end, so that a signal need not end this one.
        watch: over the other ranks; None where there are none.

    Raises:
        OptionError: an option is not for this engine.
        BackendError: the engine is not installed.
        LaunchError: the ranks could not meet, or the engine's world is not the launcher's.
    """

    name: ClassVar[str]
    only_for_others: ClassVar[Mapping[str, str]] = {}
    """Options that this engine cannot honour, each with the reason and what to do instead."""

    def __init__(self, options: EngineOptions | None = None, environ: Mapping[str, str] | None = None) -> None:
        self.options = options or EngineOptions()
        self.environ = os.environ if environ is None else environ
        self.check_options()
        self.world: World = detect(self.environ)
        self.slurm_job = slurm_job(self.environ)
        self.device = torch.device("cpu")
        self.activity = Activity(self.options.startup_timeout_s)
        self._guard = ExitStack()
        self.watch: Station | None = None
        self.stopping = False
        self._held: deque[list[Tensor]] = deque(maxlen=4)

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
                    flag = "--" + field.name.replace("_", "-")
                    given = flag if value is True else f"{flag} {value}"
                    mistakes.append(f"{given} with --backend {self.name}: {self.only_for_others[key]}")
        if min(self.options.timeout_s, self.options.startup_timeout_s, self.options.bucket_mb) <= 0:
            mistakes.append("--timeout-s, --startup-timeout-s and --bucket-mb must be more than 0")
        if mistakes:
            raise OptionError("; ".join(mistakes))

    @property
    @abstractmethod
    def version(self) -> str: ...

    # Starting and stopping.

    def __enter__(self) -> Backend:
        # A second start in one process must not look like the end of the first.
        self.activity, self.stopping = Activity(self.options.startup_timeout_s), False
        try:
            self._meet()
            self._start()
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _meet(self) -> None:
        """Finds the other ranks, and begins to watch over them."""
        self.store, self.first_host = rendezvous.open_store(
            self.world,
            self.environ,
            init_method=self.options.init_method,
            timeout_s=self.options.startup_timeout_s,
        )
        self.device = choose_device(self.world, self.options.device)
        watched = self.world.size > 1
        memory, page = (stacks.answer(), self.activity.show()) if watched else (None, None)
        self._guard.callback(self.activity.hide, page)
        self._guard.callback(stacks.answer_no_more, memory)
        me = Peer(
            host=self.world.host or socket.gethostname(),
            local_rank=self.world.local_rank,
            group=self.world.group,
            backend=self.name,
            cpus=cpu_ids(),
            gpu=str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else None,
            starter=_starter() if self.world.launcher == "torchrun" else "",
            process=os.getpid(),
            started=started(os.getpid()) if watched else "",
            memory=memory,
            page=page,
        )
        self.peers = peers.meet(self.store, self.world, me)
        self.job = peers.job_of(self.peers, self.slurm_job)
        self.world = peers.locate(self.world, self.peers)
        if self.uses_nccl:
            self._refuse_shared_gpu()
        if self.device.type == "cpu" and "OMP_NUM_THREADS" not in self.environ:
            # horovodrun sets nothing, so that each of four ranks would start a thread per core.
            torch.set_num_threads(peers.fair_cpus(self.world, self.peers))
        self._begin_watch()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, PreemptedError):
            try:
                if self.watch is not None:
                    self.watch.done()
                self._stop(failed=error is not None)
            except BaseException as stopping:
                self._fail(stopping)
                raise
            self._end_watch()
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Leaves after an error: with another one, if it is only the consequence of what happened elsewhere."""
        verdict = None if self.watch is None else self.watch.failed(error)
        self._stop(failed=True)
        self._end_watch()
        # Without a text, all ranks have left alike.
        if verdict is None or not verdict.text or isinstance(error, UserError):
            return
        if verdict.rank == self.world.rank:
            if isinstance(error, SystemExit) and verdict.told:
                raise SystemExit(error.code or 1) from error
        elif isinstance(error, Exception | SystemExit):
            if self.world.launcher != "run":
                stand_by(QUIET_S if failure.takes_tracebacks() else LOUD_S)
            raise PeerError(
                f"{self.world} stopped because rank {verdict.rank} failed or ended: see what that said. "
                f"({first_line(error)})"
            ) from error

    def _begin_watch(self) -> None:
        failure.forget()
        if self.world.size > 1:
            station = Hub if self.world.is_first else Spoke
            watch = station(
                self.world,
                self.peers,
                self.activity,
                startup_s=self.options.startup_timeout_s,
                environ=self.environ,
            )
            watch.start(self.store, self.first_host)
            self.watch = watch
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                # Launchers end the others so when one rank fails, sometimes before this one has said why.
                heard = preemption.heard(self._end_by_signal, signals=(signal.SIGTERM,))
                self._signals = self._guard.enter_context(heard)

    def _end_by_signal(self, number: int) -> None:
        if self.stopping:
            self._signals.granted = True
            return
        if self.watch is not None:
            self.watch.terminated()
        os._exit(128 + number)

    def _end_watch(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()
        self._guard.close()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _stop(self, failed: bool) -> None: ...

    @property
    def uses_nccl(self) -> bool:
        """Whether this engine would move GPU tensors by NCCL, which allows one rank per GPU."""
        return False

    def _refuse_shared_gpu(self) -> None:
        others = peers.sharing_gpu(self.world, self.peers)
        if others:
            raise LaunchError(
                f"Ranks {', '.join(map(str, sorted([self.world.rank, *others])))} would share one GPU "
                f"({self.device} on {self.peers[self.world.rank].host}), and NCCL allows one rank per GPU. "
                f"{torch.cuda.device_count()} GPUs are visible here: start that many ranks per node, or "
                f"train on CPUs with --device cpu"
            )

    # Training.

    @abstractmethod
    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, exchange: bool = True
    ) -> tuple[nn.Module, Optimizer]:
        """Makes all ranks start equal and connects the engine's gradient exchange.

        Moves the model to `device`; then parameters, buffers and the optimizer's state and settings are rank
        0's everywhere. State that the optimizer has is kept.

        Args:
            exchange: whether the engine averages the gradients; else the caller gives each rank the same ones,
                from `tree_sum`, before it calls `step`.

        Returns:
            The module to call in training (the given one may still be called for evaluation: they share all
            tensors), and the optimizer to step: a plain one.

        Raises:
            BackendError: the ranks built different models.
        """

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Forward and backward inside: gradients are averaged over ranks only if `enabled`, else kept local.

        All ranks must pass the same. Local gradients of earlier passes are part of the next average.
        """
        return nullcontext()

    def step(
        self,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        norm: bool = False,
        skip_non_finite: bool = False,
    ) -> StepResult:
        """Waits for the averaged gradients, unscales, clips, and updates the parameters.

        Args:
            optimizer: as returned by `prepare`.
            max_norm: clip the norm of the averaged gradient to this.
            scaler: the loss scaler of fp16 training, which leaves a step out whose gradients overflowed.
            norm: give the gradient's norm also where nothing is clipped.
            skip_non_finite: leave the update out if the gradient is not finite; waits for the device to know.

        Raises:
            BackendError: a parameter got no gradient and `find_unused_parameters` is off.
        """
        self.activity.enter("reduce")
        self._finish_exchange(optimizer)
        self.activity.enter("step")
        if scaler is not None:
            scaler.unscale_(optimizer)
        size = None
        if max_norm is not None:
            size = nn.utils.clip_grad_norm_(list(parameters_of(optimizer)), max_norm)
        elif norm or skip_non_finite:
            size = nn.utils.get_total_norm([p.grad for p in parameters_of(optimizer) if p.grad is not None])
        if scaler is None:
            skipped = skip_non_finite and size is not None and not math.isfinite(float(size))
            if not skipped:
                self._update(optimizer)
            return StepResult(skipped=skipped, grad_norm=size)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale
        if skip_non_finite:
            skipped = size is not None and not math.isfinite(float(size))
            if scaler.get_scale() < 1:
                # Bad data halves the scale each time, as if the scale were to blame, down to nothing.
                scaler.update(1.0)
        return StepResult(skipped=skipped, grad_norm=size)

    @abstractmethod
    def _finish_exchange(self, optimizer: Optimizer) -> None:
        """Waits until `.grad` of all parameters is the average over ranks."""

    def _update(self, optimizer: Optimizer) -> None:
        optimizer.step()

    # Collectives. All ranks must call them, in the same order.

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Combines a tensor (any shape, same on all ranks) over ranks into a new tensor, equal on all ranks."""
        with self.activity.waiting():
            return self._all_reduce(tensor, op)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """The engine's own."""

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The ranks' tensors (any shape, same on all ranks) in rank order."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor) -> None:
        """Fills a tensor with rank 0's."""

    def _hold(self, *tensors: Tensor) -> None:
        """Keeps the tensors of an exchange that is about to start through the next ones, which are soon.

        An engine's thread lets go of a tensor a moment after its exchange. If only Python has it then, that thread
        enters the interpreter to say so, and a fork at that moment, such as that of a DataLoader's worker, makes a
        child that hangs (CPython's issue 112275; Python before 3.10.15, 3.11.10 and 3.12.1). A view has its base
        outside Python, and so spares the engine's thread that way.
        """
        self._held.append([tensor.view_as(tensor) for tensor in tensors])

    def all_gather_object(self, value: T) -> list[T]:
        """Collects one picklable value from each rank: a list in rank order, on all ranks."""
        if self.world.size == 1:
            return [value]
        mine = pickle.dumps(value)
        with self.activity.waiting():
            lengths = [int(length) for length in self._all_gather(torch.tensor([len(mine)]))]
            # Tensors of one shape: the shorter ones are filled up.
            payload = torch.frombuffer(bytearray(mine.ljust(max(lengths))), dtype=torch.uint8)
            parts = self._all_gather(payload)
        return [pickle.loads(_bytes(part[:length])) for part, length in zip(parts, lengths, strict=True)]

    def broadcast_object(self, value: T) -> T:
        """Gives rank 0's picklable value to all ranks."""
        if self.world.size == 1:
            return value
        payload = pickle.dumps(value) if self.world.is_first else b""
        with self.activity.waiting():
            length = int(self._all_reduce(torch.tensor([len(payload)]), "max"))
            tensor = torch.frombuffer(bytearray(payload.ljust(length)), dtype=torch.uint8)
            self._broadcast(tensor)
        received: T = pickle.loads(_bytes(tensor))
        return received

    @abstractmethod
    def _all_to_all(self, rows: Tensor) -> Tensor:
        """Row i goes to rank i; the result's row i is from rank i. Shape (ranks, n) both."""

    def tree_sum(self, tensor: Tensor) -> Tensor:
        """The ranks' sum of a flat tensor in one fixed order, whatever the engine: pairs, then pairs of pairs.

            ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))

        A power of two of ranks is needed. Each rank sums one slice of all ranks' tensors, and then all gather the
        slices: 2(n-1)/n of the tensor's size are sent, as in a ring. Small tensors are gathered whole, which sends
        more and waits once only.
        """
        size = self.world.size
        if size == 1:
            return tensor
        with self.activity.waiting():
            if size == 2 or size * tensor.numel() * tensor.element_size() <= GATHERED_WHOLE_BYTES:
                return pairwise_sum(self._all_gather(tensor))
            length = -(-len(tensor) // size)
            rows = nn.functional.pad(tensor, (0, length * size - len(tensor))).view(size, length)
            mine = pairwise_sum(list(self._all_to_all(rows)))
            return torch.cat(self._all_gather(mine))[: len(tensor)]

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        with self.activity.waiting():
            float(self._all_reduce(torch.zeros(1), "sum"))  # on a GPU, only reading it waits for it

    def average_buffers(self, model: nn.Module) -> None:
        """Makes batch-norm statistics and other buffers equal on all ranks, the same way on both engines.

        Neither engine's own rule serves (Horovod never synchronises buffers, DDP sends rank 0's in each
        forward): here each rank keeps its own while training, and before they are used (evaluation, saving)
        floating-point buffers become their mean over ranks. Integer buffers count steps and are equal already.
        """
        means = self.mean_buffers(model)
        for name, buffer in model.named_buffers():
            if name in means:
                buffer.detach().copy_(means[name])

    def mean_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """What `average_buffers` would make of the floating-point buffers, by name; the model stays as it is."""
        if self.world.size == 1:
            return {}
        buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point() and b.numel()}
        means: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(b.dtype for b in buffers.values()):
            same = {name: b for name, b in buffers.items() if b.dtype == dtype}
            flat = self.all_reduce(torch.cat([b.detach().reshape(-1) for b in same.values()]), "mean")
            parts = flat.split([b.numel() for b in same.values()])
            means |= {name: part.view_as(same[name]) for name, part in zip(same, parts, strict=True)}
        return means


def pairwise_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of a power of two of tensors: of neighbours first, then of their sums, and so on."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _starter() -> str:
    """The parent process, as nothing else is called."""
    parent = os.getppid()
    return f"{parent} {started(parent)}"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


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


def choose_device(world: World, wish: str = "auto") -> torch.device:
    """Pins this process to its GPU: `local_rank` modulo the visible ones, so that a task that sees one works.

    Raises:
        BackendError: a GPU was asked for and PyTorch sees none.
    """
    visible = 0 if wish == "cpu" else torch.cuda.device_count()
    if visible == 0:
        if wish == "cuda":
            raise BackendError(
                f"--device cuda was asked for, but PyTorch {torch.__version__} sees no GPU. "
                f"Check nvidia-smi and CUDA_VISIBLE_DEVICES, or train on CPUs with --device cpu"
            )
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % visible)
    torch.cuda.set_device(device)
    return device
