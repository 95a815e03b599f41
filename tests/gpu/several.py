"""Two and more GPUs: who is on which, and what more of them bring."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from gpu.bench import HERE, IMDB, MNIST, REPRODUCIBLE, Bench, Check, FailedError, MissingError, digest, records
from gpu.install import output_of
from gpu.ranks import equal
from gpu.table import needs_in

APPS = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]


def several(bench: Bench) -> Iterable[Check]:
    pair = ("2 gpus",)
    for engine in ("ddp", "horovod"):
        needs = (*pair, *needs_in(f"--backend {engine}"))
        yield Check(f"{engine}: the bits of one rank", check_same_bits, (engine,), needs)
        yield Check(f"{engine}: scaling and overlap", measure_scaling, (engine,), needs, measures=True)
    yield Check("no process but on its own GPU", check_contexts, needs=("gpu", *pair))
    devices = str(max(1, bench.gpus // 2)), "--devices-per-rank 2"
    yield Check("--devices-per-rank 2", train_texts, devices, pair)
    yield Check("--stages 2 --shard full", train_texts, ("4", "--stages 2 --shard full"), ("4 gpus",))


def check_contexts(bench: Bench) -> dict[str, Any]:
    """By the processes that the driver sees on each GPU while ranks train; in a container it may see none."""
    seen: set[tuple[str, ...]] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            seen.update(tuple(line.split(", ")) for line in output_of(APPS).splitlines() if ", " in line)

    watcher = threading.Thread(target=look)
    before = set(output_of(APPS).splitlines())
    watcher.start()
    try:
        bench.torchrun(bench.gpus, *MNIST, "--backend", "ddp", "--epochs", "5")
    finally:
        done.set()
        watcher.join()
    new = [its for its in seen if ", ".join(its) not in before]
    if not new:
        raise MissingError("a driver that shows processes (not in this container)")
    wrong = {pid for pid, _ in new if sum(pid == other for other, _ in new) > 1}
    if wrong:
        raise FailedError(f"processes {sorted(wrong)} were on more than one GPU: {sorted(new)}")
    return {"processes seen": len(new)}


def check_same_bits(bench: Bench, engine: str) -> dict[str, Any]:
    log_dir, wanted = bench.folder(engine), bench.reference()
    ranks = 4 if bench.gpus >= 4 else 2
    options = ("--backend", engine, "--device", bench.device, "--log-dir", log_dir)
    bench.torchrun(ranks, *MNIST, *REPRODUCIBLE, *options)
    return equal({f"{ranks} ranks": digest(log_dir)}, wanted)


def measure_scaling(bench: Bench, engine: str) -> dict[str, Any]:
    """Return samples a second on 1, 2, 4, 8 GPUs, and what of the exchange is not hidden on the most."""
    from hvd_trainer.measure.message import Message

    figures: dict[str, Any] = {}
    speed = {}
    counts = [ranks for ranks in (1, 2, 4, 8) if ranks <= bench.gpus]
    for ranks, left_out in [*((ranks, ()) for ranks in counts), (counts[-1], ("exchange",))]:
        log_dir = bench.folder(f"{engine}{ranks}")
        job = (str(HERE / "speed_job.py"), "scaling", log_dir, "--backend", engine, "--device", bench.device)
        began = time.monotonic()
        env = Message(log_dir=log_dir, leave_out=left_out).variables() if left_out else {}
        bench.torchrun(ranks, *job, env=env)
        name = f"{ranks} without exchange" if left_out else str(ranks)
        speed[name] = records(log_dir, "epoch")[-1]["samples_per_s"]
        figures[f"samples/s on {name}"] = round(speed[name])
        figures[f"seconds in all, {name}"] = round(time.monotonic() - began)
    most = str(counts[-1])
    added = 100 * (speed[f"{most} without exchange"] / speed[most] - 1)
    efficiency = speed[most] / speed["1"] / counts[-1]
    return figures | {"efficiency": round(efficiency, 3), "step time that the exchange adds, %": round(added, 1)}


def train_texts(bench: Bench, ranks: str, text: str) -> dict[str, Any]:
    options = ("--backend", "ddp", "--device", bench.device, *text.split(), "--max-steps", "5")
    bench.torchrun(int(ranks), *IMDB, *options)
    return {"ranks": ranks}
