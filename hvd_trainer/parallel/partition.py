"""Partitions of a sequence of blocks: by hand, by the bytes of their parameters, or by measured time.

blocks   embedding  layer0  layer1  layer2  head        weights 4 2 2 2 1
2 parts  |--- 6 ----------|  |------ 5 -------|         the largest part is as small as possible
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from torch import nn

from hvd_trainer.errors import OptionError

MB = 2**20


@dataclass(frozen=True)
class Partition:
    """Consecutive blocks of a model: `len(names)` of them from number `first` on."""

    first: int
    names: tuple[str, ...]
    parameters: int
    bytes: int
    seconds: float | None
    """for one micro-batch, if measured"""

    @property
    def blocks(self) -> range:
        """The numbers of its blocks in the model."""
        return range(self.first, self.first + len(self.names))


def block_names(model: nn.Module, why: str) -> list[str]:
    """Return the names of a model's blocks; errors name the option that needs them (`why`).

    Raises:
        OptionError: the model is not a sequence of blocks, or two blocks share a parameter.
    """
    if not isinstance(model, nn.Sequential):
        raise OptionError(
            f"{why} needs a model that is a sequence of blocks, and this is a {type(model).__name__}. Build it as "
            f"torch.nn.Sequential(...), each block taking what the one before it gives"
        )
    owner: dict[int, str] = {}
    for name, block in model.named_children():
        for parameter in block.parameters():
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise OptionError(
                    f"{why}: the blocks {other} and {name} share a parameter, and could not be in two places. Put "
                    f"both into one block, or give each its own"
                )
    return [name for name, _ in model.named_children()]


def num_bytes(block: nn.Module) -> int:
    """Return the bytes of a block's parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*block.parameters(), *block.buffers()))


def parse_balance(text: str, blocks: int, parts: int) -> list[int]:
    """Parse `--balance 3,2` and return the number of blocks in each part.

    Raises:
        OptionError: it has another form, or does not fit the blocks and the parts.
    """
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        raise OptionError(
            f"--balance {text}: give bytes, time, or the number of blocks in each part, such as --balance 3,2"
        )
    sizes = [int(number) for number in text.split(",")]
    if len(sizes) != parts or sum(sizes) != blocks or 0 in sizes:
        example = ",".join(map(str, balance_weights([1.0] * blocks, parts)))
        raise OptionError(
            f"--balance {text} makes {len(sizes)} parts of {sum(sizes)} blocks, but {parts} parts of {blocks} "
            f"blocks are needed, none of them empty. Type for instance: --balance {example}"
        )
    return sizes


def make_partitions(
    model: nn.Module, names: Sequence[str], parts: int, balance: str, why: str, times: Sequence[float] | None
) -> list[Partition]:
    """Partition a model.

    Args:
        balance: bytes, time, or the numbers of blocks by hand.
        why: the option that asks for it, for errors.

    Raises:
        OptionError: the model has fewer blocks, or `balance` does not fit it.
    """
    blocks = list(model.children())
    if parts > len(blocks):
        raise OptionError(f"{why} makes {parts} parts, and the model has only {len(blocks)} blocks to share out")
    weights = times or [float(num_bytes(block)) for block in blocks]
    by_hand = balance not in ("bytes", "time")
    sizes = parse_balance(balance, len(blocks), parts) if by_hand else balance_weights(weights, parts)
    made = []
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        start = end - size
        chosen = blocks[start:end]
        count = sum(p.numel() for block in chosen for p in block.parameters())
        seconds = None if times is None else sum(times[start:end])
        made.append(Partition(start, tuple(names[start:end]), count, sum(map(num_bytes, chosen)), seconds))
    return made


def balance_weights(weights: Sequence[float], parts: int) -> list[int]:
    """Split a sequence into consecutive parts so that the largest sum of weights is as small as possible.

    The exact optimum by dynamic programming over prefixes, in O(parts x n^2): chains-on-chains partitioning, as in
    Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", J. Parallel Distrib. Comput.
    64 (2004). Of the optima it is the one with the smallest sum of squares, which balances the other parts.

    Returns:
        The number of blocks in each part, at least one.
    """
    sums = [0.0, *accumulate(weights)]
    largest, _ = _cheapest(sums, parts, max)
    return _cheapest(sums, parts, lambda cost, part: cost + part * part if part <= largest else inf)[1]


def _cheapest(
    sums: Sequence[float], parts: int, extended: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least cost of all ways to split, and the sizes of its parts.

    Args:
        extended: returns the cost with one more part, given the cost without it and the part's weight.
    """
    n = len(sums) - 1
    # best[parts][end]: cost of the first `end` blocks in that many parts, and where the last part begins.
    best = [[(0.0, 0)] + [(inf, 0)] * n]
    for part in range(1, parts + 1):
        before = best[-1]
        row = [(inf, 0)] * (n + 1)
        for end in range(part, n + 1):
            row[end] = min(
                (extended(before[start][0], sums[end] - sums[start]), start) for start in range(part - 1, end)
            )
        best.append(row)
    sizes, end = [], n
    for row in reversed(best[1:]):
        sizes.append(end - row[end][1])
        end = row[end][1]
    return best[-1][n][0], sizes[::-1]
