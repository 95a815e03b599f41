"""The loop over epochs and steps. It names no engine, no device and no rank.

A batch's way through an epoch:

    TrainingLoop._train_epoch   draws the batches of one step (StepBatches) and sets its learning rate
      run.step                  trains on them: optim/step.py, where the engines come in
      _finish_step              counts their samples; calls callbacks; writes to the log; if due, evaluates, saves
                                or stops
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from hvd_trainer.backends import StepResult
from hvd_trainer.data import Batch, samples_taken
from hvd_trainer.data.step_batches import StepBatches
from hvd_trainer.errors import NonFiniteError
from hvd_trainer.launch.world import World
from hvd_trainer.observe.callback import Callback, Observer
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.observe.progress import Bar
from hvd_trainer.observe.summary import epoch_line, evaluation_line, summary_line
from hvd_trainer.optim.loss_module import modules_of
from hvd_trainer.optim.reproducible import computing
from hvd_trainer.training.interrupts import Interrupts
from hvd_trainer.training.run import TrainingRun
from hvd_trainer.utils import accelerator


class _RunningEpoch(NamedTuple):
    meter: Meter
    batches: StepBatches
    """those that are left"""
    bar: Bar


class TrainingLoop:
    """Runs one training from where it stands to its end.

    Args:
        run: all its parts, restored.
        records: one per epoch of earlier parts of this run; the loop appends its own.
    """

    def __init__(self, run: TrainingRun, records: list[dict[str, Any]]) -> None:
        self._run = run
        self._records = records
        self._resumed = len(records)
        self._interrupts = Interrupts(run)
        self._epoch_began = 0.0
        # Observers change nothing.
        of_user = [one for one in run.callbacks if not isinstance(one, Observer)]
        self._has_step_callbacks = any(type(one).on_step_end is not Callback.on_step_end for one in of_user)
        # Of this rank's first step, which sets up caches and may compile, and so is no measure of speed.
        self._first_step_s: float | None = None
        self._evaluates_inside = run.options.train.evaluate_every_steps is not None

    def train(self) -> None:
        """Train until the run is over.

        Raises:
            PreemptedError: a signal has stopped the job; everything is saved.
            RescaleError: ranks are about to come or go.
            NonFiniteError: a loss or a gradient was not finite.
        """
        run, activity = self._run, self._run.backend.activity
        freeze_objects(run.backend.world)
        with ExitStack() as stack:
            stack.enter_context(run.manager.open_writer())
            stack.callback(self._lift_time_limits)
            stack.enter_context(self._interrupts.listen())
            stack.enter_context(computing(run.options.train, run.device))
            for observer in run.observers:
                stack.enter_context(observer.around_training(run))
            started = time.perf_counter()
            activity.step = run.progress.step
            # The first step may compile and connect: until it is done, every phase may take as long as the start.
            activity.long_limit_s = activity.step_limit_s = run.options.engine.startup_timeout_s
            while not run.is_over:
                record, is_complete = self._train_epoch()
                self._finish_epoch(record, is_complete=is_complete)
                self._records.append(record)
            if not self._records and run.progress.figures:  # of a finished run in another log folder
                self._records.append(self._position() | run.progress.figures)
                self._resumed = 1
            self._finish(started)
        activity.enter("trained")

    def _train_epoch(self) -> tuple[dict[str, Any], bool]:
        """Train on the rest of an epoch, and evaluate.

        Returns:
            The record of the epoch, and whether all of its batches were trained on.
        """
        run, progress = self._run, self._run.progress
        run.model.train()  # and not the loss, which may have a teacher in evaluation mode
        run.backend.activity.enter("epoch")
        run.placement.follow_changes(run.step, run.trained)  # a checkpoint may have frozen or unfrozen layers
        meter = self._make_meter()
        batches_of_steps = StepBatches(self._batches(), run.plan.passes)
        samples_before, self._epoch_began = progress.samples, time.perf_counter()
        with Bar(run.log.prints, progress, run.options.train.epochs, run.train_loader.num_samples) as bar:
            epoch = _RunningEpoch(meter, batches_of_steps, bar)
            self._evaluate_inside(epoch)  # where the run was stopped in that evaluation
            for batches in () if run.is_over else batches_of_steps:
                with run.rate.apply(run.epochs_done):
                    result = run.step(batches, meter, batches_of_steps.prefetch)
                self._finish_step(batches, result, epoch)
                bar.advance(progress.consumed, meter)
                if run.is_over:
                    break
        is_complete = batches_of_steps.is_exhausted
        if not is_complete:
            run.manager.at_end_of_run(meter)
        run.step.guard.check()
        run.backend.activity.enter("epoch")
        samples, seconds = progress.samples - samples_before, time.perf_counter() - self._epoch_began
        speed = {"seconds": seconds, "samples_per_s": samples / seconds} | run.placement.figures(seconds)
        # Before the meter brings the ranks' figures together: a job that is stopped in it saves each rank's own.
        val_figures = progress.evaluation or self._evaluate(meter)
        for module in modules_of(run.model, run.loss):
            run.backend.synchronize_buffers(module)
        figures = meter.compute()
        if samples and not figures["samples"]:
            raise NonFiniteError(f"Every step of epoch {progress.epoch + 1} was skipped: no gradient was finite")
        return self._position() | add_prefix("train", figures) | speed | val_figures, is_complete

    def _make_meter(self) -> Meter:
        """Return the meter of an epoch; of a restored one with what its metrics had gathered."""
        state = self._run.state
        meter = Meter(self._run.metrics, self._run.backend)
        if state.metrics is not None:
            for name in meter.load_state_dict(state.metrics):
                self._run.say(f"resume   the metric {name} counts from here on only")
            state.metrics = None
        return meter

    def _batches(self) -> Iterator[Batch]:
        """Return the rest of this rank's batches of the epoch."""
        run = self._run
        batches = run.train_loader.epoch(run.progress.epoch, run.progress.consumed)
        for observer in run.observers:
            batches = observer.on_batches(batches)
        return batches

    def _finish_step(self, batches: list[Batch], result: StepResult, epoch: _RunningEpoch) -> None:
        run, progress = self._run, self._run.progress
        samples = sum([samples_taken(batch, run.placement.shard.size) for batch in batches])
        progress.step += 1
        progress.consumed += samples
        progress.samples += samples
        progress.count_skipped(result.skipped)
        if run.schedule.is_by_steps:
            run.schedule.after_step(result.skipped)
        activity = run.backend.activity
        activity.finish_step(progress.step)
        if self._first_step_s is None:
            accelerator.synchronize(run.device)
            self._first_step_s = time.perf_counter() - self._epoch_began
            self._limit_steps()
        for callback in run.callbacks:
            callback.on_step_end(run, result)
        if self._has_step_callbacks:
            run.placement.follow_changes(run.step, run.trained, agree=False)
        if progress.step % run.options.log.log_every == 0:
            self._record("step", self._position() | add_prefix("train", epoch.meter.recent()))
            run.step.guard.check()
        if self._evaluates_inside:
            self._evaluate_inside(epoch)
        self._interrupts.after_step(epoch.meter)
        activity.enter("data")

    def _limit_steps(self) -> None:
        """Tell the monitor of the ranks how long each further step may take."""
        activity, options = self._run.backend.activity, self._run.options
        if options.train.compile == "none":  # or any step may compile again
            activity.long_limit_s = options.engine.startup_timeout_s
            activity.step_limit_s = options.engine.timeout_s

    def _lift_time_limits(self) -> None:
        activity = self._run.backend.activity
        activity.long_limit_s = activity.step_limit_s = None

    def _finish_epoch(self, record: dict[str, Any], *, is_complete: bool) -> None:
        run, progress = self._run, self._run.progress
        if is_complete:
            progress.epoch += 1
            progress.consumed = 0
            progress.figures = self._common_figures(record)
            if not run.schedule.is_by_steps:
                run.schedule.after_epoch(progress.figures)
        run.backend.activity.enter("save")
        self._record("epoch", record)
        run.say(epoch_line(record, run.options.train.epochs))
        run.backend.activity.enter("callback")
        for callback in run.callbacks:
            callback.on_epoch_end(run, record)
        run.placement.follow_changes(run.step, run.trained)
        self._interrupts.agree_to_end()
        # Inside an epoch `at_end_of_run` has saved: what callbacks do now, they do again when that epoch ends.
        if is_complete:
            run.manager.after_epoch(record, last=run.is_over)

    def _common_figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return an epoch's figures; the same on all ranks if the stop condition or the scheduler reads them.

        Each rank computes metric objects by itself, and all must stop after the same epoch, and train at one rate.
        """
        figures = {key: value for key, value in record.items() if key.startswith(("train_", "val_"))}
        shared = bool(self._run.stop_condition.figure or self._run.schedule.figure)
        return self._run.backend.collectives.broadcast_object(figures) if shared else figures

    def _evaluate(self, meter: Meter) -> dict[str, float]:
        """Return loss and metrics over the whole validation set, each sample counted once; empty without one.

        Args:
            meter: of the running epoch.
        """
        evaluation = self._run.evaluation
        return {} if evaluation is None else add_prefix("val", self._interrupts.evaluate(evaluation, meter))

    def _evaluate_inside(self, epoch: _RunningEpoch) -> None:
        """Evaluate inside an epoch if that is due after the last step, and let callbacks act on it. A collective.

        The ends of an epoch and of the run have evaluations of their own.
        """
        run, progress, every = self._run, self._run.progress, self._run.options.train.evaluate_every_steps
        is_due = every is not None and progress.consumed and progress.step % every == 0
        if not is_due or progress.evaluated == progress.step or run.is_over or epoch.batches.is_exhausted:
            return
        accelerator.synchronize(run.device)  # or the steps in its queue would count as evaluation
        began = time.perf_counter()
        record = self._position() | self._evaluate(epoch.meter)
        progress.evaluated = progress.step
        progress.figures |= self._common_figures(record)
        run.backend.activity.enter("callback")
        self._record("evaluation", record)
        epoch.bar.clear()
        run.say(evaluation_line(record))
        run.placement.follow_changes(run.step, run.trained)
        self._interrupts.agree_to_end()
        self._epoch_began += time.perf_counter() - began

    def _finish(self, started: float) -> None:
        """Write the weights and the record of the end, and say what came of the run."""
        run = self._run
        run.backend.activity.enter("save")
        run.manager.wait()
        memory = run.peak_memory.figures()
        last = self._records[-1] if self._records else {}
        if run.exchanges:
            run.state.export(run.log.folder)
        if not run.log.ended:
            end = {key: value for key, value in last.items() if key != "seconds"}
            first = {} if self._first_step_s is None else {"first_step_s": self._first_step_s}
            stopped = {"stopped": run.progress.stopped} if run.progress.stopped else {}
            self._record("end", self._position() | end | run.manager.figures() | memory | first | stopped)
        outcome = run.stop_condition.outcome_line(run.progress.figures | last)
        if outcome is not None:
            run.say(outcome)
        if run.progress.stopped:
            run.say(f"stop     {run.progress.stopped}")
        trained = last if len(self._records) > self._resumed else {}
        run.say(summary_line(trained, time.perf_counter() - started, run.log.folder))

    def _record(self, event: str, record: dict[str, Any]) -> None:
        self._run.log.record(event, record)
        for callback in self._run.callbacks:
            callback.on_record(self._run, event, record)

    def _position(self) -> dict[str, Any]:
        """Return the counters that every line of metrics.jsonl has."""
        run, progress = self._run, self._run.progress
        progress.read_skipped(run.backend.read)
        return {
            "backend": run.backend.name,
            "launcher": run.world.launcher,
            "world_size": run.world.size,
            "epoch": min(progress.epoch + 1, run.options.train.epochs),
            "step": progress.step,
            "samples": progress.samples,
            "global_batch_size": run.plan.global_batch_size,
            "lr": run.rate.last,
            "skipped_steps": progress.skipped_steps,
        }


def freeze_objects(world: World) -> None:
    """Exclude all objects that exist now from garbage collections, until `gc.unfreeze` is called.

    A full collection visits the 330,000 objects of PyTorch's modules in 0.1 to 0.17 s, and finds none to free. It
    comes at another step in each rank, and the others wait. One process by itself keeps none waiting, and a
    notebook's trains several models after each other, whose memory must come back.
    """
    if world.size > 1:
        gc.freeze()


def add_prefix(split: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures under names such as `val_loss`; without the number of samples, which the counters have."""
    return {f"{split}_{name}": value for name, value in figures.items() if name != "samples"}
