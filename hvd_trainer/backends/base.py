"""The contract between the trainer and an engine, documented once.

Everything above this layer sees a plain module, a plain optimizer and the methods of `Backend`. Every
difference between Horovod and DDP stays inside the subclasses: nothing above asks which one it has, and the
numbers are the same on both.

The module `backends/ddp.py` is the "parallel" backend in the sense of standing beside Horovod's; model
parallelism is another thing and not in this folder.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import process_group
from hvd_trainer.backends.exchange_monitor import ExchangeMonitor
from hvd_trainer.backends.objects import decode_object, encode_object
from hvd_trainer.backends.session import Session
from hvd_trainer.config.checks import flag, range_errors, refuse, switch
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.errors import LaunchError, PreemptedError, UserError, first_line
from hvd_trainer.faults.activity import Activity
from hvd_trainer.faults.elastic import RescaleError
from hvd_trainer.launch.world import World
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import parameters_of

if TYPE_CHECKING:
    from typing_extensions import Self

LOST_RANK_ERRORS = (UserError, RuntimeError, OSError)
"""Raised where ranks meet or part and one is missing: by us, by the engines, at their time limits."""
MAX_FAILED_WORLDS = 3
"""How many worlds in a row may fail to come about before a rank gives up."""
GATHERED_WHOLE_BYTES = 2**20
"""Up to so many bytes in all, one exchange of whole tensors is quicker than two of slices."""

ReduceOp = Literal["sum", "mean", "max", "min"]
T = TypeVar("T")
Columns = Callable[[Sequence[str]], list[list[int]]]
"""Makes the lists of ranks that have the same parameters, from the node of each rank."""
TotalNorm = Callable[[Sequence[Tensor]], Tensor]
"""The norm of all gradients together."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    skipped: bool | Tensor = False
    """True if the update was left out, on all ranks: the gradient was not finite. A 1 or 0 on the device where it
    alone knows: with a scaler and a fused optimizer."""
    grad_norm: Tensor | None = None
    """Norm of the averaged gradient before clipping; None unless it was asked for, or to clip."""
    losses: tuple[Tensor, ...] = ()
    """This rank's mean loss in each pass of the step, on the device; with stages the last one alone has any."""


class Span(NamedTuple):
    """Something that took time."""

    row: str
    """what it is shown with, such as the tensor that was exchanged"""
    name: str
    began_ns: int
    """since 1970, by this host's clock"""
    ended_ns: int
    """the same, if it is a moment"""


class Backend(ABC):
    """One engine. Use it as a context manager: it starts on entry and ends, on all ranks, on exit.

    Args:
        session: this rank's membership in the job, not yet connected; its options are the engine's.
        columns: where a model is cut into stages, which ranks have the same one; None: all have the whole model.
        timeline: whether `timeline` will be asked for.

    Attributes:
        name: `horovod`, `ddp`, `single` or `data-parallel`.
        version: the engine and its version, for the banner.
        columns: the ranks that have the same parameters, for each part of the model; once started.
        column: the one with this rank.
    """

    name: ClassVar[str]
    only_for_others: ClassVar[Mapping[str, str]] = {}
    """Options that this engine cannot honour, each with the reason and what to do instead."""

    def __init__(self, session: Session, *, columns: Columns | None = None, timeline: bool = False) -> None:
        self.session = session
        self._records = timeline
        self._held: deque[list[Tensor]] = deque(maxlen=4)
        self._make_columns, self.columns = columns, [[*range(session.world.size)]]
        self._names: dict[Tensor, str] = {}
        self._exchanges: ExchangeMonitor | None = None

    @classmethod
    def check_options(cls, options: EngineOptions) -> None:
        """Refuse what this engine cannot do: all mistakes at once.

        Raises:
            OptionError: an option that differs from its default has no meaning on this engine.
        """
        mistakes = []
        for field in fields(EngineOptions):
            value = getattr(options, field.name)
            for key in (field.name, f"{field.name}={value}"):
                if value != field.default and key in cls.only_for_others:
                    on_or_off = isinstance(value, bool)
                    typed = switch(field.name, value) if on_or_off else f"{flag(field.name)} {value}"
                    mistakes.append(f"{typed} with --backend {cls.name}: {cls.only_for_others[key]}")
        refuse([*mistakes, *range_errors(options)])

    @property
    def options(self) -> EngineOptions:
        """How gradients are exchanged."""
        return self.session.options

    @property
    def world(self) -> World:
        """This process among all; with nodes once started."""
        return self.session.world

    @property
    def device(self) -> torch.device:
        """Where this rank computes: the first of its devices."""
        return self.session.device

    @property
    def activity(self) -> Activity:
        """Step and phase of this rank, for failure reports."""
        return self.session.activity

    # Starting and ending.

    def __enter__(self) -> Self:
        """Meet the other ranks and start the engine.

        Raises:
            BackendError: the engine is not installed, or cannot work here.
            LaunchError: the ranks could not meet, or the engine's world is not the launcher's.
        """
        self._load()
        try:
            self._connect()
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

    def _connect(self) -> None:
        session = self.session
        session.connect()
        if self.uses_nccl:
            session.prepare_nccl()
        watches = session.world.size > 1 and not accelerator.is_host(session.device)
        self._exchanges = ExchangeMonitor(session.device) if watches else None
        self.columns = [[*range(session.world.size)]]
        if self._make_columns is not None:
            self.columns = self._make_columns([peer.node for peer in session.peers])
        session.begin_monitoring(self.abort_exchanges)

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None or isinstance(error, PreemptedError):
            self._leave(failed=error is not None)
        else:
            self._fail(error)

    def _leave(self, failed: bool = False) -> None:
        """End as all ranks do."""
        try:
            self.session.finish()
            self._stop(failed)
        except BaseException as stopping:
            self._fail(stopping)
            raise
        self.session.close()

    def _abandon(self, error: BaseException) -> None:
        """End after an error, without the other ranks."""
        self.session.fail(error)
        self._stop(failed=True)
        self.session.close()

    def _fail(self, error: BaseException) -> None:
        """End after an error; raise another one in its place if it only follows from another rank's."""
        self._abandon(error)
        self.session.raise_root_cause(error)

    def rejoin(self, error: Exception) -> bool:
        """End after an error and start again in the next world, if ranks come and go and this one can go on.

        Args:
            error: by which training has ended: `RescaleError`, or that of a broken exchange.

        Returns:
            Whether the engine has started again; if not, the error stands.

        Raises:
            DismissedError: there is no place for this rank in the next world.
            LaunchError: there is no next world.
        """
        if self.session.driver is None:
            return False
        if isinstance(error, RescaleError):
            # All ranks keep the state of the step after which they leave: one that fails now is not missed.
            with suppress(*LOST_RANK_ERRORS):
                self._leave()
        else:
            in_exchange = self.activity.in_exchange and not isinstance(error, UserError)
            self._abandon(error)
            if not (in_exchange and self.session.failed_elsewhere):
                return False
        for attempt in itertools.count(1):
            self.session.next_world()
            try:
                self.__enter__()
            except LOST_RANK_ERRORS:
                # Another rank may have failed on its way to the meeting.
                if attempt == MAX_FAILED_WORLDS:
                    raise
            else:
                break
        return True

    def _load(self) -> None:  # noqa: B027  an engine may have nothing to import
        """Import the engine, before the ranks meet.

        Raises:
            BackendError: it is not installed.
        """

    @abstractmethod
    def _start(self) -> None:
        """Start the engine among the ranks that have met."""

    @abstractmethod
    def _stop(self, failed: bool) -> None:
        """End the engine; called again, or before it has started, it does nothing.

        Args:
            failed: do not wait for the other ranks.
        """

    @property
    def uses_nccl(self) -> bool:
        """Whether this engine would move GPU tensors by NCCL or Intel's XCCL, which want one rank per GPU."""
        return False

    @property
    def column(self) -> list[int]:
        return next(ranks for ranks in self.columns if self.world.rank in ranks)

    @property
    @abstractmethod
    def version(self) -> str: ...

    @property
    def exchanges_in_graph(self) -> bool:
        """Whether a step's exchange is in the device's queue, so that it can be captured with the rest of it."""
        return True

    @property
    def copies(self) -> int:
        """Of the model that this process trains at once, each on its own share of the batch."""
        return 1

    # Training.

    def compile(self, model: nn.Module, mode: str, *, exchange: bool) -> None:
        """Compile a model in place, before `prepare`, such that gradients can be exchanged during backward.

        Args:
            mode: as in `torch.compile`.
            exchange: as in `prepare`.
        """
        model.compile(mode=mode)

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

    def prepare_stage(self, stage: nn.Module, *, passes: int, exchange: bool = True) -> None:
        """The same for one stage of a model, among the ranks that have it: `column`.

        Makes its parameters and buffers those of the column's first rank, and has `step` average its gradients
        over the column. What differs between models and optimizers has been seen to before
        (`same_model.start_equal`), and all tensors are where they are to be.

        Args:
            passes: backward passes of a step, after the last of which a gradient is complete.
            exchange: whether the engine averages the gradients.
        """
        if len(self.column) > 1:
            with self.activity.waiting():
                tensors = list(stage.state_dict().values())
                packed = [tensor.contiguous() for tensor in tensors]
                self.column_broadcast([(tensor, self.column[0]) for tensor in packed])
                for tensor, received in zip(tensors, packed, strict=True):
                    if received is not tensor:
                        tensor.copy_(received)
            if exchange:
                self._connect_stage(stage, passes)

    def learn_names(self, model: nn.Module) -> None:
        """By which the engine speaks of parameters; after those that `prepare` has seen were replaced."""
        self._names = {p: name for name, p in model.named_parameters()}

    @abstractmethod
    def _connect_stage(self, stage: nn.Module, passes: int) -> None:
        """Starts to average the gradients of a stage over its column, in place of what was connected before."""

    def group_of(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The torch.distributed group of this rank, such as that of the stages of a replica.

        Horovod cannot send from one rank to another, so that torch.distributed runs beside it for that.

        Args:
            groups: the ranks of each; all ranks must give the same.
        """
        return process_group.make(
            self.session, groups, accelerator.process_group_backend(self.device) if self.uses_nccl else "gloo"
        )

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
        total_norm: TotalNorm = nn.utils.get_total_norm,
    ) -> StepResult:
        """Waits for the averaged gradients, unscales, clips, and updates the parameters.

        Args:
            optimizer: as returned by `prepare`.
            max_norm: clip the norm of the averaged gradient to this.
            scaler: the loss scaler of fp16 training, which leaves a step out whose gradients overflowed.
            norm: give the gradient's norm also where nothing is clipped.
            skip_non_finite: leave the update out if the gradient is not finite; waits for the device to know.
            total_norm: the norm of the whole model's gradient, from those that are here.

        Raises:
            BackendError: a parameter got no gradient and `find_unused_parameters` is off.
        """
        self.activity.enter("reduce")
        self._finish_exchange(optimizer)
        self.mark_exchange()
        self.activity.enter("step")
        if scaler is not None:
            scaler.unscale_(optimizer)
        size = None
        if max_norm is not None or norm or skip_non_finite:
            size = total_norm([p.grad for p in parameters_of(optimizer) if p.grad is not None])
        if max_norm is not None and size is not None:
            nn.utils.clip_grads_with_norm_(parameters_of(optimizer), max_norm, size)
        if scaler is None:
            skipped = skip_non_finite and size is not None and not math.isfinite(self.read(size))
            if not skipped:
                self._update(optimizer)
            return StepResult(skipped=skipped, grad_norm=size)
        left_out = _scaled_update(scaler, optimizer)
        if skip_non_finite:
            left_out = size is not None and not math.isfinite(self.read(size))
            if scaler.get_scale() < 1:
                # Bad data halves the scale each time, as if the scale were to blame, down to nothing.
                scaler.update(1.0)
        return StepResult(skipped=left_out, grad_norm=size)

    @abstractmethod
    def _finish_exchange(self, optimizer: Optimizer) -> None:
        """Waits until `.grad` of all parameters is the average over ranks."""

    def mark_exchange(self) -> None:
        """Let the monitor of the ranks see whether the device has come to the end of this step's exchange."""
        if self._exchanges is not None:
            self._exchanges.mark()
            self.activity.is_exchanging = self._exchanges.is_exchanging

    @contextmanager
    def pause_observers(self) -> Iterator[None]:
        """Time no phases and watch no exchanges, inside: the device only records what it will do later."""
        listeners, self.activity.listeners = self.activity.listeners, []
        try:
            with nullcontext() if self._exchanges is None else self._exchanges.pause():
                yield
        finally:
            self.activity.listeners = listeners

    def confirm_exchanges(self) -> None:
        """Raise if what was read from the device may have come of an exchange that was given up. A collective.

        An aborted kernel leaves in its tensors whatever is there. Horovod aborts also by itself, when it misses a
        rank; then no exchange succeeds any more, and the one made here fails as well.
        """
        self.activity.check()
        if not accelerator.is_host(self.device):
            self.barrier()

    def abort_exchanges(self) -> None:
        """Have the device give up what it exchanges with a rank that is gone; called by another thread.

        On CPUs nothing: there the connection that breaks ends the exchange.
        """
        if self.uses_nccl:
            self.activity.abort()
            process_group.abort()

    def _update(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def timeline(self) -> AbstractContextManager[list[Span]]:
        """Inside, the engine records what it does by itself, such as each exchange: the list, once it has ended.

        Only if it was made with `timeline=True`; and the list stays empty on engines that record nothing, and on
        ranks that leave that to another one.
        """
        return nullcontext([])

    # Collectives. All ranks must call them, in the same order.

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Combines a tensor (any shape, same on all ranks) over ranks into a new tensor, equal on all ranks."""
        with self.activity.waiting():
            return self._all_reduce(tensor, op)

    def all_reduce_numbers(self, values: Sequence[float], op: ReduceOp = "sum") -> list[float]:
        """Combine numbers over ranks: host to host, whatever the device is doing."""
        with self.activity.waiting():
            numbers: list[float] = self._all_reduce(torch.tensor(values, dtype=torch.float64), op).tolist()
            return numbers

    def read(self, tensor: Tensor) -> Any:
        """Return a tensor as Python's numbers: waits for the device, and so for the exchanges in its queue."""
        with self.activity.waiting():
            return tensor.tolist()

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """The engine's own; the result is on the tensor's device."""

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The ranks' tensors (any shape, same on all ranks) in rank order."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> None:
        """Fills a tensor with that of one rank."""

    def _hold(self, *tensors: Tensor) -> None:
        """Keeps the CPU tensors of an exchange that is about to start through the next ones, which are soon.

        An engine's thread lets go of a tensor a moment after its exchange. If only Python has it then, that thread
        enters the interpreter to say so, and a fork at that moment, such as that of a DataLoader's worker, makes a
        child that hangs (CPython's issue 112275; Python before 3.10.15, 3.11.10 and 3.12.1). A view has its base
        outside Python, and so spares the engine's thread that way.
        """
        held = [tensor.view_as(tensor) for tensor in tensors if accelerator.is_host(tensor.device)]
        if held:
            self._held.append(held)

    def all_gather_object(self, value: T) -> list[T]:
        """Collect one value from each rank: a list in rank order, on all ranks; tensors on the host.

        Args:
            value: plain values and tensors, as for `utils.serialization.flatten`.

        Raises:
            BackendError: a rank's value consists of others; on all ranks.
        """
        if self.world.size == 1:
            return [value]
        mine = encode_object(value)
        with self.activity.waiting():
            lengths = [int(length) for length in self._all_gather(torch.tensor([len(mine)]))]
            # Tensors of one shape: the shorter ones are filled up.
            payload = torch.frombuffer(bytearray(mine.ljust(max(lengths))), dtype=torch.uint8)
            parts = self._all_gather(payload)
        return [decode_object(part[:length]) for part, length in zip(parts, lengths, strict=True)]

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Give one rank's value to all ranks; value and errors as in `all_gather_object`."""
        if self.world.size == 1:
            return value
        payload = encode_object(value) if self.world.rank == source else b""
        with self.activity.waiting():
            length = int(self._all_reduce(torch.tensor([len(payload)]), "max"))
            tensor = torch.frombuffer(bytearray(payload.ljust(length)), dtype=torch.uint8)
            self._broadcast(tensor, source)
        received: T = decode_object(tensor)
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

    @abstractmethod
    def column_broadcast(self, pairs: Sequence[tuple[Tensor, int]]) -> None:
        """Fill contiguous tensors, on the ranks of this column, each with the given rank's.

        All are under way before the first is waited for.
        """

    def _column_sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that have the same parameters, as a new tensor."""
        return self._all_reduce(tensor, "sum")

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        with self.activity.waiting():
            accelerator.synchronize(self.device)  # which is behind the host
            self._all_reduce(torch.zeros(1), "sum")

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
        size = len(self.column)
        if size == 1:
            return {}
        buffers = {
            name: b
            for name, b in model.named_buffers()
            if b.is_floating_point() and b.numel() and not b.is_meta  # which other stages have
        }
        means: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(b.dtype for b in buffers.values()):
            same = {name: b for name, b in buffers.items() if b.dtype == dtype}
            with self.activity.waiting():
                flat = self._column_sum(torch.cat([b.detach().reshape(-1) for b in same.values()])).div_(size)
            parts = flat.split([b.numel() for b in same.values()])
            means |= {name: part.view_as(same[name]) for name, part in zip(same, parts, strict=True)}
        return means


def _scaled_update(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool | Tensor:
    """Update the parameters unless the gradients overflowed; return whether the update was left out.

    Most optimizers are not called then: the scaler has waited for the device to know. A fused one is always
    called, and given the device's own flag.
    """
    flags: list[Tensor | None] = []
    hook = optimizer.register_step_pre_hook(lambda its, *_: flags.append(getattr(its, "found_inf", None)))
    try:
        scaler.step(optimizer)
    finally:
        hook.remove()
    scaler.update()
    if not flags:
        return True
    return False if flags[0] is None else flags[0]


def pairwise_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of a power of two of tensors: of neighbours first, then of their sums, and so on."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
