"""The counters of a run, and the progress bar that shows them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import psutil
from torch import Tensor

from hvd_trainer.observe.log_handler import in_notebook

if TYPE_CHECKING:
    from tqdm import tqdm

    from hvd_trainer.observe.metrics import Meter

REFRESH_S = 0.5
MAX_COUNT = 2**53


@dataclass
class Progress:
    """The counters of a run, saved and restored with it."""

    epoch: int = 0
    """epochs that are finished"""
    step: int = 0
    """optimizer steps so far, skipped ones included"""
    consumed: int = 0
    """samples of the running epoch that all ranks together have trained on"""
    samples: int = 0
    """samples of all epochs"""
    skipped_steps: int = 0
    """steps left out because the gradient was not finite"""
    figures: dict[str, float] = field(default_factory=dict)
    """of the epoch that was finished last, such as val_loss, or of a later evaluation"""
    lr: float | None = None
    """effective learning rate of the last step; None before the first"""
    stopped: str = ""
    """why a callback has ended the training; empty: none has"""
    evaluated: int = 0
    """steps before the newest evaluation inside of an epoch"""

    def __post_init__(self) -> None:
        self._unread: Tensor | None = None
        self.unread_lr: Tensor | None = None

    @property
    def evaluation(self) -> dict[str, float]:
        """The figures of an evaluation inside of the epoch, right after the last step; empty if there was none."""
        if self.evaluated != self.step:
            return {}
        return {name: value for name, value in self.figures.items() if name.startswith("val_")}

    def count_skipped(self, skipped: bool | Tensor) -> None:
        """Count a step that was left out; one of which only the device knows when `read_skipped` is called."""
        if isinstance(skipped, bool):
            self.skipped_steps += skipped
        else:
            self._unread = skipped if self._unread is None else self._unread + skipped

    def read_skipped(self, read: Callable[[Tensor], Any] = Tensor.tolist) -> None:
        """Bring `skipped_steps` up to date: waits for the device if that has something to tell."""
        if self._unread is not None:
            self.skipped_steps += int(read(self._unread))
            self._unread = None

    def note_lr(self, lr: float | Tensor) -> None:
        """Keep the effective learning rate of a step; a tensor is read by `read_lr`."""
        if isinstance(lr, Tensor):
            self.unread_lr = lr.detach().clone()  # the optimizer's own changes
        else:
            self.lr, self.unread_lr = float(lr), None

    def read_lr(self) -> None:
        """Bring `lr` up to date: waits for the device if the rate is a tensor there."""
        if self.unread_lr is not None:
            self.lr, self.unread_lr = float(self.unread_lr), None

    def state_dict(self) -> dict[str, Any]:
        self.read_skipped()
        self.read_lr()
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`.

        Raises:
            ValueError: it holds something else; nothing has been changed then.
        """
        figures = state.get("figures", {})
        if not isinstance(figures, Mapping) or not all(type(value) in (int, float) for value in figures.values()):
            raise ValueError("its figures are not all numbers")
        lr, stopped = state.get("lr"), state.get("stopped", "")
        if type(lr) not in (float, type(None)) or type(stopped) is not str:
            raise ValueError(f"its learning rate is {lr!r:.40}, and its reason to stop {stopped!r:.40}")
        counts = {name: value for name, value in state.items() if name not in ("figures", "lr", "stopped")}
        for name, value in counts.items():
            if name not in Progress.__dataclass_fields__ or type(value) is not int or not 0 <= value < MAX_COUNT:
                raise ValueError(f"its counter {name!r} is {value!r:.40}, and no number from 0 on")
        for name, value in counts.items():
            setattr(self, name, value)
        self.figures, self.lr, self.stopped = dict(figures), lr, stopped
        self.unread_lr = None


class Bar:
    """One tqdm bar over an epoch's samples, on rank 0 and only where a person watches; in a notebook a widget."""

    def __init__(self, visible: bool, progress: Progress, epochs: int, total: int | None) -> None:
        self._bar: tqdm[Any] | None = None
        self._shown = time.monotonic()
        terminal = _terminal() if visible else None
        if terminal is not None:
            from tqdm.auto import tqdm

            self._bar = tqdm(
                total=total,
                initial=progress.consumed,
                desc=f"epoch {progress.epoch + 1}/{epochs}",
                unit=" samples",
                unit_scale=True,
                mininterval=REFRESH_S,
                leave=False,
                dynamic_ncols=True,
                file=terminal,
            )

    def advance(self, consumed: int, meter: Meter) -> None:
        """Move to the sample `consumed`; read the loss at most twice a second, because that waits for the
        device.
        """
        if self._bar is None:
            return
        now = time.monotonic()
        # Where the model is in stages, only the last one has losses.
        if now - self._shown > REFRESH_S and meter.samples:
            self._shown = now
            self._bar.set_postfix_str(f"loss {meter.local_loss():.4f}", refresh=False)
        # The last step may repeat a few samples so that all ranks have as many.
        self._bar.update(min(consumed, self._bar.total or consumed) - self._bar.n)

    def clear(self) -> None:
        """Take it off the terminal until it moves, so that a line can be printed there."""
        if self._bar is not None:
            self._bar.clear()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _terminal() -> TextIO | None:
    """Return what shows the bar: stderr in a terminal or a notebook, or that of horovodrun; None if there is none.

    horovodrun puts a pipe between its ranks and its terminal but passes carriage returns on, so a bar
    works exactly if its own stderr is a terminal.
    """
    if sys.stderr.isatty() or in_notebook():
        return sys.stderr
    for parent in psutil.Process().parents()[:6]:
        try:
            if any(os.path.basename(word) == "horovodrun" for word in parent.cmdline()[:3]):
                target = os.readlink(f"/proc/{parent.pid}/fd/2")
                return sys.stderr if target.startswith(("/dev/pts/", "/dev/tty")) else None
        except (psutil.Error, OSError):
            return None
    return None
