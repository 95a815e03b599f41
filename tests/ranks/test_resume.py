"""Exact resume: an interrupted run ends as one that was not, bit for bit; on other ranks, within rounding."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import resume_checks
from combinations import case
from launchers import QUICKEST, launch, requires, run_ranks, start
from records import lines

pytestmark = pytest.mark.warm

RANKS = {"ddp": 4, "horovod": 3}
"""Two ranks hide in which order values are added: a + b = b + a."""


@pytest.fixture(scope="module", params=[case("ddp"), case("horovod")])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("runs"))
    return run_ranks(
        resume_checks.interrupted_and_not,
        num_processes=RANKS[request.param],
        args=(request.param, folder),
        timeout_s=240,
    )


@pytest.mark.parametrize("name", resume_checks.SETUPS)
def test_resumed_run_ends_with_the_same_bits(runs: list[dict[str, Any]], name: str) -> None:
    """The run has dropout, batch norm, transforms, a scheduler, a scaler, and an interrupted epoch's figures."""
    for rank in runs:
        whole, resumed = rank[name]
        for key, tensor in whole["weights"].items():
            assert tensor.equal(resumed["weights"][key]), key
        assert resumed["optimizer"] == whole["optimizer"]
        assert resumed["records"] == whole["records"]


@pytest.mark.parametrize("name", resume_checks.SETUPS)
def test_resumed_run_trains_each_sample_once_per_epoch(runs: list[dict[str, Any]], name: str) -> None:
    """The resumed run continues the second epoch after 2 steps of 5, and must repeat no sample."""
    seen = Counter(sample for rank in runs for sample in rank[name][1]["seen"])
    # Ranks that have no equal shares train on some samples twice in each epoch; of a stream of samples on each
    # once, and of one of batches they leave the last out.
    left_out = resume_checks.ODD % len(runs) if "stream of batches" in name else 0
    per_epoch = resume_checks.ODD - left_out if "stream" in name else resume_checks.NUM
    assert sum(seen.values()) == 2 * per_epoch - 2 * resume_checks.GLOBAL_BATCH
    assert set(seen.values()) <= {1, 2, 3}
    assert len(seen) == resume_checks.ODD - left_out


@pytest.mark.parametrize(
    ("backend", "size"), [case("ddp", 3), case("horovod", 3), case("ddp", 4), case("horovod", 4, when="long")]
)
def test_run_resumes_after_any_step_on_three_ranks_and_more(backend: str, size: int, tmp_path: Path) -> None:
    """The first exchange of a process had another layout, in which a ring adds in another order of ranks."""
    args = (backend, str(tmp_path))
    ranks = run_ranks(resume_checks.resumed_after_each_step, num_processes=size, args=args, timeout_s=240)
    for name in ranks[0]:
        (whole, *resumed), *others = [results[name] for results in ranks]
        assert resumed == [whole] * (resume_checks.STEPS - 1), name
        assert others == [[whole, *resumed]] * (size - 1), name


@cache
def saved(backend: str, size: int) -> tuple[str, list[dict[str, Any]]]:
    """Interrupt in the middle of the second epoch; return the folder, and what each rank did."""
    folder = tempfile.mkdtemp(prefix="hvd-saved-")
    atexit.register(shutil.rmtree, folder)
    return folder, run_ranks(resume_checks.first_part, num_processes=size, args=(backend, folder))


@cache
def undisturbed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return resume_checks.run("single", folder, {}, plain=True, num=resume_checks.NUM, global_batch=48)


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
    resumed = run_ranks(
        resume_checks.second_part,
        num_processes=size,
        args=(backend, str(tmp_path), folder),
    )
    # Three epochs in all, of which the first 4 steps were saved, and the fifth was lost.
    share = resume_checks.NUM // len(first) + 48 // len(first)
    seen = Counter(sample for rank in first for sample in rank["seen"][:share])
    seen += Counter(sample for rank in resumed for sample in rank["seen"])
    assert seen == Counter(dict.fromkeys(range(resume_checks.NUM), resume_checks.EPOCHS))
    for rank in resumed:
        for key, tensor in whole["weights"].items():
            assert float((rank["weights"][key] - tensor).norm() / tensor.norm()) < 1e-5, key
        for ours, theirs in zip(rank["records"], whole["records"][1:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


ENGINES = [case("ddp"), case("horovod")]


@pytest.mark.parametrize("backend", ENGINES)
def test_resume_takes_memory_for_the_state_once(backend: str, tmp_path: Path) -> None:
    """Each rank had the whole state a second time, sharded or not."""
    shards = ["none", "optimizer", *(["full"] if backend == "ddp" else [])]
    args = (backend, str(tmp_path), shards)
    for rank in run_ranks(resume_checks.memory_of_resumes, num_processes=2, args=args):
        for shard, (state_bytes, peak_bytes) in rank.items():
            print(
                f"{backend} {shard}: state {state_bytes / 1e6:.0f} MB, peak {peak_bytes / state_bytes:.2f} of it"
            )
            assert state_bytes > 150e6
            assert peak_bytes < 1.3 * state_bytes, shard


@pytest.mark.long
@pytest.mark.parametrize("backend", ENGINES)
def test_state_above_2_gib_resumes(backend: str, tmp_path: Path) -> None:
    """Horovod counts the bytes of a message in an int."""
    args = (backend, str(tmp_path), ["none"], 2**29 + 1000)
    for rank in run_ranks(resume_checks.memory_of_resumes, num_processes=2, args=args, timeout_s=300):
        state_bytes, peak_bytes = rank["none"]
        print(f"{backend}: state {state_bytes / 1e6:.0f} MB, peak {peak_bytes / state_bytes:.2f} of it")
        assert state_bytes > 2**31
        assert peak_bytes < 1.3 * state_bytes


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
        assert running.wait(60).returncode != 0
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


@pytest.mark.parametrize(("replicas", "cut"), [(3, "1,3"), (3, "2,2"), (2, "1,3")])
def test_resume_says_that_the_model_is_cut_elsewhere(replicas: int, cut: str, tmp_path: Path) -> None:
    """`--balance time` may cut elsewhere, and from three replicas on that changes the order of sums."""
    argv = [*REVIEWS.split(), "--global-batch-size", "12", "--stages", "2", "--chunks", "2", "--backend", "ddp"]
    argv += ["--log-dir", str(tmp_path), "--layers", "2"]
    launch(QUICKEST, 2 * replicas, [*argv, "--balance", "2,2", "--max-steps", "3"])
    resumed = launch(QUICKEST, 2 * replicas, [*argv, "--balance", cut, "--max-steps", "5", "--resume", "auto"])
    said = "resume   the model is cut into 1,3 blocks, and was into 2,2: "
    assert (said in resumed.stdout) == (replicas == 3 and cut == "1,3"), resumed.stdout
    assert ("For the same type --balance 2,2" in resumed.stdout) == (said in resumed.stdout)


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
