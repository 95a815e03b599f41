"""Put PyTorch's launchers of Spark and Ray in the place of Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import libcst as cst

from hvd_trainer.tools.migrate.imports import names_of
from hvd_trainer.tools.migrate.source import Source

USE_GPU = "use_gpu=torch.cuda.is_available()"


def _runner(source: Source, call: cst.Call) -> str | None:
    """Return what stands for HorovodRunner(np=N); N processes are on the driver if it is negative."""
    words = {arg.keyword.value if arg.keyword else "np": source.code(arg.value) for arg in call.args}
    ranks = words.pop("np", "").replace(" ", "")
    words.pop("driver_log_verbosity", None)
    if words or not ranks.lstrip("-").isdigit() or int(ranks) == 0:
        return None
    is_local = ranks.startswith("-")
    return f"TorchDistributor(num_processes={ranks.lstrip('-')}, local_mode={is_local}, {USE_GPU})"


def _run(source: Source, call: cst.Call) -> str | None:
    """Return what stands for horovod.spark.run(function, args=(...), num_proc=N) whose results are not used."""
    words = {arg.keyword.value: arg.value for arg in call.args[1:] if arg.keyword}
    rows: Any = words.pop("args", cst.Tuple([]))
    ranks = words.pop("num_proc", None)
    is_plain = isinstance(source.parents[call], cst.Expr) and isinstance(rows, cst.Tuple) and not words
    if not is_plain or ranks is None or not call.args or sum(not arg.keyword for arg in call.args) != 1:
        return None
    given = ", ".join(source.code(node) for node in (call.args[0].value, *(row.value for row in rows.elements)))
    return f"TorchDistributor(num_processes={source.code(ranks)}, local_mode=False, {USE_GPU}).run({given})"


def _trainer(source: Source, call: cst.Call) -> str | None:
    """Return what stands for Ray's HorovodTrainer, whose workers are in a process group when they begin."""
    if any(arg.keyword and arg.keyword.value == "horovod_config" for arg in call.args):
        return None
    given = ", ".join(source.code(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for arg in call.args)
    return f"TorchTrainer({given})"


LAUNCHERS: Mapping[str, Callable[[Source, cst.Call], str | None]] = {
    "sparkdl.HorovodRunner": _runner,
    "horovod.spark.run": _run,
    "ray.train.horovod.HorovodTrainer": _trainer,
}


def plan_launchers(source: Source) -> bool:
    """Note the new launchers of a file, and take out imports of the old ones; return whether Ray's is one."""
    made = [(name, call) for call in source.find(cst.Call) if (name := source.qualified(call.func)) in LAUNCHERS]
    texts = {call: LAUNCHERS[name](source, call) for name, call in made}
    kept = {name for name, call in made if texts[call] is None}
    for name, call in made:
        if texts[call] is not None and name not in kept:
            source.replaced[call] = str(texts[call])
    done = {name for name, _ in made} - kept
    for node in [*source.find(cst.Import), *source.find(cst.ImportFrom)]:
        own, wholes = source.own_line(node), {whole for _, whole, _ in names_of(node)}
        modules = {name.rpartition(".")[0] for name in done}
        parts = {*done, *(module for module in modules if not module.startswith("ray"))}
        if own is not None and wholes <= parts - kept:
            source.gone.add(own)
    return "ray.train.horovod.HorovodTrainer" in done
