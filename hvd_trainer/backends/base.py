"""The contract between the trainer and an engine.

Everything above this layer sees a plain module, a plain optimizer and the methods of `Backend`. Every
difference between Horovod and DDP stays inside the subclasses: nothing above asks which one it has, and the
numbers are the same on both.

Data parallelism only: models in parts are the subject of `hvd_trainer.parallel`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import process_group
from hvd_trainer.backends.buckets import Reducer
from hvd_trainer.backends.buffers import other_buffers_of, statistics_of
from hvd_trainer.backends.collectives import Collectives
from hvd_trainer.backends.connection import Connection, parameter_names
from hvd_trainer.backends.engine import Engine
from hvd_trainer.backends.exchange_monitor import ExchangeMonitor
from hvd_trainer.backends.model_sync import check_same_model, synchronize
from hvd_trainer.backends.session import Session
from hvd_trainer.backends.sync_batch_norm import convert_sync_batch_norm
from hvd_trainer.backends.unused_parameters import check_unused
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.errors import BackendError
from hvd_trainer.faults.activity import COLLECTIVE, Activity
from hvd_trainer.launch.world import World
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.digest import digest
from hvd_trainer.utils.tensors import parameters_of

if TYPE_CHECKING:
    from typing_extensions import Self

ReplicaGrouping = Callable[[Sequence[str]], list[list[int]]]
"""Returns the replica groups (lists of ranks that have the same parameters), given the node of each rank."""
SMALL_BYTES = 2**16
"""Size of a tensor up to which it is sent together with others."""
NOTHING = nullcontext()
TotalNorm = Callable[[Sequence[Tensor]], Tensor]
"""Returns the norm of all gradients together."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step."""

    skipped: bool | Tensor = False
    """True if all ranks left the update out because the gradient was not finite. A tensor (1 or 0) on the device
    with a scaler and a fused optimizer, where the host does not know."""
    grad_norm: Tensor | None = None
    """Norm of the averaged gradient before clipping; None unless it was asked for, or to clip."""
    losses: tuple[Tensor, ...] = ()
    """This rank's mean loss in each pass of the step, on the device; with stages only the last one has losses."""
    weights: tuple[Tensor, ...] = ()
    """What the weight function gave for each pass, on the device; empty without one."""


class Backend(Engine, ABC):
    """One engine. Use it as a context manager: it starts on entry and ends, on all ranks, on exit.

    Args:
        session: this rank's membership in the job, not yet connected; its options are the engine's.
        grouping: for a model in stages, which ranks have the same stage; None: every rank has the whole model.

    Attributes:
        name: `horovod`, `ddp`, `single` or `data-parallel`.
        collectives: what ranks compute together, and send each other, besides gradients.
        replica_groups: lists of ranks that have the same parameters; once started, one per stage.
    """

    name: ClassVar[str]
    collectives_class: ClassVar[type[Collectives]]
    takes_ddp_kwargs: ClassVar[bool] = False
    """Whether `DistributedDataParallel` exchanges the gradients of a whole model."""

    def __init__(self, session: Session, *, grouping: ReplicaGrouping | None = None) -> None:
        self.session = session
        self.collectives = self.collectives_class(session)
        self.replica_groups = [[*range(session.world.size)]]
        self._grouping = grouping
        self._reducer: Reducer | None = None
        self._connection: Connection | None = None
        self._parameter_names: dict[Tensor, str] = {}
        self._exchange_monitor: ExchangeMonitor | None = None

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
        self.session.start(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self.session.end(error)

    def start(self) -> None:
        """Start the engine, and learn what follows from who the other ranks are."""
        runs_ahead = self.world.size > 1 and not accelerator.is_host(self.device)
        self._exchange_monitor = ExchangeMonitor(self.device) if runs_ahead else None
        self.replica_groups = [[*range(self.world.size)]]
        if self._grouping is not None:
            self.replica_groups = self._grouping([peer.node for peer in self.session.peers])
        self._start()

    def _load(self) -> None:  # noqa: B027  an engine may have nothing to import
        """Import the engine, before the ranks meet.

        Raises:
            BackendError: it is not installed.
        """

    @abstractmethod
    def _start(self) -> None:
        """Start the engine among the ranks that have met."""

    @property
    def replica_group(self) -> list[int]:
        """The ranks that have the same parameters as this one, itself among them."""
        return next(ranks for ranks in self.replica_groups if self.world.rank in ranks)

    @property
    @abstractmethod
    def version(self) -> str:
        """The engine and its version, for the start-up summary."""

    @property
    def num_replicas(self) -> int:
        """How many copies of the model this process trains at once, each on its own share of the batch."""
        return 1

    # Training.

    def compile(self, model: nn.Module, mode: str, *, exchange: bool) -> None:
        """Compile a model in place, before `prepare`, such that gradients can be exchanged during backward.

        Args:
            mode: as in `torch.compile`.
            exchange: as in `prepare`.
        """
        model.compile(mode=mode)

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, exchange: bool = True
    ) -> tuple[nn.Module, Optimizer]:
        """Make all ranks start equal and connect the engine's gradient exchange.

        Moves the model to `device`; then parameters, buffers and the optimizer's state and settings are rank
        0's everywhere. State that the optimizer has is kept.

        Args:
            exchange: whether the engine averages the gradients; else the caller gives each rank the same ones,
                from `tree_sum`, before it calls `step`.

        Returns:
            The module to call in training (the given one may still be called for evaluation: they share all
            tensors), and the optimizer to step: a plain one.

        Raises:
            BackendError: the ranks built different models, or the engine cannot train this one.
        """
        self._check_model(model)
        self.session.has_trained = True
        model.to(self.device)
        if exchange or self.options.sync_batch_norm:
            convert_sync_batch_norm(model, self.collectives, every=self.options.sync_batch_norm)
        synchronize(self.collectives, model, optimizer)
        self.broadcast_module(model)
        self.set_parameter_names(model, optimizer)

        def connect() -> nn.Module:
            self._check_model(model)
            model.to(self.device)
            return self._connect_model(model) if exchange else model

        return self._connect(model, connect) or model, optimizer

    def _connect(self, module: nn.Module, connect: Callable[[], nn.Module | None]) -> nn.Module | None:
        """Connect a module's gradient exchange, as `Connection` does, instead of that of an earlier one."""
        self._disconnect()
        self._connection = Connection(module, connect)
        with self.activity.waiting():
            return self._connection.connect()

    def follow_changes(
        self, train_model: nn.Module, model: nn.Module, optimizer: Optimizer, *, agree: bool
    ) -> nn.Module:
        """Connect the exchange again if a callback has changed what is trained. A collective then.

        New parameters and buffers are moved to the device, and become those of rank 0.

        Args:
            train_model: the module that is called in training.
            model: all that is trained, as given to `prepare`, or of which a stage was given to `prepare_stage`.
            agree: whether ranks tell each other if they have changed it, so that one that alone has is an error
                at once, and not after the time limit. A collective in any case.

        Returns:
            The module to call from now on.

        Raises:
            BackendError: ranks have different models now, or the optimizer updates what the model does not have.
        """
        self.set_parameter_names(model, optimizer)
        connection = self._connection
        if connection is None:
            return train_model
        if lacking := connection.lacks(model):
            raise BackendError(
                f"{lacking[0]} was put into the model after the start, and blocks that are called one by one are "
                "those of the start: leave out --activation-checkpointing or what cuts the model, or begin "
                "another fit"
            )
        has_changed = connection.has_changed
        if agree or len(self.replica_groups) > 1:  # only the ranks of a stage see what has changed in it
            [has_changed] = map(bool, self.collectives.all_reduce_numbers([has_changed], "max"))
        if not has_changed:
            return train_model
        check_same_model(self.collectives, model)
        new = connection.new_tensors()
        self._disconnect()
        with self.activity.waiting():
            to_call = connection.connect() or train_model
        self._broadcast_tensors(new)
        return to_call

    def follow_freezing(self, train_model: nn.Module, outputs: Any) -> nn.Module:
        """Connect the exchange again if the forward pass has frozen or unfrozen parameters, before its backward.

        Args:
            train_model: the module that is called in training.
            outputs: what it has returned.

        Returns:
            The module to call from now on.
        """
        connection = self._connection
        if connection is None or connection.is_frozen_as_before():
            return train_model
        self._disconnect()
        to_call = connection.connect() or train_model
        self._expect_backward(to_call, outputs)
        return to_call

    def _expect_backward(self, train_model: nn.Module, outputs: Any) -> None:  # noqa: B027  most have hooks only
        """Prepare an exchange that was connected after the forward pass for the backward pass."""

    def _check_model(self, model: nn.Module) -> None:  # noqa: B027  an engine may take any
        """Raise BackendError or OptionError if the engine cannot exchange a model's gradients."""

    @abstractmethod
    def _connect_model(self, model: nn.Module) -> nn.Module:
        """Average the gradients of a whole model over all ranks from now on; return the module to call."""

    def _disconnect(self) -> None:
        """Average the gradients of no model any more."""
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

    def prepare_stage(self, stage: nn.Module, *, passes: int, exchange: bool = True) -> None:
        """Make one stage start equal on the ranks of its replica group, and connect its gradient exchange.

        Its parameters and buffers become those of the group's first rank, and `step` averages its gradients over
        the group. Models and optimizers are compared before, by `model_sync.synchronize`, and all tensors must be
        on their devices.

        Args:
            passes: backward passes of a step, after the last of which a gradient is complete.
            exchange: whether the engine averages the gradients.
        """
        self.broadcast_module(stage)
        exchange = exchange and len(self.replica_group) > 1
        self._connect(stage, lambda: self._connect_stage(stage, passes) if exchange else None)

    def broadcast_module(self, module: nn.Module) -> None:
        """Give parameters and buffers the values of the replica group's first rank. A collective."""
        self._broadcast_tensors([*module.parameters(), *module.buffers()])

    def _broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors the values that they have on the replica group's first rank."""
        first, *others = self.replica_group
        if not others:
            return
        # Small ones together: 10,000 by themselves took two seconds.
        groups: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            key = tensor.device if tensor.nbytes <= SMALL_BYTES else id(tensor)
            groups.setdefault(key, []).append(tensor.detach())
        for group in groups.values():
            group.sort(key=lambda tensor: -tensor.itemsize)  # so that each is aligned among the bytes of all
        packed = [_pack(group) for group in groups.values()]
        with self.activity.waiting():
            self.collectives.broadcast_to_replicas([(tensor, first) for tensor in packed])
            # A rank whose device waits for the others' would count as busy.
            accelerator.synchronize(self.device)
        for group, received in zip(groups.values(), packed, strict=True):
            parts = _as_bytes(received).split([tensor.nbytes for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                if part.data_ptr() != tensor.data_ptr():
                    tensor.copy_(part.view(tensor.dtype).view_as(tensor))

    def set_parameter_names(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Learn the names of parameters for error messages; again after a model's parameters are replaced.

        Raises:
            BackendError: the optimizer updates a parameter that the model does not have.
        """
        self._parameter_names = parameter_names(model, optimizer, self._parameter_names)

    def why_not_exchanged(self, parameter: Tensor) -> str | None:
        """Return why no gradient of a parameter is exchanged, for an error message; None if it is."""
        return None if self._connection is None else self._connection.why_without(parameter)

    def check_unused(self, optimizer: Optimizer) -> None:
        """Raise BackendError if a trained parameter got no gradient in this step, or a frozen one got one."""
        check_unused(self._parameter_names, optimizer)

    @abstractmethod
    def _connect_stage(self, stage: nn.Module, passes: int) -> None:
        """Average a stage's gradients over its replica group from now on."""

    def group_of(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return the torch.distributed group with this rank, such as that of a replica's stages. A collective.

        Horovod cannot send from one rank to another, so torch.distributed runs beside it for that.

        Args:
            groups: the ranks of each group; the same on all ranks.
        """
        transport = accelerator.process_group_backend(self.device) if self.uses_nccl else "gloo"
        return process_group.new_group(self.session, groups, transport)

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Average the gradients of a forward and backward inside the block over ranks, or keep them local.

        Args:
            model: as returned by `prepare`.
            enabled: whether to average; the same on all ranks. Local gradients of earlier passes are part of the
                next average.
        """
        if self._reducer is not None:
            self._reducer.set_enabled(enabled)
        return NOTHING

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
        """Wait for the averaged gradients, unscale and clip them, and update the parameters.

        Args:
            optimizer: as returned by `prepare`.
            max_norm: clip the norm of the averaged gradient to this.
            scaler: the loss scaler of fp16 training, which skips the update if gradients overflowed.
            norm: return the gradient's norm even if nothing is clipped.
            skip_non_finite: skip the update if the gradient is not finite; this waits for the device.
            total_norm: returns the norm of the whole model's gradient, given the gradients on this rank.

        Raises:
            BackendError: a parameter got no gradient and `find_unused_parameters` is off.
        """
        activity = self.activity
        activity.enter(COLLECTIVE)
        self._finish_exchange(optimizer)
        if self._exchange_monitor is not None:
            self._exchange_monitor.mark()
            activity.is_exchanging = self._exchange_monitor.is_exchanging
        activity.enter("step")
        if scaler is not None:
            scaler.unscale_(optimizer)
        grad_norm = None
        if max_norm is not None or norm or skip_non_finite:
            grad_norm = total_norm([p.grad for p in parameters_of(optimizer) if p.grad is not None])
        if max_norm is not None and grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters_of(optimizer), max_norm, grad_norm)
        skipped: bool | Tensor = False if scaler is None else _scaled_update(scaler, optimizer)
        if skip_non_finite and grad_norm is not None:
            skipped = not math.isfinite(self.read(grad_norm))
        if scaler is None and not skipped:
            optimizer.step()
        elif scaler is not None and skip_non_finite and scaler.get_scale() < 1:
            # Non-finite data halves the scale each time, as an overflow does: without a bound, down to 0.
            scaler.update(1.0)
        return StepResult(skipped=skipped, grad_norm=grad_norm)

    @abstractmethod
    def _finish_exchange(self, optimizer: Optimizer) -> None:
        """Wait until `.grad` of all parameters is the average over ranks."""

    def confirm_exchanges(self) -> None:
        """Raise if values read from the device may come from an aborted exchange. A collective.

        An aborted kernel leaves its tensors as they happen to be. Horovod also aborts by itself, when it misses a
        rank; then no exchange succeeds any more, and the one made here fails as well.

        Raises:
            CollectiveAbortedError: the monitor has aborted this rank's exchanges.
            Exception: as the engine's, if it has.
        """
        self.activity.check()
        if not accelerator.is_host(self.device):
            self.collectives.barrier()

    def abort_collectives(self) -> None:
        """Abort the device's exchanges with a rank that is gone; called by another thread.

        On CPUs nothing is to be done: the broken connection ends the exchange.
        """
        if self.uses_nccl:
            self.activity.abort()
            process_group.abort()

    def read(self, tensor: Tensor) -> Any:
        """Return a tensor as Python numbers; this waits for the device, and so for the exchanges in its queue."""
        with self.activity.waiting():
            return tensor.tolist()

    def synchronize_buffers(self, model: nn.Module) -> None:
        """Make the buffers of a model equal on all ranks, as `buffers` says, in the same way on both engines.

        Neither engine's own rule serves: Horovod never synchronises buffers, and DDP sends rank 0's in each
        forward.
        """
        means = self.mean_buffers(model)
        for name, buffer in statistics_of(model).items():
            if name in means:
                buffer.detach().copy_(means[name])
        self._broadcast_tensors(list(other_buffers_of(model).values()))

    def mean_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the mean over ranks of each statistic, by name; the model stays as it is. A collective."""
        size = len(self.replica_group)
        if size == 1:
            return {}
        buffers = statistics_of(model)
        means: dict[str, Tensor] = {}
        for dtype, device in dict.fromkeys((b.dtype, b.device) for b in buffers.values()):
            same = {name: b for name, b in buffers.items() if (b.dtype, b.device) == (dtype, device)}
            flat = torch.cat([b.detach().reshape(-1) for b in same.values()])
            own = flat.float() if flat.itemsize < 4 else flat  # of 16 bits, the sum could be more than the largest
            mean = self.collectives.all_reduce(own, replicas=True).div_(size)
            # The mean of equal numbers can round, and statistics of frozen layers stay as they are.
            largest, smallest = self.collectives.all_reduce(torch.cat([own, -own]), "max", replicas=True).chunk(2)
            parts = own.where(largest == -smallest, mean).to(dtype).split([b.numel() for b in same.values()])
            means |= {name: part.view_as(same[name]) for name, part in zip(same, parts, strict=True)}
        return means

    def differing(self, tensors: Mapping[str, Tensor]) -> dict[str, bool]:
        """Return the names of tensors whose bits differ on the ranks of the replica group. A collective.

        Returns:
            By name, whether all ranks of the group have such a tensor; the same on all of them, in one order.
        """
        own = {name: digest([tensor]).tolist() for name, tensor in tensors.items()}
        everyone = self.collectives.all_gather_object(own)
        group = [everyone[rank] for rank in self.replica_group]
        names = dict.fromkeys(name for digests in group for name in digests)
        return {
            name: all(name in digests for digests in group)
            for name in names
            if any(digests.get(name) != group[0].get(name) for digests in group)
        }

    def are_equal(self, numbers: Tensor) -> Tensor:
        """Return which of some integers are the same on all ranks of the replica group: bool, in their shape."""
        # The complement, because the negative of the smallest is itself.
        largest = self.collectives.all_reduce(torch.stack([numbers, ~numbers]), "max", replicas=True)
        return largest[0] == ~largest[1]


def _pack(tensors: list[Tensor]) -> Tensor:
    """Return tensors as one that is contiguous and of a type that engines can send; in place if it can be."""
    if len(tensors) > 1:
        return torch.cat([_as_bytes(tensor) for tensor in tensors])
    # Horovod sends no booleans; of floats more than 2 GB are one tensor.
    return tensors[0].contiguous() if tensors[0].is_floating_point() else _as_bytes(tensors[0])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _scaled_update(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool | Tensor:
    """Update the parameters unless the gradients overflowed; return whether the update was skipped.

    The scaler waits for the device, and does not call most optimizers after an overflow. A fused one is always
    called, and reads a flag on the device, which is returned here.
    """
    flags: list[Tensor | None] = []
    hook = optimizer.register_step_pre_hook(lambda stepped, *_: flags.append(getattr(stepped, "found_inf", None)))
    try:
        scaler.step(optimizer)
    finally:
        hook.remove()
    scaler.update()
    if not flags:
        return True
    return False if flags[0] is None else flags[0]
