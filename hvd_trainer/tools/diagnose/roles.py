"""Tell what a stack does for a step, by the phase that its rank was in and the code that it runs."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_trainer.measure.collective_calls import ENGINES
from hvd_trainer.measure.figures import STEP_PARTS
from hvd_trainer.measure.stack_record import AFTER_STEP, LOADER_START, WORKER, Frame

QUEUE, GIL, SLOW = "queue", "gil", "slow"
"""Causes without a role: waiting for a CPU or for the GIL, and what slow steps take longer than others."""
TEXTS = {
    **STEP_PARTS,
    **dict.fromkeys(("model", "own forward"), STEP_PARTS["forward"]),
    "exchange": "exchange, and waiting for other ranks",
    "loss": "the loss function",
    "metric": "metrics",
    "callback": "callbacks",
    "collective": "collectives of your code",
    "script": "your code between the batches",
    "lone": "what only one rank does",
    "start": "starting loader processes",
    "trainer": "the Trainer's own work",
    QUEUE: "waiting for a CPU",
    GIL: "waiting for the GIL",
    SLOW: "slow steps now and then",
}
"""Roles in words, as parts of a step."""
IN_TRAINER = {
    "callback.on_step_end": "callback",
    "self._interrupts.after_step": "trainer",
    "mean_loss": "loss",
    "meter.add": "metric",
    "self.train_model": "model",
    "scaled.backward": "backward",
    "prefetch": "data",
}
"""Roles of the Trainer's calls."""
OUT_OF_PHASE = ("metric", "callback")
"""Roles of calls that the Trainer makes before it begins another phase."""
LOOP, STEP = "/hvd_trainer/training/loop.py", "/hvd_trainer/optim/step.py"
CONTEXTS = (
    ("/torch/optim/lr_scheduler.py", "update"),
    ("/torch/utils/data/", "data"),
    ("/torch/nn/modules/loss.py", "loss"),
    ("/torch/nn/modules/module.py", "model"),
    ("/torch/autograd/", "backward"),
)
"""Roles by the folder of the code, from the outermost frame on."""
INNER = (
    ("/torch/distributed/", "exchange"),
    ("/horovod/", "exchange"),
    ("/hvd_trainer/hvd/", "exchange"),
    ("/torch/optim/", "update"),
)
"""Roles by the folder of the code, from the innermost frame on; they come before the others in a script."""
WAITING = ("exchange", "collective")
"""Roles in which a rank waits for others: exchanging gradients, and collectives that the user's code calls."""
START = "start"
"""The role of starting a loader's processes until their first batch comes, and of ending them."""
LOADER, STARTING = "/torch/utils/data/dataloader.py", ("__init__", "_shutdown_workers")
"""The file and the functions that do."""
LONE = "lone"
"""The role of what only one rank does."""
EXCHANGING = ("/torch/distributed/", "/horovod/", "/hvd_trainer/hvd/", "/hvd_trainer/backends/")
"""Folders of collectives."""
OTHER_PHASES = ("data", "forward", "backward")
"""Phases in which no optimizer updates anything."""
BY_PHASE = {"collective": "exchange", "forward": "model", "step": "update"}


def role_of(phase: str, frames: Sequence[Frame], *, in_trainer: bool) -> str:
    """Return what a stack does for a step: data, model, loss, backward, exchange, update, metric, callback, ...

    Args:
        frames: from the training loop on, or all of a script.
    """
    if phase == WORKER:  # a forked one has the stack that started it, too
        return WORKER
    if is_own_collective(frames):
        return "collective"
    starts = any(frame.file.endswith(LOADER) and frame.name.endswith(STARTING) for frame in frames)
    if starts or phase == LOADER_START:
        return START
    calls = (frame.call for frame in frames if LOOP in frame.file or STEP in frame.file)
    in_call = next((IN_TRAINER[call] for call in calls if call in IN_TRAINER), None)
    by_phase = BY_PHASE.get(phase, phase)
    if phase in ("collective", "data") and in_call not in OUT_OF_PHASE:
        return by_phase
    if in_call is not None:
        return in_call
    if not in_trainer and (role := _role_in_script(phase, frames)):
        return role
    for frame in frames:
        for folder, role in CONTEXTS:
            if folder in frame.file:
                # After a step a model's forward pass is an evaluation.
                return "script" if phase == AFTER_STEP and role in ("model", "loss") else role
    if not in_trainer and phase in ("forward", "callback", AFTER_STEP):
        return "own forward" if phase == "forward" else "script"
    return by_phase


def _role_in_script(phase: str, frames: Sequence[Frame]) -> str:
    """Return the role by a script's calls of its engine, its optimizer or a loss function; empty without any."""
    if frames and frames[-1].name == "_distributed_broadcast_coalesced":  # of DistributedDataParallel's buffers
        return "exchange"
    for frame in reversed(frames):
        for folder, role in INNER:
            # A step that is given a closure, as Lightning's, calls what is another phase.
            if folder in frame.file and (role != "update" or phase not in OTHER_PHASES):
                return role
    functions = (frame.name for frame in frames if "/torch/nn/functional.py" in frame.file)
    return "loss" if any(name.endswith(("loss", "cross_entropy")) for name in functions) else ""


def is_own_collective(frames: Sequence[Frame]) -> bool:
    """Return whether a stack is in a collective that the user's code calls, or waits for one."""
    last = max((n for n, frame in enumerate(frames) if frame.owner == "user"), default=None)
    if last is None:
        return False
    below = frames[last + 1 :]
    if not below:  # what an asynchronous call returns waits in C++
        return frames[last].call.endswith(".wait")
    if any(part in frame.file for frame in below for part in ENGINES):
        return False
    return any(folder in frame.file for frame in below for folder in EXCHANGING)
