"""A model cut into stages: the same numbers for any stages, schedule and engine, and what is refused."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from combinations import case
from launchers import RankError, in_ranks, requires
from torch import Tensor, nn
from trainings import StopAfter, StoppedError, options_of, signs

from hvd_trainer import Callback, Trainer, accuracy
from hvd_trainer.errors import UserError
from hvd_trainer.optim import non_finite
from hvd_trainer.parallel import fsdp
from hvd_trainer.parallel.fsdp import gathering_policy
from hvd_trainer.parallel.stage_placement import make_placement
from hvd_trainer.utils.tensors import state_on_this_stage

NUM = 60  # the last of 4 batches of 16 has 12 samples: two of 3 chunks are full, and one is empty


class AtEnd(Callback):
    """A callback that collects the state after the last epoch, and what this rank holds of it."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.state: Any = None
        self.own_state = self.hooks = 0

    def on_epoch_end(self, run: Any, record: dict[str, Any]) -> None:
        if record["epoch"] < self.epochs:
            return
        of_optimizer = run.optimizer.state_dict()["state"]
        weights, updates = map(run.placement.gather, (state_on_this_stage(run.model), of_optimizer))
        if weights is not None:
            self.state = {name: weights[name] for name in run.model.state_dict()}, updates
        own = [t for its in run.optimizer.state.values() for t in its.values() if isinstance(t, Tensor)]
        own = [t.to_local() if hasattr(t, "to_local") else t for t in own]
        self.own_state = sum(tensor.numel() for tensor in own)
        self.hooks = len(run.optimizer._optimizer_step_post_hooks)


class Masked(nn.Module):
    """A block that returns a mask beside its output, as a Transformer's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(inputs), (inputs > 0).float()


class Joined(nn.Module):
    """A block that takes an output and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(18, 12)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(self.linear(torch.cat(both, 1)))


def model(dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(
        Masked(), Joined(), nn.Dropout(dropout), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 2)
    )


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return two groups, of which only weights decay, so that the optimizer's order is not the model's."""
    decaying = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02
    )


def fit(
    backend: str,
    parallel: dict[str, Any],
    *,
    dropout: float = 0.3,
    stop_after: int | None = None,
    again: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Train once, or a second time with the same model and optimizer; return the results."""
    # Cut by time, the parts are the machine's mood, and with them what each rank keeps.
    cut = {"balance": "bytes"} if parallel.get("stages", 1) > 1 else {}
    usual = {"epochs": 3, "global_batch_size": 16, "max_norm": 0.5}
    never = {"save_every_epochs": None, "save_every_s": None}
    options = options_of(backend, **usual | never | cut | parallel | more)
    with Trainer(options) as trainer:
        whole = model(dropout)
        end = AtEnd(options.train.epochs)
        optimizer = two_groups(whole)
        history = None
        with suppress(StoppedError):
            for _ in range(2 if again else 1):
                history = trainer.fit(
                    whole,
                    optimizer,
                    nn.functional.cross_entropy,
                    signs(NUM),
                    signs(21),
                    metrics={"accuracy": accuracy},
                    callbacks=[end, StopAfter(stop_after)],
                )
        state = end.state
        names = ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "samples", "step")
        return {
            "records": [[record[name] for name in names] for record in (history.epochs if history else [])],
            "weights": state[0] if state else None,
            "state": state[1] if state else None,
            "own state": end.own_state,
            "hooks": end.hooks,
        }


def cut_twice() -> None:
    """Train the same model twice; the second training is refused."""
    whole = model()
    optimizer = two_groups(whole)
    for balance in ("1,5", "4,2"):
        trainings.fit(options_of("ddp", stages=2, balance=balance), whole, signs(NUM), optimizer=optimizer)


class Unused(nn.Module):
    """A model with a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def fit_unused(parallel: dict[str, Any]) -> None:
    """Train a model with an unused parameter, which is refused."""
    whole = nn.Sequential(*model(), Unused())
    trainings.fit(options_of("ddp", **parallel), whole, signs(NUM), optimizer=two_groups(whole))


def cut_on_the_host(parallel: dict[str, Any]) -> dict[str, Any]:
    """Lay out a model and its optimizer's state, which differ between replicas before; return what they became."""
    options = options_of("ddp", **parallel)
    with Trainer(options) as trainer:
        backend = trainer.backend
        torch.manual_seed(0 if backend.replica_group[0] == backend.world.rank else 1)
        whole = model()
        whole[1].register_buffer("noise", torch.randn(3))
        optimizer = two_groups(whole)
        whole(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        both = whole.state_dict(), optimizer.state_dict()["state"]
        weights, state = backend.collectives.broadcast_object(both)
        placement = make_placement(backend, options.parallel, options.train)
        placement.set_batch_size(16)
        held = _watched_cuts(whole)
        placement.prepare(whole, nn.functional.mse_loss, optimizer, lambda: None)
        mine = {name: value for name, value in whole.state_dict().items() if not value.is_meta}
        merged = placement.gather(mine)
        updates = placement.gather(optimizer.state_dict()["state"])
        placement.close()
        if merged is None or updates is None:
            return {"held": held}
        same = {
            "weights": all(value.equal(merged[name]) for name, value in weights.items()),
            "state": all(v.equal(updates[number][key]) for number, its in state.items() for key, v in its.items()),
        }
        return {"held": held, **same}


def _watched_cuts(whole: nn.Module) -> list[str]:
    """Record, from now on, the blocks that were held whole when the next one was cut; there should be none."""
    held: list[str] = []
    earlier: dict[str, Any] = {}
    fully_shard = fsdp.fully_shard

    def watched(module: nn.Module, **options: Any) -> Any:
        gc.collect()
        held.extend(name for name, parameter in earlier.items() if parameter() is not None)
        own = [parameter for parameter in module.parameters() if not hasattr(parameter, "to_local")]
        earlier.update({f"{module} {number}": weakref.ref(parameter) for number, parameter in enumerate(own)})
        return fully_shard(module, **options)

    def refused(module: nn.Module, device: Any) -> nn.Module:
        if str(device) == "meta":
            return to(module, device)
        raise AssertionError(f"{type(module).__name__} was moved as a whole")

    to = nn.Module.to
    fsdp.fully_shard = watched  # type: ignore[assignment]
    nn.Module.to = refused  # type: ignore[method-assign, assignment]
    return held


def fit_tied() -> None:
    """Train a model whose blocks share a parameter."""
    whole = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    whole[2].weight = whole[0].weight
    trainings.fit(options_of("ddp", shard="full"), whole, signs(NUM))


def run_all(backend: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train several set-ups one after the other, in one launch."""
    non_finite.MAX_UNREAD_LOSSES = 5  # so that all ranks or none read their losses in the middle of an epoch
    found = {}
    for name, how in runs.items():
        try:
            found[name] = fit(backend, **how)
        except UserError as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
ENGINES = [case("ddp"), case("horovod", when="long")]
# 3 chunks of 6, 6 and 4 samples; the last batch of an epoch has 12: 6, 6 and none.
CUT = {"chunks": 3}
ALONE: dict[str, dict[str, Any]] = {
    "plain": {"parallel": CUT},
    "accumulate": {"parallel": CUT, "accumulate": 2},
    "bf16": {"parallel": CUT, "precision": "bf16"},
    "fp16": {"parallel": CUT, "precision": "fp16"},
    "recompute": {"parallel": {**CUT, "activation_checkpointing": "blocks"}},
    "again": {"parallel": CUT, "again": True},
}
DEVICES: dict[str, dict[str, Any]] = {
    "2 devices": {"parallel": {**CUT, "devices_per_rank": 2}},
    "3 devices": {"parallel": {**CUT, "devices_per_rank": 3, "balance": "time"}},
    "fp16 on 2 devices": {"parallel": {**CUT, "devices_per_rank": 2}, "precision": "fp16"},
}
SLICED: dict[str, dict[str, Any]] = {
    "plain": {"parallel": {"shard": "full"}},
    "accumulate": {"parallel": {"shard": "full"}, "accumulate": 2},
    "bf16": {"parallel": {"shard": "full"}, "precision": "bf16"},
    "fp16": {"parallel": {"shard": "full"}, "precision": "fp16"},
    "recompute": {"parallel": {"shard": "full", "activation_checkpointing": "blocks"}},
}
WHOLE: dict[str, dict[str, Any]] = {
    "whole": {"parallel": {}, "dropout": 0.0},
    "recompute whole": {"parallel": {"activation_checkpointing": "blocks"}, "dropout": 0.0},
}


def in_stages(stages: int, runs: dict[str, dict[str, Any]], **more: Any) -> dict[str, dict[str, Any]]:
    return {name: {**how, "parallel": {**how["parallel"], "stages": stages, **more}} for name, how in runs.items()}


def sliced_in_stages() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return trainings of two replicas in two stages, with and without full sharding."""
    runs = {
        **{schedule: ({"schedule": schedule}, {}) for schedule in ("gpipe", "1f1b", "interleaved")},
        "accumulate": ({}, {"accumulate": 2}),
        "bf16": ({}, {"precision": "bf16"}),
        "fp16": ({}, {"precision": "fp16"}),
        "recompute": ({"activation_checkpointing": "blocks"}, {}),
    }
    found = {}
    for name, (parallel, train) in runs.items():
        whole = {"parallel": {**CUT, "stages": 2, **parallel}, **train}
        found[f"sliced, {name}"] = ({**whole, "parallel": {**whole["parallel"], "shard": "full"}}, whole)
    return found


@cache
def trained(backend: str, size: int) -> list[dict[str, Any]]:
    """Run all trainings with so many ranks; return the results per rank."""
    runs: dict[str, dict[str, Any]]
    plain = {"plain": ALONE["plain"]}
    exact = {"exact": {"parallel": CUT, "dropout": 0.0}}
    if size == 1:
        runs = ALONE | WHOLE | DEVICES
    elif size == 2:
        runs = in_stages(2, ALONE, schedule="gpipe") | {
            "copies": ALONE["plain"],
            "copies on 2 devices": DEVICES["2 devices"],
        }
        for schedule in SCHEDULES:
            runs |= {f"{schedule}": in_stages(2, plain, schedule=schedule)["plain"]}
        runs |= {"by hand": in_stages(2, plain, balance="1,5")["plain"]}
        runs |= {"by time": in_stages(2, plain, balance="time")["plain"]}
        runs |= {"fp16 on the wire": {**ALONE["plain"], "compression": "fp16"}}
        runs |= {"whole copies": {"parallel": {}}, "shared": {"parallel": {"shard": "optimizer"}}}
        runs |= {"shared again": {"parallel": {"shard": "optimizer"}, "again": True}}
        runs |= {"whole again": {"parallel": {}, "again": True}}
        runs |= {"shared in fp16": {"parallel": {"shard": "optimizer"}, "precision": "fp16"}}
        runs |= {"whole in fp16": {"parallel": {}, "precision": "fp16"}}
        runs |= {"shared, reproducible": {"parallel": {"shard": "optimizer"}, "reproducible": 2}}
        runs |= {"whole, reproducible": {"parallel": {}, "reproducible": 2}}
        if backend == "ddp":
            runs |= {f"sliced, {name}": how for name, how in SLICED.items()}
            runs |= {"sliced, in chunks": {"parallel": {"shard": "full", "chunks": 3}, "dropout": 0.0}}
            runs |= {f"whole, {name}": {**how, "parallel": {}} for name, how in SLICED.items()}
    else:
        runs = {
            "copies": in_stages(2, plain)["plain"],
            "exact": in_stages(2, exact)["exact"],
            "shared": in_stages(2, plain, shard="optimizer")["plain"],
            "deep": in_stages(4, {"deep": {"parallel": {"chunks": 4}}})["deep"],
            "exact deep": in_stages(4, {"deep": {"parallel": {"chunks": 4}, "dropout": 0.0}})["deep"],
            "fp16 on the wire": {**in_stages(2, plain)["plain"], "compression": "fp16"},
        }
        if backend == "ddp":
            runs |= {name: how for name, (how, _) in sliced_in_stages().items()}
            runs |= {f"whole, {name}": how for name, (_, how) in sliced_in_stages().items()}
    return in_ranks(size, run_all, backend, runs)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that losses, weights and the optimizer's state are equal, bit for bit."""
    assert one["records"] == other["records"]
    assert list(one["weights"]) == list(other["weights"])
    for name, tensor in one["weights"].items():
        assert tensor.equal(other["weights"][name]), name
    assert sorted(one["state"]) == sorted(other["state"])
    for number, entries in one["state"].items():
        for key, value in entries.items():
            assert value.equal(other["state"][number][key]), (number, key)


def close(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["records"], other["records"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    for name, tensor in one["weights"].items():
        assert float((tensor - other["weights"][name]).norm() / tensor.norm()) < 1e-5, name


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("name", [*ALONE, *SCHEDULES, "by hand", "by time"])
def test_stages_change_no_bit(backend: str, name: str) -> None:
    """One process with the same micro-batches is the reference: dropout, masks, clipping, uneven sizes."""
    alone = trained("single", 1)[0]
    for rank in trained(backend, 2):
        assert rank[name]["records"] == alone.get(name, alone["plain"])["records"]
    same(trained(backend, 2)[0][name], alone.get(name, alone["plain"]))


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("name", ["copies", "fp16 on the wire"])
def test_stages_change_no_bit_of_two_replicas(backend: str, name: str) -> None:
    """2 ranks with a whole model each are compared with 4 with half of it, and one engine with the other."""
    same(trained(backend, 4)[0][name], trained("ddp", 2)[0][name])


@pytest.mark.parametrize("backend", ENGINES)
def test_devices_change_no_bit(backend: str) -> None:
    """CPUs stand for devices: tested are the order of the work, and the exchange of what is in several places."""
    alone = trained("single", 1)[0]
    for name in ("2 devices", "3 devices"):
        same(alone[name], alone["plain"])
    same(alone["fp16 on 2 devices"], alone["fp16"])
    copies = trained(backend, 2)[0]
    same(copies["copies on 2 devices"], copies["copies"])


@pytest.mark.parametrize("backend", ENGINES)
def test_any_grid_equals_the_whole_model(backend: str) -> None:
    """Replicas and micro-batches change only the order of sums."""
    whole = trained("single", 1)[0]["whole"]
    close(trained(backend, 4)[0]["exact"], whole)
    close(trained(backend, 4)[0]["exact deep"], whole)


@pytest.mark.parametrize("backend", ENGINES)
def test_sharded_optimizer_changes_no_bit(backend: str) -> None:
    two, four = trained(backend, 2), trained(backend, 4)
    same(two[0]["shared"], two[0]["whole copies"])
    same(two[0]["shared again"], two[0]["whole again"])
    # An earlier training's hooks stayed, and sent all parameters round once more.
    assert [two[0][name]["hooks"] for name in ("shared", "shared again", "whole again")] == [1, 1, 0]
    same(two[0]["shared in fp16"], two[0]["whole in fp16"])
    same(two[0]["shared, reproducible"], two[0]["whole, reproducible"])
    same(four[0]["shared"], four[0]["copies"])
    kept = [rank["shared"]["own state"] for rank in two]
    assert sum(kept) == two[0]["whole copies"]["own state"]
    assert max(kept) < 0.6 * sum(kept)


@pytest.mark.parametrize("name", SLICED)
def test_full_sharding_changes_the_order_of_sums_only(name: str) -> None:
    ranks = trained("ddp", 2)
    close(ranks[0][f"sliced, {name}"], ranks[0][f"whole, {name}"])
    kept = [rank[f"sliced, {name}"]["own state"] for rank in ranks]
    assert max(kept) < 0.6 * ranks[0][f"whole, {name}"]["own state"]


@pytest.mark.parametrize("name", sliced_in_stages())
def test_full_sharding_of_stages_is_close_to_whole_copies(name: str) -> None:
    """Two replicas of two stages train in every schedule, and with the other options of a step."""
    ranks = trained("ddp", 4)
    close(ranks[0][name], ranks[0][f"whole, {name}"])
    kept = [rank[name]["own state"] for rank in ranks]
    assert max(kept) < 0.4 * trained("ddp", 2)[0]["whole copies"]["own state"]


def test_full_sharding_with_chunks_is_close_to_one_process() -> None:
    close(trained("ddp", 2)[0]["sliced, in chunks"], trained("single", 1)[0]["whole"])


@pytest.mark.parametrize(
    ("size", "parallel"),
    [(2, {"shard": "full"}), (4, {"stages": 2, "chunks": 3, "shard": "full", "balance": "bytes"})],
    ids=str,
)
def test_models_are_moved_to_gpus_block_by_block(size: int, parallel: dict[str, Any]) -> None:
    """A model was moved to every rank's GPU as a whole, and cut there."""
    ranks = in_ranks(size, cut_on_the_host, parallel)
    assert [rank["held"] for rank in ranks] == [[]] * size
    assert ranks[0]["weights"], "those of the first copy"
    assert ranks[0]["state"]


def test_blocks_that_share_a_parameter_are_refused() -> None:
    """Each block had a parameter of its own from then on, and the optimizer knew only one."""
    with pytest.raises(RankError, match="--shard full: the blocks 0 and 2 share a parameter"):
        in_ranks(2, fit_tied)


@pytest.mark.parametrize(
    ("device", "precision", "gathered", "summed"),
    [
        ("cuda:0", "bf16", torch.bfloat16, torch.float32),
        ("cuda:0", "fp32", None, None),
        ("cuda:0", "fp16", None, None),
        ("cpu", "bf16", None, None),
    ],
)
def test_gathering_policy_uses_bf16_on_gpus(device: str, precision: str, gathered: Any, summed: Any) -> None:
    """In fp32 blocks are twice as many bytes; on CPUs bf16 has the bits of whole copies."""
    policy = gathering_policy(torch.device(device), precision)
    assert (policy.param_dtype, policy.reduce_dtype) == (gathered, summed)
    assert policy.output_dtype is None
    assert policy.cast_forward_inputs == (gathered is None), "autocast does it"


@pytest.mark.parametrize("parallel", [{"shard": "full"}, {"stages": 2}], ids=str)
def test_parameter_without_a_gradient_is_named(parallel: dict[str, Any]) -> None:
    """A sharded parameter had no name in the error, and one in a stage another name than the user's."""
    with pytest.raises(RankError, match=r"1 parameter got no gradient in this step \(6\.forgotten\)"):
        in_ranks(2, fit_unused, parallel)


def test_second_cut_of_a_model_is_refused() -> None:
    """The error was PyTorch's "Cannot copy out of meta tensor"."""
    with pytest.raises(RankError, match="An earlier training of this process has cut this model elsewhere"):
        in_ranks(2, cut_twice)


def test_activation_checkpointing_changes_no_bit() -> None:
    alone = trained("single", 1)[0]
    same(alone["recompute"], alone["plain"])
    same(alone["recompute whole"], alone["whole"])


def interrupted_and_not(shape: tuple[str, int, dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Train to the end, and again in two parts; return the results per rank."""
    backend, size, parallel = shape
    usual: dict[str, Any] = {"parallel": parallel, "max_norm": None, "global_batch_size": 18}
    parts = {"log_dir": str(folder)}
    runs = {
        "whole": usual,
        "first part": {**usual, **parts, "save_every_steps": 5, "stop_after": 7},
        "second part": {**usual, **parts, "resume": "auto"},
    }
    return in_ranks(size, run_all, backend, runs)


SAVED: list[tuple[str, int, dict[str, Any]]] = [
    ("ddp", 2, {"stages": 2, "chunks": 3}),
    ("horovod", 6, {"stages": 2, "chunks": 3, "shard": "optimizer"}),
    ("ddp", 3, {"shard": "optimizer"}),
    ("horovod", 3, {"shard": "optimizer"}),
    ("ddp", 3, {"shard": "full"}),
    ("ddp", 6, {"stages": 2, "chunks": 3, "shard": "full"}),
    ("single", 1, {}),
]
"""Engines, ranks and options: three replicas, as two hide in which order values are added."""


@requires("horovod")
@pytest.mark.parametrize("shape", SAVED, ids=str)
def test_interrupted_run_in_parts_ends_with_the_same_bits(shape: Any, tmp_path: Path) -> None:
    """Each rank saves what it has, and nothing is gathered; the run has dropout."""
    ranks = interrupted_and_not(shape, tmp_path)
    whole, resumed = ranks[0]["whole"], ranks[0]["second part"]
    same(resumed, whole)
    _, size, parallel = shape
    files = list((tmp_path / "checkpoints/step-000000005").glob("*.safetensors"))
    assert len(files) == (size if parallel else 1)


SHAPES: list[tuple[str, int, dict[str, Any]]] = [
    ("ddp", 2, {"stages": 2, "chunks": 3}),
    ("single", 1, {"chunks": 3}),
    ("ddp", 4, {"stages": 2, "chunks": 3}),
    ("horovod", 2, {"stages": 2, "chunks": 3, "schedule": "zero-bubble"}),
    ("single", 1, {}),
    ("ddp", 2, {"shard": "optimizer"}),
    ("horovod", 4, {"stages": 2, "chunks": 3, "shard": "optimizer"}),
    ("ddp", 2, {"shard": "full"}),
    ("ddp", 4, {"shard": "full"}),
    ("ddp", 4, {"stages": 2, "chunks": 3, "shard": "full"}),
]


def stopped_and_resumed(shapes: list[int], folder: Path) -> dict[str, Any]:
    """Stop inside the second epoch in one layout, and resume in another."""
    first, second = (SHAPES[number] for number in shapes)
    common = {"log_dir": str(folder), "dropout": 0.0}
    saving = {"parallel": first[2], **common, "save_every_steps": 5, "stop_after": 6}
    in_ranks(first[1], run_all, first[0], {"run": saving})
    going_on = {"parallel": second[2], **common, "resume": "auto"}
    ranks = in_ranks(second[1], run_all, second[0], {"run": going_on})
    run: dict[str, Any] = ranks[0]["run"]
    return run


@requires("horovod")
@pytest.mark.parametrize(
    "shapes",
    [
        *([0, 1], [1, 3], [2, 4], [8, 9]),
        *(case(both, when="long") for both in ([0, 2], [4, 6], [6, 5], [5, 7], [7, 0], [7, 8], [9, 3])),
    ],
    ids=str,
)
def test_checkpoint_of_any_layout_loads_into_any_other(shapes: list[int], tmp_path: Path) -> None:
    """Training resumes at the next sample, with the same bits where only stages, schedule or engine differ."""
    resumed, whole = stopped_and_resumed(shapes, tmp_path), trained("single", 1)[0]["whole"]
    close(resumed, whole)
