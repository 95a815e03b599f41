"""Write docs/migrate.md: how scripts are migrated, from the table of rules and from what it makes of two scripts.

python docs/migrate_page.py writes the file; tests/unit/project/test_docs.py fails if it is out of date.
"""

from __future__ import annotations

import os
from pathlib import Path

from hvd_trainer.tools.migrate.migration import migrate
from hvd_trainer.tools.migrate.table import TABLE, Rule

ROOT = Path(__file__).parent.parent
SCRIPTS = ("tests/scripts/horovod_mnist.py", "examples/mnist/plain_horovod.py")
BEGIN = """\
# From Horovod to PyTorch

A script for `horovod.torch` can stay as it is and [run on either engine](scripts.md), or change one import. Or
it becomes one for plain torch.distributed and DistributedDataParallel, which needs neither Horovod nor this
package:

```bash
hvd-trainer migrate train.py
hvd-trainer migrate train.py --prove -np 3 -- --epochs 1
hvd-trainer migrate train.py --write
```

The first prints a diff, in colours on a terminal; with `--json` it prints what is changed and left, for
programs. With `--check` the exit code is 1 if a file would change, and 0 once it is migrated.

The second runs the script as it is, on Horovod or, where that is not installed, on `hvd_trainer.hvd`, and as the
diff has it under torchrun, with a copy of its project. By [parity](verify.md#parity) it says `the same bits
through 20 steps`, or what differs first and the line behind it. For that each gradient is a message of its own
in both: from three ranks on, the order in which Gloo adds up depends on the place in a message, and Horovod
packs its messages as gradients come. On 3, 5, 6 and other ranks that are no power of two the last bit may differ
even so, as DDP divides before the sum. After the first step each rank has a seed of its own, also where the
script seeds all alike: without an exchange they would train alike.

The third changes the file; with changes in it that git does not have, only with `--force`. A folder is migrated
together: models, and `hvd` itself, are followed through calls from file to file; files that do not import each
other decide for themselves. `horovodrun` and `mpirun` become torchrun in the folder and beside the file: in
shell and Slurm scripts, READMEs, Makefiles, Dockerfiles, CI and Kubernetes files. What is not certain, such as
several hosts, is listed with what to type. With `--write` the last line says how to start it.

Comments and messages that name Horovod stay, as their author knows what of them still holds; their lines are
listed. Only a leading `Horovod:`, and names of migrated calls, are put right, and a line that goes takes its
comment along. What cannot be migrated, or is not seen well enough, is left as it is and listed with its line and
what to do: it still works, by `from hvd_trainer import hvd`, so a half-migrated script runs. So is every other
name, string or variable of Horovod's in code: `HorovodStrategy`, `"horovod.torch"`, `HOROVOD_RANK`, `mpi4py`. A
file of a folder that is not Python 3, or uses Horovod for TensorFlow or Keras, is left and named. Exit codes: 0,
all is migrated; 3, something is left; 1, `--prove` has found a difference; 2, a mistake.

<!-- Written by `python docs/migrate_page.py`: change the rules and not this page. -->

## What each call becomes

The last column names the case of `tests/support/migrate_cases.diff` that fails without the rule.

| Horovod | becomes | why | test |
|---|---|---|---|
"""
LEFT = """\

## What is left

| Horovod | by hand |
|---|---|
"""
MORE_LEFT = """\
| `horovod.ray.RayExecutor`, `horovod.run`; `HorovodRunner` with another `np` than a number; `horovod.spark.run` \
with a result | `ray.train.torch.TorchTrainer`; torchrun; `TorchDistributor`, which returns that of rank 0 |
| names that may come in another order on each rank, as in a loop over `items()` | make the order the same: \
torch.distributed knows no names |
| a collective of a tensor that is not seen to be detached, as its gradient may be used \
| `.detach()`, or `torch.distributed.nn.functional` |
| a parameter that is frozen after the model is wrapped, for whose gradient DDP waits | freeze it before, or \
`find_unused_parameters=True` |
| an optimizer of a loop before `join` that calls other collectives: then all is | call them behind the loop |
| a model that is trained by other calls than its own | wrap what is called |
| a model that another variable or object has before it is wrapped, and trains | wrap it before |
| one of several optimizers in files that import each other: then all are | as for that one |
| a model that `amp.initialize` or the like replaces after the optimizer is wrapped | wrap it after that |

`sparkdl.HorovodRunner` and `horovod.spark.run` become PySpark's `TorchDistributor`, and Ray's `HorovodTrainer` its
`TorchTrainer`.

What is not followed gets the wrapped model: a function that is not in these files, a dictionary, a list. It trains
right, and the line is listed, as it may save or inspect the model, which then is `model.module`.

Where Horovod has a trap that changes numbers, the result is without it, and `--prove` names it: most scripts
call `broadcast_optimizer_state` of a new optimizer, [which takes a step](scripts.md#the-numbers-of-horovod). It
then compares once more, with a Horovod that does not; if these are the same, so is the exit code, 0.

## Two diffs
"""


def page() -> str:
    """Return the page."""
    rows = [f"| {_calls(rule.names)} | {_becomes(rule)} | {rule.why} | {rule.test} |\n" for rule in TABLE.rules]
    left = [f"| {_calls(names)} | {advice} |\n" for names, advice in TABLE.by_hand.items()]
    return "".join([BEGIN, *rows, LEFT, *left, MORE_LEFT, *map(_diff, SCRIPTS)])


def _calls(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _becomes(rule: Rule) -> str:
    if rule.special:
        return f"`{rule.result}`" if rule.result.endswith(")") and " " not in rule.result else rule.result
    lines = [*rule.lines, *([rule.result] if rule.result != "{x}" else [])]
    text = "; ".join(" ".join(line.split()) for line in lines)
    for word, stands_for in {
        "{tensor:name}": "{tensor}",
        "{copy}": "{tensor}.clone()",
        "{divided}": f" /= {SIZE}",
        "{values}": "{model}.state_dict().values()",
    }.items():
        text = text.replace(word, stands_for)
    return f"`{text.replace('{op}', '').replace('{', '').replace('}', '')}`"


def _diff(name: str) -> str:
    path = ROOT / name
    (result,) = migrate({path: path.read_text()})
    text = result.diff().replace(f"{ROOT}{os.sep}", "")
    return f"\n[{path.name}](../{name}):\n\n```diff\n{text}```\n"


SIZE = "dist.get_world_size()"

if __name__ == "__main__":
    (Path(__file__).parent / "migrate.md").write_text(page())
