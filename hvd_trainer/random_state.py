"""The random state of one rank, as part of what a run goes on from."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """PyTorch's random state on the CPU and, where it trains, on the GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Goes on where `random_state` was taken."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
