"""The engine of `--backend auto`."""

from __future__ import annotations

from importlib.machinery import PathFinder

import digits_job
import pytest

from hvd_trainer.launch.engine import choose_engine
from hvd_trainer.launch.launchers import LAUNCHERS, Launcher

UNDER_HOROVODRUN = {f"HOROVOD_{name}": "0" for name in ("RANK", "LOCAL_RANK")} | {
    f"HOROVOD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")
}


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A set of what is installed of Horovod: taking its name out of the set takes it away."""
    installed = {"horovod"}
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: name if name in installed else None)
    return installed


def environ_of(launcher: Launcher) -> dict[str, str]:
    """Return the variables of a single rank of a launcher."""
    numbers = dict.fromkeys(launcher.variables(), "1")
    return {**dict.fromkeys(launcher.markers, "0"), **numbers} | {
        name: "0" for name in (launcher.rank, launcher.local_rank, launcher.node_rank) if name
    }


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_horovod_is_the_default_under_horovodrun_only(launcher: Launcher, horovod: set[str]) -> None:
    """Trainer jobs took Horovod everywhere, and `run` DDP: torchrun first_job.py failed without Horovod."""
    usual = "horovod" if launcher.name == "horovodrun" else "ddp"
    assert choose_engine("auto", environ_of(launcher)) == usual
    assert choose_engine("horovod", environ_of(launcher)) == "horovod"


def test_horovodrun_alone_is_not_enough_for_horovod(horovod: set[str]) -> None:
    assert choose_engine("auto", UNDER_HOROVODRUN) == "horovod"
    horovod.clear()
    assert choose_engine("auto", UNDER_HOROVODRUN) == "ddp"
    assert choose_engine("horovod", UNDER_HOROVODRUN) == "horovod", "which then says what to type"
    assert choose_engine("auto", digits_job.by_hand(0, 1)) == choose_engine("auto", {}) == "ddp"
