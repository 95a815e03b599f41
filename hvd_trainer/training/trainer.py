"""The loop, and only the loop: no engine, no device and no rank is named here."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_trainer import backends
from hvd_trainer.backends import StepResult
from hvd_trainer.checkpoint.train_state import TrainState
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.checks import collect_errors, refuse
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten
from hvd_trainer.config.rules import check
from hvd_trainer.config.stop_condition import StopCondition
from hvd_trainer.data import Batch, Loader, LoaderPlan, make_loader, samples_in
from hvd_trainer.data.step_batches import StepBatches, repeat_first
from hvd_trainer.errors import NonFiniteError, OptionError
from hvd_trainer.faults.preemption import Requeue
from hvd_trainer.launch.world import World
from hvd_trainer.observe.callback import Callback
from hvd_trainer.observe.memory import PeakMemory
from hvd_trainer.observe.metrics import Meter, Metric
from hvd_trainer.observe.observers import make_observers
from hvd_trainer.observe.progress import Bar, Progress
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.observe.step_timer import FirstStep
from hvd_trainer.observe.summary import epoch_line, facts, startup_summary, summary_line
from hvd_trainer.optim.captured_step import CapturedStep
from hvd_trainer.optim.learning_rate import (
    Scheduler,
    StepRate,
    advance,
    check_decay,
    count_warmup_steps,
    make_scheduler,
)
from hvd_trainer.optim.non_finite import NonFiniteGuard
from hvd_trainer.optim.reproducible import ReproducibleStep, ask_cublas, one_way_to_compute
from hvd_trainer.optim.step import LossFunction, StepParts, TrainStep
from hvd_trainer.parallel.factory import make_layout
from hvd_trainer.parallel.grid import check_stages, make_grid
from hvd_trainer.training.manager import CheckpointManager, InMemorySnapshot
from hvd_trainer.utils import accelerator

logger = logging.getLogger(__name__)
_FITS = itertools.count()


@dataclass
class History:
    """What a run did: one record per epoch, as in metrics.jsonl."""

    epochs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def end(self) -> dict[str, Any]:
        """The last epoch's record."""
        return self.epochs[-1] if self.epochs else {}


class Trainer:
    """Trains one model on all ranks. Use it as a context manager: the engine runs inside.

        with Trainer(options) as trainer:
            trainer.fit(model, optimizer, loss, train_data, test_data)

    Attributes:
        options: all options.
        backend: the engine, started on entry.
        model, optimizer: the bare module and the optimizer of the running `fit`.
        progress: how far it is.

    Raises:
        OptionError, BackendError, LaunchError, DataError: see these; on entry and in `fit`.
    """

    def __init__(self, options: TrainerOptions | None = None) -> None:
        self.options = options or TrainerOptions()
        check(self.options)
        if self.options.train.reproducible is not None:
            ask_cublas()
        parallel = self.options.parallel
        self.backend = backends.create(
            self.options.engine,
            columns=self._columns(),
            devices=parallel.devices or parallel.devices_per_rank,
            timeline=self.options.measure.profile is not None,
        )
        check_stages(parallel.stages, self.world.size)
        self.progress = Progress()
        self._target = StopCondition.parse(self.options.train.until)
        self.requeue = Requeue(self.options.save.requeue, self.backend.slurm_job.number)
        self.model: nn.Module
        self.optimizer: Optimizer

    def _columns(self) -> backends.Columns | None:
        """Which ranks have the same stage, once the ranks have met; None where all have the whole model."""
        stages = self.options.parallel.stages
        return None if stages == 1 else lambda nodes: make_grid(nodes, stages).columns

    @property
    def world(self) -> World:
        """This process among all."""
        return self.backend.world

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self.backend.device

    def __enter__(self) -> Trainer:
        self.backend.__enter__()
        # Models that are built inside start equal on all ranks, before rank 0's weights are sent round.
        torch.manual_seed(self.options.train.seed)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._let_go()
        self.backend.__exit__(kind, error, traceback)

    def _let_go(self) -> None:
        """Drops what holds the engine's connections, which must be freed before it ends."""
        step = self.__dict__.pop("step", None)
        if step is not None:
            step.close()
        if "layout" in self.__dict__:
            self.layout.close()

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: LossFunction,
        train_data: Any,
        test_data: Any = None,
        *,
        scheduler: Scheduler | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> History:
        """Trains for `options.train.epochs` epochs.

        Args:
            model: any module that takes a batch of inputs.
            optimizer: any optimizer over its parameters.
            loss: gives the mean loss (a scalar) from outputs and targets.
            train_data, test_data: a `TensorData`, `Dataset` or `IterableDataset` of (inputs, targets).
            scheduler: stepped after each epoch; or a function that makes it from the optimizer. Scaling and
                warm-up of the learning rate multiply what it gives, while a step is taken.
            metrics: by name; functions of outputs and targets, or torchmetrics objects.
            callbacks: called at the ends of steps and epochs.
            collate: makes a batch from a list of samples, as in `DataLoader`.

        Returns:
            One record per epoch.
        """
        setup = functools.partial(
            self._fit,
            (model, optimizer, loss, scheduler),
            (train_data, test_data, collate),
            dict(metrics or {}),
            callbacks,
            memory=InMemorySnapshot(next(_FITS)),
            history=History(),
        )
        while True:
            try:
                return setup()
            except Exception as error:
                # Where ranks come and go, those that stay begin anew, and go on from what they remember.
                self._let_go()
                if not self.backend.goes_on_after(error):
                    raise
            optimizer.zero_grad(set_to_none=True)

    def _fit(
        self,
        parts: tuple[nn.Module, Optimizer, LossFunction, Scheduler | None],
        data: tuple[Any, Any, Callable[[list[Any]], Any] | None],
        metrics: dict[str, Metric],
        callbacks: Sequence[Callback],
        *,
        memory: InMemorySnapshot,
        history: History,
    ) -> History:
        """Trains in one world, from what there is in memory or on the disk."""
        options, train = self.options, self.options.train
        train_data, test_data, collate = data
        self._let_go()  # of an earlier training, whose hooks would go on in this one
        exchange = "exchange" not in options.measure.leave_out
        self.layout = make_layout(self.backend, options.parallel, train, exchange=exchange)
        self.plan = BatchPlan.of(train, self.layout.share.size * self.backend.copies)
        self.layout.check_batch(self.plan.batch_size)
        self.progress = Progress()
        self.memory = PeakMemory(self.backend)
        self.log = RunLog(self.backend, options.log.log_dir, quiet=options.log.quiet)
        if self.backend.monitor is not None:
            self.backend.monitor.log_folder = options.log.log_dir
        try:
            self._first_step = FirstStep(self.device)
            self._observers = [self._first_step, *make_observers(self)]
            self.metrics, self.callbacks = metrics, [*callbacks, *self._observers]
            splits = ("train",) if test_data is None else ("train", "test")
            self._target.check([f"{split}_{name}" for split in splits for name in ("loss", *metrics)])
            self.train_loader = self._loader(train_data, collate, shuffle=True)
            self.test_loader = None if test_data is None else self._loader(test_data, collate, shuffle=False)
            self._prepare(*parts, memory)
            self.log.say(startup_summary(self))
            self._restore()
            self.log.write_config(flatten(options))
            self.log.write_facts(facts(self))
            history.epochs = [record for record in history.epochs if record["epoch"] <= self.progress.epoch]
            with self.keeper.at_work(), self._computing(), ExitStack() as observing:
                for observer in self._observers:
                    observing.enter_context(observer.at_work())
                return self._run(history)
        finally:
            self.log.close()

    def _restore(self) -> None:
        rate = self.rate.full
        if self.keeper.restore(seed=self.options.train.seed, is_over=lambda: self._is_over):
            self.rate.go_on(self.progress.step, self._done)
            if self.rate.full != rate:
                self.log.say(f"resume   with the checkpoint's learning rate, {self.rate.full:g}, not {rate:g}")

    def _run(self, history: History) -> History:
        started = time.perf_counter()
        activity = self.backend.activity
        activity.step = self.progress.step
        # The first step sets much up: its limit is the start's.
        activity.limits = (self.options.engine.startup_timeout_s,) * 2
        while not self._is_over:
            record = self._train_epoch()
            record |= self.evaluate()
            self._finish_epoch(record)
            history.epochs.append(record)
        activity.enter("save")
        saving, memory = self.keeper.finish(), self.memory.figures()
        if self._is_of_use:
            self.state.export(self.log.folder)
        if not self.log.ended:
            end = {key: value for key, value in history.end.items() if key != "seconds"}
            self.log.record("end", self._position() | end | saving | memory | self._first_step.figures())
        self.say(self._target.told(self.progress.figures | history.end))
        self.log.say(summary_line(history.end, time.perf_counter() - started, self.log.folder))
        return history

    @property
    def _is_over(self) -> bool:
        train, progress = self.options.train, self.progress
        ended = progress.epoch >= train.epochs or progress.step >= (train.max_steps or math.inf)
        return ended or self._target.is_reached(progress.figures)

    @property
    def _done(self) -> float:
        """The share of all epochs that is behind; whole epochs only of a stream."""
        progress, samples = self.progress, self.train_loader.num_samples
        inside = 0.0 if samples is None else min(1.0, progress.consumed / samples)
        return (progress.epoch + inside) / self.options.train.epochs

    @property
    def _is_of_use(self) -> bool:
        """Whether this trains what was meant."""
        return not self.options.measure.leave_out

    def _train_epoch(self) -> dict[str, Any]:
        self.model.train()
        progress, first = self.progress, self.progress.samples
        self.backend.activity.enter("epoch")
        meter = Meter(self.metrics, self.backend)
        if self.state.metrics is not None:
            for name in meter.load_state_dict(self.state.metrics):
                self.log.say(f"resume   the metric {name} counts from here on only")
            self.state.metrics = None
        windows = StepBatches(self._batches(), self.plan.passes)
        started = time.perf_counter()
        with Bar(self.log.prints, progress, self.options.train.epochs, self.train_loader.num_samples) as bar:
            for window in windows:
                with self.rate.applied(progress.step, self._done):
                    result = self.step(window, meter, windows.prefetch)
                self._finish_step(window, result, meter)
                bar.advance(progress.consumed, meter)
                if self._is_over:
                    break
        self._inside = not windows.ended
        if self._inside:
            self.keeper.inside_epoch(meter)
        self.guard.check()
        self.backend.activity.enter("epoch")
        figures = meter.compute()
        if progress.samples > first and not figures["samples"]:
            raise NonFiniteError(f"Every step of epoch {progress.epoch + 1} was skipped: no gradient was finite")
        seconds = time.perf_counter() - started
        rate = {"seconds": seconds, "samples_per_s": (progress.samples - first) / seconds}
        return self._position() | prefixed("train", figures) | rate | self.layout.figures(seconds)

    def _batches(self) -> Iterator[Batch]:
        """What is left of this rank's batches of this epoch."""
        loader, progress = self.train_loader, self.progress
        batches = loader.epoch(progress.epoch, progress.consumed)
        if "data" in self.options.measure.leave_out:
            if loader.batches_per_epoch is None and self.options.train.max_steps is None:
                raise OptionError("--leave-out data: this stream does not tell where it ends; add --max-steps N")
            batches = repeat_first(batches, loader.batches_per_epoch)
        for observer in self._observers:
            batches = observer.seen(batches)
        return batches

    def _finish_step(self, window: list[Batch], result: StepResult, meter: Meter) -> None:
        progress = self.progress
        samples = sum(map(samples_in, window)) * self.layout.share.size
        progress.step += 1
        progress.consumed += samples
        progress.samples += samples
        progress.count_skipped(result.skipped)
        self._count(progress.step)
        for callback in self.callbacks:
            callback.on_step_end(self, result)
        if progress.step % self.options.log.log_every == 0:
            self.log.record("step", self._position() | prefixed("train", meter.recent()))
            self.guard.check()
        self.keeper.after_step(meter)
        self.backend.activity.enter("data")

    def _count(self, step: int) -> None:
        """The watch now knows that this step is done, and that the next one has no more time than others."""
        activity, engine = self.backend.activity, self.options.engine
        activity.step = step
        activity.enter("step")
        if not self.options.train.compile:  # which may compile again in any step
            activity.limits = engine.startup_timeout_s, engine.timeout_s

    def _finish_epoch(self, record: dict[str, Any]) -> None:
        if not self._inside:
            advance(self.scheduler, record)
            self.progress.epoch += 1
            self.progress.consumed = 0
            self.progress.figures = self._agreed(record)
        self.backend.activity.enter("save")
        self.log.record("epoch", record)
        self.log.say(epoch_line(record, self.options.train.epochs))
        if not self._inside:
            self.keeper.after_epoch(record, last=self._is_over)
        self.backend.activity.enter("callback")
        for callback in self.callbacks:
            callback.on_epoch_end(self, record)

    def _agreed(self, record: Mapping[str, Any]) -> dict[str, float]:
        """An epoch's figures: rank 0's where training may end by them, as each rank computes metric objects."""
        figures = {key: value for key, value in record.items() if key.startswith(("train_", "test_"))}
        return self.backend.broadcast_object(figures) if self._target.figure else figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the whole test set, each sample counted once; empty without a test set."""
        self.backend.activity.enter("epoch")
        if self.options.train.reproducible is None:
            self.backend.average_buffers(self.model)
        if self.test_loader is None:
            return {}
        self.model.eval()
        meter = Meter(self.metrics, self.backend)
        for batch in self.layout.evaluation(self.test_loader):
            self.step.evaluate(batch, meter)
            self.backend.activity.enter("evaluate")
            self.keeper.alive()
        self.backend.activity.enter("epoch")
        return prefixed("test", meter.compute())

    def say(self, text: str | None) -> None:
        """Prints a line once for the whole job, unless it is None or the job is quiet."""
        if text is not None and self.world.is_first and not self.options.log.quiet:
            logger.info(text)

    # Setting up.

    @contextmanager
    def _computing(self) -> Iterator[None]:
        train = self.options.train
        one_way = nullcontext() if train.reproducible is None else one_way_to_compute(self.device)
        with accelerator.fast_kernels(tf32=train.tf32, cudnn_benchmark=train.cudnn_benchmark), one_way:
            yield

    def _check_kernels(self) -> None:
        """Refuse what this rank's device does not have.

        Raises:
            OptionError: an option on how it computes is for other devices.
        """
        train, device = self.options.train, self.device
        refuse(
            collect_errors(
                (
                    train.tf32 and accelerator.is_host(device),
                    f"--tf32 is for GPUs, and this rank trains on {accelerator.name(device)}: leave it out",
                ),
                (
                    train.cudnn_benchmark and not accelerator.has_cudnn(device),
                    f"--cudnn-benchmark needs cuDNN, and {accelerator.name(device)} has none: leave it out",
                ),
                (
                    train.capture_step and not accelerator.can_capture(device),
                    f"--capture-step needs a GPU that captures graphs, and this rank trains on "
                    f"{accelerator.name(device)}: leave it out",
                ),
            )
        )

    def _loader(self, data: Any, collate: Callable[[list[Any]], Any] | None, *, shuffle: bool) -> Loader:
        train = self.options.train
        return make_loader(
            data,
            self.backend,
            LoaderPlan(
                self.plan.batch_size * self.backend.copies,
                train.seed,
                shuffle,
                train.reproducible,
                train.accumulate,
                self.layout.share,
                train.workers,
                train.prefetch,
            ),
            collate=collate,
        )

    def _some_inputs(self) -> Any:
        """Those of one batch. A collective."""
        return next(iter(self.train_loader.epoch(0)))[0]

    def _prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: LossFunction,
        scheduler: Scheduler | None,
        memory: InMemorySnapshot,
    ) -> None:
        train = self.options.train
        self.model = model
        self._check_kernels()
        if train.channels_last:
            model.to(memory_format=torch.channels_last)
        self.layout.compile(model)
        with accelerator.apart(self.device) if train.capture_step else nullcontext() as stream:
            wrapped, self.optimizer = self.layout.prepare(model, optimizer, self._some_inputs)
        self.step = self._make_step(wrapped, loss, stream)
        self.scheduler = make_scheduler(scheduler, self.optimizer)
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.step.scaler}
        self.state = TrainState(
            self.backend,
            model,
            self.progress,
            {name: part for name, part in parts.items() if part is not None},
            {"seed": train.seed, "samples": self.train_loader.num_samples},
            self.layout,
            reproducible=train.reproducible is not None,
        )
        self.keeper = CheckpointManager(
            self.backend,
            self.options.save,
            self.log,
            keeps=self.options.log.log_dir is not None and self._is_of_use,
            state=self.state,
            progress=self.progress,
            guard=self.guard,
            requeue=self.requeue,
            memory=memory,
        )
        check_decay(train.lr_decay, self.train_loader.num_samples)
        self.rate = StepRate(
            self.optimizer,
            self.plan.lr_factor(train.lr_scaling),
            count_warmup_steps(train.warmup_epochs, self.steps_per_epoch),
            train.lr_decay,
            begins=train.warmup_epochs / train.epochs,
        )

    def _make_step(self, wrapped: nn.Module, loss: LossFunction, stream: Any) -> TrainStep:
        train = self.options.train
        self.guard = NonFiniteGuard(self.backend, train.non_finite, self.model)
        parts = StepParts(
            self.backend,
            wrapped,
            self.model,
            self.optimizer,
            loss,
            self.progress,
            self.guard,
            max_norm=train.max_norm,
            precision=train.precision,
            norm=any(callback.needs_norm for callback in self.callbacks),
        )
        if train.capture_step:
            return CapturedStep(parts, stream, is_uniform=self.train_loader.in_memory)
        if train.reproducible is None:
            return self.layout.make_step(parts)
        return ReproducibleStep(
            parts,
            virtual_ranks=train.reproducible,
            seed=train.seed,
            find_unused_parameters=self.options.engine.find_unused_parameters,
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in a whole epoch; None for a stream."""
        batches = self.train_loader.batches_per_epoch
        return None if batches is None else -(-batches // self.plan.passes)

    def _position(self) -> dict[str, Any]:
        """The work accounting of every line in metrics.jsonl."""
        progress, world = self.progress, self.world
        progress.read_skipped(self.backend.read)
        return {
            "backend": self.backend.name,
            "launcher": world.launcher,
            "world_size": world.size,
            "epoch": min(progress.epoch + 1, self.options.train.epochs),
            "step": progress.step,
            "samples": progress.samples,
            "global_batch_size": self.plan.global_batch_size,
            "lr": self.rate.last,
            "skipped_steps": progress.skipped_steps,
        }


def prefixed(split: str, figures: Mapping[str, float]) -> dict[str, float]:
    """`loss` of the test split becomes `test_loss`; the count of samples is left to the accounting."""
    return {f"{split}_{name}": value for name, value in figures.items() if name != "samples"}
