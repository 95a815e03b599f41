"""What a run keeps while it trains, and what it goes on from: checkpoints, and copies in memory.

checkpoints     on the disk, by rank 0: for a job that is started again
memory          on every rank, where ranks come and go: for those that go on without others, or with new ones
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hvd_trainer.backends import Backend
from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.async_writer import AsyncWriter, on_host
from hvd_trainer.checkpoint.train_state import TrainState
from hvd_trainer.config.options import SaveOptions
from hvd_trainer.errors import CheckpointError, OptionError, PreemptedError
from hvd_trainer.faults.elastic import RescaleError
from hvd_trainer.faults.preemption import Requeue, StopRequest, listen_for_signals
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.observe.progress import Progress
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.optim.non_finite import NonFiniteGuard
from hvd_trainer.training.consensus import StepConsensus
from hvd_trainer.utils import accelerator


@dataclass
class InMemorySnapshot:
    """The newest state that this process remembers of a training."""

    fit: int
    """the number of the training among those of this process"""
    step: int = -1
    state: Mapping[str, Any] | None = None


class CheckpointManager:
    """Saves one run, and stops it where a signal or horovodrun wants that; all ranks alike.

    Args:
        backend: the engine.
        options: when to save, and what to go on from.
        log: the run's log, in whose folder checkpoints are.
        keeps: whether there is such a folder; the same on all ranks.
        state, progress: of the run.
        guard: asked before anything is saved.
        requeue: puts a Slurm job that was stopped back into its queue.
        memory: what this process remembers of the run; the keepers of its other worlds share it.
    """

    def __init__(
        self,
        backend: Backend,
        options: SaveOptions,
        log: RunLog,
        *,
        keeps: bool,
        state: TrainState,
        progress: Progress,
        guard: NonFiniteGuard,
        requeue: Requeue,
        memory: InMemorySnapshot,
    ) -> None:
        self._backend, self._options, self._log, self._keeps = backend, options, log, keeps
        self._state, self._progress, self._guard = state, progress, guard
        self._requeue, self._memory = requeue, memory
        self._request: StopRequest | None = None

    # Going on.

    def restore(self, *, seed: int, is_over: Callable[[], bool]) -> bool:
        """Goes on from memory or a checkpoint, or starts the random state of a new run. A collective.

        Args:
            seed: of a new run.
            is_over: whether nothing is left to train, once all is restored.

        Returns:
            Whether there was something to go on from.

        Raises:
            CheckpointError: what there is does not fit, or what was asked for is not there.
            OptionError: ranks that came later are in another training than those that were here.
        """
        found = self._from_memory()
        from_disk = found is None
        if found is None:
            found = self._from_disk()
        # From here on dropout differs between ranks, and not between engines.
        torch.manual_seed(seed + 1 + self._backend.world.rank)
        said = list(found.said)
        if found.state is not None:
            said += self._state.restore(found.state, self._options.resume_partial)
            if self._memory.state is not None:
                self._memory.step = self._progress.step
            said.append(f"at epoch {self._progress.epoch + 1}, after {self._progress.step:,} steps")
        if from_disk:
            self._refuse_newer_elsewhere(-1 if found.state is None else self._progress.step)
        for line in said:
            self._log.say(f"resume   {line}")
        self._log.begin(
            self._progress.step,
            self._progress.epoch,
            goes_on=found.goes_on,
            finished=is_over(),
            names=self._in_this_fit(self._backend.job.names),
        )
        return found.state is not None

    def _from_memory(self) -> storage.LoadedCheckpoint | None:
        """The newest state that any rank remembers."""
        if self._backend.driver is None:
            return None
        memory = self._memory
        all_ranks = self._backend.all_gather_object((memory.fit, memory.step))
        fits = {fit for fit, _ in all_ranks}
        if len(fits) > 1:
            raise OptionError(
                f"A rank that came later is in training {min(fits) + 1} of its process, and others are in "
                f"{max(fits) + 1}: in horovodrun's elastic mode a job may call fit only once."
            )
        steps = [step for _, step in all_ranks]
        newest = max(steps)
        if newest < 0:
            return None
        holder = steps.index(newest)
        mine = memory.state if self._backend.world.rank == holder else None
        memory.state = self._backend.broadcast_object(mine, holder)
        # Copied, or what is remembered would become what is trained.
        state = on_host(memory.state)
        return storage.LoadedCheckpoint(state, goes_on=True, said=["from the memory of the ranks that were here"])

    def _from_disk(self) -> storage.LoadedCheckpoint:
        """What rank 0 reads for all."""
        outcome: dict[str, Any] = {}
        if self._backend.world.is_first:
            # A job that is started again goes on, whatever it was begun from.
            again = self._log.holds(self._in_this_fit(self._backend.job.earlier))
            if again:
                self._log.say("restart  this job was started before, and goes on")
            resume = self._options.resume
            try:
                found = storage.restore(self._log.folder, "auto" if again else resume)
                if again and found.state is None and resume != "auto":
                    found = storage.restore(self._log.folder, resume)
                outcome = found._asdict()
            except CheckpointError as error:
                outcome = {"error": str(error)}
        outcome = self._backend.broadcast_object(outcome)
        if "error" in outcome:
            raise CheckpointError(outcome["error"])
        found = storage.LoadedCheckpoint(**outcome)
        if self._backend.driver is not None and found.state is not None and not self._options.resume_partial:
            # Only there is what the metrics of a running epoch have gathered.
            self._memory.state = on_host(found.state)
        return found

    def _refuse_newer_elsewhere(self, step: int) -> None:
        """Checkpoints are rank 0's; on nodes that share no folder, an earlier rank 0 may have left newer ones.

        Args:
            step: what this run would go on from; -1: from nothing.

        Raises:
            CheckpointError: there are such; on all ranks.
        """
        backend, place = self._backend, self._log.place
        if backend.world.num_nodes == 1 or place is None:
            return
        newest = -1
        if backend.world.local_rank == 0 and not backend.world.is_first:
            again = self._log.holds(self._in_this_fit(backend.job.earlier))
            found, _ = (
                storage.whole(place / "checkpoints") if again or self._options.resume == "auto" else ([], [])
            )
            newest = max((manifest.step for manifest, _ in found), default=-1)
        everyone = backend.all_gather_object(newest)
        if max(everyone) > step:
            theirs, ours = backend.peers[everyone.index(max(everyone))].host, backend.peers[0].host
            here = f"after {step:,} steps" if step >= 0 else "none"
            raise CheckpointError(
                f"{place} on {theirs} has a checkpoint after {max(everyone):,} steps, and on {ours}, where rank "
                f"0 is, the newest is {here}: the hosts do not share that folder. Name one that they share, or "
                f"start rank 0 on {theirs}, or copy: scp -r {theirs}:{place.absolute()} "
                f"{place.absolute().parent}; to leave it: --resume none"
            )

    def _in_this_fit(self, names: Collection[str]) -> set[str]:
        """The names of this training among those of one process."""
        return {f"{name} fit {self._memory.fit}" for name in names}

    # Keeping.

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, the run is saved when it is due."""
        folder = None if self._log.folder is None else self._log.folder / "checkpoints"
        self._saver = AsyncWriter(folder, self._options)
        self._agreement = StepConsensus(self._backend, ["save", "stop", "rescale"])
        try:
            if self._backend.driver is not None and self._memory.state is None:
                self._save(None, to_disk=False)
            # Without a folder there is nothing to save to, and a signal ends the process as ever.
            with listen_for_signals(self._asked_to_stop) if self._keeps else nullcontext() as self._request:
                yield
        finally:
            self._backend.activity.limits = None
            self._saver.close()

    def _asked_to_stop(self, number: int) -> None:
        """Another thread calls it, when a signal has come."""
        self._agreement.want("stop")

    def alive(self) -> None:
        """To be called in whatever takes long: this process is not stuck."""
        if self._request is not None:
            self._request.mark_progress()

    def after_step(self, meter: Meter) -> None:
        """Saves after this step, and stops, where that is due: by its number, rank 0's clock, signals, horovodrun.

        Raises:
            PreemptedError: a signal has stopped the job; everything is saved.
            RescaleError: ranks are about to come or go; every rank remembers this step.
        """
        driver, step = self._backend.driver, self._progress.step
        if not self._keeps and driver is None:
            return
        if self._keeps and self._saver.overdue:
            self._agreement.want("save")
        if driver is not None and driver.hosts_changed.is_set():
            self._agreement.want("rescale")
        wanted = self._agreement.after_step()
        if self._request is not None:
            self._request.mark_progress()
            self._request.granted = "stop" in wanted
        to_disk = self._keeps and (bool(wanted & {"save", "stop"}) or self._saver.after_step(step))
        if to_disk or "rescale" in wanted or (driver is not None and step % self._options.commit_every_steps == 0):
            self._save(meter, to_disk=to_disk)
        if "stop" in wanted:
            self._stop()
        if "rescale" in wanted:
            self._saver.wait()  # or nobody hears that this world's last checkpoint could not be written
            raise RescaleError(f"after step {step:,}")

    def inside_epoch(self, meter: Meter) -> None:
        """Saves what a later run goes on from, since this one ends here."""
        if self._keeps and self._saver.after_epoch(self._progress.epoch, last=True):
            self._save(meter, to_disk=True)

    def after_epoch(self, record: Mapping[str, Any], *, last: bool) -> None:
        """Saves between epochs, where that is due.

        Args:
            record: the epoch's figures.
            last: whether the run ends with it.
        """
        to_disk = self._keeps and self._saver.after_epoch(self._progress.epoch, last=last)
        if to_disk or self._backend.driver is not None:
            self._save(None, record, to_disk=to_disk)

    def finish(self) -> dict[str, Any]:
        """Waits until all is written; returns how often the run was saved, and what that cost it."""
        self._saver.wait()
        return {"saves": self._saver.saves, "save_stall_s": self._saver.stalled_s}

    def _save(self, meter: Meter | None, record: Mapping[str, Any] | None = None, *, to_disk: bool) -> None:
        """Saves; inside an epoch with what its metrics have gathered, at its end with its record's figures."""
        self._backend.activity.enter("save")
        accelerator.synchronize(self._backend.device)  # or the steps in its queue would count as saving
        began = time.perf_counter()
        self._guard.check()
        everywhere = self._backend.driver is not None
        state = self._state.collect(meter, everywhere=everywhere)
        progress = self._progress
        if everywhere:
            copied = on_host(state)
            self._backend.confirm_exchanges()
            self._memory.step, self._memory.state = progress.step, copied
        if to_disk:
            figures = {k: v for k, v in (record or {}).items() if k.startswith(("train_", "test_"))}
            self._saver.hand_over(began, state, step=progress.step, epoch=progress.epoch, figures=figures)

    def _stop(self) -> None:
        self._saver.wait()
        self._backend.stopping = True
        what = f"stopped by a signal after step {self._progress.step:,}, and saved"
        said = self._requeue(what, acts=self._backend.world.is_first)
        # The first rank to end takes the others with it, so none may before the checkpoint is there.
        self._backend.barrier()
        raise PreemptedError(said)
