"""The two scripts written by hand: they run as their docstrings say, and they agree bit for bit.

They are what the package's numbers are compared with, so they are compared with each other first.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launchers import REPOSITORY, Result, launch
from requirements import requires
from safetensors.torch import load_file

EXAMPLES = REPOSITORY / "examples" / "mnist"
MNIST = REPOSITORY.parent / "shared" / "data" / "mnist"

pytestmark = [
    pytest.mark.warm,
    pytest.mark.skipif(not (MNIST / "MNIST" / "raw").is_dir(), reason="needs MNIST in ../shared/data/mnist"),
]

SCRIPTS = {"horovodrun": "plain_horovod.py", "torchrun": "plain_ddp.py"}


def train(launcher: str, num_processes: int, *options: str, script: str = "") -> Result:
    path = EXAMPLES / (script or SCRIPTS[launcher])
    argv = [str(path), "--data-dir", str(MNIST), *options]
    return launch(launcher, num_processes, argv)


@pytest.mark.long
@requires("horovodrun")
def test_plain_examples_agree_at_two_ranks(tmp_path: Path) -> None:
    """With momentum, weight decay, clipping, accumulation and dropout."""
    options = "--optimizer sgd --lr 0.05 --weight-decay 1e-3 --max-norm 0.5 --accumulate 3 --batch-size 32"
    weights, results = [], []
    for launcher in SCRIPTS:
        model, record = tmp_path / f"{launcher}.safetensors", tmp_path / f"{launcher}.json"
        train(launcher, 2, *options.split(), "--max-steps", "20", "--save", str(model), "--json", str(record))
        weights.append(model.read_bytes())
        results.append(json.loads(record.read_text()))
    horovod, ddp = (result["epochs"][0] for result in results)

    assert weights[0] == weights[1]
    assert [result["backend"] for result in results] == ["horovod", "ddp"]
    for key in ("samples", "step_losses", "train_loss", "val_loss", "val_accuracy"):
        assert horovod[key] == ddp[key], key
    assert len(set(ddp["step_losses"])) == len(ddp["step_losses"])
    # Each of the 10,000 samples counted once: with padding this would be no whole number.
    assert (ddp["val_accuracy"] * 10_000) == pytest.approx(round(ddp["val_accuracy"] * 10_000))


@requires("horovodrun")
def test_saved_model_is_bare_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    done = train("python", 1, "--max-steps", "2", "--save", str(path), script="plain_horovod.py")
    state = load_file(path)
    assert set(state) == {
        f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2") for part in ("weight", "bias")
    }
    assert sum(tensor.numel() for tensor in state.values()) == 21_840
    assert done.stdout.count("epoch 0:") == 1


@pytest.mark.long
def test_ddp_leaves_no_thread_behind(tmp_path: Path) -> None:
    """Gloo's threads at interpreter exit abort one process in ten (SIGABRT): none may be left.

    DistributedDataParallel imports torch.distributed.nn.functional, whose functions take the
    process group of that moment as a default argument. It then outlives destroy_process_group(),
    and so do its threads; one that frees a tensor while Python finalizes is ended inside a
    destructor, which C++ answers with std::terminate.
    """
    wrapper = tmp_path / "count_threads.py"
    wrapper.write_text(
        "import os, runpy, sys\n"
        "from pathlib import Path\n"
        f"sys.argv[0] = {str(EXAMPLES / 'plain_ddp.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "tasks = Path('/proc/self/task').iterdir()\n"
        "names = [task.joinpath('comm').read_text() for task in tasks]\n"
        "print('left:', [name for name in names if 'gloo' in name])\n"
    )
    argv = [str(wrapper), "--data-dir", str(MNIST), "--max-steps", "3"]
    assert launch("torchrun", 2, argv).stdout.count("left: []") == 2


@pytest.mark.long
@requires("horovodrun")
@pytest.mark.parametrize(
    ("launcher", "size", "script", "found", "command"),
    [
        ("python", 1, "plain_ddp.py", "RANK is not set", "torchrun --nproc-per-node 2"),
        (
            *("torchrun", 2, "plain_horovod.py", "torchrun started 2 processes, but Horovod sees 1"),
            "horovodrun -np 2 python",
        ),
    ],
)
def test_wrong_launcher_says_what_to_type(launcher: str, size: int, script: str, found: str, command: str) -> None:
    argv = [str(EXAMPLES / script), "--data-dir", str(MNIST)]
    failed = launch(launcher, size, argv, check=False)
    assert failed.returncode != 0
    assert found in failed.stderr
    assert f"Type: {command}" in failed.stderr
