"""hvd_trainer's Trainer on an engine."""

from __future__ import annotations

from typing import Any, Literal

from torch.utils.data import DataLoader

from benchmarks.idioms.idiom import Idiom
from benchmarks.idioms.ranks import Start
from hvd_trainer import Callback, Trainer, TrainerOptions
from hvd_trainer.config.options import EngineOptions, LogOptions, SaveOptions, TrainOptions

ENGINES: dict[str, Literal["ddp", "horovod"]] = {"hvd_trainer, DDP": "ddp", "hvd_trainer, Horovod": "horovod"}


class AfterEpoch(Callback):
    """The callback of a row, with its state."""

    def __init__(self, idiom: Idiom) -> None:
        self.idiom = idiom

    def on_epoch_end(self, run: Any, record: dict[str, Any]) -> None:
        self.idiom.after_epoch(record["epoch"])

    def state_dict(self) -> dict[str, Any]:
        return self.idiom.state.state_dict() if self.idiom.state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.idiom.state:
            self.idiom.state.load_state_dict(state)


def train(start: Start) -> list[float]:
    """Train in this rank, and return the values."""
    idiom = start.make()
    options = TrainerOptions(
        engine=EngineOptions(backend=ENGINES[start.library], device="cpu", threads=1),
        train=TrainOptions(
            epochs=idiom.epochs,
            global_batch_size=idiom.batch if idiom.batch_sampler is None else None,
            workers=start.loader_processes,
        ),
        log=LogOptions(log_dir=str(start.folder / "log"), quiet=True),
        save=SaveOptions(resume="auto"),
    )
    with Trainer(options) as trainer:
        for number in range(idiom.trainings):
            idiom = start.make()
            name = f"fold-{number + 1}" if idiom.trainings > 1 else None
            fit(trainer, idiom, start, name)
    return idiom.values()


def fit(trainer: Trainer, idiom: Idiom, start: Start, name: str | None) -> None:
    """Train, evaluate, save."""
    data: Any = idiom.data
    if idiom.batch_sampler is not None:
        data = DataLoader(data, batch_sampler=idiom.batch_sampler)
    elif idiom.sampler is not None:
        data = DataLoader(data, idiom.batch, sampler=idiom.sampler)
    if "shards_by_rank" in start.way:
        data.shards_by_rank = True
    scheduled: dict[str, Any] = {}
    if idiom.scheduler_step is not None:
        scheduled = {"scheduler": idiom.scheduler(), "scheduler_step": "step"}
    if idiom.scheduler_step == "metric":
        scheduled |= {"scheduler_step": "epoch", "scheduler_metric": "val_metric"}
    history = trainer.fit(
        idiom.model,
        idiom.optimizer,
        idiom.loss,
        data,
        idiom.val_data,
        metrics={"metric": idiom.metric} if idiom.val_data is not None else None,
        weight=idiom.item_count if "weight" in start.way else None,
        callbacks=[AfterEpoch(idiom)],
        collate=idiom.collate,
        name=name,
        **scheduled,
    )
    idiom.val_metric = history.end.get("val_metric", 0.0)
