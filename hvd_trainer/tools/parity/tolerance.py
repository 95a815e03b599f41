"""Set how far two runs that do the same may be apart.

Two engines on as many ranks of CPUs compute the same sums in the same order, and so give the same bits; those of a
script, on two ranks; two versions of a script, on 4, 8 and so on, too (by 3, DDP divides before the sum, Horovod
after it). Else the order differs, and with it the last bit. The effect of that bit:

first step      The loss is a smooth function of the weights, and differs as little. The gradient is not: a part
                of the network's units, as small as that bit, is so close to the bend of its ReLU (or to another
                maximum of its pool) that it falls to the other side. If a part e does, that moves the gradient by
                sqrt(e) of its norm: 3e-4 in fp32.
later steps     Training is chaotic. A small network that was 1e-6 apart for five steps was 8e-4 apart after a bend
                in the sixth, and 2e-2 in the twentieth.
                A mistake, unlike rounding, changes figures by a factor of about two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hvd_trainer.tools.parity.traces import VERSIONS, Trace

TOLERANCE_BY_PRECISION = {
    "fp64": (2e-14, 5e-8, 0.05),
    "fp32": (1e-5, 1e-3, 0.05),
    "fp16": (1e-3, 0.1, 0.3),
    "bf16": (1e-2, 0.3, 0.3),
}
"""By precision, for the first loss (once the last bit in 16 bits, else 100 times), the first tensors (3 times its
square root), and all from the second step on (measured over 20 steps: 0.01 in fp32, 0.05 in bf16)."""
COMPRESSION_TOLERANCE = (1e-5, 0.01, 0.05)
"""As above, where gradients are sent in 16 bits: Horovod adds up and divides, DDP divides first, and numbers below
6e-5 have few bits left in fp16."""
FIRST_STEP_ONLY = ("gradients", "optimizer")
"""Not compared from the second step on, unless by a tolerance that the user set: the loss shows what matters."""


class Tolerance(NamedTuple):
    """The relative differences that are allowed between two runs; none by itself."""

    why: str
    loss: float = 0.0
    """for the loss of the first step"""
    tensors: float = 0.0
    """for tensors of the first step: gradients and their norm, parameters, the optimizer's state"""
    later: float = 0.0
    """for loss, gradient norm and parameters from the second step on"""
    everywhere: bool = True
    """whether gradients and optimizer state are compared in later steps, too"""

    @property
    def exact(self) -> bool:
        """Whether every bit must be the same."""
        return self.loss == self.tensors == self.later == 0

    def limit(self, quantity: str, *, first: bool) -> float:
        """Return the relative difference allowed to a quantity in the first step, or in a later one."""
        if first:
            return self.loss if quantity == "loss" else self.tensors
        return self.later if self.everywhere or quantity not in FIRST_STEP_ONLY else math.inf

    def __str__(self) -> str:
        if self.everywhere:
            return f"{self.tensors:g} ({self.why})"
        return f"{self.tensors:g} in the first step, {self.loss:g} for its loss, {self.later:g} later ({self.why})"


def expected_tolerance(one: Trace, other: Trace, asked: float | None = None) -> Tolerance:
    """Return the tolerance for two runs that should compute the same.

    Args:
        asked: the tolerance that the user set instead.
    """
    if asked is not None:
        return Tolerance("--tolerance", asked, asked, asked)
    if one.options["reproducible"] is not None:
        return Tolerance("with --reproducible any number of ranks gives the same bits")
    loss, tensors, later = TOLERANCE_BY_PRECISION[one.precision]
    reasons = []
    are_versions, is_power_of_two = (one.name, other.name) == VERSIONS, one.size & (one.size - 1) == 0
    if one.size != other.size:
        reasons.append(f"on {one.size} and {other.size} ranks")
    elif one.facts["device"] != "cpu":
        reasons.append("on GPUs, which need not add up in one order")
    elif one.is_script and one.size > 2 and not (are_versions and is_power_of_two):
        reasons.append(f"a script on {one.size} ranks, whose gradients the engines may add up in another order")
    if one.compression != "none":
        loss, tensors, later = map(max, (loss, tensors, later), COMPRESSION_TOLERANCE)
        reasons.append(f"gradients are sent as {one.compression}")
    if not reasons:
        return Tolerance("on CPUs both engines compute the same sums in the same order")
    # What a script computes in another precision than that of its parameters cannot be seen.
    precision = f"taken for {one.precision} without autocast" if one.is_script else one.precision
    return Tolerance(", ".join([precision, *reasons]), loss, tensors, later, everywhere=False)
