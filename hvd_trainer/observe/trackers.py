"""Callbacks that send a run's options and figures to trackers, each of which has a package of its own.

trainer.fit(..., callbacks=[WandbTracker(project="mnist")])
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hvd_trainer.config.parser import flatten
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.callback import Callback, RunView
from hvd_trainer.utils.text import install_extra

PLACES = ("step", "epoch")
"""Keys of a record that are no figures."""


class Tracker(Callback, ABC):
    """Send each record of metrics.jsonl from rank 0, under names such as `step/train_loss` and `epoch/val_loss`.

    Args:
        settings: of the tracker's run, as its package takes them.

    Raises:
        OptionError: the package is not installed.
    """

    package: str
    """by whose name the extra is called, too"""

    def __init__(self, **settings: Any) -> None:
        try:
            self._module = importlib.import_module(self.package)
        except ImportError as error:
            install = install_extra(self.package)
            raise OptionError(f"{type(self).__name__} needs {self.package}. Type: {install}") from error
        self._settings = settings
        self._run: Any = None

    def on_record(self, run: RunView, event: str, record: Mapping[str, Any]) -> None:
        """Send a record, and begin or end the tracker's run with it; one that fails does not end."""
        if not run.world.is_first:
            return
        if self._run is None:
            self._run = self._begin(flatten(run.options))
        figures = {
            key: value for key, value in record.items() if isinstance(value, int | float) and key not in PLACES
        }
        self._send({f"{event}/{key}": value for key, value in figures.items()}, record["step"])
        if event == "end":
            self._end()
            self._run = None

    @abstractmethod
    def _begin(self, options: dict[str, Any]) -> Any: ...

    @abstractmethod
    def _send(self, figures: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


class WandbTracker(Tracker):
    """A tracker for Weights & Biases; its settings are those of `wandb.init`, such as project and name."""

    package = "wandb"

    def _begin(self, options: dict[str, Any]) -> Any:
        return self._module.init(config=options, **self._settings)

    def _send(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def _end(self) -> None:
        self._run.finish()


class MLflowTracker(Tracker):
    """A tracker for MLflow; its settings are those of `mlflow.start_run`, such as run_name and experiment_id."""

    package = "mlflow"

    def _begin(self, options: dict[str, Any]) -> Any:
        run = self._module.start_run(**self._settings)
        if "run_id" not in self._settings:  # else it is resumed, and has them
            self._module.log_params(options)
        return run

    def _send(self, figures: dict[str, float], step: int) -> None:
        self._module.log_metrics(figures, step=step)

    def _end(self) -> None:
        self._module.end_run()
