"""The candidates of a search: options that change how a job runs and not what it trains. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from hvd_trainer.config.parser import as_arguments

Group = Literal["threads", "data", "exchange", "compression"]
GROUPS: Mapping[Group, str] = {
    "threads": "CPU threads",
    "data": "fetching data",
    "exchange": "exchanging gradients",
    "compression": "compressing gradients",
}
"""Groups of settings, in words. Settings of a group reduce the same loss, so they are changed one at a time."""
SCRIPT_UNTRIED: Mapping[Group, str] = {
    "data": "the script's own: give its DataLoader another num_workers, and search again",
    "compression": "the script's own: compression=hvd.Compression.fp16, or DDP's communication hooks",
}
"""Groups that lie in a script itself."""
BUCKETS_MB = (1, 4, 12, 25, 64, 128)
CYCLES_MS = (1, 5)
WORKERS = (0, 1, 2, 4)
PREFETCH = (4, 8)


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments."""
    return [word for name, value in settings.items() for word in as_arguments(name, value)]


def describe(settings: Mapping[str, Any]) -> str:
    """Return settings to read: `--workers 2`."""
    return " ".join(as_words(settings)).replace("=", " ")


def find_changes(
    group: Group, backend: str, facts: Mapping[str, Any], settings: Mapping[str, Any], fixed: Collection[str]
) -> list[dict[str, Any]]:
    """Return the changes that are worth trying in a group: an option, by its name in YAML, with another value.

    Args:
        backend: the engine.
        facts: of the job's work, and `cores`.
        settings: adopted so far.
        fixed: options that the job is typed with, which are not changed.
    """
    now = {**facts, **settings}
    values = _values(group, backend, facts, now)
    return [
        {option: value}
        for option, choices in values.items()
        if option not in fixed
        for value in choices
        if value != now.get(option)
    ]


def _values(
    group: Group, backend: str, facts: Mapping[str, Any], now: Mapping[str, Any]
) -> Mapping[str, Iterable[Any]]:
    """Return the values of a group's options, by their names."""
    cores = facts["cores"]
    if group == "threads":
        return {"threads": [2**n for n in range(cores.bit_length())] if facts["device"] == "cpu" else ()}
    if group == "data":
        workers = [number for number in WORKERS if number <= max(2, cores)]
        return {"workers": workers, "prefetch": PREFETCH if now["workers"] else ()}
    if group == "compression":
        return {"compression": ("fp16", "bf16", *(["powersgd"] if backend == "ddp" else []))}
    if "uses_hvd" not in facts:
        return _bucket_sizes("bucket_mb", now["bucket_mb"], facts)
    # What lies underneath a script, by options of `run`.
    name, default = ("fusion_threshold_mb", 64) if facts["uses_hvd"] else ("bucket_mb", 25)
    has_cycles = backend == "horovod" or facts["uses_hvd"]
    cycles: Mapping[str, Iterable[Any]] = {"cycle_time_ms": CYCLES_MS} if has_cycles else {}
    return {**_bucket_sizes(name, now.get(name, default), facts), **cycles}


def _bucket_sizes(option: str, now: float, facts: Mapping[str, Any]) -> dict[str, Iterable[Any]]:
    """Return other sizes of buckets; those that are larger than all gradients together are the same."""
    all_mb = 4 * facts["parameters"] / 2**20
    sizes = {min(size, all_mb): size for size in reversed(BUCKETS_MB)}  # of equal ones, the smallest
    return {option: [sizes[size] for size in sorted(sizes) if size != min(now, all_mb)]}
