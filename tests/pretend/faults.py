"""Faults to put into the product, one at a time: each must make a check fail.

A fault is put into the source of one module when a rank imports it; no file is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import device_checks
import stream_checks
from rules import FOLDER, LATE_SIDE
from ways_to_train import DIGITS, TEXTS

REPOSITORY = Path(__file__).resolve().parents[2]
VERY_LATE_DEFAULT = "very late default stream"
VERY_LATE_SIDE = "very late side streams"
"""Later than a step takes: batches are fetched one step ahead."""


class Fault(NamedTuple):
    """One mistake.

    Args:
        what: says it.
        file: of the package.
        old, new: text that stands there once, and what to put in its place.
        check: must fail; a function for `run_ranks`.
        args: for it; FOLDER becomes an empty folder.
    """

    what: str
    file: str
    old: str
    new: str
    check: Callable[..., Any]
    args: tuple[Any, ...] = ()
    ranks: int = 2

    @property
    def module(self) -> str:
        return f"hvd_trainer.{self.file.removesuffix('.py').replace('/', '.')}"

    def put_into(self, source: str) -> str:
        """Return a module's source with the mistake."""
        assert source.count(self.old) == 1, (
            f"{self.file}: {self.old!r} stands there {source.count(self.old)} times"
        )
        return source.replace(self.old, self.new)


def bits(text: str, order: str, job: str = "mnist") -> tuple[Any, ...]:
    return device_checks.same_bits, (job, [text], FOLDER, ["blocking", order])


def waits(text: str) -> tuple[Any, ...]:
    return device_checks.host_waits, ("ddp", [text])


WORKERS = f"{DIGITS} --backend single --workers 1"
TRANSFER, EXECUTOR, OPERATION = "data/transfer.py", "hvd/common/executor.py", "hvd/collective.py"

ALL = (
    # Batches.
    Fault(
        "a batch is used before it has arrived",
        TRANSFER,
        "        current.wait_event(arrival)\n",
        "",
        *bits(WORKERS, VERY_LATE_SIDE),
        1,
    ),
    Fault(
        "batches are copied between the steps",
        TRANSFER,
        "accelerator.on_stream(self._stream)",
        "accelerator.on_stream(accelerator.current_stream(self._device))",
        stream_checks.copies_overlap,
        (),
        1,
    ),
    Fault(
        "the arrival is noted before the copy",
        TRANSFER,
        "        with accelerator.on_stream(self._stream):\n"
        "            moved = to_device(batch, self._device)\n"
        "        arrival = accelerator.event(self._device)\n"
        "        arrival.record(self._stream)\n",
        "        arrival = accelerator.event(self._device)\n"
        "        arrival.record(self._stream)\n"
        "        with accelerator.on_stream(self._stream):\n"
        "            moved = to_device(batch, self._device)\n",
        *bits(WORKERS, VERY_LATE_SIDE),
        1,
    ),
    Fault(
        "a batch's memory is used again while it is read",
        TRANSFER,
        "            tensor.record_stream(current)\n",
        "            pass\n",
        *bits(WORKERS, VERY_LATE_DEFAULT),
        1,
    ),
    Fault(
        "the host waits for each copy",
        "data/batch.py",
        "non_blocking=True",
        "non_blocking=False",
        *waits("--batch-size 32 --workers 1"),
    ),
    Fault(
        "a batch's indices are copied one by one",
        "data/loader.py",
        "place, self._rows(self._inputs, chosen), ",
        "place, self._rows(self._inputs, chosen.cpu().to(chosen.device)), ",
        *waits("--batch-size 32"),
    ),
    # Numbers that are read.
    Fault(
        "the loss is read in each step",
        "optim/step.py",
        "        self._losses.append(result.loss)\n",
        "        self._losses.append(result.loss)\n        result.loss.item()\n",
        *waits("--batch-size 32"),
    ),
    Fault(
        "the norm is read in each step",
        "optim/step.py",
        "        return nn.utils.get_total_norm(grads)",
        "        norm = nn.utils.get_total_norm(grads)\n        norm.tolist()\n        return norm",
        *waits("--batch-size 32 --max-norm 1"),
    ),
    Fault(
        "the losses of a step are read by the guard",
        "optim/step.py",
        "        self.optimizer.zero_grad(set_to_none=True)\n",
        "        self.optimizer.zero_grad(set_to_none=True)\n"
        "        torch.stack(self._losses).isfinite().all().item()\n",
        *waits("--batch-size 32"),
    ),
    Fault(
        "the places of norms are copied in each step",
        "parallel/pipeline.py",
        "if present != self._present:",
        "if True:",
        *waits("--batch-size 32 --chunks 2 --max-norm 1"),
    ),
    # Checkpoints.
    Fault(
        "a checkpoint is written before it is copied",
        "checkpoint/async_writer.py",
        "            accelerator.synchronize(device)\n",
        "            pass\n",
        stream_checks.copy_to_host_is_whole,
        (),
        1,
    ),
    Fault(
        "the generator's state is not saved",
        "utils/rng.py",
        "        state[device.type] = torch.get_device_module(device).get_rng_state(device)\n",
        "        pass\n",
        device_checks.generators,
        (),
        1,
    ),
    Fault(
        "the generator's state is that of another device",
        "utils/rng.py",
        "get_rng_state(device)",
        "get_rng_state(0)",
        device_checks.generators,
        (),
        1,
    ),
    Fault(
        "another device's generator gets the state",
        "utils/rng.py",
        ".set_rng_state(state[device.type], device)",
        ".set_rng_state(state[device.type], 0)",
        device_checks.generators,
        (),
        1,
    ),
    Fault(
        "another device's generator is seeded",
        "utils/accelerator.py",
        "module.default_generators[index].manual_seed",
        "module.default_generators[0].manual_seed",
        device_checks.generators,
        (),
        1,
    ),
    # hvd_trainer.hvd.
    Fault(
        "hvd: an exchange begins before its tensor is there",
        EXECUTOR,
        "                    stream.wait_event(job.request.ready)\n",
        "                    pass\n",
        stream_checks.hvd_in_any_order,
        ((LATE_SIDE,),),
    ),
    Fault(
        "hvd: a result is used before the exchange has ended",
        OPERATION,
        "            stream.wait_event(request.finished)\n",
        "",
        stream_checks.hvd_in_any_order,
        ((LATE_SIDE,),),
    ),
    Fault(
        "hvd: the stream does not wait for the group's",
        "hvd/common/transport.py",
        "            work.wait()\n            return\n        while",
        "            return\n        while",
        stream_checks.hvd_in_any_order,
        ((LATE_SIDE,),),
    ),
    Fault(
        "hvd: the end is noted before the exchange",
        EXECUTOR,
        "            run(jobs, device)\n"
        "            finished = accelerator.event(device)\n"
        "            finished.record(stream)\n",
        "            finished = accelerator.event(device)\n"
        "            finished.record(stream)\n"
        "            run(jobs, device)\n",
        stream_checks.hvd_in_any_order,
        ((LATE_SIDE,),),
    ),
    Fault(
        "hvd: poll asks the host alone",
        OPERATION,
        "request.finished is None or bool(request.finished.query())",
        "True",
        stream_checks.hvd_in_any_order,
        (("as queued",),),
    ),
    Fault(
        "hvd: the device's groups are not aborted",
        "hvd/common/transport.py",
        "(self._gloo, *self._device_groups.values())",
        "(self._gloo,)",
        stream_checks.abort_ends_a_wait,
        ("hvd", FOLDER),
    ),
    Fault(
        "hvd: a result's memory is used again while it is read",
        OPERATION,
        "                tensor.record_stream(stream)\n",
        "                pass\n",
        stream_checks.hvd_in_any_order,
        ((VERY_LATE_DEFAULT,),),
    ),
    # Horovod below torch.distributed.
    Fault(
        "c10d: a result is used before it is there",
        "c10d/work.py",
        "            accelerator.current_stream(self._stream.device).wait_event(self._finished)\n",
        "            pass\n",
        stream_checks.c10d_in_any_order,
        ((VERY_LATE_DEFAULT,),),
    ),
    Fault(
        "c10d: the end is noted before the results are there",
        "c10d/work.py",
        "        self._finish(self._received)\n"
        "        if self._stream is not None:\n"
        "            self._finished = accelerator.event(self._stream.device)\n"
        "            self._finished.record(self._stream)\n",
        "        if self._stream is not None:\n"
        "            self._finished = accelerator.event(self._stream.device)\n"
        "            self._finished.record(self._stream)\n"
        "        self._finish(self._received)\n",
        stream_checks.c10d_in_any_order,
        ((LATE_SIDE,),),
    ),
    # DDP.
    Fault(
        "stages: gradients are used before they are summed",
        "backends/ddp_collectives.py",
        "        work, wire = self._sent.pop(bucket.number)\n        work.wait()\n",
        "        _, wire = self._sent.pop(bucket.number)\n",
        device_checks.same_bits,
        ("imdb", [f"{TEXTS} --backend ddp --chunks 2"], FOLDER, ["blocking", LATE_SIDE]),
    ),
    Fault(
        "an abort leaves the device waiting",
        "backends/process_group.py",
        "            dist.distributed_c10d._abort_process_group()\n",
        "            pass\n",
        stream_checks.abort_ends_a_wait,
        ("ddp", FOLDER),
    ),
    # Devices and memory.
    Fault(
        "parts of a model are computed on the wrong device",
        "parallel/device_pipeline.py",
        "move_to(values[chunk], self._devices[part])",
        "move_to(values[chunk], self._devices[0])",
        device_checks.same_bits,
        ("imdb", [f"{TEXTS} --backend ddp --devices-per-rank 2"], FOLDER, ["as queued"]),
        1,
    ),
    Fault(
        "the tensors of the last exchanges are kept",
        "backends/collectives.py",
        "for tensor in tensors if accelerator.is_host(tensor.device)]",
        "for tensor in tensors]",
        device_checks.peak,
        ("--backend ddp --reproducible 2", 2.0, "--backend ddp"),
    ),
)
FAULTS = {fault.what: fault for fault in ALL}
