"""How far two tensors are apart, or two numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

NONE = "none"
"""Stands for what one side does not have."""
SHARE = 0.01
"""A tensor counts with at least this part of the norm of all tensors of its kind. Some gradients are zero but for
rounding, such as that of a bias in front of batch norm: what is left of them differs by as much as they are."""


class Distance(NamedTuple):
    """How far two tensors are apart."""

    absolute: float
    """the largest difference of an element"""
    relative: float
    """the norm of the difference by that of the larger tensor"""
    left: Any
    right: Any
    """the elements that are farthest apart, or what is to be said of a tensor that has no counterpart"""


def distance_between(one: Tensor | None, other: Tensor | None, least: float = 0.0) -> Distance:
    """Of two flat tensors.

    Args:
        one, other: None where a side does not have it.
        least: the norm that the larger of them counts with at least.
    """
    if one is None or other is None or len(one) != len(other):
        return Distance(math.inf, math.inf, _described(one), _described(other))
    left, right = one.double(), other.double()
    distance = (left - right).abs()
    distance[(left == right) | (left.isnan() & right.isnan())] = 0.0
    distance = distance.nan_to_num(nan=math.inf, posinf=math.inf)
    if not len(distance) or not float(distance.max()):
        return Distance(0.0, 0.0, 0.0, 0.0)
    place = int(distance.argmax())
    size = max(float(left.norm()), float(right.norm()), least)
    relative = float(distance.norm()) / size if math.isfinite(size) else math.inf
    return Distance(float(distance[place]), relative, float(left[place]), float(right[place]))


def _described(tensor: Tensor | None) -> Any:
    if tensor is None:
        return NONE
    return (
        float(tensor)
        if len(tensor) == 1
        else f"{len(tensor):,} elements, norm {float(tensor.double().norm()):.4g}"
    )


def least_norms(values: Mapping[str, Tensor]) -> dict[str, float]:
    """For each tensor the norm that it counts with at least, from all of its kind."""
    squares: dict[str, float] = {}
    for name, tensor in values.items():
        squares[_kind(name)] = squares.get(_kind(name), 0.0) + float(tensor.double().square().sum())
    return {name: SHARE * math.sqrt(squares[_kind(name)]) for name in values}


def _kind(name: str) -> str:
    """`gradients` of `gradients/fc1.weight`; `optimizer/exp_avg` of `optimizer/fc1.weight/exp_avg`."""
    kind, _, rest = name.partition("/")
    return f"{kind}/{rest.rpartition('/')[2]}" if kind == "optimizer" else kind


def apart(left: float, right: float) -> float:
    """The relative difference of two numbers."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    size = max(abs(left), abs(right))
    return abs(left - right) / size if math.isfinite(size) else math.inf
