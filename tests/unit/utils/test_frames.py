"""What a traceback shows: a user's lines, and all lines where this package has raised."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trainings import fit, options_of, signs

from hvd_trainer import DataError
from hvd_trainer.utils.frames import format_traceback


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)  # type: ignore[no-any-return]


def test_a_users_error_shows_the_users_lines() -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(options_of(epochs=1), Shapes(), signs(8))
    text = format_traceback(raised.value, {})
    assert "return self.layer(inputs)" in text
    assert "test_a_users_error_shows_the_users_lines" in text
    assert "mat1 and mat2 shapes cannot be multiplied" in text
    assert "/hvd_trainer/training/" not in text
    assert "_call_impl" not in text
    assert "frames of hvd_trainer and PyTorch are left out. To see them: HVD_TRAINER_FRAMES=all" in text
    whole = format_traceback(raised.value, {"HVD_TRAINER_FRAMES": "all"})
    assert "/hvd_trainer/training/" in whole
    assert "left out" not in whole


def test_an_error_of_the_package_shows_all() -> None:
    with pytest.raises(DataError) as raised:
        fit(options_of(epochs=1), Shapes(), object())
    assert "/hvd_trainer/training/" in format_traceback(raised.value, {})


def test_causes_are_shown_alike() -> None:
    with pytest.raises(RuntimeError) as cause:
        fit(options_of(epochs=1), Shapes(), signs(8))
    with pytest.raises(ValueError, match="wrong") as raised:
        raise ValueError("wrong") from cause.value
    text = format_traceback(raised.value, {})
    assert "direct cause" in text
    assert "/hvd_trainer/training/" not in text
