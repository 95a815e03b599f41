"""Carries out the operations that all members of a process set have asked for, in the order of the responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.hvd.common import adasum
from hvd_trainer.hvd.common.launch_order import LaunchOrder
from hvd_trainer.hvd.common.matching import Response
from hvd_trainer.hvd.common.request import DTYPES, Kind, Op, Request, Signature
from hvd_trainer.hvd.common.transport import Transport
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import as_bytes

GROUP_OPS = {
    Op.AVERAGE: dist.ReduceOp.SUM,
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}
COMBINE: dict[int, Callable[..., Tensor]] = {
    Op.AVERAGE: torch.add,
    Op.SUM: torch.add,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.PRODUCT: torch.mul,
}


Part = tuple[Tensor, Tensor]
"""One tensor of an operation, which may travel with others, and where its result goes."""


class Executor:
    """Carries out operations; one thread at a time.

    Args:
        fusion_bytes: tensors up to this size in total travel together.
        order: of this rank's process sets.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], fusion_bytes: int, order: LaunchOrder) -> None:
        self._transport, self._order = transport, order
        self._ranks = ranks
        self._fusion_bytes = fusion_bytes
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.join_device = torch.device("cpu")
        """where the zeros of a rank that has joined are made, for operations on an accelerator"""

    @torch.no_grad()
    def run(self, responses: Sequence[Response]) -> None:
        """Carry out operations and fill the outputs of this rank's requests, unless it has joined.

        Raises:
            RuntimeError: a connection is broken.
        """
        together: dict[tuple[Any, ...], list[Response]] = {}
        for response in responses:
            if response.signature.shapes:  # a rank that has joined is told of operations without tensors, too
                together.setdefault(_fusion_key(response), []).append(response)
        for fused in together.values():
            signature = fused[0].signature
            run = {
                Kind.ALLREDUCE: self._all_reduction(signature),
                Kind.BROADCAST: self._broadcast,
                Kind.ALLGATHER: self._all_gather,
                Kind.ALLTOALL: self._all_to_all,
                Kind.REDUCESCATTER: self._reduce_scatter,
            }[signature.kind]
            device = self._device(fused)
            if accelerator.is_host(device):
                run(fused, device)
            else:
                self._on_stream(run, fused, device)

    def _device(self, responses: Sequence[Response]) -> torch.device:
        for response in responses:
            if response.request is not None and response.request.tensors:
                return response.request.tensors[0].device
        return torch.device("cpu") if responses[0].signature.device == "cpu" else self.join_device

    def _on_stream(self, run: Callable[..., None], responses: Sequence[Response], device: torch.device) -> None:
        """Queue the operations on the stream of exchanges, after what the tensors depend on."""
        with accelerator.on_stream(self._order.stream(device)):
            for response in responses:
                if response.request is not None and response.request.ready is not None:
                    response.request.ready.block()
            run(responses, device)
            finished = accelerator.Point(device)
        for response in responses:
            if response.request is not None:
                response.request.finished = finished

    # Tensors that came with the requests.

    def compute(self, response: Response, request: Request) -> None:
        """Compute a result on this rank, from all members' tensors in the response."""
        signature = response.signature
        dtype = DTYPES[signature.dtypes[0]]
        rows = [torch.frombuffer(bytearray(payload), dtype=dtype) for payload in response.payloads]
        if signature.kind == Kind.ALLREDUCE:
            result = _combine(rows, signature)
            _scale(result, _factor_after(signature, len(self._ranks)))
        elif signature.kind == Kind.BROADCAST:
            result = rows[self._ranks.index(signature.root)]
        else:
            result = torch.cat(rows)
            lengths = [peer.shapes[0][0] for peer in response.signatures if peer is not None]
            request.outputs = [result.view(sum(lengths), *signature.shapes[0][1:])]
            request.result = [lengths]
            return
        if request.in_place:
            request.outputs[0].data.view(-1).copy_(result)
        else:
            request.outputs = [result.view(signature.shapes[0])]

    # Allreduce.

    def _all_reduction(self, signature: Signature) -> Callable[..., None]:
        if signature.is_bucket:
            return self._start_bucket
        return self._adasum if signature.op == Op.ADASUM else self._all_reduce

    def _start_bucket(self, responses: Sequence[Response], device: torch.device) -> None:
        """Start to reduce a bucket. On CPUs the next one can begin meanwhile; on GPUs streams see to that."""
        signature, request = responses[0].signature, responses[0].request
        ((_, bucket),) = self._parts(responses[0], device)
        work = self._transport.group(device).allreduce([bucket], _options(signature))
        if not accelerator.is_host(device):
            self._transport.wait(work, device)
        elif request is not None:
            request.work = work

    def _all_reduce(self, responses: Sequence[Response], device: torch.device) -> None:
        by_dtype: dict[torch.dtype, list[Part]] = {}
        for response in responses:
            for source, output in self._parts(response, device):
                by_dtype.setdefault(source.dtype, []).append((source, output))
        signature = responses[0].signature
        for parts in by_dtype.values():
            for chunk in self._chunks(parts):
                self._all_reduce_together(chunk, signature, device)

    def _parts(self, response: Response, device: torch.device) -> list[Part]:
        signature, request = response.signature, response.request
        if request is None:
            zeros = [
                torch.zeros(shape, dtype=DTYPES[dtype], device=device)
                for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
            ]
            return [(tensor, tensor) for tensor in zeros]
        return [*zip(request.tensors, self._outputs(request), strict=True)]

    def _outputs(self, request: Request) -> list[Tensor]:
        """Return where the results of tensors of the same shapes go."""
        if not request.in_place:
            request.outputs = [torch.empty_like(tensor) for tensor in request.tensors]
        return [output.data for output in request.outputs]

    def _chunks(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Divide parts into lists of at most `fusion_bytes`, or of one part."""
        chunks: list[list[Part]] = []
        space = -1
        for source, output in parts:
            space -= source.nbytes
            if space < 0:
                chunks.append([])
                space = self._fusion_bytes - source.nbytes
            chunks[-1].append((source, output))
        return chunks

    def _all_reduce_together(self, parts: Sequence[Part], signature: Signature, device: torch.device) -> None:
        if len(parts) == 1:
            source, output = parts[0]
            flat = output.view(-1)
            if output.data_ptr() != source.data_ptr():
                flat.copy_(source.view(-1))
        else:
            flat = self._gather_into_buffer([source.view(-1) for source, _ in parts])
        if flat.numel() == 0:
            return
        _scale(flat, signature.prescale)
        if len(self._ranks) > 1:
            self._transport.wait(self._transport.group(device).allreduce([flat], _options(signature)), device)
        _scale(flat, _factor_after(signature, len(self._ranks)))
        if len(parts) > 1:
            _scatter_buffer(flat, [output.view(-1) for _, output in parts])

    def _gather_into_buffer(self, flats: Sequence[Tensor]) -> Tensor:
        """Return the tensors one after the other in a buffer, which is kept for the next time."""
        size = sum(map(len, flats))
        key = flats[0].dtype, flats[0].device
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers[key] = torch.empty(size, dtype=key[0], device=key[1])
        return torch.cat(list(flats), out=self._buffers[key][:size])

    def _adasum(self, responses: Sequence[Response], device: torch.device) -> None:
        signature = responses[0].signature
        for source, output in self._parts(responses[0], device):
            result = source * signature.prescale if signature.prescale != 1.0 else source
            result = adasum.reduce(result.view(-1), self._transport)
            output.view(-1).copy_(result)
            _scale(output, signature.postscale)

    # The operations that only move bytes.

    def _broadcast(self, responses: Sequence[Response], device: torch.device) -> None:
        root = self._ranks.index(responses[0].signature.root)
        is_root = root == self._transport.member
        parts: list[Part] = []
        for response in responses:
            for source, output in self._parts(response, device):
                if is_root and output is not source:
                    output.copy_(source)
                if source.numel():
                    parts.append((as_bytes(output), as_bytes(output)))
        options = dist.BroadcastOptions()
        options.rootRank = root
        for chunk in self._chunks(parts) if len(self._ranks) > 1 else ():
            flats = [flat for flat, _ in chunk]
            flat = flats[0] if len(flats) == 1 else self._gather_into_buffer(flats)
            self._transport.wait(self._transport.group(device).broadcast([flat], options), device)
            if len(flats) > 1 and not is_root:
                _scatter_buffer(flat, flats)

    def _all_gather(self, responses: Sequence[Response], device: torch.device) -> None:
        response, request = responses[0], responses[0].request
        assert request is not None
        request.outputs, request.result = [], []
        for index, tensor in enumerate(request.tensors):
            lengths = [s.shapes[index][0] for s in response.signatures if s is not None]
            output = tensor.new_empty((sum(lengths), *tensor.shape[1:]))
            request.outputs.append(output)
            request.result.append(lengths)
            if output.numel() == 0:
                continue
            sent, received = as_bytes(tensor), as_bytes(output)
            group = self._transport.group(device)
            if len(set(lengths)) == 1:
                self._transport.wait(group._allgather_base(received, sent), device)
                continue
            row_bytes = len(received) // sum(lengths)
            slices = received.split([length * row_bytes for length in lengths])
            slices[self._transport.member].copy_(sent)
            works = []
            for member, part in enumerate(slices):
                if len(part):
                    options = dist.BroadcastOptions()
                    options.rootRank = member
                    works.append(group.broadcast([part], options))
            for work in works:
                self._transport.wait(work, device)

    def _all_to_all(self, responses: Sequence[Response], device: torch.device) -> None:
        response, request = responses[0], responses[0].request
        assert request is not None
        tensor = request.tensors[0]
        signature = response.signatures[self._transport.member]
        assert signature is not None
        received_rows = [s.splits[self._transport.member] for s in response.signatures if s is not None]
        output = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        received_bytes = [count * row_bytes for count in received_rows]
        sent_bytes = [count * row_bytes for count in signature.splits]
        sent = as_bytes(tensor[: sum(signature.splits)])
        self._transport.all_to_all(as_bytes(output), sent, received_bytes, sent_bytes)
        request.outputs, request.result = [output], received_rows

    def _reduce_scatter(self, responses: Sequence[Response], device: torch.device) -> None:
        response, request = responses[0], responses[0].request
        assert request is not None
        size, me = len(self._ranks), self._transport.member
        request.outputs = []
        for tensor in request.tensors:
            base, rest = divmod(tensor.shape[0], size)
            rows = [base + (member < rest) for member in range(size)]
            row_size = math.prod(tensor.shape[1:])
            flat = tensor.view(-1)
            if response.signature.prescale != 1.0:
                flat = flat.clone()
                _scale(flat, response.signature.prescale)
            received = flat.new_empty(size * rows[me] * row_size)
            sent_bytes = [count * row_size * flat.element_size() for count in rows]
            self._transport.all_to_all(as_bytes(received), as_bytes(flat), [sent_bytes[me]] * size, sent_bytes)
            result = _combine(received.view(size, -1).unbind(), response.signature, scaled=True)
            _scale(result, _factor_after(response.signature, size))
            request.outputs.append(result.view(rows[me], *tensor.shape[1:]))


def _fusion_key(response: Response) -> tuple[Any, ...]:
    """Return what operations that travel together have in common, the same on all members."""
    signature, where = response.signature, (response.signature.device, *response.device_indices)
    if signature.kind == Kind.ALLREDUCE and signature.op != Op.ADASUM and not signature.is_bucket:
        return Kind.ALLREDUCE, where, signature.op, signature.prescale, signature.postscale
    if signature.kind == Kind.BROADCAST:
        return Kind.BROADCAST, where, signature.root
    return response.key


def _options(signature: Signature) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = GROUP_OPS[signature.op]
    return options


def _scatter_buffer(flat: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy consecutive parts of a buffer to where they belong."""
    torch._foreach_copy_(list(outputs), list(flat.split([len(output) for output in outputs])))


def _factor_after(signature: Signature, size: int) -> float:
    """Return by what a sum is to be multiplied."""
    return signature.postscale / size if signature.op == Op.AVERAGE else signature.postscale


def _scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; integers are computed in fp64 and cut towards zero, as Horovod does."""
    if factor == 1.0:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).trunc_())


def _combine(rows: Sequence[Tensor], signature: Signature, scaled: bool = False) -> Tensor:
    """Return the rows, which may be overwritten, combined in the members' order; 16-bit numbers in fp32."""
    dtype = rows[0].dtype
    if dtype in (torch.float16, torch.bfloat16):
        rows = [row.float() for row in rows]
    if not scaled and signature.prescale != 1.0:
        for row in rows:
            _scale(row, signature.prescale)
    combine = COMBINE[signature.op]
    for row in rows[1:]:
        combine(rows[0], row, out=rows[0])
    return rows[0] if rows[0].dtype == dtype else rows[0].to(dtype)
