"""Resumes on other ranks and engines, after a kill, and in little memory; test_bits.py has all others."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import bit_jobs
import pytest
import torch
from bit_jobs import NUM, Numbered, noted
from combinations import case
from launchers import QUICKEST, in_ranks, launch, requires, start
from peak_memory import PeakMemory
from records import lines
from torch import Tensor, nn
from trainings import train

from hvd_trainer import TensorData
from hvd_trainer.checkpoint.manager import CheckpointManager
from hvd_trainer.utils.tensors import local_rows, tensors_in

pytestmark = pytest.mark.warm

PLAIN = partial(noted, num=NUM, make=partial(Numbered, plain=True), global_batch_size=48)


@cache
def saved(backend: str, size: int) -> tuple[str, list[dict[str, Any]]]:
    """Save in the middle of the second epoch, then train two steps more, which are lost.

    Returns:
        The folder, and what each rank did.
    """
    folder = tempfile.mkdtemp(prefix="hvd-saved-")
    atexit.register(shutil.rmtree, folder)
    return folder, in_ranks(size, bit_jobs.run, backend, folder, PLAIN, save_every_steps=4, stop_after=5)


@cache
def undisturbed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return bit_jobs.run("single", folder, PLAIN)


@requires("horovod")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("horovod", 4), ("ddp", 2)),
        (("horovod", 4), ("horovod", 3)),
        (("horovod", 4), ("single", 1)),
        (("ddp", 2), ("horovod", 4)),
    ],
    ids=lambda part: "-".join(map(str, part)),
)
def test_resume_on_other_ranks_and_engines(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    """Every sample is used once, and the weights are within 1e-5 of an undisturbed run of one process."""
    (folder, first), whole = saved(*before), undisturbed()
    backend, size = after
    resumed = in_ranks(size, bit_jobs.run, backend, str(tmp_path), PLAIN, resume=folder)
    # Three epochs in all, of which the first 4 steps were saved, and the fifth was lost.
    share = NUM // len(first) + 48 // len(first)
    seen = Counter(sample for rank in first for sample in rank["seen"][:share])
    seen += Counter(sample for rank in resumed for sample in rank["seen"])
    assert seen == Counter(dict.fromkeys(range(NUM), bit_jobs.EPOCHS))
    for rank in resumed:
        for key, tensor in whole["state"].items():
            assert float((rank["state"][key] - tensor).norm() / tensor.norm()) < 1e-5, key
        for ours, theirs in zip(rank["records"], whole["records"][1:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


WIDTH = 2830
"""Rows and columns of a weight of 32 MB."""


class Wide(nn.Module):
    """A model of 160 MB in 5 blocks, beside a frozen tensor of so many numbers."""

    def __init__(self, frozen: int, value: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)))
        self.frozen = nn.Parameter(torch.full((frozen,), value), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs.repeat(1, WIDTH))[:, :2]


def own_bytes(model: nn.Module, state: Any) -> int:
    """Return the bytes of a model and its optimizer's state in this rank."""
    return sum(local_rows(tensor)[0].nbytes for tensor in tensors_in([model.state_dict(), dict(state)]))


def memory_of_resumes(backend: str, folder: str, shards: list[str], frozen: int) -> dict[str, tuple[int, int]]:
    """Train a step and resume after it, with each `--shard`; return its state and its peak in a rank, in bytes.

    The peak is that of the model before, and of what restoring takes; buffers of gradients are not part of it.
    """
    data = TensorData(torch.ones(2, 1), torch.zeros(2).long())
    momentum = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    measured, restore = {}, CheckpointManager.restore

    def measure(manager: CheckpointManager, **how: Any) -> bool:
        own = manager.state.model, manager.state.others["optimizer"].state
        before = own_bytes(*own)
        with PeakMemory() as peak:
            is_restored = restore(manager, **how)
        if is_restored:
            assert local_rows(own[0].frozen)[0].eq(1).all(), "as it was saved"
            measured[shard] = own_bytes(*own), before + peak.grown_bytes
        return is_restored

    for shard in shards:
        for value, resume in ((1.0, "none"), (0.0, "auto")):
            how = {"shard": shard, "log_dir": f"{folder}/{shard}", "resume": resume, "save_every_s": None}
            make = partial(Wide, frozen, value)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CheckpointManager, "restore", measure)
                patch.setattr("hvd_trainer.training.trainer._finished", set())  # as in a process of its own
                train(backend, make, data, optimizer=momentum, epochs=1, batch_size=1, **how)
            gc.collect()
    return measured


LARGE = 2**29 + 1000
"""Numbers of more than 2 GiB."""


@pytest.mark.parametrize(
    ("backend", "shards", "frozen"),
    [
        case("ddp", ["none", "optimizer", "full"], 2),
        case("horovod", ["none", "optimizer"], 2),
        # Horovod counts the bytes of a message in an int.
        *(case(engine, ["none"], LARGE, when="long", name=f"{engine}-large") for engine in ("ddp", "horovod")),
    ],
)
def test_resume_takes_memory_for_the_state_once(
    backend: str, shards: list[str], frozen: int, tmp_path: Path
) -> None:
    """Each rank had the whole state a second time, sharded or not."""
    for rank in in_ranks(2, memory_of_resumes, backend, str(tmp_path), shards, frozen, timeout_s=300):
        for shard, (state_bytes, peak_bytes) in rank.items():
            print(f"{backend} {shard}: {state_bytes / 1e6:.0f} MB, peak {peak_bytes / state_bytes:.2f} of it")
            assert state_bytes > max(4 * frozen, 150e6)
            assert peak_bytes < 1.3 * state_bytes, shard


DIGITS = "-m hvd_trainer.mnist --dataset digits --repeat 1 --save-every-steps 5 "
REVIEWS = (
    "-m hvd_trainer.imdb --dataset synthetic --synthetic-reviews 96 --sequence-length 16 --vocabulary 300 "
    "--global-batch-size 16 --device cpu --save-every-steps 5 "
)
KILLED = [
    # With dropout and warm-up.
    case(
        f"{DIGITS} --batch-size 64 --epochs 16 --lr-scaling linear --warmup-epochs 1.5",
        *(("horovod", 3), ("ddp", 3), ("ddp", 3)),
    ),
    # Two ranks are the reference for four.
    case(
        f"{DIGITS} --batch-size 32 --epochs 12 --reproducible 4",
        *(("horovod", 4), ("horovod", 4), ("ddp", 2)),
        when="long",
    ),
    # The checkpoint has the whole model.
    case(
        f"{REVIEWS} --epochs 20 --chunks 4",
        *(("horovod --stages 2 --schedule zero-bubble", 2), ("single", 1), ("ddp --stages 2", 2)),
        when="long",
    ),
]


@requires("horovod")
@pytest.mark.parametrize(("job", "killed", "resumed", "undisturbed"), KILLED)
def test_killed_job_resumes_with_the_same_bits(
    job: str, killed: tuple[str, int], resumed: tuple[str, int], undisturbed: tuple[str, int], tmp_path: Path
) -> None:
    """One rank under horovodrun gets kill -9, and the job resumes on an engine and ranks that may be others."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def argv(engine: str, folder: Path) -> list[str]:
        return [*job.split(), "--log-dir", str(folder), "--backend", *engine.split()]

    launch(QUICKEST, undisturbed[1], argv(undisturbed[0], whole))
    with start("horovodrun", killed[1], argv(killed[0], parts)) as running:
        running.wait_for_output("epoch 2/")
        running.ranks(killed[1])[1].kill()
        assert running.wait().returncode != 0
    again = launch(QUICKEST, resumed[1], [*argv(resumed[0], parts), "--resume", "auto"])
    restored = "model, optimizer, random" if killed[1] == resumed[1] else "model, optimizer"
    assert f"resume   restored {restored}" in again.stdout
    assert "epoch 1/" not in again.stdout
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    if resumed != undisturbed:
        return  # their figures are summed in another order
    same = ("event", "step", "epoch", "samples", "lr", "train_loss", "train_accuracy", "val_loss")
    for mine, theirs in zip(lines(whole), lines(parts), strict=True):
        assert [mine.get(key) for key in same] == [theirs.get(key) for key in same]


@pytest.mark.parametrize(("replicas", "cuts"), [(3, ("1,3", "2,2")), (2, ("1,3",))])
def test_resume_says_that_the_model_is_cut_elsewhere(replicas: int, cuts: tuple[str, ...], tmp_path: Path) -> None:
    """`--balance time` may cut elsewhere, and from three replicas on that changes the order of sums."""
    argv = [*REVIEWS.split(), "--global-batch-size", "12", "--stages", "2", "--chunks", "2", "--backend", "ddp"]
    argv += ["--layers", "2", "--log-dir"]
    launch(QUICKEST, 2 * replicas, [*argv, str(tmp_path / "first"), "--balance", "2,2", "--max-steps", "3"])
    for cut in cuts:
        folder = shutil.copytree(tmp_path / "first", tmp_path / cut)
        options = ["--balance", cut, "--max-steps", "5", "--resume", "auto"]
        resumed = launch(QUICKEST, 2 * replicas, [*argv, str(folder), *options]).stdout
        is_said = replicas == 3 and cut == "1,3"
        assert ("resume   the model is cut into 1,3 blocks, and was into 2,2: " in resumed) == is_said, resumed
        assert ("For the same type --balance 2,2" in resumed) == is_said


ON_ANOTHER_HOST = """
import os, sys
words = [sys.executable, "-m", "hvd_trainer.mnist", "--dataset=digits", "--repeat=1", "--log-dir", *sys.argv[1:]]
if os.environ["RANK"] == "1":
    hide = f'mount -t tmpfs none {sys.argv[1]} && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", hide, "sh", *words]
os.execvp(words[0], words)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, and unshare of util-linux"
)
def test_sharded_job_is_refused_at_its_start_where_hosts_share_no_folder(tmp_path: Path) -> None:
    """It trained until its first checkpoint, and then ended."""
    job, logs = tmp_path / "job.py", tmp_path / "logs"
    job.write_text(ON_ANOTHER_HOST)
    logs.mkdir()
    words = [str(job), str(logs), "--backend", "ddp", "--max-steps", "5"]
    result = launch("torchrun", 2, [*words, "--shard", "full"], check=False)
    assert result.returncode == 1, result.stderr
    assert f"{logs} of " in result.stderr
    assert "name a --log-dir that all hosts share" in result.stderr
    assert "train loss" not in result.stdout
    launch("torchrun", 2, words)
