"""The same weights on both engines, in one process, and in the scripts written by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import case
from launchers import QUICKEST, launch, requires, run_ranks
from torch import Tensor, nn
from trainings import options_of

from hvd_trainer import OptionError, TensorData, Trainer, TrainerOptions
from hvd_trainer.jobs.models import conv_net

SAMPLES, LENGTH = 452, {"epochs": 2, "global_batch_size": 48}  # 9 windows of 48 and one of 20 per epoch: 20 steps


def small_net() -> nn.Module:
    """Return a net without dropout, which would differ between numbers of ranks."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4)
    )


def data(shape: tuple[int, ...]) -> TensorData:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 4, (SAMPLES,), generator=generator)
    inputs = torch.randn(SAMPLES, *shape, generator=generator) + targets.view(-1, *[1] * len(shape))
    return TensorData(inputs, targets)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1)


def train_all(backend: str) -> tuple[int, dict[str, dict[str, Tensor]]]:
    """Return the final weights of three set-ups from one launch."""
    weights: dict[str, dict[str, Tensor]] = {}
    rank = 0
    for name, accumulate, max_norm, model_of, optimizer_of, shape in (
        ("sgd, clipping, accumulation", 2, 0.5, small_net, sgd, (16,)),
        ("adamw", 1, None, small_net, adamw, (16,)),
        ("adamw, clipping, accumulation, dropout", 2, 1.0, conv_net, adamw, (1, 28, 28)),
    ):
        with Trainer(options_of(backend, **LENGTH, accumulate=accumulate, max_norm=max_norm)) as trainer:
            rank = trainer.world.rank
            model = model_of()
            history = trainer.fit(model, optimizer_of(model), nn.functional.cross_entropy, data(shape))
            assert history.end["step"] == 20
            weights[name] = {key: value.clone() for key, value in model.state_dict().items()}
    return rank, weights


@cache
def final_weights(backend: str, size: int) -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(train_all, num_processes=size, args=(backend,), timeout_s=200)


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest |a - b| / |b| over all tensors, as norms."""
    return max(float((ours[k] - theirs[k]).norm() / theirs[k].norm()) for k in theirs)


@requires("horovod")
@pytest.mark.parametrize("size", [3, 4])
def test_engines_give_the_same_bits(size: int) -> None:
    """The order of sums matters, too: Horovod's buckets are laid out as DDP's."""
    for horovod, ddp in zip(final_weights("horovod", size), final_weights("ddp", size), strict=True):
        for name, tensors in ddp.items():
            for key, tensor in tensors.items():
                assert torch.equal(horovod[name][key], tensor), f"{name}: {key}"


def train_in_bfloat16(backend: str, compression: str) -> tuple[int, tuple[float, dict[str, Tensor]]]:
    """Train a model in bfloat16, or one whose gradients are sent in it; return the final loss and weights."""
    with Trainer(options_of(backend, **LENGTH, compression=compression)) as trainer:
        dtype = torch.bfloat16 if compression == "none" else torch.float32
        model, points = small_net().to(dtype), data((16,))
        train_data = TensorData(points.inputs.to(dtype), points.targets)
        history = trainer.fit(model, sgd(model), nn.functional.cross_entropy, train_data)
        return trainer.world.rank, (history.epochs[-1]["train_loss"], model.state_dict())


@requires("horovod")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_engines_give_the_same_bits_in_bfloat16(size: int, compression: str) -> None:
    """On three ranks DDP divides a compressed gradient after rounding it, and Horovod before."""
    runs = {
        backend: run_ranks(train_in_bfloat16, num_processes=size, args=(backend, compression))
        for backend in ("horovod", "ddp")
    }
    (loss, weights), *others = runs["horovod"] + ([] if (size, compression) == (3, "bf16") else runs["ddp"])
    assert loss < 1.0
    for _, other in others:
        assert all(torch.equal(weights[key], tensor) for key, tensor in other.items())


class Bags(nn.Module):
    """An embedding with sparse gradients; optionally a layer with dense ones, and one that is frozen."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(30, 4, sparse=True)
        self.frozen = nn.Embedding(30, 4, sparse=True).requires_grad_(False)
        self.layer = nn.Linear(4, 4) if dense else nn.Identity()

    def forward(self, words: Tensor) -> Tensor:
        return self.layer(self.table(words) + self.frozen(words).mean(1))


def train_sparse(backend: str) -> tuple[int, list[dict[str, Tensor]]]:
    """Train models with sparse gradients, in one pass per step and in three."""
    words = torch.randint(0, 30, (SAMPLES, 6), generator=torch.Generator().manual_seed(2))
    points = TensorData(words, words[:, 0] % 4)
    results = []
    for dense, accumulate in ((True, 1), (True, 3), (False, 1)):
        with Trainer(options_of(backend, epochs=1, global_batch_size=36, accumulate=accumulate)) as trainer:
            model = Bags(dense).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            trainer.fit(model, optimizer, nn.functional.cross_entropy, points)
            results.append(model.state_dict())
    return trainer.world.rank, results


@requires("horovod")
@pytest.mark.parametrize("size", [2, 3])
def test_engines_average_sparse_gradients(size: int) -> None:
    runs = [run_ranks(train_sparse, num_processes=size, args=(backend,)) for backend in ("horovod", "ddp")]
    for ranks in zip(*(results for run in runs for results in run), strict=True):
        for other in ranks[1:]:
            assert relative_difference(other, ranks[0]) < 1e-12


@pytest.mark.parametrize("size", [2, 4])  # three would train on one sample twice in each epoch
@pytest.mark.parametrize("backend", [case("ddp"), case("horovod")])
def test_ranks_train_the_weights_of_one_process(backend: str, size: int) -> None:
    """The global batch in one process differs by the order of sums only: 1e-5 after 20 steps."""
    (alone,) = final_weights("single", 1)
    for weights in final_weights(backend, size):
        for name in ("sgd, clipping, accumulation", "adamw"):
            assert relative_difference(weights[name], alone[name]) < 1e-5, name


def train_with(
    options: TrainerOptions, ddp_kwargs: dict[str, Any] | None = None
) -> tuple[int, tuple[int, dict[str, Tensor]]]:
    """Return the number of CPU threads while training, and the final weights of the second set-up above."""
    with Trainer(options, ddp_kwargs=ddp_kwargs) as trainer:
        model = small_net()
        trainer.fit(model, adamw(model), nn.functional.cross_entropy, data((16,)))
        ddp: Any = getattr(trainer.backend, "_ddp", None)
        assert all(getattr(ddp, name) == value for name, value in (ddp_kwargs or {}).items())
        return trainer.world.rank, (torch.get_num_threads(), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("backend", "ddp_kwargs", "variables"),
    [
        case("ddp", {"gradient_as_bucket_view": False}, {}, name="ddp"),
        case("horovod", None, {"HOROVOD_CACHE_CAPACITY": "0"}, name="horovod"),
    ],
)
def test_speed_options_change_no_bit(
    backend: str, ddp_kwargs: dict[str, Any] | None, variables: dict[str, str]
) -> None:
    wanted = options_of(backend, **LENGTH, workers=1, prefetch=4)
    results = run_ranks(train_with, num_processes=3, args=(wanted, ddp_kwargs), env=variables)
    for (_, weights), usual in zip(results, final_weights(backend, 3), strict=True):
        for key, tensor in usual["adamw"].items():
            assert torch.equal(weights[key], tensor), key


def test_prefetch_needs_loader_processes() -> None:
    with pytest.raises(OptionError, match="--prefetch 4 is for loader processes, .* add --workers 2"):
        train_with(options_of(epochs=1, prefetch=4))


def test_threads_option_sets_each_rank() -> None:
    """More threads than cores are allowed; they cut sums elsewhere, and the last bits are not compared."""
    results = run_ranks(train_with, num_processes=2, args=(options_of("ddp", threads=3, max_steps=1),))
    assert [threads for threads, _ in results] == [3, 3]


@pytest.mark.long
@requires("horovod")
def test_job_equals_the_plain_example(tmp_path: Path, mnist_dir: Path) -> None:
    """An epoch of MNIST at 2 ranks, dropout included, on both engines and by hand: the same file, byte for byte.

    The two scripts are compared with each other in test_examples_plain.py.
    """
    options = (
        "--epochs 1 --batch-size 512 --lr 0.01 --optimizer sgd --max-norm 1.0 --accumulate 2 --seed 3 "
        f"--data-dir {mnist_dir}"
    ).split()
    hand = tmp_path / "hand.safetensors"
    launch(QUICKEST, 2, ["examples/mnist/plain_ddp.py", *options, "--save", str(hand)], timeout_s=200)
    for backend in ("ddp", "horovod"):
        folder = tmp_path / backend
        argv = ["-m", "hvd_trainer.mnist", "--backend", backend, *options, "--log-dir", str(folder)]
        launch(QUICKEST, 2, argv, timeout_s=200)
        assert (folder / "model.safetensors").read_bytes() == hand.read_bytes(), backend
