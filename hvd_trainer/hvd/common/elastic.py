"""Elastic training: the state that all ranks share, and the loop that trains again when ranks come or go."""

from __future__ import annotations

import copy
import functools
import itertools
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

T = TypeVar("T")
_STATES = itertools.count()


class NotificationManager:
    """Tells states which hosts have come or gone, where horovodrun tells this process."""

    def __init__(self) -> None:
        self._listeners: set[State] = set()

    def init(self) -> None:
        """Listen to horovodrun; nothing before `hvd.init`, or if the number of ranks is fixed."""
        basics.listen_to_hosts(self.handle_hosts_updated)

    def register_listener(self, listener: State) -> None:
        """Have a state's `on_hosts_updated` called."""
        self._listeners.add(listener)

    def remove_listener(self, listener: State) -> None:
        """Stop that."""
        self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Tell all states; called by a thread of Horovod's."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()
"""Of this process."""


class State:
    """State that all ranks share, saved in memory.

    Args:
        bcast_object: returns rank 0's object on all ranks.
        get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._number = next(_STATES)  # attributes without underscore are the script's
        self._reset_callbacks: list[Callable[[], object]] = []
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Have functions called after ranks have come or gone, such as to scale the learning rate anew."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to other ranks, and call the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Note that hosts have changed; rank 0's note counts, at the next `commit` or `check_host_updates`."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, to which all return if a rank is lost, and look for changes of the hosts. A collective.

        Raises:
            HostsUpdatedInterrupt: as in `check_host_updates`.
        """
        self.save()
        commits = basics.commits()
        if commits is not None:
            commits.write(self._number, self._committed)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Ask rank 0 for changes of the hosts. A collective.

        Raises:
            HostsUpdatedInterrupt: hosts have come, or are about to go; on all ranks at once.
        """
        if self._bcast_object(not self._host_messages.empty() or basics.hosts_have_changed()):
            raise HostsUpdatedInterrupt(skip_sync=False)

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state of the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state. A collective."""
        raise NotImplementedError

    def reset(self) -> None:  # noqa: B027  a state may have nothing to adapt
        """Adapt to other ranks, before `sync`."""

    def _committed(self) -> dict[str, Any]:
        """Return the saved state, for the ranks that torchrun starts after these; empty if it cannot be had."""
        return {}

    def _load_committed(self, saved: dict[str, Any]) -> None:
        """Make what `_committed` has returned the saved state."""


class ObjectState(State):
    """Python objects that all ranks share; they are attributes of the state.

    They are copied when they are saved, so that one that is changed in place can be restored, too.

    Args:
        bcast_object, get_rank: as in `State`.
        kwargs: the objects, by attribute.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._set(kwargs)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Save the objects in memory."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Return to the objects of the last `save`."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Take over rank 0's objects, also those that it has not saved. A collective."""
        current = {name: getattr(self, name) for name in self._saved_state}
        if current:
            self._set(self._bcast_object(current))
        self.save()

    def _set(self, objects: Mapping[str, Any]) -> None:
        for name, value in objects.items():
            setattr(self, name, value)

    def _committed(self) -> dict[str, Any]:
        """Return the saved objects."""
        return {"objects": self._saved_state}

    def _load_committed(self, saved: dict[str, Any]) -> None:
        """Make these the saved objects."""
        self._saved_state = saved["objects"]


def run_fn(func: Callable[..., T], reset: Callable[[], object]) -> Callable[..., T]:
    """Return a function that calls `func(state, ...)` again whenever ranks have come or gone, until it returns.

    After a lost rank with the last committed state, after other changes with the current one of rank 0.

    Args:
        func: trains. Its first argument is a `State`.
        reset: ends operations among the old ranks, and begins them among the new ones.
    """

    @functools.wraps(func)
    def train(state: State, *args: Any, **kwargs: Any) -> T:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return train_anew(state, *args, **kwargs)
        finally:
            notification_manager.remove_listener(state)

    def train_anew(state: State, *args: Any, **kwargs: Any) -> T:
        has_reset, refused = False, None
        while True:
            try:
                if has_reset:
                    state.on_reset()
                state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                # Ranks that asked for different things will do so again, and no rank is lost.
                if basics.is_initialized() and refused == str(error):
                    raise
                refused = str(error)
                state.restore()
                basics.leave(error)
            except HostsUpdatedInterrupt:
                pass  # those that come take part in `sync`, so none may skip it
            reset()
            has_reset = True

    return train
