"""Horovod's environment variables, and what they mean on torch.distributed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hvd_trainer.config.options import EngineOptions

LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""Python's levels by the values of HOROVOD_LOG_LEVEL."""
NO = ("", "0")
"""Values of Horovod's switches that leave them off."""
EXACTLY_HOROVOD = "HVD_TRAINER_EXACTLY_HOROVOD"
"""The switch of `run --exactly-horovod`."""
WITHOUT_MEANING = (
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_AUTOTUNE_LOG",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_DISABLE_GROUP_FUSION",
    "HOROVOD_ENABLE_ASYNC_COMPLETION",
    "HOROVOD_ENABLE_XLA_OPS",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_THREAD_AFFINITY",
    "HOROVOD_TORUS_ALLREDUCE",
)
"""Variables that tune Horovod's own transports and its search for settings."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings from environment variables, Horovod's but for the last, the same on all ranks."""

    fusion_bytes: int = 128 * 2**20
    cycle_s: float = 0.001
    stall_check_s: float = 60.0
    stall_shutdown_s: float = 0.0
    exactly_horovod: bool = False
    """take the step on gradients of zero by which Horovod creates the state of a fresh optimizer, and drop an
    optimizer's state where it is wrapped"""


def engine_options(environ: Mapping[str, str]) -> EngineOptions:
    """Return how ranks are to meet, by Horovod's environment variables.

    The variables of Gloo and NCCL themselves go before HOROVOD_GLOO_IFACE; horovodrun sets NCCL's beside it.

    Raises:
        ValueError: HOROVOD_GLOO_TIMEOUT_SECONDS is not a number.
    """
    default = EngineOptions(backend="ddp")
    timeout_s = _number(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", default.startup_timeout_s)
    is_chosen = environ.get("GLOO_SOCKET_IFNAME") or environ.get("NCCL_SOCKET_IFNAME")
    interface = None if is_chosen else environ.get("HOROVOD_GLOO_IFACE") or None
    return replace(default, startup_timeout_s=timeout_s, network_interface=interface)


def set_log_level(environ: Mapping[str, str]) -> None:
    """Log from the level in HOROVOD_LOG_LEVEL on, as in Horovod only warnings and errors if it is not set.

    To stderr, unless the program has set up logging itself.

    Raises:
        ValueError: there is no such level.
    """
    given = environ.get("HOROVOD_LOG_LEVEL", "")
    name = given.lower() or "warning"
    if name not in LOG_LEVELS:
        raise ValueError(f"HOROVOD_LOG_LEVEL={given} is none of {', '.join(LOG_LEVELS)}.")
    package = logging.getLogger("hvd_trainer.hvd")
    if given or package.level == logging.NOTSET:
        package.setLevel(LOG_LEVELS[name])
    if given and not package.hasHandlers():
        handler = logging.StreamHandler()
        time = "" if environ.get("HOROVOD_LOG_HIDE_TIME", "0") not in NO else "%(asctime)s "
        handler.setFormatter(logging.Formatter(f"[{time}%(levelname)s] %(message)s"))
        package.addHandler(handler)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return the number in a variable.

    Raises:
        ValueError: it is not a number, or negative.
    """
    text = environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={text} is not a number from 0. Correct it or leave it out.")
    return value


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return what Horovod's environment variables ask for.

    Raises:
        ValueError: one of them is not a number.
    """
    default = Settings()
    check_s = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_check_s)
    is_checked = environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") in NO
    return Settings(
        fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes)),
        cycle_s=_number(environ, "HOROVOD_CYCLE_TIME", default.cycle_s * 1000) / 1000,
        stall_check_s=check_s if is_checked else 0.0,
        stall_shutdown_s=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.stall_shutdown_s),
        exactly_horovod=environ.get(EXACTLY_HOROVOD, "0") not in NO,
    )


def ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """Return those of Horovod's variables that are set, and have no meaning here."""
    return [f"{name}={environ[name]}" for name in WITHOUT_MEANING if environ.get(name, "0") not in NO]
