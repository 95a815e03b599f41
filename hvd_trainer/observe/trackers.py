"""Callbacks that send a run's options and figures to trackers, each of which has a package of its own.

trainer.fit(..., callbacks=[WandbTracker(project="mnist")])
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hvd_trainer.config.parser import flatten
from hvd_trainer.errors import OptionError, first_line
from hvd_trainer.observe.callback import Callback, RunView
from hvd_trainer.utils.text import install_extra

logger = logging.getLogger(__name__)

PLACES = ("step", "epoch")
"""Keys of a record that are no figures."""


class Tracker(Callback, ABC):
    """Send each record of metrics.jsonl from rank 0, under names such as `step/train_loss` and `epoch/val_loss`.

    A tracker that fails does not end the training: it warns once, and sends again from the next epoch on.

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
        self._has_failed = self._waits = False

    def on_record(self, run: RunView, event: str, record: Mapping[str, Any]) -> None:
        """Send a record, and begin or end the tracker's run with it; one that fails does not end."""
        # Each try may take as long as the package waits for its server, so a step does not try again.
        if not run.world.is_first or (self._waits and event not in ("epoch", "end")):
            return
        try:
            self._send_record(flatten(run.options), event, record)
            self._waits = False
        except Exception as error:  # the package's own, or of what it sends with
            self._waits = True
            if not self._has_failed:
                self._has_failed = True
                reason = f"{type(error).__name__}: {first_line(error)}"
                logger.warning(
                    "warning: %s sends nothing for now (%s); the training continues", self.package, reason
                )

    def _send_record(self, options: dict[str, Any], event: str, record: Mapping[str, Any]) -> None:
        if self._run is None:
            self._run = self._begin(options)
        figures = {
            key: value for key, value in record.items() if isinstance(value, int | float) and key not in PLACES
        }
        self._send({f"{event}/{key}": value for key, value in figures.items()}, record["step"])
        if event == "end":
            run, self._run = self._run, None
            self._end(run)

    @abstractmethod
    def _begin(self, options: dict[str, Any]) -> Any: ...

    @abstractmethod
    def _send(self, figures: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def _end(self, run: Any) -> None: ...


class WandbTracker(Tracker):
    """A tracker for Weights & Biases; its settings are those of `wandb.init`, such as project and name."""

    package = "wandb"

    def _begin(self, options: dict[str, Any]) -> Any:
        return self._module.init(config=options, **self._settings)

    def _send(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def _end(self, run: Any) -> None:
        run.finish()


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

    def _end(self, run: Any) -> None:
        self._module.end_run()
