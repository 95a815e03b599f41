"""`hvd.DistributedOptimizer`: the real one's signature and bits, and what is right where the real one is not."""

from __future__ import annotations

import importlib
import inspect
import json
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hvd_checks import run_checks
from launchers import QUICKEST, LaunchError, in_ranks, launch, requires, run_ranks
from torch import Tensor, nn
from waiting import wait_for

from hvd_trainer import hvd
from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.controller import DOZE_S
from hvd_trainer.hvd.gradient_buckets import NegotiatedBuckets

pytestmark = pytest.mark.warm


class Net(nn.Module):
    """Two heads, of which a rank may use one; optionally on top of an embedding."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.below = nn.Embedding(10, 6, sparse=True) if sparse else nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, heads: tuple[int, ...] = (0, 1)) -> Tensor:
        y = torch.relu(self.below(x))
        return torch.stack([self.heads[head](y) for head in heads]).square().sum()


def wrapped_model(**how: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **how)


def backward(model: nn.Module) -> None:
    """The gradient is rank + 1."""
    model(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()


def check_order_of_calls() -> None:
    model, optimizer = wrapped_model()
    backward(model)
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        backward(model)
    with pytest.raises(AssertionError, match="before optimizer.zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"without optimizer.skip_synchronize\(\)"):
        optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    optimizer.zero_grad()
    backward(model)
    backward(model)
    optimizer.step()
    assert model.weight.grad.tolist() == [[3.0, 3.0]]
    backward(model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()


def check_set_to_none() -> None:
    """The real one takes no argument, and raises TypeError."""
    model, optimizer = wrapped_model()
    for set_to_none in (True, False):
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert (model.weight.grad is None) == set_to_none


def check_missing_gradient() -> None:
    """Also in a group, where the real one cannot."""
    for groups in (None, 1):
        model, optimizer = wrapped_model(groups=groups)
        other = nn.Linear(2, 1)
        optimizer.add_param_group({"params": [*other.parameters()]})
        if hvd.rank() == 0:
            backward(model)
            other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[0.5, 0.5]]
        assert other.weight.grad.tolist() == [[0.5, 0.5]], "added later"


def check_unfrozen() -> None:
    """The real one does not reduce a parameter that required no gradient when it was wrapped."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model.weight.requires_grad_(True)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert model.weight.grad.tolist() == [[1.5, 1.5]]


def check_closure() -> None:
    """The real one steps on gradients that the closure has computed, and nobody has reduced."""
    model, optimizer = wrapped_model()

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 7.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [optimizer.step(closure), optimizer.step(closure)] == [7.0, 7.0]
    assert model.weight.grad.tolist() == [[1.5, 1.5]]


def check_layout_of_gradients() -> None:
    """The real one refuses gradients in channels_last."""
    model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.full((1, 2, 2, 2), hvd.rank() + 1.0)).sum().backward()
    assert model.weight.grad is not None
    assert not model.weight.grad.is_contiguous()
    optimizer.step()
    assert not model.weight.grad.is_contiguous()
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 1.5))


def check_type_that_cannot_be_added() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
    weight.abs().sum().backward()
    with pytest.raises(ValueError, match="Tensor type torch.ComplexFloatTensor is not supported"):
        optimizer.step()


def check_order_of_parameters() -> None:
    """Ranks form the same groups though their optimizers have other orders."""
    torch.manual_seed(0)
    model = Net()
    named = dict(model.named_parameters())
    parameters = [named[name] for name in sorted(named, reverse=hvd.rank() == 1)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named.items(), groups=4)
    model(torch.full((1, 6), hvd.rank() + 1.0)).backward()
    optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = hvd.allgather(flat[None])
    assert torch.equal(everyone[0], everyone[1])


def check_wrapped_again() -> None:
    """The hooks of an optimizer that is gone do not reduce under the names of its successor."""
    model = nn.Linear(2, 1, bias=False)
    for _ in range(3):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)


def check_scheduler_of_the_optimizer_without_ranks() -> None:
    """PyTorch warned of `lr_scheduler.step()` before `optimizer.step()`."""
    for op in (hvd.Average, hvd.Adasum):
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            backward(model)
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05


def check_process_set() -> None:
    """A rank that is not in the set steps on its own gradients."""
    first = hvd.add_process_set([0])
    model, optimizer = wrapped_model(process_set=first)
    backward(model)
    optimizer.step()
    assert model.weight.grad.tolist() == [[hvd.rank() + 1.0] * 2]
    with pytest.raises(NotImplementedError):
        wrapped_model(process_set=first, op=hvd.Adasum)


def check_adasum() -> None:
    """Updates in the same direction are averaged, and those at right angles added up."""
    model, optimizer = wrapped_model(op=hvd.Adasum)
    start = model.weight.detach().clone()
    model(torch.tensor([[1.0, 1.0]])).sum().backward()
    optimizer.step()
    assert torch.allclose(start - model.weight, torch.tensor([[0.1, 0.1]]))
    start = model.weight.detach().clone()
    optimizer.zero_grad()
    model(torch.eye(2)[hvd.rank() : hvd.rank() + 1]).sum().backward()
    with pytest.raises(AssertionError, match="before optimizer.zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    assert torch.allclose(start - model.weight, torch.tensor([[0.1, 0.1]]))
    with pytest.raises(AssertionError, match="Adasum"):
        optimizer.skip_synchronize()


def mean_steps(model: nn.Module, optimizer: Any, count: int, divisor: float = 2.0) -> None:
    """Take steps of which each must give the mean gradient, of ranks' numbers from 1."""
    for _ in range(count):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert model.weight.grad[0].tolist() == pytest.approx([sum(range(1, hvd.size() + 1)) / divisor] * 2)


def num_rounds() -> int:
    return basics.controller(0)._num_rounds


def check_known_step_takes_one_round() -> None:
    """Also after a parameter group was added, and on the step in which ranks agree on other buckets."""
    model, optimizer = wrapped_model()
    mean_steps(model, optimizer, 2)
    before = num_rounds()
    mean_steps(model, optimizer, 5)
    assert num_rounds() == before + 5
    other = nn.Linear(2, 1)
    optimizer.add_param_group({"params": [*other.parameters()]})
    mean_steps(model, optimizer, 2)
    assert num_rounds() == before + 5 + 2 + 1
    assert len(optimizer._reducer._buckets.buckets) == 1


def check_two_threads_of_backward() -> None:
    """On two devices two threads begin a step. One of them put its gradient into buckets that were over."""
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Sum)
    backward(model)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, hvd.rank())
    slow = property(lambda exchange: time.sleep(0.3) or True)
    with mock.patch.object(NegotiatedBuckets, "is_over", slow), ThreadPoolExecutor() as pool:
        assert [*pool.map(optimizer._reducer._count, optimizer._reducer.gradients.values())] == [None, None]
    assert optimizer._reducer._buckets is None
    optimizer.step()
    assert [parameter.grad.unique().tolist() for parameter in model.parameters()] == [[1], [1]]


def check_two_optimizers_at_once() -> None:
    """Their gradients are finished in one backward, on each rank in another order."""
    first, second = (nn.Linear(2, 1, bias=False) for _ in range(2))
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), [(name, m.weight)])
        for name, m in (("first", first), ("second", second))
    ]
    x = torch.full((1, 2), hvd.rank() + 1.0)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        in_order = (first, second) if hvd.rank() == 0 else (second, first)
        sum(m(x).sum() for m in in_order).backward()
        if step > 0:
            # By now the gradients have no names.
            assert hvd.allreduce(torch.ones(1000), op=hvd.Sum, name="first")[0] == 2
        for optimizer in optimizers:
            optimizer.step()
        assert first.weight.grad.tolist() == second.weight.grad.tolist() == [[1.5, 1.5]]


def check_unnamed_optimizers_in_turn() -> None:
    """Both have the same names of parameters."""
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            mean_steps(model, optimizer, 1)


def check_models_of_the_same_names_at_once() -> None:
    """Generator and discriminator, whose gradients are finished in another order on each rank."""

    class Own(hvd.Compression.none):  # type: ignore[name-defined,misc]  # each gradient travels by its name
        pass

    for compression, is_sparse in ((hvd.Compression.none, False), (Own, False), (hvd.Compression.none, True)):
        models = [nn.Embedding(1, 2, sparse=is_sparse) for _ in range(2)]
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
            )
            for model in models
        ]
        for _ in range(3):
            for factor, model in sorted(enumerate(models, 1), reverse=hvd.rank() > 0):
                (model(torch.tensor([0])) * factor * (hvd.rank() + 1.0)).sum().backward()
            for factor, (model, optimizer) in enumerate(zip(models, optimizers, strict=True), 1):
                optimizer.step()
                assert model.weight.grad.to_dense().tolist() == [[(hvd.size() + 1) / 2 * factor] * 2]
                optimizer.zero_grad()


def check_abandoned_gradients() -> None:
    """Ranks forget the gradients of a step that is known, and go on."""
    model, optimizer = wrapped_model()
    mean_steps(model, optimizer, 2)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.load_state_dict(optimizer.state_dict())
        mean_steps(model, optimizer, 2)


def check_gradients_of_a_rank_that_does_not_step_yet() -> None:
    """The others' steps do not wait for its own, as in Horovod: the last bucket is sent without it, too."""
    model, optimizer = wrapped_model()
    mean_steps(model, optimizer, 2)
    with tempfile.TemporaryDirectory() as folder:
        done = Path(hvd.broadcast_object(folder)) / "done"
        for pause_s in (0.0, DOZE_S + 0.5):  # while the controller's thread dozes, and while it sleeps
            time.sleep(pause_s)
            optimizer.zero_grad()
            backward(model)
            if hvd.rank() == 0:
                wait_for(done.exists)
                optimizer.step()
                done.unlink()
            else:
                optimizer.step()
                done.touch()
            hvd.barrier()


def check_gradients_stay_the_users() -> None:
    """A gradient that the user keeps is not overwritten by the next step."""
    model, optimizer = wrapped_model()
    for _ in range(3):
        mean_steps(model, optimizer, 1)
        kept = model.weight.grad
        optimizer.zero_grad()
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()
        assert kept is not model.weight.grad
        assert kept.tolist() == [[1.5, 1.5]]


def check_orders_of_backward() -> None:
    """Buckets are those of rank 0, in whatever order gradients are finished elsewhere."""
    for groups in (None, 2):
        layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
        named = [(f"layer {number}", layer.weight) for number, layer in enumerate(layers)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight for _, weight in named], lr=0.1), named, groups=groups
        )
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((1, 2), hvd.rank() + 1.0)
            for layer in layers if (hvd.rank() + step) % 2 else layers[::-1]:
                if step < 3 or layer is not layers[hvd.rank()]:
                    layer(x).sum().backward()
            optimizer.step()
            found = [weight.grad[0, 0].item() for _, weight in named]
            assert found == ([1.5] * 4 if step < 3 else [1.0, 0.5, 1.5, 1.5])


def check_process_set_that_goes_away() -> None:
    other = hvd.rank() == 0
    alone = hvd.add_process_set([1])
    model, optimizer = wrapped_model(process_set=alone)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert model.weight.grad.tolist() == [[hvd.rank() + 1.0] * 2]
    hvd.remove_process_set(alone)
    if not other:
        backward(model)
        with pytest.raises(ValueError, match="not registered"):
            optimizer.step()


def check_gradients_are_stored_by_one_operation() -> None:
    """One copy for each took a kernel for each on a GPU."""
    model, optimizer = wrapped_model()
    mean_steps(model, optimizer, 2)
    stored: list[int] = []
    backward(model)
    with mock.patch.object(torch, "_foreach_copy_", lambda targets, sources: stored.append(len(targets))):
        optimizer.synchronize()
    assert stored[-1] == len([*model.parameters()])


def check_timeline_has_buckets() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        model, optimizer = wrapped_model()
        hvd.start_timeline(str(path))
        mean_steps(model, optimizer, 3)
        hvd.stop_timeline()
        if hvd.rank() == 0:
            rows = [event.get("args", {}).get("name") for event in json.loads(path.read_text())]
            assert "allreduce.bucket.weight" in rows


def check_other_job_with_the_same_optimizer() -> None:
    """Elastic training does so whenever ranks have come or gone."""
    model, optimizer = wrapped_model()
    mean_steps(model, optimizer, 3)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    mean_steps(model, optimizer, 3)
    before = num_rounds()
    mean_steps(model, optimizer, 3)
    assert num_rounds() == before + 3


CHECKS = {name: function for name, function in list(globals().items()) if name.startswith("check_")}


def uneven_steps() -> int:
    """Each rank has one batch more than the one before; then all have the same number again."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    model, optimizer = wrapped_model()
    others = [wrapped_model() for _ in range(2)]
    for least in (0, 1, 2, 5):  # in the first step buckets are not agreed on yet
        for step in range(least + rank):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            taking = [its for its in range(size) if step < least + its]
            assert model.weight.grad[0].tolist() == pytest.approx([sum(its + 1 for its in taking) / size] * 2)
        assert hvd.join() == size - 1
        for other, its_optimizer in (others[0], (model, optimizer)):
            mean_steps(other, its_optimizer, 3, size)
    before = num_rounds()
    mean_steps(model, optimizer, 3, size)
    asked = num_rounds() - before
    hvd.shutdown()
    return asked


def uneven_steps_before_the_join() -> list[float]:
    """The optimizer is gone when the rank with less data joins, and operations by name go on."""
    hvd.init()

    def train() -> list[float]:
        model, optimizer = wrapped_model()
        seen = []
        for _ in range(4 if hvd.rank() == 0 else 7):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            seen.append(model.weight.grad[0, 0].item())
            if len(seen) > 4:
                hvd.allreduce(torch.ones(1000), name="by name")
        return seen

    seen = train()
    hvd.join()
    hvd.shutdown()
    return seen


def last_rank_leaves(how: str, in_known_step: bool) -> str:
    """The last rank ends or sleeps; return the error by which the others' operation ends, or known step."""
    hvd.init()
    rank = hvd.rank()
    model, optimizer = wrapped_model()
    if in_known_step:
        mean_steps(model, optimizer, 3, hvd.size())
    if rank == hvd.size() - 1:
        if how == "shuts down":
            hvd.shutdown()
        else:
            time.sleep(60)
        return ""
    optimizer.zero_grad()
    if in_known_step:
        backward(model)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        optimizer.step() if in_known_step else hvd.allreduce(torch.ones(3), name="weight")
    assert how != "shuts down" or not hvd.is_initialized()
    hvd.shutdown()
    return str(caught.value)


class EndsOperations(torch.autograd.Function):
    """Ends all operations in backward, as the monitor's thread does when a rank is lost."""

    ends = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if EndsOperations.ends:
            basics.runtime().abort_collectives()
        return grad


def restored_after_operations_ended_in_backward() -> bool:
    """Return whether an elastic state is that of the last commit, after a rank was lost in backward."""
    hvd.init()
    layers = nn.Linear(600, 600), nn.Linear(600, 600)
    model = nn.ModuleList(layers)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    for step in range(4):
        state.save()
        saved = layers[0].weight.detach().clone()
        EndsOperations.ends = step == 3
        layers[1](EndsOperations.apply(layers[0](torch.ones(2, 600)))).sum().backward()
        if step < 3:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    state.restore()
    optimizer.zero_grad()
    return torch.equal(layers[0].weight, saved)


def train_on_after_the_shutdown() -> list[float]:
    """Return the gradient of a backward pass after the shutdown."""
    hvd.init()
    rank = hvd.rank()
    model, optimizer = wrapped_model()
    mean_steps(model, optimizer, 3, hvd.size())
    optimizer.zero_grad()
    hvd.shutdown()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    grad = model.weight.grad[0].tolist()
    with pytest.raises(ValueError, match="not been initialized"):
        optimizer.step()
    optimizer.zero_grad()
    return grad


OURS, REAL = "hvd_trainer.hvd", "horovod.torch"
STEPS = 4
STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
TRAININGS: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": "Sum"},
    "fp16": {"compression": "fp16"},
    "predivided": {"gradient_predivide_factor": 4.0},
    "two passes": {"backward_passes_per_step": 2},
    "two groups": {"groups": 2},
    "listed groups": {"groups": "listed"},
    "unnamed": {"named": False},
    "clipped": {"clip": 0.05},
    "sparse": {"sparse": True},
    "sparse as dense": {"sparse": True, "sparse_as_dense": True},
    "different branches": {"branches": True},
}


def train(
    api: Any, *, named: bool = True, clip: float = 0.0, sparse: bool = False, branches: bool = False, **how: Any
) -> list[list[float]]:
    """Return the weights after some steps, in which each rank has its own data."""
    torch.manual_seed(0)
    model = Net(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if sparse else 0.9)
    if how.get("groups") == "listed":
        how["groups"] = [[*model.heads.parameters()]]
    if "op" in how:
        how["op"] = getattr(api, how["op"])
    if "compression" in how:
        how["compression"] = getattr(api.Compression, how["compression"])
    optimizer = api.DistributedOptimizer(optimizer, model.named_parameters() if named else None, **how)
    generator = torch.Generator().manual_seed(api.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(how.get("backward_passes_per_step", 1)):
            shape = (4 + api.rank(), 6)
            x = (
                torch.randint(10, shape, generator=generator)
                if sparse
                else torch.randn(shape, generator=generator)
            )
            model(x, (api.rank(),) if branches else (0, 1)).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def train_all(module: str) -> tuple[int, dict[str, list[list[float]]]]:
    api = importlib.import_module(module)
    api.init()
    rank = api.rank()
    weights = {name: train(api, **how) for name, how in TRAININGS.items()}
    api.shutdown()
    return rank, weights


@pytest.fixture(scope="module")
def ours() -> list[dict[str, list[list[float]]]]:
    result: list[dict[str, list[list[float]]]] = run_ranks(train_all, num_processes=2, args=[OURS])
    return result


@pytest.fixture(scope="module")
def real() -> list[dict[str, list[list[float]]]]:
    result: list[dict[str, list[list[float]]]] = run_ranks(
        train_all, num_processes=2, launcher="horovodrun", args=[REAL]
    )
    return result


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_have_the_same_weights(name: str, ours: list[dict[str, list[list[float]]]]) -> None:
    assert ours[0][name] == ours[1][name]


@requires("horovod")
@pytest.mark.parametrize("name", TRAININGS)
def test_weights_are_the_real_ones_bit_for_bit(
    name: str, ours: list[dict[str, list[list[float]]]], real: list[dict[str, list[list[float]]]]
) -> None:
    assert ours[0][name] == real[0][name]


def signature_of(module: str) -> list[tuple[str, Any, Any]]:
    its = inspect.signature(importlib.import_module(module).DistributedOptimizer)
    plain = (int, float, bool, type(None))
    return [
        (parameter.name, parameter.kind.name, parameter.default if isinstance(parameter.default, plain) else "")
        for parameter in its.parameters.values()
    ]


def real_signature() -> list[tuple[str, Any, Any]]:
    return signature_of(REAL)


@requires("horovod")
def test_signature_is_the_real_one() -> None:
    assert [signature_of(OURS)] == in_ranks(1, real_signature)


# In two ranks.


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str | None]]:
    result: list[dict[str, str | None]] = in_ranks(2, run_checks, CHECKS)
    return result


@pytest.mark.parametrize("name", CHECKS)
def test_in_two_ranks(name: str, outcomes: list[dict[str, str | None]]) -> None:
    assert not [f"rank {rank}:\n{its[name]}" for rank, its in enumerate(outcomes) if its[name]]


@pytest.mark.parametrize("ranks", [3, 4])
def test_optimizers_of_the_same_names_on_more_ranks(ranks: int) -> None:
    check = check_models_of_the_same_names_at_once
    assert in_ranks(ranks, run_checks, {"check": check}) == [{"check": None}] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_fewer_batches_join(ranks: int) -> None:
    assert in_ranks(ranks, uneven_steps) == [3] * ranks


def test_rank_joins_without_its_optimizer() -> None:
    assert in_ranks(2, uneven_steps_before_the_join) == [
        [1.5] * 4,
        [1.5] * 4 + [1.0] * 3,
    ]


@pytest.mark.parametrize("in_known_step", [False, True])
def test_operations_fail_once_a_rank_has_shut_down(in_known_step: bool) -> None:
    texts = in_ranks(3, last_rank_leaves, "shuts down", in_known_step)
    assert ["rank 2 called hvd.shutdown()" in text for text in texts] == [True, True, False]


@pytest.mark.parametrize("in_known_step", [False, True])
def test_stall_names_the_missing_rank_and_ends_the_wait(in_known_step: bool) -> None:
    args = ["never comes", in_known_step]
    name = r"bucket\.weight\.1" if in_known_step else "weight"
    told = rf"(?s)failure: rank 2 of 3 .*rank 1: .*, waits for [34] s in allreduce\.{name} for rank 2"
    with pytest.raises(LaunchError, match=told):
        in_ranks(3, last_rank_leaves, *args, env=STALL)


@pytest.mark.parametrize("ranks", [2, 3])
def test_state_can_be_restored_after_operations_ended_in_backward(ranks: int) -> None:
    """`restore` forgets the step. It sent the rest of it, and the error ended the elastic training."""
    assert in_ranks(ranks, restored_after_operations_ended_in_backward) == [True] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_stay_after_the_shutdown(ranks: int) -> None:
    """Backward raised, where Horovod's does not on one rank."""
    assert in_ranks(ranks, train_on_after_the_shutdown) == [[i + 1.0] * 2 for i in range(ranks)]


ENDS = {
    "raises": (QUICKEST, "raise RuntimeError('this is why')", {1}, "RuntimeError: this is why"),
    "is killed": ("torchrun", "os.kill(os.getpid(), 9)", {1}, "{place}: ended without a word"),
    # The launcher has the code of the rank that ends first, which may be the one that then waits in vain.
    "exits": (QUICKEST, "sys.exit(3)", {1, 3}, "rank 1 called hvd.shutdown() or came to its end"),
}


@pytest.mark.parametrize("end_at", [0, 5])
@pytest.mark.parametrize("how", ENDS)
def test_no_rank_waits_for_one_that(how: str, end_at: int, tmp_path: Path) -> None:
    """A rank ends in the first step or in a known one: the others end, too, and one of them says why."""
    launcher, statement, codes, said = ENDS[how]
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "from hvd_trainer import hvd\n"
        "hvd.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "hvd.allreduce(torch.ones(3))\n"
        "for step in range(9):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        f"    if step == {end_at} and hvd.rank() == 1:\n        {statement}\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    result = launch(launcher, 2, [str(script)], check=False, timeout_s=60)
    assert result.returncode in codes
    place = "step 6, step" if end_at else "before the first step"
    assert said.format(place=place) in result.stdout + result.stderr
