"""A model that a user's code changes while it is trained: frozen, unfrozen, replaced and converted layers.

Each case trains the weights of one process, on either engine and any number of ranks. Ranks that differ all the
same end the training.
"""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import case
from launchers import in_ranks
from torch import Tensor, nn
from trainings import WholeWeights, fit, options_of

from hvd_trainer import Callback, TensorData, detect
from hvd_trainer.backends.connection import Connection
from hvd_trainer.errors import ReplicasDifferError

pytestmark = pytest.mark.warm

GLOBAL_BATCH, EPOCHS = 24, 3
RTOL = 1e-5
"""Ranks and one process add the same numbers in another order, in fp32."""
LOSS = nn.functional.mse_loss


def data() -> TensorData:
    inputs = torch.randn(72, 2, generator=torch.Generator().manual_seed(3))
    return TensorData(inputs, inputs.sum(1, keepdim=True) ** 2)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


class After(Callback):
    """A callback that acts once, after a step or an epoch (steps have numbers from 1 on, 3 in an epoch)."""

    def __init__(self, act: Any, *, step: int = 0, epoch: int = 0) -> None:
        self.act, self.step, self.epoch = act, step, epoch

    def on_step_end(self, run: Any, result: Any) -> None:
        if run.progress.step == self.step:
            self.act(run)

    def on_epoch_end(self, run: Any, record: dict[str, Any]) -> None:
        if record["epoch"] == self.epoch:
            self.act(run)


def unfreeze(run: Any) -> None:
    run.model[0].requires_grad_(True)


def freeze(run: Any) -> None:
    run.model[0].requires_grad_(False)


def add_group(run: Any) -> None:
    unfreeze(run)
    run.optimizer.add_param_group({"params": list(run.model[0].parameters()), "lr": 0.02})


def convert_and_back(run: Any) -> None:
    run.model.double()
    run.model.float()


def to_double(run: Any) -> None:
    run.model.double()
    run.optimizer.state.clear()


def replace_head(run: Any) -> None:
    """Put in a layer with weights of this rank's own random numbers, of which those of rank 0 count."""
    torch.manual_seed(50 + run.world.rank)
    run.model[2] = nn.Linear(3, 1)
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
    run.optimizer.state.clear()


class FreezesInForward(nn.Module):
    """A model that freezes its first layer in its fifth forward pass, and unfreezes it in the eighth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.passes = net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.training:
            self.layers[0].requires_grad_(self.passes not in (5, 6, 7))
        return self.layers(x)


class Converts(nn.Module):
    """A model that takes inputs of the type of its weights, and gives float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def __getitem__(self, place: int) -> nn.Module:
        return self.layers[place]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype)).float()


class LossWithScale(nn.Module):
    """A mean of squares over a scale that is learned, with a table of constants and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.register_buffer("table", torch.tensor([1e-4, 0.3, 7.0], dtype=torch.float16))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += self.training
        return ((outputs - targets) ** 2 * torch.exp(-self.scale) + self.scale).mean()


class LossWithTeacher(nn.Module):
    """Squares of the differences that frozen layers make of both, whose batch norm is in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.teacher = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3)).requires_grad_(False).eval()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return LOSS(self.teacher(outputs), self.teacher(targets))


LOSSES = {"loss with parameters": LossWithScale, "loss with a teacher": LossWithTeacher}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that moves a parameter with a gradient of zeros, by momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5, weight_decay=0.01)


def setup(name: str) -> dict[str, Any]:
    """Return model, optimizer, loss and callbacks of a case."""
    model: Any = FreezesInForward() if name == "frozen in forward" else net()
    if name == "to double":
        model = Converts()
    if name in ("unfrozen", "unfrozen after a step", "group added", "unfrozen, sharded optimizer"):
        model[0].requires_grad_(False)
    loss: Any = LOSSES[name]() if name in LOSSES else LOSS
    trained = [*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
    acts = {
        "unfrozen": After(unfreeze, epoch=1),
        "unfrozen, sharded optimizer": After(unfreeze, epoch=1),
        "unfrozen after a step": After(unfreeze, step=4),
        "group added": After(add_group, epoch=1),
        "group added, sharded optimizer": After(add_group, epoch=1),
        "frozen": After(freeze, epoch=1),
        "frozen after a step, accumulated": After(freeze, step=4),
        "converted and back": After(convert_and_back, epoch=1),
        "to double": After(to_double, step=4),
        "head replaced": After(replace_head, epoch=2),
    }
    own = model[2].parameters() if name.startswith("group added") else trained
    if name == "group added, sharded optimizer":
        model[0].requires_grad_(False)
    return {"model": model, "loss": loss, "optimizer": sgd(own), "callbacks": [acts[name]] if name in acts else []}


NAMES = (
    *("unfrozen", "unfrozen, sharded optimizer", "unfrozen after a step", "frozen", "frozen in forward"),
    *("frozen after a step, accumulated", "group added", "group added, sharded optimizer", "to double"),
    *("converted and back", "head replaced", *LOSSES),
)


def train(backend: str, name: str, callbacks: Any = (), **options: Any) -> list[float]:
    """Train a case; return all parameters, and the tensors of a loss that is a module."""
    how = setup(name)
    how["callbacks"] = [*how["callbacks"], *callbacks]
    usual: dict[str, Any] = {"epochs": EPOCHS, "global_batch_size": GLOBAL_BATCH, "workers": 0}
    usual |= {"shard": "optimizer"} if "sharded" in name and detect(os.environ).size > 1 else {}
    usual |= {"accumulate": 2} if "accumulated" in name else {}
    model, loss = how.pop("model"), how["loss"]
    fit(options_of(backend, **usual | options), model, data(), **how)
    tensors = [
        *model.parameters(),
        *([*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else ()),
    ]
    return [float(number) for tensor in tensors for number in tensor.detach().flatten()]


def train_all(backend: str) -> dict[str, list[float]]:
    return {name: train(backend, name) for name in NAMES}


@cache
def trained(backend: str, size: int) -> list[dict[str, list[float]]]:
    return in_ranks(size, train_all, backend)


ENGINES = [
    *(case(engine, size) for engine in ("ddp", "horovod") for size in (2, 3)),
    *(case("ddp", 4), case("horovod", 4, when="long")),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("backend", "size"), ENGINES)
def test_what_a_callback_changes_is_exchanged(backend: str, size: int, name: str) -> None:
    ranks = [rank[name] for rank in trained(backend, size)]
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0] == pytest.approx(trained("single", 1)[0][name], rel=RTOL, abs=RTOL)
    if size == 2 or name == "frozen in forward":
        assert ranks == [rank[name] for rank in trained("ddp", size)]  # two ranks have one order of sums


def test_each_change_counts() -> None:
    """A case in which nothing changed would prove nothing."""
    whole = trained("single", 1)[0]
    assert (
        len({tuple(whole[name]) for name in NAMES}) >= len(NAMES) - 2
    )  # two cases are there with and without shards
    assert whole["loss with parameters"][-5] != 0
    assert whole["loss with parameters"][-4:-1] == torch.tensor([1e-4, 0.3, 7.0]).half().tolist()


STOPS = ("unfrozen", "frozen", "loss with parameters", "unfrozen, sharded optimizer")


def resume(backend: str, folder: str) -> dict[str, list[list[float]]]:
    """Train each case undisturbed, and in two parts; return the weights of each way."""
    found: dict[str, list[list[float]]] = {}
    for name in STOPS:
        found[name] = [train(backend, name)]
        for step in (2, 5):
            saved = {"log_dir": f"{folder}/{name}{step}"}
            train(backend, name, max_steps=step, **saved)
            found[name].append(train(backend, name, resume="auto", **saved))
    return found


@pytest.mark.parametrize(("backend", "size"), [case("single", 1), case("ddp", 3), case("horovod", 3)])
def test_a_resume_trains_what_was_trained(backend: str, size: int, tmp_path: Path) -> None:
    for rank in in_ranks(size, resume, backend, str(tmp_path)):
        for name, (undisturbed, *resumed) in rank.items():
            assert resumed == [undisturbed] * 2, name


def error_of(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def add_on_rank_1(amount: float, run: Any) -> None:
    if run.world.rank == 1:
        with torch.no_grad():
            run.model[2].weight[0, 1] += amount


def freeze_on_last_rank(run: Any) -> None:
    if run.world.rank == run.world.size - 1:
        freeze(run)


def age_on_last_rank(run: Any) -> None:
    if run.world.rank == run.world.size - 1:
        run.optimizer.state[run.model[0].bias]["momentum_buffer"].mul_(2)


def forget_on_last_rank(run: Any) -> None:
    """Make a rank have no state where the others have one: the comparison had tensors of unequal shapes."""
    if run.world.rank == run.world.size - 1:
        del run.optimizer.state[run.model[0].bias]


def differ(backend: str, folder: str) -> dict[str, Any]:
    """Make ranks differ; return the error of each case, and the checkpoints that are there after the first."""

    def changed(act: Any, step: int = 0, epoch: int = 0, **options: Any) -> str:
        callbacks = [After(act, step=step, epoch=epoch)]
        return error_of(lambda: train(backend, "plain", callbacks, **options))

    add = partial(add_on_rank_1, 0.1)
    found: dict[str, Any] = {
        "changed": changed(add, epoch=2, log_dir=folder, keep_best=None),
        "sharded": changed(add, step=3, shard="optimizer"),
        "optimizer": changed(age_on_last_rank, step=3),
        "no state": changed(forget_on_last_rank, step=3),
        "frozen": changed(freeze_on_last_rank, epoch=2, startup_timeout_s=10.0),
    }
    found["saved"] = sorted(path.name for path in Path(folder).glob("checkpoints/*step*"))
    last_bit = 2.0**-20
    found["last bits"] = train(backend, "plain", callbacks=[After(partial(add_on_rank_1, last_bit), epoch=1)])
    # Without what follows a change, the ranks must be found to differ.
    Connection.has_changed = property(lambda self: False)  # type: ignore[assignment, method-assign]
    Connection.is_frozen_as_before = lambda self: True  # type: ignore[method-assign]
    for name in ("unfrozen", "group added", "head replaced", "unfrozen after a step"):
        found[name] = error_of(lambda name=name: train(backend, name))
    return found


@pytest.mark.parametrize(("backend", "size"), [case("ddp", 3), case("horovod", 4), case("ddp", 2, when="long")])
def test_ranks_that_differ_end_the_training_before_a_save(backend: str, size: int, tmp_path: Path) -> None:
    found = in_ranks(size, differ, backend, str(tmp_path))
    unlike = {"saved": 0, "head replaced": 0}
    assert all(rank | unlike == found[0] | unlike for rank in found)
    first = found[0]
    begin = f"{ReplicasDifferError.__name__}: The ranks no longer train one model: "
    others = ", ".join(map(str, range(1, size)))
    for name in ("changed", "sharded"):
        assert first[name].startswith(f"{begin}2.weight on rank 1 differs from rank 0. ")
        assert "something else has changed it on some ranks" in first[name]
    state = f"{begin}momentum_buffer of 0.bias on rank"
    assert first["optimizer"].startswith(f"{state} {size - 1} differs from rank 0")
    assert first["no state"].startswith(f"{state} {others} differs from rank 0")
    frozen = f"BackendError: Rank {size - 1} has another model than rank 0: 0.weight float32 [3, 2] frozen against"
    assert first["frozen"].startswith(frozen)  # a rank that alone compared models waited for the time limit
    assert len(first["saved"]) == 1
    for name in ("unfrozen", "group added", "unfrozen after a step"):
        assert first[name].startswith(f"{begin}0.weight on rank {others} differs from rank 0")
        assert "Its gradient is not exchanged: it was frozen at the start" in first[name]
    if backend == "horovod":  # DDP finds that the old head has got no gradient
        assert first["head replaced"].startswith(f"{begin}2.weight on rank {others} differs from rank 0")
        assert "was put in after the start" in first["head replaced"]


def deep() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def freeze_stage(run: Any) -> None:
    run.model[0].requires_grad_(False)
    run.model[2].requires_grad_(False)


def in_stages(backend: str, **parts: Any) -> dict[str, Any]:
    """Freeze and unfreeze a layer of the first stage, and then all of them; return weights, and the error."""

    def fit_deep(act: Any, begin: bool = True) -> list[float]:
        model, end = deep(), WholeWeights()
        model[0].requires_grad_(begin)
        how = {"optimizer": sgd(model.parameters()), "loss": LOSS, "callbacks": [After(act, epoch=1), end]}
        usual = {"epochs": EPOCHS, "global_batch_size": GLOBAL_BATCH, "workers": 0}
        fit(options_of(backend, **usual, **parts), model, data(), **how)
        return [float(number) for tensor in end.weights.values() for number in tensor.flatten()]

    found: dict[str, Any] = {"unfrozen": fit_deep(unfreeze, begin=False), "frozen": fit_deep(freeze)}
    found["error"] = error_of(lambda: fit_deep(freeze_stage)) if parts else ""
    return found


@pytest.mark.parametrize("backend", [case("ddp"), case("horovod")])
def test_what_a_callback_changes_in_stages_is_exchanged(backend: str) -> None:
    parts = {"stages": 2, "chunks": 2, "balance": "3,2"}
    ranks = in_ranks(4, in_stages, backend, **parts)
    [whole] = in_ranks(1, in_stages, "single")
    for name in ("unfrozen", "frozen"):
        assert ranks[0][name] == pytest.approx(whole[name], rel=RTOL, abs=RTOL)
    assert whole["unfrozen"] != whole["frozen"]
    assert "All parameters of the first stage (0, 1, 2) are frozen" in ranks[0]["error"]


class Buffers(nn.Module):
    """A model with buffers of many kinds, of which each rank changes some by its own data."""

    averaged_buffers = ("mean",)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 1), nn.BatchNorm1d(2)
        self.norm.eval()
        self.norm.running_mean.fill_(0.1)  # frozen: a third of three times 0.1 is another number
        table = torch.linspace(0.1, 7, 200)
        self.register_buffer("mask", torch.full((4,), torch.finfo(torch.float32).min))
        self.register_buffer("fp16", table.half())
        self.register_buffer("bf16", table.bfloat16())
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("bank", torch.zeros(5, 2))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
                self.bank[int(self.place)] = x[0]
                self.place.add_(1).remainder_(5)
        return self.layer(self.norm(x)) + self.bank.sum() * 1e-3


class Misnamed(Buffers):
    averaged_buffers = ("maen",)


class SeeBuffers(Callback):
    """A callback that keeps the buffers that a rank has in the middle of an epoch, and at its end."""

    def __init__(self) -> None:
        self.seen: list[dict[str, list[float]]] = []

    def on_step_end(self, run: Any, result: Any) -> None:
        if run.progress.step == 2:
            self.keep(run)

    def on_epoch_end(self, run: Any, record: dict[str, Any]) -> None:
        self.keep(run)

    def keep(self, run: Any) -> None:
        self.seen.append({name: b.float().flatten().tolist() for name, b in run.model.named_buffers()})


def buffers(backend: str, folder: str) -> Any:
    """Train with buffers, undisturbed and in two parts that meet inside the second epoch."""

    def fit_buffers(kind: type[Buffers], callbacks: Any = (), **options: Any) -> list[float]:
        torch.manual_seed(2)
        model = kind()
        usual: dict[str, Any] = {"epochs": 2, "global_batch_size": GLOBAL_BATCH, "workers": 0}
        how = {"optimizer": sgd(model.parameters()), "loss": nn.functional.mse_loss, "callbacks": callbacks}
        fit(options_of(backend, **usual | options), model, data(), data(), **how)
        return [float(n) for tensor in model.state_dict().values() for n in tensor.float().flatten()]

    see = SeeBuffers()
    whole = fit_buffers(Buffers, [see])
    fit_buffers(Buffers, max_steps=5, log_dir=folder)
    resumed = fit_buffers(Buffers, log_dir=folder, resume="auto")
    wrong = error_of(lambda: fit_buffers(Misnamed))
    return see.seen, whole == resumed, wrong


@pytest.mark.parametrize(("backend", "size"), [case("single", 1), case("ddp", 3), case("horovod", 3)])
def test_only_statistics_are_averaged(backend: str, size: int, tmp_path: Path) -> None:
    ranks = in_ranks(size, buffers, backend, str(tmp_path))
    inside, after, _ = zip(*(seen for seen, *_ in ranks), strict=True)
    fresh = {name: b.float().flatten().tolist() for name, b in Buffers().named_buffers()}
    for rank in after:
        assert rank == after[0]
        for name in ("mask", "fp16", "bf16", "norm.running_mean", "norm.running_var"):
            assert rank[name] == fresh[name], name
    if size > 1:
        assert inside[0]["bank"] != inside[1]["bank"]  # each rank's own, in training
        assert inside[0]["mean"] != inside[1]["mean"]
    # The third step of the epoch has changed the third row; what is in the others, rank 0 has had before.
    assert after[0]["bank"][:4] == inside[0]["bank"][:4]
    assert all(is_same for _, is_same, _ in ranks)
    assert "names 'maen' in averaged_buffers" in ranks[0][2]


def freeze_late(run: Any) -> None:
    run.model[0].requires_grad_(False)


def refused(backend: str) -> dict[str, str]:
    """Return the error of each change that cannot be followed."""
    alone = nn.Parameter(torch.zeros(3))
    cases: dict[str, Any] = {
        "foreign": lambda: fit(
            options_of(backend), model := net(), data(), optimizer=sgd([*model.parameters(), alone]), loss=LOSS
        ),
        "added": lambda: train(
            backend, "plain", [After(lambda run: run.optimizer.add_param_group({"params": [alone]}), epoch=1)]
        ),
        "head not given": lambda: train(
            backend, "plain", [After(lambda run: setattr(run.model, "2", nn.Linear(3, 1)), epoch=1)]
        ),
        "block": lambda: train(backend, "head replaced", activation_checkpointing="blocks"),
    }
    if backend == "ddp":
        cases["slices"] = lambda: train(backend, "plain", [After(freeze_late, epoch=1)], shard="full")
        cases["loss in stages"] = lambda: train(backend, "loss with parameters", chunks=2)
    return {name: error_of(run) for name, run in cases.items()}


@pytest.mark.parametrize("backend", [case("ddp"), case("horovod")])
def test_what_cannot_be_followed_is_refused_by_name(backend: str) -> None:
    for found in in_ranks(2, refused, backend):
        neither = "The optimizer updates a parameter that neither the model nor the loss has: "
        assert f"{neither}4 of its group 0, [3]" in found["foreign"]
        assert f"{neither}0 of its group 1, [3]" in found["added"]
        assert f"{neither}2 of its group 0, 2.weight before, [1, 3]" in found["head not given"]
        assert "2.weight was put into the model after the start" in found["block"]
        if backend == "ddp":
            assert "0.weight was frozen after the start, and --shard full gathers" in found["slices"]
            assert "LossWithScale) has parameters, which --chunks has no place for" in found["loss in stages"]
