"""Types of gradients that Horovod cannot exchange are refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hvd_trainer import EngineOptions, OptionError, backends
from hvd_trainer.backends import horovod
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


def test_adasum_refuses_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "patch_set", lambda: horovod.MIN_PATCH_SET_BFLOAT16)
    with pytest.raises(OptionError, match="--adasum combines fp16, fp32 and fp64 only"):
        check(nn.Linear(2, 2).bfloat16(), adasum=True)


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
