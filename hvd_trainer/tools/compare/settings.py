"""The candidates of a search: options that change how a job runs and not what it trains. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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
BUCKETS_MB = (1, 4, 12, 25, 64, 128)
CYCLES_MS = (1, 5)
MAX_WORKERS = 4
PREFETCH = (4, 8)


@dataclass(frozen=True)
class Change:
    """An option with another value."""

    group: Group
    option: str
    """its name in YAML"""
    value: Any

    @property
    def label(self) -> str:
        """The option as it is typed."""
        return describe({self.option: self.value})

    def after(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with this change."""
        return {**settings, self.option: self.value}


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments."""
    return [word for name, value in settings.items() for word in as_arguments(name, value)]


def describe(settings: Mapping[str, Any]) -> str:
    """Return settings to read: `--workers 2`."""
    return " ".join(as_words(settings)).replace("=", " ")


def find_changes(
    group: Group, backend: str, facts: Mapping[str, Any], settings: Mapping[str, Any], fixed: Collection[str]
) -> list[Change]:
    """Return the changes that are worth trying in a group.

    Args:
        backend: the engine.
        facts: run.json of the job, and `cores`.
        settings: adopted so far.
        fixed: options that the job is typed with, which are not changed.
    """
    makers = _SCRIPT_MAKERS if "uses_hvd" in facts else _MAKERS
    made = makers[group](backend, facts, settings)
    return [change for change in made if change.option not in fixed]


def _threads(backend: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Change]:
    if facts["device"] != "cpu":
        return
    now, number = settings.get("threads", facts["threads"]), 1
    while number <= facts["cores"]:
        if number != now:
            yield Change("threads", "threads", number)
        number *= 2


def _data(backend: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Change]:
    now = settings.get("workers", facts["workers"])
    for number in (0, 1, 2, MAX_WORKERS):
        if number != now and number <= max(2, facts["cores"]):
            yield Change("data", "workers", number)
    for number in PREFETCH if now else ():
        if number != settings.get("prefetch"):
            yield Change("data", "prefetch", number)


def _exchange(backend: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Change]:
    yield from _bucket_sizes("bucket_mb", settings.get("bucket_mb", facts["bucket_mb"]), facts)


def _compression(backend: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Change]:
    kinds = ("fp16", "bf16", "powersgd") if backend == "ddp" else ("fp16", "bf16")
    for kind in kinds:
        if kind != settings.get("compression", facts["compression"]):
            yield Change("compression", "compression", kind)


def _script_exchange(backend: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Change]:
    """Yield changes of what lies underneath a script, by options of `run`."""
    option, default = ("fusion_threshold_mb", 64) if facts["uses_hvd"] else ("bucket_mb", 25)
    yield from _bucket_sizes(option, default, facts)
    if backend == "horovod" or facts["uses_hvd"]:
        now = settings.get("cycle_time_ms")
        yield from (Change("exchange", "cycle_time_ms", number) for number in CYCLES_MS if number != now)


def _bucket_sizes(option: str, now: float, facts: Mapping[str, Any]) -> Iterator[Change]:
    """Yield other sizes of buckets; those that are larger than all gradients together are the same."""
    all_mb = 4 * facts["parameters"] / 2**20
    sizes = {min(size, all_mb): size for size in reversed(BUCKETS_MB)}  # of equal ones, the smallest
    yield from (Change("exchange", option, sizes[size]) for size in sorted(sizes) if size != min(now, all_mb))


_SCRIPT_MAKERS = {"threads": _threads, "exchange": _script_exchange}
SCRIPT_UNTRIED: Mapping[Group, str] = {
    "data": "the script's own: give its DataLoader another num_workers, and search again",
    "compression": "the script's own: compression=hvd.Compression.fp16, or DDP's communication hooks",
}
"""Groups that lie in the script itself."""
_MAKERS = {"threads": _threads, "data": _data, "exchange": _exchange, "compression": _compression}
