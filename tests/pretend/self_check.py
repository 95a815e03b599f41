"""Check the pretend device itself: streams, events, memory, and host waits."""

from __future__ import annotations

import pytest
import torch
from stream_checks import place

from pretend import device


def device_itself() -> tuple[int, None]:
    """The device runs ahead, forgets and fails as a GPU does: else it would show no fault."""
    lib, gpu = device.library(), place()
    side = torch.Stream(gpu)
    # The host runs ahead, and a stream that waits for nothing reads what is not written yet.
    held, source = lib.hold(gpu.index), torch.ones(4).to(gpu, non_blocking=True)
    written = torch.Event(gpu)
    doubled = source * 2
    written.record()
    with side:
        too_early = (doubled + 1).to("cpu")
        side.wait_event(written)
        waited = doubled + 1
    assert not written.query()
    held.reach()
    side.synchronize()
    assert too_early.isnan().all()
    assert waited.tolist() == [3.0] * 4
    # Memory that is freed goes to the next tensor of its own stream, unless another stream is known to use it.
    for recorded in (False, True):
        values = torch.ones(4, device=gpu)
        torch.accelerator.synchronize()
        with side:
            held, copy = lib.hold(gpu.index), torch.empty(4, device=gpu).copy_(values)
        if recorded:
            values.record_stream(side)
        del values
        torch.empty(1, device=gpu)  # takes over what is free
        torch.accelerator.current_stream().synchronize()
        held.reach()
        side.synchronize()
        assert copy.isnan().all().item() is not recorded
    # An operator of several results writes them while nothing of its arguments is freed.
    for _ in range(300):
        largest, place_of_largest = torch.arange(4.0, device=gpu).max(dim=0)
    assert (largest.item(), place_of_largest.item()) == (3.0, 3)
    # Copies wait for the host only from page-locked memory; each host wait is counted.
    counted: list[str] = []
    lib.on_host_wait(counted.append)
    torch.ones(4).pin_memory().to(gpu, non_blocking=True)
    assert counted == []
    torch.ones(4, device=gpu).sum().item()
    torch.ones(4).to(gpu)
    assert counted == ["item", "copy to the device"]
    # Each device has a generator of its own, whose state is on the host.
    first, second = torch.pretend.default_generators[:2]
    second.manual_seed(7)
    state = first.get_state()
    torch.rand(4, device=torch.device(device.NAME, 1))
    assert torch.equal(state, first.get_state())
    # A kernel that fails is seen later, and by all that follow.
    torch.nn.functional.cross_entropy(torch.zeros(1, 2, device=gpu), torch.tensor([2], device=gpu))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device has failed"):
            torch.accelerator.synchronize()
    return 0, None
