"""The public `Trainer`: it owns the engine, and runs one training for each call of `fit`.

Trainer.fit
  TrainingRun     builds all parts of the training                 (run.py)
  TrainingLoop    epochs and steps                                 (loop.py)
    TrainStep     forward, backward, exchange, update              (optim/step.py)
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_trainer import backends
from hvd_trainer.checkpoint.manager import InMemorySnapshot
from hvd_trainer.config.checks import refuse
from hvd_trainer.config.launch_rules import Launch
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten
from hvd_trainer.config.rules import check
from hvd_trainer.errors import OptionError
from hvd_trainer.launch.slurm import slurm_job
from hvd_trainer.launch.world import World, find_world, is_elastic
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.trainer import as_asked
from hvd_trainer.observe.callback import Callback
from hvd_trainer.observe.log_handler import install_handler
from hvd_trainer.observe.metrics import Metric
from hvd_trainer.observe.run_folder import RESERVED
from hvd_trainer.observe.summary import facts, startup_summary
from hvd_trainer.optim.reproducible import set_cublas_workspace
from hvd_trainer.optim.schedule import Interval, Scheduler
from hvd_trainer.optim.weights import LossFunction, WeightFunction
from hvd_trainer.parallel.grid import make_grid
from hvd_trainer.training.arguments import argument_mistakes, training_mistakes
from hvd_trainer.training.lone_evaluation import EvaluationInputs, evaluate
from hvd_trainer.training.loop import TrainingLoop, freeze_objects
from hvd_trainer.training.run import FitInputs, TrainingRun

logger = logging.getLogger(__name__)
_FITS = itertools.count()
_finished: set[Path] = set()
"""The log folders of this process's trainings that have ended."""


@dataclass
class History(Sequence[dict[str, Any]]):
    """The result of a training: a sequence of one record per epoch, as in metrics.jsonl.

    A run that is resumed in its log folder has the records of its earlier epochs, too, on all ranks.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, place: Any) -> Any:
        """Return the record of an epoch, from 0 on, or those of a slice: `trainer.fit(...)[-1]["val_loss"]`."""
        return self.epochs[place]

    def __len__(self) -> int:
        return len(self.epochs)

    @property
    def end(self) -> dict[str, Any]:
        """The last epoch's record; empty if there is none."""
        return self.epochs[-1] if self.epochs else {}


class Trainer:
    """Trains one model on all ranks. Use it as a context manager: the engine runs inside.

        with Trainer(options) as trainer:
            trainer.fit(model, optimizer, loss, train_data, val_data)

    Args:
        options: all options.
        ddp_kwargs: further arguments of `DistributedDataParallel`, such as `{"static_graph": True}`, where it
            exchanges the gradients: on --backend ddp, without --stages, --shard full and --reproducible. Elsewhere
            a line says that they are left out.

    Attributes:
        options: all options.
        backend: the engine, started on entry.

    Raises:
        OptionError, BackendError, LaunchError, DataError: see these; on entry and in `fit`.
    """

    def __init__(
        self, options: TrainerOptions | None = None, *, ddp_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.options = as_asked(options or TrainerOptions(), os.environ)
        self._message = Message.read(os.environ)
        check(self.options, _launch(os.environ))
        self._own_folders: set[Path] = set()
        self._run: TrainingRun | None = None
        if self.options.train.reproducible is not None:
            set_cublas_workspace()
        parallel = self.options.parallel
        self.backend = backends.create(
            self.options.engine,
            grouping=self._replica_grouping(),
            devices=parallel.devices_per_rank,
            ddp_kwargs=ddp_kwargs,
        )
        in_parts = parallel.is_staged or parallel.shard == "full" or self.options.train.reproducible is not None
        has_use = self.backend.takes_ddp_kwargs and not in_parts
        self._unused_kwargs = [] if has_use else sorted(ddp_kwargs or ())

    def _replica_grouping(self) -> backends.ReplicaGrouping | None:
        """Return a function that lists the ranks of each stage; None where every rank has the whole model."""
        stages = self.options.parallel.stages
        return None if stages == 1 else lambda nodes: make_grid(nodes, stages).replica_groups

    @property
    def world(self) -> World:
        """This process among all."""
        return self.backend.world

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self.backend.device

    def __enter__(self) -> Trainer:
        freeze_objects(self.world)
        install_handler()
        self.backend.__enter__()
        if self._unused_kwargs:
            names = ", ".join(self._unused_kwargs)
            self.say(f"left out {names} of ddp_kwargs: here DistributedDataParallel exchanges no gradients")
        # Models that are built inside start equal on all ranks, before rank 0's weights are sent to the others.
        torch.manual_seed(self.options.train.seed)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            self.backend.__exit__(kind, error, traceback)
        finally:
            gc.unfreeze()

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: LossFunction,
        train_data: Any,
        val_data: Any = None,
        *,
        scheduler: Scheduler | None = None,
        scheduler_step: Interval = "epoch",
        scheduler_metric: str | None = None,
        metrics: Mapping[str, Metric] | None = None,
        weight: WeightFunction | None = None,
        callbacks: Sequence[Callback] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> History:
        """Train for `options.train.epochs` epochs.

        Args:
            model: any module that takes a batch of inputs.
            optimizer: any optimizer over its parameters.
            loss: returns the mean loss (a scalar) from outputs and targets: over samples, without a `weight`.
            train_data, val_data: a `TensorData`, `Dataset` or `IterableDataset` of (inputs, targets), a
                `DataLoader` of one, whose batches are shared out over the ranks, or a `BatchSource` of batches.
            scheduler: one of `torch.optim.lr_scheduler`; or a function that makes it from the optimizer. Scaling,
                warm-up and decay of the learning rate multiply its rate while a step is taken.
            scheduler_step: "epoch" or "step": after each of these the scheduler is stepped. A step is the
                optimizer's, of all ranks and passes; one that was skipped counts.
            scheduler_metric: the figure that `ReduceLROnPlateau` follows, such as "val_accuracy"; None: val_loss,
                or train_loss without `val_data`.
            metrics: by name; functions of outputs and targets that return a value per sample or their mean over
                the batch, or torchmetrics objects.
            weight: returns how much a batch, (inputs, targets), counts: where the loss is a mean over something
                else than samples, their number, such as that of tokens. Passes and ranks are weighted by it, and
                so are losses and metrics that are means, in training and evaluation.
            callbacks: called at the ends of steps and epochs, with the running training.
            collate: makes a batch from a list of samples, as in `DataLoader`, which has its own.
            batch_transform: converts the inputs of each batch on the training device, such as bytes to normalised
                floats, which are four times as many bytes to copy there. Random ones belong in the data set, where
                each sample has its seed.
            name: of one training among several, such as "fold-2". Its log and checkpoints are in the folder of
                this name in the log folder, so that each resumes by itself.

        Returns:
            One record per epoch, of a resumed run also those of the epochs that its log folder has.
        """
        data = {"train_data": train_data, "val_data": val_data}
        of_training = training_mistakes(model, optimizer, callbacks)
        refuse([*argument_mistakes(model, loss, data, metrics=metrics, collate=collate), *of_training])
        inputs = FitInputs(
            model=model,
            optimizer=optimizer,
            loss=loss,
            train_data=train_data,
            val_data=val_data,
            scheduler=scheduler,
            scheduler_step=scheduler_step,
            scheduler_metric=scheduler_metric,
            metrics=dict(metrics or {}),
            weight=weight,
            callbacks=callbacks,
            collate=collate,
            batch_transform=batch_transform,
        )
        with self.backend.session.common_call():
            return self._fit(inputs, self._named(name))

    def evaluate(
        self,
        model: nn.Module,
        loss: LossFunction,
        data: Any,
        *,
        metrics: Mapping[str, Metric] | None = None,
        weight: WeightFunction | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
    ) -> dict[str, float]:
        """Return loss and metrics over a data set: before, after and without `fit`, or in a callback of it.

        All ranks call it, and get the figures that an evaluation in `fit` gives, over all samples of all ranks.
        Nothing of a training changes by it. Outside of one, ranks with other weights take rank 0's, as in `fit`.
        With `--stages`, `--devices-per-rank`, `--chunks` and `--shard full` a callback may evaluate the model that
        is trained.

        Args:
            model: any module that takes a batch of inputs; it is moved to the device.
            loss, metrics, weight, collate, batch_transform: as in `fit`.
            data: as `val_data` in `fit`.

        Returns:
            The mean `loss`, each metric by its name, and the number of `samples`.
        """
        refuse(argument_mistakes(model, loss, {"data": data}, metrics=metrics, collate=collate))
        inputs = EvaluationInputs(
            model=model,
            loss=loss,
            data=data,
            metrics=dict(metrics or {}),
            weight=weight,
            collate=collate,
            batch_transform=batch_transform,
        )
        with nullcontext() if self._run else self.backend.session.common_call():
            return evaluate(inputs, self.options, self.backend, self._run)

    def _named(self, name: str | None) -> TrainerOptions:
        """Return the options of a training, with its own log folder if it has a name.

        Raises:
            OptionError: the name is none of a folder, or a training of this trainer has the same folder.
        """
        options, log_dir = self.options, self.options.log.log_dir
        if name is not None and (not re.fullmatch(r"\w[\w.+=-]*", name) or name.startswith(RESERVED)):
            raise OptionError(
                f"fit(..., name={name!r}): a training is named by letters, digits and any of _ . + = -, such as "
                f'"fold-2", and not as what is in a log folder ({", ".join(RESERVED)})'
            )
        if log_dir is None:
            return options
        if name is not None:
            log_dir = str(Path(log_dir) / name)
            options = replace(options, log=replace(options.log, log_dir=log_dir))
        if _absolute(log_dir) in self._own_folders:
            raise OptionError(
                f"An earlier fit of this Trainer has its log and its checkpoints in {log_dir}. Give each training "
                f'a folder of its own, by a name: fit(..., name="fold-2")'
            )
        return options

    def _fit(self, inputs: FitInputs, options: TrainerOptions) -> History:
        """Train in one world of ranks after the other; in more than one only in elastic mode."""
        history, snapshot = History(), InMemorySnapshot(fit=next(_FITS))
        while True:
            try:
                self._fit_in_this_world(inputs, options, snapshot, history)
                if options.log.log_dir is not None:
                    for folders in (_finished, self._own_folders):
                        folders.add(_absolute(options.log.log_dir))
                return history
            except Exception as error:
                # In elastic mode the ranks that stay meet in a new world, and resume from the snapshot.
                if not self.backend.session.leave(error):
                    raise
            finally:
                self._run = None
            self.backend.session.join_next_world(self.backend)
            inputs.optimizer.zero_grad(set_to_none=True)

    def _fit_in_this_world(
        self, inputs: FitInputs, options: TrainerOptions, snapshot: InMemorySnapshot, history: History
    ) -> None:
        """Train until the end, or until the ranks change."""
        with TrainingRun(inputs, options, self.backend, message=self._message, snapshot=snapshot) as run:
            self._run = run
            run.say(startup_summary(run, run.placement.lines()))
            run.restore()
            log_dir = options.log.log_dir
            if run.is_over and log_dir is not None and _absolute(log_dir) in _finished:
                raise OptionError(
                    f"An earlier fit of this process has finished the training in {log_dir}, and nothing is left "
                    f'to train. Give another training a folder of its own, by a name: fit(..., name="fold-2")'
                )
            run.log.describe(flatten(options), facts(run))
            # The epochs after the restored one are trained again.
            kept = [record for record in history.epochs if record["epoch"] <= run.progress.epoch]
            history.epochs = self.backend.collectives.broadcast_object(run.log.epochs or kept)
            TrainingLoop(run, history.epochs).train()

    def say(self, text: str | None) -> None:
        """Print a line once for the whole job, unless it is None or the job is quiet."""
        if text is not None and self.world.is_first and not self.options.log.quiet:
            logger.info(text)


def _launch(environ: MutableMapping[str, str]) -> Launch:
    """Return what is known of this job before its ranks meet."""
    return Launch(
        num_ranks=find_world(environ).size,
        is_elastic=is_elastic(environ),
        is_queued=slurm_job(environ).job_id is not None,
    )


def _absolute(log_dir: str) -> Path:
    return Path(log_dir).expanduser().absolute()
