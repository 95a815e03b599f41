"""Measure how far two tensors, or two numbers, are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

NONE = "none"
"""Stands for a value that one side does not have."""
MIN_NORM_FRACTION = 0.01
"""A difference is divided by at least this fraction of the norm of all tensors of its kind: some gradients are
nothing but rounding, such as that of a bias in front of batch norm, and differ by as much as their own norm."""


class Distance(NamedTuple):
    """The distance of two tensors."""

    absolute: float
    """the largest difference of an element"""
    relative: float
    """the norm of the difference divided by that of the larger tensor"""
    left: Any
    right: Any
    """the elements that are farthest apart, or a description of a tensor without a counterpart"""


def distance_between(one: Tensor | None, other: Tensor | None, min_norm: float = 0.0) -> Distance:
    """Return the distance of two flat tensors.

    Args:
        one, other: the tensors; None where a side does not have it.
        least: the least norm by which the difference is divided.
    """
    if one is None or other is None or len(one) != len(other):
        return Distance(math.inf, math.inf, _describe_tensor(one), _describe_tensor(other))
    left, right = one.double(), other.double()
    distance = (left - right).abs()
    distance[(left == right) | (left.isnan() & right.isnan())] = 0.0
    distance = distance.nan_to_num(nan=math.inf, posinf=math.inf)
    if not len(distance) or not float(distance.max()):
        return Distance(0.0, 0.0, 0.0, 0.0)
    place = int(distance.argmax())
    size = max(float(left.norm()), float(right.norm()), min_norm)
    relative = float(distance.norm()) / size if math.isfinite(size) else math.inf
    return Distance(float(distance[place]), relative, float(left[place]), float(right[place]))


def _describe_tensor(tensor: Tensor | None) -> Any:
    if tensor is None:
        return NONE
    return (
        float(tensor)
        if len(tensor) == 1
        else f"{len(tensor):,} elements, norm {float(tensor.double().norm()):.4g}"
    )


def min_norms(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return for each tensor the least norm that it is measured by, from the norm of all tensors of its kind."""
    squares: dict[str, float] = {}
    for name, tensor in values.items():
        squares[_kind(name)] = squares.get(_kind(name), 0.0) + float(tensor.double().square().sum())
    return {name: MIN_NORM_FRACTION * math.sqrt(squares[_kind(name)]) for name in values}


def _kind(name: str) -> str:
    """Return the kind of a tensor: `gradients` of `gradients/fc1.weight`, `optimizer/exp_avg` of
    `optimizer/fc1.weight/exp_avg`.
    """
    kind, _, rest = name.partition("/")
    return f"{kind}/{rest.rpartition('/')[2]}" if kind == "optimizer" else kind


def relative_difference(left: float, right: float) -> float:
    """Return the relative difference of two numbers; infinite if one is, or is NaN, and the other is not."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    size = max(abs(left), abs(right))
    return abs(left - right) / size if math.isfinite(size) else math.inf
