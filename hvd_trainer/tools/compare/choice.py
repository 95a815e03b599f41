"""The fastest values of the options that vary: what to type to use them, and YAML for the job's --config."""

from __future__ import annotations

import shlex
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import read_yaml
from hvd_trainer.measure.command import launcher_of, option_values, with_options
from hvd_trainer.measure.machine import as_text
from hvd_trainer.tools.compare.plan import CompareTrial, is_beneath
from hvd_trainer.tools.compare.result import Comparison, Pair
from hvd_trainer.utils.text import COMMAND


def choose(comparison: Comparison) -> list[Pair]:
    """Return, for each engine on its largest number of ranks, the fastest values beside the first ones.

    An engine of which no values are certainly faster than the first ones has none.
    """
    chosen: dict[str, Pair] = {}
    for pairs in sorted(comparison.of_values, key=lambda pairs: pairs[0].one.trial.ranks):
        faster = [pair for pair in pairs if pair.speed.matters and pair.speed.value > 1]
        trial = pairs[0].one.trial
        chosen.pop(trial.entry, None)
        if faster:
            chosen[trial.entry] = faster[0]
    return list(chosen.values())


def line_to_type(pair: Pair) -> str:
    """Return the command line that starts the job with the faster values of a pair."""
    trial, work = pair.one.trial, _work(pair)
    beneath = [(option, value) for option, value in trial.settings if is_beneath(option, trial.job)]
    if not work.get("on_trainer"):
        own = [word for option, value in beneath for word in (option.replace("_", "-"), value)]
        run = [*COMMAND.split(), "run", "--np", str(trial.ranks), "--backend", trial.engine, *own]
        return shlex.join([*run, "--", *trial.job])
    if not work.get("reads_options"):
        return in_code({"backend": trial.engine, **_values(trial)})
    launcher = launcher_of(trial.engine, trial.job)
    start = {"python": ["python"], "torchrun": ["torchrun", "--nproc-per-node", str(trial.ranks)]}
    words = with_options(trial.job, [("--backend", trial.engine), *beneath])
    return shlex.join([*start.get(launcher, [launcher, "-np", str(trial.ranks), "python"]), *words])


def in_code(values: Mapping[str, Any]) -> str:
    """Return options as they stand in the code of a job that reads none."""
    groups = []
    for group in fields(TrainerOptions):
        kind: Any = group.default_factory
        own = [f"{entry.name}={values[entry.name]!r}" for entry in fields(kind) if entry.name in values]
        groups += [f"{group.name}={kind.__name__}({', '.join(own)})"] if own else []
    return f"TrainerOptions({', '.join(groups)})  # the job reads no options: write these into its code"


def write_settings(comparison: Comparison, folder: Path) -> list[Path]:
    """Write what `choose` returns as files for `--config`, and return their paths.

    A job that is no job on the Trainer, or reads no options, has none. Files of an earlier command are removed.

    Raises:
        OptionError: the file that the job is typed with cannot be read.
    """
    files = []
    for engine in {result.trial.engine for result in comparison.results}:
        (folder / f"{engine}.yaml").unlink(missing_ok=True)
    for pair in choose(comparison):
        trial, work = pair.one.trial, _work(pair)
        if work.get("on_trainer") and work.get("reads_options"):
            verdict, where = pair.verdict(), as_text(comparison.machine)
            head = [f"Found by: {comparison.ran.command}", f"On: {where}", str(verdict)]
            # The file that the job is typed with is replaced by this one.
            own = ChainMap(*(read_yaml(Path(file)) for file in reversed(option_values(trial.job, "--config"))))
            options = {**own, "backend": trial.engine, **_values(trial)}
            text = "".join(f"# {line}\n" for line in head) + yaml.safe_dump(options, sort_keys=False)
            files.append(folder / f"{trial.engine}.yaml")
            files[-1].write_text(text)
    return files


def _work(pair: Pair) -> Mapping[str, Any]:
    work: Mapping[str, Any] = next(iter(pair.one.runs.values())).figures["work"]
    return work


def _values(trial: CompareTrial) -> dict[str, Any]:
    """Return the values that vary, by the names of their options in YAML."""
    return {option.lstrip("-").replace("-", "_"): yaml.safe_load(value) for option, value in trial.settings}
