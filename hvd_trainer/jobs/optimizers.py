"""Make the optimizers of the jobs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.jobs.options import OptimizerOptions
from hvd_trainer.utils import accelerator

MOMENTUM = 0.9


def make_optimizer(
    model: nn.Module, choice: OptimizerOptions, *, device: torch.device, options: TrainerOptions
) -> Optimizer:
    """Return an optimizer over all parameters.

    On an accelerator it is fused: one kernel updates all parameters.
    """
    assert choice.lr is not None
    fused = None if accelerator.is_host(device) else True
    if choice.optimizer == "sgd":
        momentum = MOMENTUM if choice.momentum is None else choice.momentum
        # PyTorch has no fused SGD of slices (`--shard full`); and if the scaler leaves the first step out, its
        # momentum starts from uninitialised memory.
        if options.parallel.shard == "full" or (options.train.precision == "fp16" and momentum):
            fused = None
        optimizer: Optimizer = torch.optim.SGD(
            model.parameters(), choice.lr, momentum=momentum, weight_decay=choice.weight_decay, fused=fused
        )
    else:
        kind = torch.optim.AdamW if choice.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(model.parameters(), choice.lr, weight_decay=choice.weight_decay, fused=fused)
    optimizer.register_load_state_dict_pre_hook(_keep_fused)
    return optimizer


def _keep_fused(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Keep this machine's own setting of `fused` when a state is loaded, whichever machine saved it."""
    groups = [
        {**saved, "fused": group["fused"]}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False)
    ]
    return {**state, "param_groups": groups + state["param_groups"][len(groups) :]}
