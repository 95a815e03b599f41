"""Derive how many samples each rank takes per step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_trainer.config.options import TrainOptions
from hvd_trainer.errors import OptionError


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic that makes a run comparable with another: who takes how many samples per step."""

    size: int
    """ranks, or virtual ranks, that share a global batch"""
    batch_size: int
    accumulate: int
    per_rank: int = 1
    """virtual ranks of each rank"""

    @classmethod
    def of(cls, options: TrainOptions, replicas: int) -> BatchPlan:
        """Derives the batch per rank, or per copy of the model where several ranks share one.

        Raises:
            OptionError: the global batch does not divide among the ranks, or the virtual ranks do not.
        """
        size = options.reproducible or replicas
        if size % replicas:
            possible = ", ".join(str(2**power) for power in range(size.bit_length()))
            raise OptionError(
                f"--reproducible {size} runs on {possible} ranks, each with as many virtual ranks, and not on "
                f"{replicas}."
            )
        wanted, parts = options.global_batch_size, size * options.accumulate
        if wanted is None:
            return cls(size, options.batch_size, options.accumulate, size // replicas)
        kind = "virtual rank" if options.reproducible else "rank"
        among = f"{size} {kind if size == 1 else kind + 's'} x --accumulate {options.accumulate}"
        batch_size, rest = divmod(wanted, parts)
        if rest or batch_size == 0:
            near = max(1, round(wanted / parts)) * parts
            raise OptionError(
                f"--global-batch-size {wanted} does not divide among {among}. "
                f"The nearest that does: --global-batch-size {near}"
            )
        if options.batch_size not in (batch_size, TrainOptions.batch_size):
            raise OptionError(
                f"--batch-size {options.batch_size} and --global-batch-size {wanted} contradict each other: with "
                f"{among} the batch size is {batch_size}. Leave one out."
            )
        return cls(size, batch_size, options.accumulate, size // replicas)

    @property
    def passes(self) -> int:
        """Backward passes of one rank in a step."""
        return self.accumulate * self.per_rank

    @property
    def global_batch_size(self) -> int:
        return self.size * self.batch_size * self.accumulate

    def lr_factor(self, scaling: str) -> float:
        """What the learning rate is multiplied by: one rule for both engines."""
        parts = self.size * self.accumulate
        return {"none": 1.0, "linear": float(parts), "sqrt": math.sqrt(parts)}[scaling]
