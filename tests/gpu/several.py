"""Two and more GPUs: who is on which, how they reach each other, and what more of them bring."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gpu.bench import HERE, IMDB, MNIST, REPRODUCIBLE, Bench, Check, FailedError, MissingError, digest
from gpu.install import said
from gpu.ranks import equal

APPS = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]


def several(bench: Bench) -> Iterable[Check]:
    pair = ("2 gpus",)
    yield Check("links, and peers' memory", "W7", links, ("gpu", *pair))
    yield Check("no context but on its own GPU", "B15", contexts, ("gpu", *pair))
    for engine in ("ddp", "horovod")[: 1 if bench.quick else None]:
        needs = (*pair, *(["horovod"] if engine == "horovod" else []))
        yield Check(f"{engine}: the bits of one rank", "B5", lambda its, e=engine: same(its, e), needs)
        if not bench.quick:
            yield Check(
                f"{engine}: scaling and overlap", "S1 S9 S10", lambda its, e=engine: scaling(its, e), needs
            )
    if not bench.quick:
        yield Check("--devices-per-rank 2", "W1", two_devices, pair)
        yield Check("elastic mode goes on when a rank dies", "B3", elastic)
        yield Check("--stages 2 --shard full", "B4", in_parts, ("4 gpus",))


def links(bench: Bench) -> dict[str, Any]:
    wrong = [
        (a, b)
        for a in range(bench.gpus)
        for b in range(bench.gpus)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    return {"topology": said(["nvidia-smi", "topo", "-m"]), "pairs without P2P": str(wrong or "none")}


def contexts(bench: Bench) -> dict[str, Any]:
    """By the processes that the driver sees on each GPU while two ranks train; in a container it may see none."""
    seen: set[tuple[str, ...]] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            seen.update(tuple(line.split(", ")) for line in said(APPS).splitlines() if ", " in line)

    watcher = threading.Thread(target=look)
    before = set(said(APPS).splitlines())
    watcher.start()
    try:
        bench.torchrun(bench.gpus, *MNIST, "--backend", "ddp", "--epochs", "5")
    finally:
        done.set()
        watcher.join()
    new = [its for its in seen if ", ".join(its) not in before]
    several = {pid for pid, _ in new if sum(pid == other for other, _ in new) > 1}
    if several:
        raise FailedError(f"processes {sorted(several)} were on more than one GPU: {sorted(new)}")
    return {"processes seen": len(new)}


def same(bench: Bench, engine: str) -> dict[str, Any]:
    log_dir, wanted = bench.folder(engine), bench.reference()
    ranks = 4 if bench.gpus >= 4 else 2
    bench.torchrun(
        ranks, *MNIST, *REPRODUCIBLE, "--backend", engine, "--device", bench.device, "--log-dir", log_dir
    )
    return equal({f"{ranks} ranks": digest(log_dir)}, wanted)


def scaling(bench: Bench, engine: str) -> dict[str, Any]:
    """Samples a second on 1, 2, 4, 8 GPUs, and what of the exchange is not hidden on the most."""
    figures: dict[str, Any] = {}
    speed = {}
    counts = [ranks for ranks in (1, 2, 4, 8) if ranks <= bench.gpus]
    for ranks, options in [*((ranks, ()) for ranks in counts), (counts[-1], ("--leave-out", "exchange"))]:
        log_dir = bench.folder(f"{engine}{ranks}")
        job = (str(HERE / "speed_job.py"), "scaling", log_dir, "--backend", engine, "--device", bench.device)
        began = time.monotonic()
        bench.torchrun(ranks, *job, *options)
        lines = [json.loads(line) for line in (Path(log_dir) / "metrics.jsonl").read_text().splitlines()]
        epochs = [line["samples_per_s"] for line in lines if line["event"] == "epoch"]
        name = f"{ranks} without exchange" if options else str(ranks)
        speed[name] = epochs[-1]
        figures[f"samples/s on {name}"] = round(epochs[-1])
        figures[f"seconds in all, {name}"] = round(time.monotonic() - began)
    most = str(counts[-1])
    figures["efficiency"] = round(speed[most] / speed["1"] / counts[-1], 3)
    figures["step time that the exchange adds, %"] = round(
        100 * (speed[f"{most} without exchange"] / speed[most] - 1), 1
    )
    return figures


def two_devices(bench: Bench) -> dict[str, Any]:
    ranks = max(1, bench.gpus // 2)
    bench.torchrun(
        ranks, *IMDB, "--backend", "ddp", "--device", bench.device, "--devices-per-rank", "2", "--max-steps", "5"
    )
    return {"ranks": ranks}


def elastic(bench: Bench) -> dict[str, Any]:
    raise MissingError("GPUs on two hosts that horovodrun reaches by ssh: it gives up a host whose rank has died")


def in_parts(bench: Bench) -> dict[str, Any]:
    bench.torchrun(4, *IMDB, "--backend", "ddp", "--device", bench.device, "--stages", "2", "--max-steps", "5")
    bench.torchrun(4, *IMDB, "--backend", "ddp", "--device", bench.device, "--shard", "full", "--max-steps", "5")
    return {}
