"""Save and restore one training: checkpoints on the disk, and snapshots in memory.

checkpoints     written by rank 0, or a part by each rank, for a job that is started again
snapshots       on every rank in elastic mode, for ranks that continue with fewer or with new ones
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvd_trainer.backends import Backend
from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.async_writer import AsyncWriter, copy_to_host
from hvd_trainer.checkpoint.parts import REMEDY
from hvd_trainer.checkpoint.storage import OpenCheckpoint
from hvd_trainer.checkpoint.stored import StateReader
from hvd_trainer.checkpoint.train_state import TrainState
from hvd_trainer.config.options import SaveOptions
from hvd_trainer.errors import CheckpointError, OptionError
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.observe.progress import Progress
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.utils import accelerator


@dataclass
class InMemorySnapshot:
    """The newest state of a training in this process's memory; it outlives the worlds of elastic mode."""

    fit: int
    """number of the `fit` among those of this process"""
    step: int = -1
    state: OpenCheckpoint | None = None


@dataclass(kw_only=True, eq=False)
class CheckpointManager:
    """Saves and restores one training, alike on all ranks."""

    backend: Backend
    options: SaveOptions
    log: RunLog
    is_enabled: bool
    """whether it has a folder, which holds the checkpoints; the same on all ranks"""
    state: TrainState
    progress: Progress
    before_save: Callable[[], None]
    """raises if the state must not be saved"""
    snapshot: InMemorySnapshot
    """shared with the managers of this training's other worlds"""

    def __post_init__(self) -> None:
        folder = self.log.folder
        checkpoints = None if folder is None else folder / "checkpoints"
        session = self.backend.session if self.state.parts.is_sharded else None
        self._writer = AsyncWriter(checkpoints, self.options, session, self.snapshot.fit)

    def restore(self, *, seed: int, is_over: Callable[[], bool]) -> bool:
        """Restore the newest state in memory or on the disk, or seed the random state of a new run. A collective.

        Args:
            is_over: called when all is restored; returns whether nothing is left to train.

        Returns:
            Whether a state was restored.

        Raises:
            CheckpointError: the checkpoint does not fit, or the one that was asked for is missing.
            OptionError: a new rank is in another `fit` of its process than the ranks that stayed.
        """
        loaded = self._from_memory()
        from_disk = loaded is None
        if loaded is None:
            loaded = self._from_disk()
        # From here on dropout differs between ranks, and not between engines.
        torch.manual_seed(seed + 1 + self.backend.world.rank)
        said, opened = list(loaded.notes), loaded.opened
        if opened is not None:
            state = opened.state()
            # What this job has reset and saved since then stays: it is in memory, or its launcher starts it again.
            is_own = not from_disk or not self._previous_names.isdisjoint(state.get("jobs", ()))
            partial = () if is_own else self.options.resume_partial
            said += self.state.restore(state, self._reader, partial)
            if self.snapshot.state is not None:
                self.snapshot.step = self.progress.step
            said.append(f"at epoch {self.progress.epoch + 1}, after {self.progress.step:,} steps")
        if from_disk:
            self._refuse_newer_elsewhere(-1 if opened is None else self.progress.step)
        for line in said:
            self.log.info(f"resume   {line}")
        self.log.open_at(
            self.progress.step,
            self.progress.epoch,
            self.progress.evaluated,
            goes_on=loaded.continues_run,
            finished=is_over(),
            names=self._in_this_fit(self.backend.session.job.names),
        )
        return opened is not None

    @property
    def _previous_names(self) -> frozenset[str]:
        """The names of this job's earlier starts."""
        return self.backend.session.job.previous_names

    @property
    def _reader(self) -> StateReader:
        is_alone = self.state.parts.is_sharded or self.backend.world.size == 1
        return StateReader(None if is_alone else self.backend.collectives)

    def _from_memory(self) -> storage.LoadedCheckpoint | None:
        """Return the newest snapshot of any rank; None without elastic mode, and at its start. A collective."""
        if self.backend.session.driver is None:
            return None
        snapshot = self.snapshot
        all_ranks = self.backend.collectives.all_gather_object((snapshot.fit, snapshot.step))
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
        own = snapshot.state if self.backend.world.rank == holder else None
        held: Any = self.backend.collectives.broadcast_object(own and own.describe(), holder)
        snapshot.state = OpenCheckpoint.of_description(held)
        notes = ["from the memory of the ranks that were here"]
        return storage.LoadedCheckpoint(_resumable(snapshot.state), continues_run=True, notes=notes)

    def _from_disk(self) -> storage.LoadedCheckpoint:
        """Return the checkpoint that rank 0 has chosen. A collective."""
        outcome: dict[str, Any] = {}
        if self.backend.world.is_first:
            # A job that is started again resumes its own run, whatever --resume says.
            again = self.log.belongs_to(self._in_this_fit(self._previous_names))
            if again:
                self.log.info("restart  this job was started before, and resumes")
            resume = self.options.resume
            try:
                loaded = storage.restore(self.log.folder, "auto" if again else resume)
                if again and loaded.opened is None and resume != "auto":
                    loaded = storage.restore(self.log.folder, resume)
                outcome = loaded._asdict()
                if loaded.opened is not None:
                    outcome["opened"] = loaded.opened.describe()
            except CheckpointError as error:
                outcome = {"error": str(error)}
        outcome = self.backend.collectives.broadcast_object(outcome)
        if "error" in outcome:
            raise CheckpointError(outcome["error"])
        described = outcome.pop("opened")
        opened = None if described is None else OpenCheckpoint.of_description(described)
        if opened is not None and self.state.parts.is_sharded:
            self._refuse_unseen(opened.files)
        if self.backend.session.driver is not None and opened is not None and not self.options.resume_partial:
            # A snapshot taken now would lack what the metrics of the running epoch have gathered.
            self.snapshot.state = OpenCheckpoint(opened.tree, self._reader.load(opened.tensors))
            opened = _resumable(self.snapshot.state)
        return storage.LoadedCheckpoint(opened, **outcome)

    def _refuse_unseen(self, files: Sequence[str], name: str = "") -> None:
        """Refuse files that another host does not have, if its ranks are to read or write there. A collective.

        Args:
            name: for the message; none: that of the file.

        Raises:
            CheckpointError: there is a file that a rank does not see; on all ranks.
        """
        unseen = next((file for file in files if not Path(file).is_file()), "")
        for rank, file in enumerate(self.backend.collectives.all_gather_object(unseen)):
            if file:
                host = self.backend.session.peers[rank].host
                raise CheckpointError(f"{name or file} is not on {host}. {REMEDY}")

    def _refuse_newer_elsewhere(self, step: int) -> None:
        """Refuse newer checkpoints on another node. A collective.

        Rank 0 writes them; where nodes share no folder, an earlier rank 0 may have left newer ones on its own.

        Args:
            step: where this run would resume; -1: it starts from the beginning.

        Raises:
            CheckpointError: there are some; on all ranks.
        """
        backend, place = self.backend, self.log.place
        if backend.world.num_nodes == 1 or place is None:
            return
        newest = -1
        if backend.world.is_first_on_node and not backend.world.is_first:
            again = self.log.belongs_to(self._in_this_fit(self._previous_names))
            checkpoints, _ = (
                storage.find_checkpoints(place / "checkpoints")
                if again or self.options.resume == "auto"
                else ([], [])
            )
            newest = max((manifest.step for manifest, _ in checkpoints), default=-1)
        everyone = backend.collectives.all_gather_object(newest)
        if max(everyone) > step:
            host, first_host = (backend.session.peers[rank].host for rank in (everyone.index(max(everyone)), 0))
            latest = f"after {step:,} steps" if step >= 0 else "none"
            raise CheckpointError(
                f"{place} on {host} has a checkpoint after {max(everyone):,} steps, and on {first_host}, "
                f"where rank 0 is, the newest is {latest}: the hosts do not share that folder. Name one that they "
                f"share, or start rank 0 on {host}, or copy: scp -r {host}:{place.absolute()} "
                f"{place.absolute().parent}; to leave it: --resume none"
            )

    def _in_this_fit(self, names: Collection[str]) -> set[str]:
        """Return the job's names with the number of this `fit` among those of the process."""
        return {f"{name} fit {self.snapshot.fit}" for name in names}

    def _refuse_own_folders(self) -> None:
        """Refuse a log folder that not all hosts share, if each rank is to write its part there. A collective.

        Raises:
            CheckpointError: a rank does not see what rank 0 has written; on all ranks.
        """
        backend, folder = self.backend, self.log.folder
        with nullcontext() if folder is None else tempfile.NamedTemporaryFile(dir=folder.absolute()) as written:
            file = backend.collectives.broadcast_object("" if written is None else written.name)
            self._refuse_unseen([file], f"{Path(file).parent} of {backend.session.peers[0].host}")

    @contextmanager
    def open_writer(self) -> Iterator[None]:
        """Save inside; on exit the last checkpoint is written."""
        with self._writer:
            if self.is_enabled and self.state.parts.is_sharded:
                self._refuse_own_folders()
            if self.backend.session.driver is not None and self.snapshot.state is None:
                self._save(None, to_disk=False)
            yield

    @property
    def is_overdue(self) -> bool:
        """Whether --save-every-s have passed since the last save, by this rank's clock."""
        return self.is_enabled and self._writer.is_overdue

    def after_step(self, meter: Meter, *, save: bool, commit: bool) -> None:
        """Save after this step if its number or the caller asks for it. A collective.

        Args:
            save: write a checkpoint, whatever the step's number.
            commit: keep a snapshot, whatever the step's number; in elastic mode only.
        """
        step = self.progress.step
        to_disk = self.is_enabled and (save or self._writer.is_due_after_step(step))
        is_elastic = self.backend.session.driver is not None
        if to_disk or commit or (is_elastic and step % self.options.commit_every_steps == 0):
            self._save(meter, to_disk=to_disk)

    def at_end_of_run(self, meter: Meter) -> None:
        """Save where the run ends inside an epoch, so that a later run can resume there. A collective."""
        if self.is_enabled and self._writer.is_due_after_epoch(self.progress.epoch, last=True):
            self._save(meter, to_disk=True)
        else:
            self.before_save()

    def after_epoch(self, record: Mapping[str, Any], *, last: bool) -> None:
        """Save between epochs if the epoch's number asks for it. A collective."""
        to_disk = self.is_enabled and self._writer.is_due_after_epoch(self.progress.epoch, last=last)
        if to_disk or self.backend.session.driver is not None:
            self._save(None, record, to_disk=to_disk)
        else:
            self.before_save()  # what a later save would find, told as early

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.wait()

    def figures(self) -> dict[str, Any]:
        """Return the number of saves, and for how many seconds they stopped the training."""
        return {"saves": self._writer.saves, "save_stall_s": self._writer.stalled_s}

    def _save(self, meter: Meter | None, record: Mapping[str, Any] | None = None, *, to_disk: bool) -> None:
        """Save: inside an epoch with what its metrics have gathered, at its end with the figures of its record.

        Inside an epoch the figures are those of an evaluation after the same step.
        """
        self.backend.activity.enter("save")
        accelerator.synchronize(self.backend.device)  # or the steps in its queue would count as saving
        began = time.perf_counter()
        self.before_save()
        everywhere = self.backend.session.driver is not None
        state = self.state.collect(meter, everywhere=everywhere)
        step, epoch = self.progress.step, self.progress.epoch
        if everywhere:
            copied = copy_to_host(state)
            self.backend.confirm_exchanges()
            self.snapshot.step, self.snapshot.state = step, copied
        if to_disk:
            figures = self.progress.evaluation if record is None else record
            figures = {k: v for k, v in figures.items() if k.startswith(("train_", "val_"))}
            self._writer.submit(began, state, step=step, epoch=epoch, figures=figures)


def _resumable(snapshot: OpenCheckpoint) -> OpenCheckpoint:
    """Return a snapshot that training may change, but for what model and optimizer copy into theirs."""
    later = storage.READ_LATER
    tensors = {k: t if k.startswith(later) else t.clone() for k, t in snapshot.tensors.items()}
    return OpenCheckpoint(snapshot.tree, tensors)
