"""PyTorch Lightning's Trainer, strategy "ddp"."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning, Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.idioms.idiom import Idiom
from benchmarks.idioms.ranks import Start


class Module(pl.LightningModule):
    """A row's model; its loss, if it is a module, is a part of it."""

    def __init__(self, idiom: Idiom, start: Start) -> None:
        super().__init__()
        self.idiom, self.start, self.model, self.loss = idiom, start, idiom.model, idiom.loss

    def training_step(self, batch: Any, number: int) -> Tensor:
        inputs, targets = batch
        return self.loss(self.model(inputs), targets)

    def validation_step(self, batch: Any, number: int) -> None:
        inputs, targets = batch
        mean = self.idiom.metric(self.model(inputs), targets).mean()
        self.log("val_metric", mean, sync_dist="sync_dist" in self.start.way, batch_size=len(targets))

    def configure_optimizers(self) -> Any:
        scheduler, how = self.idiom.scheduler(), {}
        if scheduler is None:
            return self.idiom.optimizer
        if "interval" in self.start.way:
            how["interval"] = "step"
        if self.idiom.scheduler_step == "metric":
            how["monitor"] = "val_metric"
        return {"optimizer": self.idiom.optimizer, "lr_scheduler": {"scheduler": scheduler, **how}}


class AfterEpoch(Callback):
    """The callback of a row, with its state."""

    def __init__(self, idiom: Idiom) -> None:
        self.idiom = idiom

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.idiom.after_epoch(trainer.current_epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return self.idiom.state.state_dict() if self.idiom.state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.idiom.state:
            self.idiom.state.load_state_dict(state)


class Finetuning(BaseFinetuning):
    """Lightning's own callback for layers that are unfrozen later."""

    def __init__(self, layer: nn.Module, idiom: Idiom) -> None:
        super().__init__()
        self.layer, self.idiom = layer, idiom

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(self.layer)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            # With the rate of the other group; by default it is a tenth of it.
            self.unfreeze_and_add_param_group(self.layer, optimizer, lr=0.1, initial_denom_lr=1.0)


def train(start: Start) -> list[float]:
    """Train in this rank, and return the values."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = None
    for _ in range(start.make().trainings):
        idiom = start.make()
        if trainer is None or "a new Trainer" in start.way:
            trainer = make_trainer(idiom, start)
        fit(trainer, idiom, start)
    return idiom.values()


def make_trainer(idiom: Idiom, start: Start) -> pl.Trainer:
    """Return a trainer on CPUs, which prints and logs nothing."""
    callbacks: list[Callback] = [AfterEpoch(idiom)]
    if "BaseFinetuning" in start.way:
        callbacks = [Finetuning(idiom.model[0], idiom)]
    if idiom.resumes:
        callbacks.append(ModelCheckpoint(start.saved, save_last=True))
    if "OnExceptionCheckpoint" in start.way:
        callbacks.append(OnExceptionCheckpoint(start.saved))
    return pl.Trainer(
        accelerator="cpu",
        devices=start.size,
        strategy="ddp_find_unused_parameters_true" if "find_unused" in start.way else "ddp",
        max_epochs=idiom.epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=idiom.resumes or idiom.is_terminated,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=start.folder,
    )


def fit(trainer: pl.Trainer, idiom: Idiom, start: Start) -> None:
    """Train, evaluate, save."""
    chosen = dict(idiom.loading())
    if idiom.batch_sampler is not None:
        chosen["batch_sampler"] = idiom.batch_sampler
    else:
        chosen["batch_size"] = idiom.batch // start.size
        chosen["shuffle"] = idiom.sampler is None and not isinstance(idiom.data, IterableDataset)
    if start.loader_processes:
        chosen["num_workers"] = start.loader_processes
        chosen["persistent_workers"] = "persistent_workers=True" in start.way
    val = None if idiom.val_data is None else DataLoader(idiom.val_data, idiom.batch // start.size)
    path = start.saved / "last.ckpt" if start.part == 2 else None
    trainer.fit(Module(idiom, start), DataLoader(idiom.data, **chosen), val, ckpt_path=path, weights_only=False)
    idiom.val_metric = float(trainer.callback_metrics.get("val_metric", torch.zeros(())))
