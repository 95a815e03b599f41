"""The state of a run: collected from all ranks, and restored on as many ranks or on another number.

State that is equal on all ranks is kept once; state that differs is kept per rank:

    model loss optimizer scheduler scaler progress rank 0's; batch-norm statistics as their mean
                                                   if ranks have shards or stages, of these what each has
    frozen                                         names of the parameters that are not trained
    data                                           seed and size of the data set: they set the order of its samples
    sampler                                        states of its generators, that of a `DataLoader`
    callbacks                                      rank 0's, by name; given to all ranks
    jobs                                           names of the job that saved it
    ranks: random, metrics, buffers                on another number of ranks random numbers are seeded again,
                                                   metrics are added up, and buffers start from their mean
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hvd_trainer.backends import Backend
from hvd_trainer.checkpoint.export import NAME as WEIGHTS
from hvd_trainer.checkpoint.export import export_tensors, export_weights
from hvd_trainer.checkpoint.stored import AnyTensor, StateReader, StoredTensor, new_like
from hvd_trainer.errors import CheckpointError, first_line
from hvd_trainer.observe.metrics import Meter, check_state, combine_states
from hvd_trainer.observe.progress import Progress
from hvd_trainer.utils.files import UNREADABLE
from hvd_trainer.utils.optimizer_state import load_in_place
from hvd_trainer.utils.rng import check_rng_state, derive_seed, rng_state, seed_all, set_rng_state
from hvd_trainer.utils.tensors import parameters_of, state_on_this_stage, without_extra_state
from hvd_trainer.utils.text import plural

MAX_LINES = 20
"""Differences between a checkpoint's model and this one that are listed."""


class Stateful(Protocol):
    """An object with a state: an optimizer, a scheduler, a loss scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class ModelShards(Protocol):
    """The parts of a model and its optimizer that a rank has; see `parallel/placement.py`."""

    is_whole: bool
    is_sharded: bool
    seeds_itself: bool

    @property
    def cut(self) -> list[int]: ...

    def own_share(self, state: Mapping[Any, Any], *, of_optimizer: bool = False) -> dict[Any, Any]: ...

    def gather(self, owned: Mapping[Any, Any]) -> dict[Any, Any] | None: ...

    def owns(self, parameter: torch.Tensor) -> bool: ...


@dataclass(kw_only=True, eq=False)
class TrainState:
    """The state of a run."""

    backend: Backend
    model: nn.Module
    """the bare module"""
    progress: Progress
    others: Mapping[str, Stateful]
    """optimizer, scheduler, scaler, sampler and loss by these names, as far as the run has them"""
    data: Mapping[str, Any]
    """seed and number of samples of the training set"""
    parts: ModelShards
    """of model and optimizer, which this rank has"""
    callbacks: Mapping[str, Stateful] = field(default_factory=dict)
    """those that have a state, by name"""
    reproducible: bool = False
    """whether each step leaves equal buffers on all ranks"""
    scheduler_step: str = "epoch"
    """after what the scheduler is stepped: epoch or step"""
    metrics: Mapping[str, Any] | None = field(default=None, init=False)
    """the `Meter.state_dict` of this rank in a restored epoch; None at an epoch's start"""

    def collect(self, meter: Meter | None, *, everywhere: bool = False) -> dict[str, Any] | None:
        """Return the current state on rank 0, or everywhere; else None. A collective.

        If the ranks have shards or stages, each has only its share of model and optimizer, and only these but on
        rank 0; of a sharded tensor its rows.

        The meter is that of the running epoch; None between epochs.
        """
        # At an epoch's end evaluation has made buffers equal.
        differ = meter is not None and not self.reproducible
        means = self.backend.mean_buffers(self.model) if differ else {}
        of_rank: dict[str, Any] = {"random": rng_state(self.backend.device)}
        if meter is not None:
            of_rank["metrics"] = meter.state_dict()
            own = self._buffers()
            names = self.backend.differing(own) if differ else {}
            of_rank["buffers"] = {name: own[name] for name in names if name in own}
        ranks = self.backend.collectives.all_gather_object(of_rank)
        frozen = self._frozen()
        model = {name: means.get(name, value) for name, value in state_on_this_stage(self.model).items()}
        others = {name: part.state_dict() for name, part in self.others.items()}
        callbacks = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        if self.parts.is_sharded:
            model = self.parts.own_share(model)
            of_optimizer = self.parts.own_share(others["optimizer"]["state"], of_optimizer=True)
            if not self.backend.world.is_first:
                return {"model": model, "optimizer": {"state": of_optimizer}}
            others["optimizer"] = {**others["optimizer"], "state": of_optimizer}
        elif not (everywhere or self.backend.world.is_first):
            return None
        return {
            "model": model,
            "progress": self.progress.state_dict(),
            "data": dict(self.data),
            "cut": self.parts.cut,
            "frozen": frozen,
            "kinds": {name: self._kind(name) for name in self.others},
            "ranks": ranks,
            "callbacks": callbacks,
            "jobs": sorted(self.backend.session.job.names),
            **others,
        }

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of this rank's part of the model, and of the loss, by name."""
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if not is_on_other_stage(buffer)}
        loss = self.others.get("loss")
        if isinstance(loss, nn.Module):
            buffers |= {f"loss: {name}": buffer for name, buffer in loss.named_buffers()}
        return buffers

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of this rank's part of the model, and of the loss, by name."""
        parameters: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        loss = self.others.get("loss")
        if isinstance(loss, nn.Module):
            parameters |= {f"loss: {name}": p for name, p in loss.named_parameters()}
        return {name: p for name, p in parameters.items() if not is_on_other_stage(p)}

    def _frozen(self) -> list[str]:
        """Return the names of parameters that are not trained. A collective if the model is in stages."""
        frozen = [name for name, p in self._parameters().items() if not p.requires_grad]
        if not self.parts.is_sharded:
            return frozen
        return sorted({name for names in self.backend.collectives.all_gather_object(frozen) for name in names})

    def export(self, folder: Path | None) -> None:
        """Write the weights of the whole model to a folder, which rank 0 alone has. A collective.

        Raises:
            OSError: the folder cannot be written to.
        """
        if self.parts.is_whole:
            export_weights(self.model, folder)
            return
        weights = self.parts.gather(state_on_this_stage(self.model))
        if folder is not None and weights is not None:
            export_tensors(weights, folder / WEIGHTS)

    def restore(self, state: Mapping[str, Any], reader: StateReader, partial: Collection[str] = ()) -> list[str]:
        """Restore a state, which is the same on all ranks. A collective.

        Args:
            reader: reads the tensors of model and optimizer into theirs.
            partial: parts that are not restored, whether they fit or not: optimizer, scheduler, scaler, loss,
                frozen, random, data, callbacks.

        Returns:
            Lines for the log: what was restored, and what was reset.

        Raises:
            CheckpointError: something is missing or does not fit. Nothing has been changed then, unless a value is
                of another kind than its name says.
        """
        if "data" in partial:
            partial = {*partial, "sampler"}
        # A callback of rank 0 alone has a state, too.
        names = self.backend.collectives.broadcast_object(list(self.callbacks))
        try:
            wrong = self._find_mismatches(state, partial, names)
            notes = [] if wrong else self._load(state, reader, partial)
        except UNREADABLE as error:
            wrong = [f"something in it is not what it should be ({type(error).__name__}: {first_line(error)})"]
        if wrong:
            raise CheckpointError(
                f"The checkpoint does not fit: {'; '.join(wrong)}. Give the options of its run, or begin another: "
                f"--resume none, or another --log-dir"
            )
        return notes

    def _load(self, state: Mapping[str, Any], reader: StateReader, partial: Collection[str]) -> list[str]:
        restored, reset = ["model"], []
        # All names and shapes have been compared.
        self._load_model(state["model"], reader)
        notes = [] if "frozen" in partial else self._load_frozen(state["frozen"])
        part: Any
        own_settings = self._settings_of_scheduler()
        for name, part in self.others.items():
            if name not in partial and self._fits(state, name):
                if name == "optimizer":
                    self._load_optimizer(part, state[name], reader)
                else:
                    part.load_state_dict(state[name])
                restored.append(name)
            else:
                reset.append(name)
        if "scheduler" in self.others and not {"optimizer", "scheduler"}.isdisjoint(reset):
            if "scheduler" in reset:
                for group, settings in zip(self._groups, own_settings, strict=True):
                    group.update(settings)
            self._take_rates_of_scheduler()
        self.progress.load_state_dict(state["progress"])
        if self.progress.consumed and ("data" in partial or state["data"] != self.data):
            reset.append("data (the epoch begins again)")
            self.progress.consumed = 0
        if "callbacks" in partial:
            reset.append("callbacks")
            self.progress.stopped = ""
        elif saved := state.get("callbacks"):
            self._load_callbacks(saved)
            restored.append("callbacks")
        notes += self._load_ranks(state["ranks"], restored, reset, partial)
        lines = [f"restored {', '.join(restored)}"]
        lines += [f"reset: {', '.join(reset)}"] if reset else []
        return [*lines, *notes, *self._note_cut(state.get("cut", []))]

    def _load_frozen(self, saved: Collection[str]) -> list[str]:
        """Freeze and unfreeze parameters as they were; return a line if that changes what the job has set up."""
        parameters = self._parameters()
        other = [name for name, p in parameters.items() if p.requires_grad == (name in saved)]
        for name in other:
            parameters[name].requires_grad_(name not in saved)
        names = f"{', '.join(other[:3])}{', ...' if len(other) > 3 else ''}"
        return [f"frozen and unfrozen as it was: {names}"] if other else []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        optimizer: Any = self.others["optimizer"]
        return list(optimizer.param_groups)

    def _settings_of_scheduler(self) -> list[dict[str, Any]]:
        """Return what the scheduler has put into each group beside the rate, such as its peak and the momentum."""
        if "scheduler" not in self.others:
            return []
        optimizer: Any = self.others["optimizer"]
        others = {"params", *optimizer.defaults}
        cycles = any("max_momentum" in group for group in self._groups)
        others -= {"momentum", "betas"} if cycles else set()
        return [{k: v for k, v in group.items() if k not in others} for group in self._groups]

    def _take_rates_of_scheduler(self) -> None:
        """Set the learning rates to those at which the scheduler is, of which one of the two is new."""
        scheduler: Any = self.others["scheduler"]
        for group, lr in zip(self._groups, scheduler.get_last_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _load_callbacks(self, saved: Mapping[str, Any]) -> None:
        for name, callback in self.callbacks.items():
            try:
                callback.load_state_dict(saved[name])
            except UNREADABLE as error:
                raise CheckpointError(
                    f"The callback {name} does not take its state ({type(error).__name__}: {first_line(error)}). "
                    f"To reset all callbacks: --resume-partial callbacks"
                ) from error

    def _note_cut(self, saved: Sequence[int]) -> list[str]:
        """Return a line if the model is cut elsewhere into as many parts, which changes the order of sums."""
        cut = self.parts.cut
        # Two replicas give the same sum in either order.
        if cut == saved or len(cut) != len(saved) or len(self.backend.replica_group) < 3:
            return []
        before, now = (",".join(map(str, sizes)) for sizes in (saved, cut))
        return [
            f"the model is cut into {now} blocks, and was into {before}: the last bits differ from those of one "
            f"run. For the same type --balance {before}"
        ]

    def _load_model(self, saved: Mapping[str, Any], reader: StateReader) -> None:
        own = {name: value for name, value in state_on_this_stage(self.model).items() if name in saved}
        reader.fill([(saved[name], value) for name, value in own.items() if isinstance(value, torch.Tensor)])
        extra = {name: saved[name] for name, value in own.items() if not isinstance(value, torch.Tensor)}
        # Most tensors are the model's own, and there is nothing to copy; but a module may give and take others.
        self.model.load_state_dict(own | reader.load(extra), strict=False)

    def _load_optimizer(self, optimizer: Any, saved: Mapping[str, Any], reader: StateReader) -> None:
        if "state" not in saved:  # of an optimizer around another, which tells its state in a way of its own
            load_in_place(optimizer, reader.load(saved))
            return
        pairs: list[tuple[AnyTensor, torch.Tensor]] = []

        def allocate(tensor: AnyTensor) -> torch.Tensor:
            pairs.append((tensor, new_like(tensor, parameter)))
            return pairs[-1][1]

        state, parameters = {}, dict(enumerate(parameters_of(optimizer)))
        for number, values in saved["state"].items():
            parameter = parameters.get(number)
            if parameter is not None and self.parts.owns(parameter):
                state[number] = tree_map_only((torch.Tensor, StoredTensor), allocate, values)
        reader.fill(pairs)
        load_in_place(optimizer, {**saved, "state": state})

    def _load_ranks(
        self,
        ranks: Sequence[Mapping[str, Any]],
        restored: list[str],
        reset: list[str],
        partial: Collection[str],
    ) -> list[str]:
        """Load the state that is kept per rank; append to `restored` and `reset`, and return further lines."""
        world, device = self.backend.world, self.backend.device
        same = len(ranks) == world.size
        own = ranks[world.rank] if same else {}
        notes = []
        if "random" in own and "random" not in partial:
            set_rng_state(own["random"], device)
            restored.append("random")
        elif not self.parts.seeds_itself:
            seed_all(derive_seed(self.data["seed"], self.progress.step, world.rank), device)
            reset.append("random")
        if not same and not self.parts.seeds_itself:
            before = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
            notes.append(f"it was saved by {before}: dropout draws other numbers now, and all else continues")
        buffers = self._buffers()
        for name, buffer in own.get("buffers", {}).items():
            if name in buffers:
                buffers[name].copy_(buffer)
        gathered = [rank["metrics"] for rank in ranks if "metrics" in rank] if self.progress.consumed else []
        if gathered:
            # On another number of ranks, rank 0 has gathered everything, and the others nothing.
            whole = gathered[world.rank] if same else combine_states(gathered) if world.is_first else None
            self.metrics = whole
            restored.append("metrics")
        elif self.progress.consumed:
            reset.append("metrics")
        return notes

    def _fits(self, state: Mapping[str, Any], name: str) -> bool:
        """Return whether the state has this part, of the kind that this run has."""
        return name in state and state["kinds"].get(name) == self._kind(name)

    def _kind(self, name: str) -> str:
        """Return the class of a part; of a scheduler also whether it counts steps."""
        kind = type(self.others[name]).__name__
        return f"{kind} by steps" if name == "scheduler" and self.scheduler_step == "step" else kind

    def _find_mismatches(
        self, state: Mapping[str, Any], partial: Collection[str], callbacks: Sequence[str]
    ) -> list[str]:
        """Return one message per difference between a state and this run that `partial` does not allow.

        Args:
            callbacks: names of those of rank 0 that have a state.
        """
        missing = [name for name in ("model", "frozen", "progress", "data", "kinds", "ranks") if name not in state]
        if missing:
            return [f"it has no {', '.join(missing)}, so it is not one of ours"]
        Progress().load_state_dict(state["progress"])
        for rank in state["ranks"]:
            self._check_rank(rank)
        mismatches = find_differences(*map(without_extra_state, (self.model.state_dict(), state["model"])))
        for name in self.others:
            if name in partial:
                continue
            if self._fits(state, name):
                mismatches += [f"{key} of its {name} is no number" for key in self._find_non_numbers(state, name)]
                mismatches += self._find_other_groups(state, name)
                continue
            kind = state["kinds"].get(name)
            mismatches.append(
                (f"its {name} is {kind}, not {self._kind(name)}" if kind else f"it has no {name}")
                + f" (to reset it: --resume-partial {'data' if name == 'sampler' else name})"
            )
        if "random" not in partial and any("random" not in rank for rank in state["ranks"]):
            mismatches.append("it has no random state (to reset it: --resume-partial random)")
        if state["progress"]["consumed"] and state["data"] != self.data and "data" not in partial:
            saved, data = state["data"], self.data
            changed = [f"{key} {saved.get(key)} (here {data[key]})" for key in data if saved.get(key) != data[key]]
            mismatches.append(
                f"it was saved inside an epoch of other data: {', '.join(changed)} (to begin that epoch again: "
                f"--resume-partial data)"
            )
        if "callbacks" not in partial:
            names = dict.fromkeys([*state.get("callbacks", {}), *callbacks])
            mismatches += [
                f"it has {'no' if name in callbacks else 'a'} state of the callback {name}, and this run has "
                f"{'one' if name in callbacks else 'none'} (to reset all callbacks: --resume-partial callbacks)"
                for name in names
                if (name in state.get("callbacks", {})) != (name in callbacks)
            ]
        return mismatches

    def _find_other_groups(self, state: Mapping[str, Any], name: str) -> list[str]:
        """Return a message if the saved part is of other parameter groups than this run's."""
        own, saved = (_sizes_of_groups(part) for part in (self.others[name].state_dict(), state[name]))
        if own == saved:
            return []
        return [f"its {name} is for {saved}, not {own} (to reset it: --resume-partial {name})"]

    def _check_rank(self, rank: Mapping[str, Any]) -> None:
        """Check the state of one rank, on all ranks: else all but that one would train on.

        Raises:
            TypeError, ValueError, LookupError, RuntimeError, AttributeError: it is none.
        """
        if "random" in rank:
            check_rng_state(rank["random"])
        if "metrics" in rank:
            check_state(rank["metrics"])
        buffers = self._buffers()
        for name, buffer in rank.get("buffers", {}).items():
            own = buffers[name] if name in buffers else self.model.get_buffer(name)
            if _describe(buffer) != _describe(own):
                raise ValueError(f"{name} of a rank is {_describe(buffer)}")

    def _find_non_numbers(self, state: Mapping[str, Any], name: str) -> list[str]:
        """Return the settings that are numbers here and not in the state: they would fail later, in a step."""
        own, saved = self.others[name].state_dict(), state[name]
        pairs = [(own, saved), *zip(own.get("param_groups", ()), saved.get("param_groups", ()), strict=False)]
        return [
            key
            for settings, loaded in pairs
            for key, value in settings.items()
            if isinstance(value, int | float)
            and not isinstance(loaded.get(key, value), int | float | torch.Tensor)
        ]


def _sizes_of_groups(state: Mapping[str, Any]) -> str:
    """Return `2 parameter groups (of 4, 2)` of an optimizer's state, `2 groups` of a scheduler's; else nothing."""
    if "param_groups" in state:
        sizes = [str(len(group["params"])) for group in state["param_groups"]]
        return f"{plural(len(sizes), 'parameter group')} (of {', '.join(sizes)})"
    return plural(len(state["_last_lr"]), "group") if "_last_lr" in state else ""


def is_on_other_stage(value: Any) -> bool:
    """Return whether this is a tensor whose contents another stage has."""
    return isinstance(value, torch.Tensor) and value.is_meta


def find_differences(tensors: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return how a saved model's tensors (`saved`) differ from this model's in name, type and shape."""
    lines = []
    for name in dict.fromkeys([*tensors, *saved]):
        if name not in saved:
            lines.append(f"{name} {_describe(tensors[name])} is not in it")
        elif name not in tensors:
            lines.append(f"{name} {_describe(saved[name])} is not in this model")
        elif _describe(tensors[name]) != _describe(saved[name]):
            lines.append(f"{name} is {_describe(saved[name])}, and here {_describe(tensors[name])}")
    more = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], f"and {more} more"] if more > 0 else lines


def _describe(value: Any) -> str:
    if isinstance(value, StoredTensor):
        value = value.like
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
