"""The promises of `hvd_trainer.hvd.elastic`, one function per promise; `test_hvd.py` calls them in ranks."""

from __future__ import annotations

import pytest
import torch
from hvd_checks import Checks
from torch import nn

from hvd_trainer import hvd
from hvd_trainer.hvd.common.elastic import notification_manager

CHECKS = Checks()


@CHECKS.add
def elastic_sampler_shares_out_the_rest_of_an_epoch() -> None:
    sampler = hvd.elastic.ElasticSampler(range(50), seed=3)
    sampler.set_epoch(1)
    first = list(sampler)[:5]
    assert len(sampler) == len(list(sampler)) == -(-50 // hvd.size())
    sampler.record_batch(0, 5)
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 5 * hvd.size()}
    other = hvd.elastic.ElasticSampler(range(50), seed=3)
    other.load_state_dict(sampler.state_dict())
    seen = hvd.allgather_object(first + list(other))
    missing = set(range(50)) - set().union(*seen)
    assert not missing
    assert sum(map(len, seen)) - 50 < hvd.size(), "samples that fill up are fewer than the ranks"
    sampler.set_epoch(2)
    assert sampler.processed_num == 0
    assert list(sampler)[:5] != first


@CHECKS.add
def elastic_sampler_fills_up_one_last_sample() -> None:
    """Horovod's fails on an assertion when less is left than is missing."""
    sampler = hvd.elastic.ElasticSampler(range(hvd.size() + 1), shuffle=False)
    for last in ([hvd.size()], []):
        sampler.record_batch(0, 1)
        sampler.load_state_dict(sampler.state_dict())
        assert list(sampler) == last


def elastic_state() -> tuple[nn.Linear, torch.optim.Optimizer, hvd.elastic.TorchState]:
    """Return a model, its optimizer with a scheduler, and their state, which differ from rank to rank."""
    torch.manual_seed(hvd.rank())
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + hvd.rank(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, step=hvd.rank(), seen=[hvd.rank()])
    return model, optimizer, state


@CHECKS.add
def elastic_state_returns_to_the_last_commit() -> None:
    model, optimizer, state = elastic_state()
    state.commit()
    before = model.weight.clone()
    state.step += 1
    state.seen.append(7)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state.scheduler.step()
    group = optimizer.param_groups[0]
    state.restore()
    assert optimizer.param_groups[0] is group, "which a scheduler may hold"
    assert (state.step, state.seen) == (hvd.rank(), [hvd.rank()])
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    assert state.scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 1.0 + hvd.rank()


@CHECKS.add
def elastic_state_is_that_of_rank_0_after_sync() -> None:
    model, optimizer, state = elastic_state()
    state.commit()
    state.step += 5  # and not saved
    group = optimizer.param_groups[0]
    state.sync()
    assert (state.step, state.seen) == (5, [0])
    assert len({str(its) for its in hvd.allgather_object(model.state_dict())}) == 1
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert state.scheduler.optimizer is optimizer, "which was sent along, and replaced by a copy"
    assert optimizer.param_groups[0] is group, "which a scheduler may hold"
    state.restore()
    assert state.step == 5, "what is received is saved"


@CHECKS.add
def elastic_state_takes_other_values_and_handlers() -> None:
    _, _, state = elastic_state()
    state.model = other = nn.Linear(1, 1)
    with torch.no_grad():
        other.weight.fill_(9.0)
    state.restore()
    assert other.weight.item() != 9.0
    registry = hvd.elastic.state.get_handler_registry()
    hvd.elastic.state.set_handler_registry([(set, SetHandler), *registry])
    try:
        state = hvd.elastic.TorchState(words={"a"})
        state.words.add("b")
        state.restore()
        assert state.words == {"a"}
    finally:
        hvd.elastic.state.set_handler_registry(registry)


class SetHandler(hvd.elastic.state.StateHandler):
    def save(self) -> None:
        self._saved = set(self.value)

    def restore(self) -> None:
        self.value.intersection_update(self._saved)


@CHECKS.add
def elastic_training_begins_again_when_hosts_change() -> None:
    _, _, state = elastic_state()
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, last: int) -> int:
        while state.step < last:
            state.step += 1
            if state.step == 3 and not resets and hvd.rank() == 0:
                assert state._host_messages.empty()
                notification_manager.handle_hosts_updated(0, 1)
                assert not state._host_messages.empty(), "Horovod's tests wait for it"
            state.check_host_updates()
        return int(state.step)

    assert train(state, last=6) == 6
    assert resets == [hvd.size()]


@CHECKS.add
def elastic_training_ends_by_a_mistake_that_comes_again() -> None:
    """Horovod repeats it for ever."""
    state = hvd.elastic.TorchState(step=0)
    attempts = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        attempts.append(hvd.allreduce(torch.ones(1)))
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="mistake")

    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="mistake"):
            train(state)
        assert len(attempts) == 2
