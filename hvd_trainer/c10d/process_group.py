"""A process group of torch.distributed whose collectives are Horovod's.

| operation | by |
|---|---|
| all_reduce: sum, average, min, max, product, scaled sum | Horovod's all-reduce |
| reduce | the same, on a copy |
| broadcast, all_gather, reduce_scatter, all_to_all | Horovod's own |
| gather, scatter | Horovod's all-to-all, in which only one rank receives, or sends |
| barrier | an all-reduce of one number |
| monitored barrier | the store by which the ranks have met |
| send, recv; bitwise reductions; sparse tensors; types that Horovod cannot add | Gloo, on CPU tensors |

Gloo's connections are made when they are first used. Objects travel by these operations, as in every group.
A group's ranks are a process set of Horovod; one rank alone exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends.horovod_start import stop_horovod
from hvd_trainer.c10d.context import HorovodContext, contexts
from hvd_trainer.c10d.monitored_barrier import monitored_barrier
from hvd_trainer.c10d.work import HorovodWork
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.process import set_variables

Begin = Callable[[str], int]
"""Hand a tensor to Horovod under a name, and return its handle."""
RedOp = dist.ReduceOp
HOROVOD_OPS = {
    RedOp.SUM: "Sum",
    RedOp.AVG: "Average",
    RedOp.MIN: "Min",
    RedOp.MAX: "Max",
    RedOp.PRODUCT: "Product",
    RedOp.PREMUL_SUM: "Sum",
}
UNSET = timedelta(0)
"""Options with a time limit up to this have none of their own."""


class HorovodProcessGroup(dist.ProcessGroup):
    """A group of ranks.

    PyTorch calls some methods by two names: those with `_single` are the newer ones.

    Args:
        store: of the group.
        rank: this process's in the group.
        ranks: of the members in the job, in ascending order.
        name: of the group, the same on its members.
        is_default: whether it is the job's default group, with which Horovod ends.

    Raises:
        torch.distributed.DistBackendError: not all ranks of the job added Horovod's process set.
    """

    def __init__(
        self,
        context: HorovodContext,
        store: dist.Store,
        *,
        rank: int,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta,
        is_default: bool,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._context, self._horovod, self._hvd = context, context.operations, context.hvd
        self._ranks, self._group, self._timeout = tuple(ranks), name, timeout
        self._me, self._size, self._is_default = rank, len(ranks), is_default
        self._store, self._num_monitored = store, 0
        self._process_set = context.process_sets.acquire(self._ranks, store, timeout.total_seconds())
        self._gloo: Any = _gloo(store, rank, len(ranks), timeout, context.interface)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        # What is not overridden here reaches Gloo by this, also from C++.
        for device in {"cpu", accelerator.kind() or "cpu"}:
            self._register_backend(torch.device(device), kind, self._gloo)

    # Reductions.

    def allreduce(self, tensors: Tensor | list[Tensor], opts: Any = RedOp.SUM, *_: Any) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if not all(self._can_reduce(tensor, opts) for tensor in tensors):
            work: dist.Work = self._gloo.allreduce(tensors, opts)
            return work
        buffers = [_dense(tensor) for tensor in tensors]
        begins = [self._all_reduction(buffer, opts) for buffer in buffers]
        return self._start(f"all_reduce of {_op(opts).name}", buffers, begins, opts, tensors, buffers)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Reduce a tensor over all ranks, in place on one of them."""
        (tensor,) = tensors
        if not self._can_reduce(tensor, opts):
            work: dist.Work = self._gloo.reduce(tensors, opts)
            return work
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        begins = [self._all_reduction(total, opts)]
        received = [total] if self._me == opts.rootRank else []
        return self._start(f"reduce of {_op(opts).name}", [total], begins, opts, tensors, received)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = RedOp.SUM) -> dist.Work:
        """Reduce a tensor over all ranks, and keep this rank's part of it; all parts have one size."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = RedOp.SUM
    ) -> dist.Work:
        """Reduce tensors over all ranks, and keep this rank's part of each."""
        buffers, begins = [], []
        for input, output in zip(map(_flat, inputs), map(_flat, outputs), strict=True):
            if len(input) != len(output) * self._size:
                raise RuntimeError(
                    f"reduce_scatter: {len(input)} elements for {self._size} ranks of {len(output)} elements each."
                )
            if HOROVOD_OPS.get(_op(opts)) in ("Sum", "Average"):
                begins.append(self._scattered_reduction(input, output, opts))
                buffers.append(output)
            else:
                total = input.clone()
                begins.append(self._all_reduction(total, opts))
                buffers.append(total.chunk(self._size)[self._me])
        return self._start(f"reduce_scatter of {_op(opts).name}", buffers, begins, opts, outputs, buffers)

    def reduce_scatter(
        self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = RedOp.SUM, *_: Any
    ) -> dist.Work:
        """Reduce a list of tensors over all ranks, and keep the one with this rank's number."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        (output,), (parts,) = outputs, inputs
        if len({part.numel() for part in parts}) == 1:
            return self.reduce_scatter_single(output, _join(parts), opts)
        total = _join(parts)
        begins, own_part = [self._all_reduction(total, opts)], _split(total, parts)[self._me]
        return self._start(f"reduce_scatter of {_op(opts).name}", [total], begins, opts, outputs, [own_part])

    # Tensors that travel.

    def broadcast(self, tensors: Tensor | list[Tensor], opts: Any = 0, *_: Any) -> dist.Work:
        """Give one rank's tensors to all."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root, buffers = _root(opts), [_flat(tensor) for tensor in tensors]
        begins = [self._broadcast(buffer, root) for buffer in buffers]
        return self._start(f"broadcast from {root}", buffers, begins, opts, tensors, buffers)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Put all ranks' tensors into one, one after the other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Put all ranks' tensors into one, one after the other, for each of several."""
        buffers = [_flat(output) for output in outputs]
        for input, buffer in zip(inputs, buffers, strict=True):
            if input.numel() * self._size != len(buffer):
                raise RuntimeError(
                    f"all_gather: {len(buffer)} elements for {self._size} ranks of {input.numel()} elements each."
                )
        begins = [self._gathering(_flat(i), buffer) for i, buffer in zip(inputs, buffers, strict=True)]
        return self._start("all_gather", buffers, begins, opts, outputs, buffers)

    def allgather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        """Give all ranks' tensors to all; they may have different sizes."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._gather_to_all(outputs, inputs, opts, outputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Give all ranks' tensors to all.

        Args:
            outputs: for each rank, as many tensors as `inputs`.
        """
        return self._gather_to_all([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts, outputs)

    def _gather_to_all(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any, result: Any
    ) -> HorovodWork:
        """Gather each tensor of `inputs` from all ranks into the tensors of one list of `outputs`."""
        for input, parts in zip(inputs, outputs, strict=True):
            sizes = [part.numel() for part in parts]
            if len(sizes) != self._size or sizes[self._me] != input.numel():
                raise RuntimeError(
                    f"all_gather: a list for {sizes} elements, and rank {self._me} of {self._size} "
                    f"sends {input.numel()}."
                )
        buffers = [_room(parts) for parts in outputs]
        begins = [self._gathering(_flat(i), buffer) for i, buffer in zip(inputs, buffers, strict=True)]
        received = [part for buffer, parts in zip(buffers, outputs, strict=True) for part in _split(buffer, parts)]
        targets = [part for parts in outputs for part in parts]
        return self._start("all_gather", buffers, begins, opts, result, received, targets)

    def gather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any, *_: Any) -> dist.Work:
        """Give all ranks' tensors to one."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        root, sent = _root(opts), _flat(inputs[0])
        parts = outputs[0] if self._me == root else []
        sizes = [part.numel() for part in parts] or [0] * self._size
        received = sent.new_empty(sum(sizes))
        return self._exchange(f"gather to {root}", sent, self._only(root, len(sent)), received, sizes, parts, opts)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        """Put all ranks' tensors into one of one rank, one after the other."""
        parts = list(output.chunk(self._size)) if self._me == _root(opts) else []
        return self.gather([parts], [input], opts)

    def scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any, *_: Any) -> dist.Work:
        """Give one rank's list of tensors to the ranks, one to each."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        root, received = _root(opts), _flat(outputs[0])
        parts = inputs[0] if self._me == root else []
        sizes = [part.numel() for part in parts] or [0] * self._size
        sent = _join(parts) if parts else received[:0]
        return self._exchange(
            f"scatter from {root}", sent, sizes, received, self._only(root, len(received)), outputs, opts
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send a part of a tensor to each rank, and put what comes from each into another tensor.

        Args:
            output_split_sizes, input_split_sizes: in rows; empty: equal parts.
        """
        sent_sizes = self._elements(input, input_split_sizes, "input")
        received_sizes = self._elements(output, output_split_sizes, "output")
        return self._exchange(
            "all_to_all", _flat(input), sent_sizes, _flat(output), received_sizes, [output], opts
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Send a tensor to each rank, and receive one from each."""
        sent_sizes = [part.numel() for part in inputs]
        received_sizes = [part.numel() for part in outputs]
        return self._exchange(
            "all_to_all", _join(inputs), sent_sizes, _room(outputs), received_sizes, outputs, opts
        )

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> dist.Work:
        """Send a tensor on the CPU to a rank."""
        _refuse_on_accelerator("send", tensors)
        work: dist.Work = self._gloo.send(tensors, destination, tag)
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Receive a tensor on the CPU from a rank."""
        _refuse_on_accelerator("recv", tensors)
        work: dist.Work = self._gloo.recv(tensors, source, tag)
        return work

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive a tensor on the CPU from the first rank that sends one."""
        _refuse_on_accelerator("recv", tensors)
        work: dist.Work = self._gloo.recv_anysource(tensors, tag)
        return work

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks, for the group's operations, and for what is queued in the device's current stream.

        As on Gloo, a script that has kept no handle of an operation has its results after a barrier.
        """
        device = accelerator.in_use()
        if device is not None:
            torch.accelerator.current_stream(device).synchronize()
        flag = torch.zeros(1, dtype=torch.int32)
        earlier = self._context.under_way(self._group)
        return self._start("barrier", [flag], [self._all_reduction(flag, RedOp.MAX)], opts, [], after=earlier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, by the group's store; rank 0's error names those that do not come.

        Gloo's would wait without a limit for a rank to which it has no connection yet.
        """
        self._num_monitored += 1
        store = dist.PrefixStore(f"monitored_barrier/{self._num_monitored}", self._store)
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(store, self._me, self._size, limit, wait_all_ranks=wait_all_ranks)

    # Names of PyTorch up to 2.12.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single

    # The group itself.

    def getBackendName(self) -> str:  # noqa: N802  PyTorch's name
        """Return "horovod"."""
        return "horovod"

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of operations that begin from now on."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """End the group; the default group ends Horovod, once all ranks have come here."""
        if self._is_default:
            contexts.leave()

    def abort(self) -> None:
        """End Horovod, with whatever is under way."""
        stop_horovod(self._hvd)

    # Horovod's operations.

    def _start(
        self,
        description: str,
        tensors: Sequence[Tensor],
        begins: Sequence[Begin | None],
        opts: Any,
        result: Any,
        received: Sequence[Tensor] = (),
        targets: Sequence[Tensor] | None = None,
        check: Callable[[list[Any]], None] = lambda returned: None,
        after: Sequence[HorovodWork] = (),
    ) -> HorovodWork:
        """Start an operation.

        Args:
            description: the same on all ranks.
            tensors: of the shapes and types by which ranks tell operations apart.
            begins: start its parts; None: there is nothing to exchange.
            opts: PyTorch's options.
            result: of the work.
            received: copied to `targets` at the end.
            targets: None: those of `result`.
            check: called with what Horovod returned; may raise.
            after: operations that are done before this one is.
        """

        def finish(returned: list[Any]) -> None:
            check(returned)
            _copy_all(received, result if targets is None else targets)

        kind = f"{description} {', '.join(f'{t.dtype}{list(t.shape)}'.removeprefix('torch.') for t in tensors)}"
        timeout: timedelta = getattr(opts, "timeout", UNSET)
        name, number = self._context.number(self._group, kind)
        return self._context.begin(
            name,
            group=self._group,
            number=number,
            ranks=self._ranks,
            call=kind,
            begin=lambda name: [begin(f"{name}.{i}") for i, begin in enumerate(begins) if begin is not None],
            finish=finish,
            result=result,
            after=after,
            device=tensors[0].device,
            timeout_s=(timeout if timeout > UNSET else self._timeout).total_seconds(),
            where=f"in group {self._group} on rank {self._me} of {self._size}",
        )

    def _all_reduction(self, buffer: Tensor, opts: Any) -> Begin | None:
        factor = _factor(opts)
        if self._size == 1:
            if factor != 1:
                buffer.mul_(factor)
            return None
        if not buffer.numel():
            return None
        op = getattr(self._hvd, self._horovod_op(buffer, opts))
        return lambda name: self._horovod._allreduce_async(
            buffer, buffer, name, op, factor, 1.0, self._process_set
        )

    def _scattered_reduction(self, sent: Tensor, kept: Tensor, opts: Any) -> Begin | None:
        factor = _factor(opts)
        if self._size == 1:
            kept.copy_(sent * factor if factor != 1 else sent)
            return None
        if not sent.numel():
            return None
        op = getattr(self._hvd, self._horovod_op(sent, opts))
        return lambda name: self._horovod._reducescatter_async(
            sent, kept, name, op, self._process_set, factor, 1.0
        )

    def _broadcast(self, buffer: Tensor, root: int) -> Begin | None:
        if self._size == 1 or not len(buffer):
            return None
        moved = self._movable(buffer)
        return lambda name: self._horovod._broadcast_async(
            moved, moved, self._ranks[root], name, self._process_set
        )

    def _gathering(self, sent: Tensor, received: Tensor) -> Begin | None:
        if self._size == 1:
            received.copy_(sent)
            return None
        if not len(received):
            return None
        # Horovod resizes what it writes to, which has the right size already: nothing is copied.
        source, target = self._movable(sent), self._movable(received)
        return lambda name: self._horovod._allgather_async(source, target, name, self._process_set)

    def _exchange(
        self,
        description: str,
        sent: Tensor,
        sent_sizes: list[int],
        received: Tensor,
        received_sizes: list[int],
        targets: list[Tensor],
        opts: Any,
    ) -> HorovodWork:
        """Send a part of a flat tensor to each rank, and receive one from each.

        Args:
            sent_sizes, received_sizes: in elements, one for each rank.
            targets: where the elements of `received` belong.
        """
        begins: list[Begin] = []
        source, target = self._movable(sent), self._movable(received)
        factor = sent.element_size() // source.element_size()
        sizes = torch.tensor([size * factor for size in sent_sizes], dtype=torch.int32)
        expected = torch.tensor([size * factor for size in received_sizes], dtype=torch.int32)
        if self._size == 1:
            received.copy_(sent)
        else:
            counts = torch.empty_like(expected)
            begins = [
                lambda name: self._horovod._alltoall_async(source, sizes, target, counts, name, self._process_set)
            ]

        def check(returned: list[Any]) -> None:
            for _, counts in returned:
                if not torch.equal(counts, expected):
                    raise RuntimeError(
                        f"the ranks sent {counts.tolist()} elements, and {expected.tolist()} were expected"
                    )

        return self._start(description, [sent[:0]], begins, opts, targets, _split(received, targets), check=check)

    def _can_reduce(self, tensor: Tensor, opts: Any) -> bool:
        return not tensor.is_sparse and _op(opts) in HOROVOD_OPS and self._has("allreduce", tensor)

    def _horovod_op(self, tensor: Tensor, opts: Any) -> str:
        """Return Horovod's name of a reduction.

        Raises:
            RuntimeError: Horovod has none for it, or not for this type.
        """
        if not self._can_reduce(tensor, opts):
            raise RuntimeError(f"Horovod cannot reduce {tensor.dtype} by {_op(opts).name}.")
        return HOROVOD_OPS[_op(opts)]

    def _has(self, operation: str, tensor: Tensor) -> bool:
        function = f"horovod_torch_{operation}_async_{tensor.type().replace('.', '_')}"
        return hasattr(self._horovod.mpi_lib, function)

    def _movable(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor as Horovod can send it: its bytes, if Horovod does not know its type."""
        return tensor if self._has("allgather", tensor) else tensor.view(torch.uint8)

    def _only(self, root: int, size: int) -> list[int]:
        return [size if rank == root else 0 for rank in range(self._size)]

    def _elements(self, tensor: Tensor, rows: list[int], side: str) -> list[int]:
        """Return the number of elements of each rank's part of a tensor.

        Args:
            rows: in each part; empty: equally many.
            side: of the exchange, for errors.

        Raises:
            RuntimeError: they are not the tensor's.
        """
        length = tensor.shape[0] if tensor.dim() else 1
        if not rows and length % self._size:
            raise RuntimeError(f"all_to_all: the {side} has {length} rows, which {self._size} ranks cannot share.")
        rows = rows or [length // self._size] * self._size
        if len(rows) != self._size or sum(rows) != length:
            raise RuntimeError(
                f"all_to_all: {side} splits {rows} are not {self._size} numbers with the sum {length}."
            )
        return [count * (tensor.numel() // max(1, length)) for count in rows]


def create_process_group(opts: Any, _: Any) -> HorovodProcessGroup:
    """Make a group, as `dist.Backend.register_backend` wants it.

    Args:
        opts: of PyTorch's type `_DistributedBackendOptions`.

    Raises:
        BackendError: Horovod cannot start, or is not the default group's backend.
        LaunchError: not all ranks came.
        ValueError: the ranks are not in ascending order.
    """
    ranks = list(opts.global_ranks_in_group)
    is_default = not ranks
    ranks = ranks or list(range(opts.group_size))
    if ranks != sorted(ranks):
        raise ValueError(f"Horovod's process sets are in ascending order, and {ranks} are not.")
    if is_default:
        contexts.open(opts.store, opts.group_rank, opts.group_size, opts.timeout)
    return HorovodProcessGroup(
        contexts.current(),
        contexts.own_keys(opts.store),
        rank=opts.group_rank,
        ranks=ranks,
        name=opts.group_id,
        timeout=opts.timeout,
        is_default=is_default,
    )


def _gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta, interface: str | None
) -> dist.ProcessGroupGloo:
    """Return a Gloo group that connects two ranks when they first exchange something."""
    variables = {"TORCH_GLOO_LAZY_INIT": "1", **({"GLOO_SOCKET_IFNAME": interface} if interface else {})}
    with set_variables(variables):
        return dist.ProcessGroupGloo(store, rank, size, timeout)


def _refuse_on_accelerator(call: str, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for tensors on an accelerator, whose memory Gloo would read as the host's."""
    for tensor in tensors:
        if not accelerator.is_host(tensor.device):
            raise RuntimeError(
                f"{call} of a tensor on {tensor.device}: Horovod has no {call}, and Gloo takes tensors on the "
                f"CPU. Exchange tensor.cpu(), or start with --backend ddp"
            )


def _op(opts: Any) -> Any:
    op = getattr(opts, "reduceOp", opts)
    return getattr(op, "op", op)


def _factor(opts: Any) -> float:
    """Return by what each rank's tensor is multiplied before a reduction."""
    return float(opts.reduceOp.__getstate__()[1]) if _op(opts) == RedOp.PREMUL_SUM else 1.0


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))


def _dense(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same elements: the same memory, if that is contiguous."""
    return tensor.detach().contiguous()


def _flat(tensor: Tensor) -> Tensor:
    return _dense(tensor).view(-1)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _room(parts: Sequence[Tensor]) -> Tensor:
    """Return an empty flat tensor with room for all parts."""
    return parts[0].new_empty(sum(part.numel() for part in parts))


def _split(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    return list(flat.split([part.numel() for part in parts]))


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy elements into tensors of other shapes, except where they are there already."""
    for source, target in zip(sources, targets, strict=False):
        if source.data_ptr() != target.data_ptr():
            target.detach().copy_(source.view(target.shape))
