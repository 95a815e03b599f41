"""Types of gradients that Horovod cannot exchange are refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hvd_trainer import EngineOptions, backends
from hvd_trainer.backends import horovod, horovod_start
from hvd_trainer.backends.horovod_start import WAKE_ON_ENQUEUE
from hvd_trainer.errors import BackendError


def check(model: nn.Module, **options: Any) -> None:
    backend = backends.create(EngineOptions(backend="horovod", **options), {})
    assert isinstance(backend, horovod.HorovodBackend)
    backend._check_model(model)


@pytest.mark.parametrize("patch_set", [0, horovod.MIN_PATCH_SET_BFLOAT16 - 1, horovod.MIN_PATCH_SET_BFLOAT16])
def test_bfloat16_needs_a_patched_horovod(patch_set: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was "Tensor type torch.BFloat16Tensor is not supported", from inside Horovod."""
    monkeypatch.setattr(horovod, "patch_set", lambda: patch_set)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check(model)
    half = nn.Sequential(nn.Linear(2, 2).to(torch.bfloat16))
    for its, options in ((half, {}), (model, {"compression": "bf16"})):
        if patch_set == horovod.MIN_PATCH_SET_BFLOAT16:
            check(its, **options)
        else:
            with pytest.raises(BackendError, match="no bfloat16. Type: python -m hvd_trainer install-horovod"):
                check(its, **options)


def test_autotune_is_given_what_it_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves alone what is set; the sizes of messages and the cycle were."""

    def settings(**environ: str) -> dict[str, str]:
        backend = backends.create(EngineOptions(backend="horovod"), environ)
        assert isinstance(backend, horovod.HorovodBackend)
        return backend._tuning()

    monkeypatch.setattr(horovod_start, "patch_set", lambda: horovod_start.MIN_PATCH_SET_WAKE)
    assert settings() == settings(HOROVOD_AUTOTUNE="0") == {"HOROVOD_FUSION_THRESHOLD": "0", **WAKE_ON_ENQUEUE}
    assert settings(HOROVOD_AUTOTUNE="1") == {}
    assert settings(HOROVOD_CYCLE_TIME="5") == {"HOROVOD_FUSION_THRESHOLD": "0"}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn])
def test_types_that_horovod_lacks_are_refused_in_what_is_trained(dtype: torch.dtype) -> None:
    """The error came at the first exchange, as a traceback of Horovod's."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[1].weight.data.to(dtype)
    words = (
        rf"Horovod exchanges no {str(dtype).removeprefix('torch.')}, and 1\.weight is of that type.*--backend ddp"
    )
    with pytest.raises(BackendError, match=words):
        check(model)
    model[1].weight.requires_grad = False
    check(model)
