"""Derive how many samples each rank takes per step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_trainer.config.options import TrainOptions
from hvd_trainer.errors import OptionError


@dataclass(frozen=True)
class BatchPlan:
    """The samples of a step, shared out over ranks and backward passes."""

    size: int
    """number of ranks, or virtual ranks, that share a global batch"""
    batch_size: int
    """samples of one backward pass"""
    accumulate: int
    """backward passes per step of each rank, or virtual rank"""
    per_rank: int = 1
    """virtual ranks of each rank; 1 without --reproducible"""
    whole: int | None = None
    """samples of one backward pass of all ranks, where they need not divide by `size`: those of a `DataLoader`"""

    @classmethod
    def of(cls, options: TrainOptions, replicas: int, whole: int | None = None) -> BatchPlan:
        """Derive the batch per rank, or per replica of the model where several ranks share one.

        Args:
            replicas: number of whole models; the ranks, if each has one.
            whole: samples of a `DataLoader`'s batch, the longest; None: the options have the size.

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
        if whole is not None:
            return cls(size, -(-whole // size), options.accumulate, size // replicas, whole)
        wanted, parts = options.global_batch_size, size * options.accumulate
        if wanted is None:
            return cls(size, options.batch_size, options.accumulate, size // replicas)
        batch_size, rest = divmod(wanted, parts)
        plan = cls(size, batch_size, options.accumulate, size // replicas)
        if rest or batch_size == 0:
            near = max(1, round(wanted / parts)) * parts
            raise OptionError(
                f"--global-batch-size {wanted} does not divide among {plan.among}. "
                f"The nearest that does: --global-batch-size {near}"
            )
        return plan

    @property
    def among(self) -> str:
        """Return what a global batch is shared out among, in words: `4 ranks x --accumulate 2`."""
        kind = "rank" if self.per_rank == 1 else "virtual rank"
        return f"{self.size} {kind if self.size == 1 else kind + 's'} x --accumulate {self.accumulate}"

    @property
    def passes(self) -> int:
        """Return the number of backward passes of one rank in a step."""
        return self.accumulate * self.per_rank

    @property
    def global_batch_size(self) -> int:
        """Return the number of samples of all ranks in a step."""
        return (self.whole or self.size * self.batch_size) * self.accumulate

    def count_steps(self, batches: int | None) -> int | None:
        """Return the steps in which a rank takes a number of batches; None if that is not known."""
        return None if batches is None else -(-batches // self.passes)

    def lr_factor(self, scaling: str) -> float:
        """Return the factor of the learning rate for a value of --lr-scaling."""
        parts = self.size * self.accumulate
        return {"none": 1.0, "linear": float(parts), "sqrt": math.sqrt(parts)}[scaling]
