"""Trainings in stages and micro-batches that `test_stages.py` runs in every rank and compares."""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from trainings import StopAfter, StoppedError, signs

from hvd_trainer import (
    Callback,
    EngineOptions,
    LogOptions,
    ParallelOptions,
    SaveOptions,
    Trainer,
    TrainerOptions,
    TrainOptions,
    accuracy,
    detect,
)
from hvd_trainer.errors import UserError
from hvd_trainer.optim import non_finite
from hvd_trainer.parallel import fsdp
from hvd_trainer.parallel.pipeline_layout import make_layout

non_finite.MAX_UNREAD_LOSSES = 5  # so that all ranks or none read their losses in the middle of an epoch
NUM = 60  # the last of 4 batches of 16 has 12 samples: two of 3 chunks are full, and one is empty


class AtEnd(Callback):
    """A callback that collects the state after the last epoch, and what this rank holds of it."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.state: Any = None
        self.own_state = self.hooks = 0

    def on_epoch_end(self, run: Any, record: dict[str, Any]) -> None:
        if record["epoch"] < self.epochs:
            return
        self.state = run.state.collect(None)
        own = [t for its in run.optimizer.state.values() for t in its.values() if isinstance(t, Tensor)]
        own = [t.to_local() if hasattr(t, "to_local") else t for t in own]
        self.own_state = sum(tensor.numel() for tensor in own)
        self.hooks = len(run.optimizer._optimizer_step_post_hooks)


class Masked(nn.Module):
    """A block that returns a mask beside its output, as a Transformer's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(inputs), (inputs > 0).float()


class Joined(nn.Module):
    """A block that takes an output and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(18, 12)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(self.linear(torch.cat(both, 1)))


def model(dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(
        Masked(), Joined(), nn.Dropout(dropout), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 2)
    )


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return two groups, of which only weights decay, so that the optimizer's order is not the model's."""
    decaying = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02
    )


def fit(
    backend: str,
    parallel: dict[str, Any],
    *,
    folder: str | None = None,
    dropout: float = 0.3,
    stop_after: int | None = None,
    again: bool = False,
    engine: dict[str, Any] | None = None,
    save: dict[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """Train once, or a second time with the same model and optimizer; return the results."""
    # Cut by time, the parts are the machine's mood, and with them what each rank keeps.
    cut = {"balance": "bytes"} if parallel.get("stages", 1) > 1 else {}
    options = TrainerOptions(
        engine=EngineOptions(backend=backend, **(engine or {})),  # type: ignore[arg-type]
        train=TrainOptions(**{"epochs": 3, "global_batch_size": 16, "max_norm": 0.5, **train}),
        parallel=ParallelOptions(**cut | parallel),
        log=LogOptions(log_dir=folder, quiet=True),
        save=SaveOptions(**{"save_every_epochs": None, "save_every_s": None, **(save or {})}),
    )
    with Trainer(options) as trainer:
        whole = model(dropout)
        end = AtEnd(options.train.epochs)
        optimizer = two_groups(whole)
        history = None
        with suppress(StoppedError):
            for _ in range(2 if again else 1):
                history = trainer.fit(
                    whole,
                    optimizer,
                    nn.functional.cross_entropy,
                    signs(NUM),
                    signs(21),
                    metrics={"accuracy": accuracy},
                    callbacks=[end, StopAfter(stop_after)],
                )
        state = end.state
        names = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "samples", "step")
        return {
            "records": [[record[name] for name in names] for record in (history.epochs if history else [])],
            "weights": state["model"] if state else None,
            "state": state["optimizer"]["state"] if state else None,
            "own state": end.own_state,
            "hooks": end.hooks,
        }


def cut_twice() -> None:
    """Train the same model twice; the second training is refused."""
    whole = model()
    optimizer = two_groups(whole)
    for balance in ("1,5", "4,2"):
        options = TrainerOptions(
            engine=EngineOptions(backend="ddp"),
            parallel=ParallelOptions(stages=2, balance=balance),
            log=LogOptions(quiet=True),
        )
        with Trainer(options) as trainer:
            trainer.fit(whole, optimizer, nn.functional.cross_entropy, signs(NUM))


class Unused(nn.Module):
    """A model with a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def fit_unused(parallel: dict[str, Any]) -> None:
    """Train a model with an unused parameter, which is refused."""
    options = TrainerOptions(
        engine=EngineOptions(backend="ddp"), parallel=ParallelOptions(**parallel), log=LogOptions(quiet=True)
    )
    whole = nn.Sequential(*model(), Unused())
    with Trainer(options) as trainer:
        trainer.fit(whole, two_groups(whole), nn.functional.cross_entropy, signs(NUM))


def cut_on_the_host(parallel: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Lay out a model and its optimizer's state, which differ between replicas before; return what they became."""
    options = TrainerOptions(engine=EngineOptions(backend="ddp"), parallel=ParallelOptions(**parallel))
    with Trainer(options) as trainer:
        backend = trainer.backend
        torch.manual_seed(0 if backend.replica_group[0] == backend.world.rank else 1)
        whole = model()
        whole[1].register_buffer("noise", torch.randn(3))
        optimizer = two_groups(whole)
        whole(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        both = whole.state_dict(), optimizer.state_dict()["state"]
        weights, state = backend.collectives.broadcast_object(both)
        layout = make_layout(backend, options.parallel, options.train)
        layout.check_batch(16)
        held = _watched_cuts(whole)
        layout.prepare(whole, optimizer, lambda: None)
        mine = {name: value for name, value in whole.state_dict().items() if not value.is_meta}
        merged, updates = layout.gather_state(mine), layout.gather_optimizer_state(optimizer.state_dict()["state"])
        layout.close()
        if merged is None or updates is None:
            return backend.world.rank, {"held": held}
        same = {
            "weights": all(value.equal(merged[name]) for name, value in weights.items()),
            "state": all(v.equal(updates[number][key]) for number, its in state.items() for key, v in its.items()),
        }
        return backend.world.rank, {"held": held, **same}


def _watched_cuts(whole: nn.Module) -> list[str]:
    """Record, from now on, the blocks that were held whole when the next one was cut; there should be none."""
    held: list[str] = []
    earlier: dict[str, Any] = {}
    fully_shard = fsdp.fully_shard

    def watched(module: nn.Module, **options: Any) -> Any:
        gc.collect()
        held.extend(name for name, parameter in earlier.items() if parameter() is not None)
        own = [parameter for parameter in module.parameters() if not hasattr(parameter, "to_local")]
        earlier.update({f"{module} {number}": weakref.ref(parameter) for number, parameter in enumerate(own)})
        return fully_shard(module, **options)

    def refused(module: nn.Module, device: Any) -> nn.Module:
        if str(device) == "meta":
            return to(module, device)
        raise AssertionError(f"{type(module).__name__} was moved as a whole")

    to = nn.Module.to
    fsdp.fully_shard = watched  # type: ignore[assignment]
    nn.Module.to = refused  # type: ignore[method-assign, assignment]
    return held


def fit_tied() -> None:
    """Train a model whose blocks share a parameter."""
    options = TrainerOptions(engine=EngineOptions(backend="ddp"), parallel=ParallelOptions(shard="full"))
    whole = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    whole[2].weight = whole[0].weight
    with Trainer(options) as trainer:
        trainer.fit(whole, torch.optim.SGD(whole.parameters(), lr=0.1), nn.functional.cross_entropy, signs(NUM))


def run_all(backend: str, runs: dict[str, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Train several set-ups one after the other, in one launch."""
    found = {}
    for name, how in runs.items():
        try:
            found[name] = fit(backend, **how)
        except UserError as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return detect(os.environ).rank, found
