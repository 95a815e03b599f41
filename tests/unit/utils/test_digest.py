"""Digests of tensors differ if a bit differs, and do not depend on how tensors are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_trainer.utils import digest as module
from hvd_trainer.utils.digest import digest

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_one_bit_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 101).to(dtype)
    before = digest([tensor]).tolist()
    raw = torch.view_as_real(tensor) if dtype.is_complex else tensor
    raw.view(torch.uint8).view(-1)[17] ^= 1
    assert digest([tensor]).tolist() != before


def test_changes_that_cancel_out_in_a_sum_are_seen() -> None:
    weights = torch.linspace(0.1, 1, 50)
    bits = weights.view(torch.int32).clone()
    bits[3] += 1
    bits[30] -= 1
    changed = bits.view(torch.float32)
    one, other = digest([weights]), digest([changed])
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_equal_values_in_all_places_differ_from_others() -> None:
    """Their exclusive or would be zero for both."""
    assert not torch.equal(digest([torch.full((4,), 0.5)]), digest([torch.full((4,), 0.25)]))


@pytest.mark.parametrize("limit", [1, 7, 2**22])
def test_the_size_of_parts_changes_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: list[Tensor] = [torch.randn(5, 4), torch.zeros(0), torch.tensor(True), torch.randn(4, 6).t()]
    whole = sum(digest([tensor]) for tensor in tensors)
    monkeypatch.setattr(module, "MAX_ELEMENTS", limit)
    assert torch.equal(digest(tensors), whole)


def test_memory_order_changes_nothing() -> None:
    images: Any = torch.randn(2, 3, 4, 5)
    assert torch.equal(digest([images]), digest([images.to(memory_format=torch.channels_last)]))
    assert digest([]).tolist() == [0, 0]
