"""The accelerator's devices, process groups and refusals; a stand-in replaces the driver."""

from __future__ import annotations

import ast
import inspect
import os
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.backends.devices import choose_devices
from hvd_trainer.backends.engine import Engine
from hvd_trainer.backends.session import Session
from hvd_trainer.errors import BackendError, LaunchError
from hvd_trainer.hvd.common.basics import Runtime
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous import ranks
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.threads import start_thread

GPU = torch.device("cuda", 0)
PACKAGE = Path(accelerator.__file__).parents[1]


class Driver:
    """Stands for `torch.cuda` or `torch.xpu`, and parts of `torch.accelerator`; records what it is asked for."""

    def __init__(self, kind: str = "cuda", devices: int = 2) -> None:
        self.kind, self.devices = kind, devices
        self.calls: list[tuple[str, Any]] = []

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.devices

    def current_device_index(self) -> int:
        return 0

    current_device = current_device_index

    def set_device_index(self, device: torch.device) -> None:
        self.calls.append(("set_device", device.index))

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("synchronize", device.index))

    def get_device_name(self, device: torch.device) -> str:
        return f"made-up {self.kind} GPU"

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B + (device.index or 0), pci_device_id=0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Let PyTorch see two GPUs of type `cuda`."""
    return install(monkeypatch, Driver())


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device(driver.kind))
    monkeypatch.setattr(torch, "get_device_module", lambda _: driver)
    for name in ("current_device_index", "set_device_index", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, getattr(driver, name))
    return driver


# Which device.


def test_each_rank_gets_its_gpu(driver: Driver) -> None:
    chosen = [choose_devices(World(local_rank, 4, local_rank, 4)) for local_rank in range(4)]
    assert [devices[0].index for devices in chosen] == [0, 1, 0, 1]
    assert choose_devices(World(), "cpu")[0].type == "cpu"


@pytest.mark.parametrize(("pins", "calls"), [(True, [("set_device", 0)]), (False, [])])
def test_engine_pins_its_rank_to_its_gpu_and_hvd_does_not(
    pins: bool, calls: list[tuple[str, int]], driver: Driver
) -> None:
    """`hvd.init` made a context before the script had chosen its GPU."""
    assert Engine.pins_device
    assert not Runtime.pins_device
    session, engine = Session(EngineOptions(device="cuda"), {}), Engine()
    engine.pins_device = pins
    with closing(session):
        session.start(engine)
        assert (session.device, driver.calls) == (torch.device("cuda", 0), calls)


@pytest.mark.parametrize(("contexts", "chosen"), [((), None), ((1,), 1), ((0, 1), 0)])
def test_thread_starts_on_a_device_with_a_context(
    contexts: tuple[int, ...], chosen: int | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first call of the driver would make one on device 0, in each rank."""
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", contexts.__contains__, raising=False)
    start_thread(lambda: driver.calls.append(("runs", None)), "a thread").join()
    assert driver.calls == [*([] if chosen is None else [("set_device", chosen)]), ("runs", None)]


def test_rank_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Slurm's --gpus-per-task=1, local rank 3 sees only its own GPU, as GPU 0."""
    install(monkeypatch, Driver(devices=1))
    assert choose_devices(World(3, 4, 3, 4))[0].index == 0


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver(devices=0))
    assert choose_devices(World())[0].type == "cpu"
    with pytest.raises(BackendError, match=r"--device cuda .* sees no such GPU\. .* --device cpu"):
        choose_devices(World(), "cuda")


def test_device_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver("xpu"))
    assert choose_devices(World(1, 2, 1, 2))[0] == torch.device("xpu", 1)
    with pytest.raises(BackendError, match=r"--device cuda .* \(it sees xpu\).* --device xpu"):
        choose_devices(World(), "cuda")


def test_unsupported_accelerator_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver("mps"))
    assert accelerator.kind() is None
    assert accelerator.unsupported() == "mps"
    assert choose_devices(World())[0].type == "cpu"


# Who shares a GPU.


def session_on_gpus(rank: int, gpus: list[str]) -> Session:
    size = len(gpus)
    session = Session(EngineOptions(backend="ddp"), {})
    session.world = World(rank, size, rank, size, launcher="torchrun")
    session.peers = [RankInfo("node1", local_rank, "ddp", (0,), (gpu,)) for local_rank, gpu in enumerate(gpus)]
    session.devices = [torch.device("cuda", rank % 2)]
    return session


def test_nccl_refuses_more_ranks_than_gpus(driver: Driver) -> None:
    session = session_on_gpus(0, ["gpu-a", "gpu-b", "gpu-a"])
    with pytest.raises(LaunchError, match=r"Ranks 0, 2 would share one GPU \(cuda:0 on node1\)") as caught:
        session.prepare_nccl()
    assert "2 GPUs are visible here: start that many ranks per node, or" in str(caught.value)
    assert "--device cpu" in str(caught.value)
    with closing(session_on_gpus(1, ["gpu-a", "gpu-b", "gpu-a"])) as session:
        session.prepare_nccl()


def test_nccl_is_the_default_transport_on_gpus(driver: Driver) -> None:
    for transport, uses_nccl in (("auto", True), ("nccl", True), ("gloo", False)):
        backend = create(EngineOptions(backend="ddp", transport=transport), {})  # type: ignore[arg-type]
        backend.session.devices = [GPU]
        assert backend.uses_nccl is uses_nccl


def test_nccl_shares_a_gpu_when_allowed(driver: Driver) -> None:
    with closing(session_on_gpus(0, ["gpu-a", "gpu-a"])) as session:
        session.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        session.prepare_nccl()


@pytest.mark.parametrize(("given", "used"), [(None, "0"), ("1", "0"), ("2", "2")])
def test_nccl_leaves_lost_ranks_to_the_monitor(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    """Also under torchrun, which sets 1 where the user has set nothing."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    with closing(session_on_gpus(0, ["gpu-a", "gpu-b"])) as session:
        if given is not None:
            session.environ[name] = given
            monkeypatch.setenv(name, given)
        session.prepare_nccl()
        assert os.environ[name] == used
    assert os.environ.get(name) == given


def test_gpu_slot_contains_nccl_hostid(driver: Driver) -> None:
    """Two slices of a GPU (MIG) have different UUIDs and one slot, by which NCCL refuses them."""
    session = session_on_gpus(1, ["gpu-a", "gpu-b"])
    assert session._gpu_name(torch.device("cuda", 1)) == "0000:3c:00"
    session.environ["NCCL_HOSTID"] = "n1"
    assert session._gpu_name(torch.device("cuda", 1)) == "n1 0000:3c:00"


def test_virtual_local_ranks_are_numbered() -> None:
    """`torchrun --virtual-local-rank` gives LOCAL_RANK=0 to all ranks."""
    gpus = [("a", "g0"), ("a", "g1"), ("b", "g0")]
    numbered = ranks.number_local_ranks([RankInfo(host, 0, "ddp", (0,), (gpu,)) for host, gpu in gpus])
    assert [peer.local_rank for peer in numbered] == [0, 1, 0]
    assert ranks.resolve_nodes(World(1, 3, 0, 2), numbered).local_rank == 1
    same = [RankInfo("a", 0, "ddp", (0,), ("g0",))] * 2
    assert ranks.number_local_ranks(same) == same
    with pytest.raises(LaunchError, match="both say that they are local rank 0"):
        ranks.resolve_nodes(World(1, 2, 0, 2), ranks.number_local_ranks([RankInfo("a", 0, "ddp", (0,))] * 2))


# Which library, and which group.


def test_nccl_without_a_gpu_is_refused() -> None:
    backend: Any = create(EngineOptions(backend="ddp", transport="nccl"), {})
    with pytest.raises(BackendError, match="--transport nccl needs a GPU per rank, and this rank has none"):
        backend._check_transport()


def test_ranks_of_several_gpus_are_refused_on_nccl() -> None:
    """PyTorch's group for NCCL has one device, and the first broadcast of another one's tensor ended the job."""
    backend: Any = create(EngineOptions(backend="ddp"), {})
    backend.session.devices = [torch.device("cuda", number) for number in (2, 3)]
    backend.session.world = World(1, 2, 1, 2, 0, 1, "torchrun")
    with pytest.raises(BackendError, match="--devices-per-rank 2 is for one rank on NCCL.* Type --transport gloo"):
        backend._check_transport()


@pytest.mark.parametrize(
    ("device", "built", "said"),
    [
        (
            "cuda",
            (),
            "was built for CPUs, .* made-up cuda GPU. Type: .*install-horovod --gpu nccl; or .*backend ddp",
        ),
        ("xpu", (), "Horovod exchanges no tensors of xpu. Type: --backend ddp"),
        ("cuda", ("cuda",), ""),
        ("cuda", ("rocm",), ""),
        ("cpu", (), ""),
    ],
)
def test_horovod_built_for_cpus_is_refused_on_a_gpu(
    device: str, built: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's background thread ended at the first GPU tensor: two ranks waited for 300 s, one rank for ever."""
    install(monkeypatch, Driver(device))
    backend: Any = create(EngineOptions(backend="horovod"), {})
    backend.session.devices = [torch.device(device)]
    backend.collectives.hvd = SimpleNamespace(
        cuda_built=lambda: "cuda" in built, rocm_built=lambda: "rocm" in built
    )
    if not said:
        backend._refuse_cpu_build()
        return
    with pytest.raises(BackendError, match=said):
        backend._refuse_cpu_build()


def test_horovod_async_completion_is_set_on_gpus_only() -> None:
    backend: Any = create(EngineOptions(backend="horovod"), {})
    backend.collectives.hvd = SimpleNamespace(nccl_built=lambda: True)
    assert "HOROVOD_ENABLE_ASYNC_COMPLETION" not in backend._tuning()
    backend.session.devices = [GPU]
    assert backend._tuning()["HOROVOD_ENABLE_ASYNC_COMPLETION"] == "1"


def test_horovod_nccl_abort_is_set_in_elastic_mode_only() -> None:
    backend: Any = create(EngineOptions(backend="horovod"), {})
    backend.collectives.hvd, backend.session.devices = SimpleNamespace(nccl_built=lambda: True), [GPU]
    assert "HOROVOD_NCCL_ABORT" not in backend._tuning()
    backend.session.driver = SimpleNamespace()
    assert backend._tuning()["HOROVOD_NCCL_ABORT"] == "1"


# What PyTorch must have.


def asked_of_a_module() -> set[str]:
    """Return the attributes that accelerator.py uses of `torch.cuda` and `torch.xpu` alike."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(accelerator))))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    modules = {ast.unparse(call) for call in calls if ast.unparse(call.func) == "torch.get_device_module"}
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.value) in modules]
    modules |= {ast.unparse(target) for node in assigned for target in node.targets}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules}


@pytest.mark.parametrize("module", [torch.cuda, torch.xpu])
def test_device_modules_have_all_attributes_in_use(module: Any) -> None:
    """CI has no accelerator, and PyTorch's releases differ."""
    asked = asked_of_a_module()
    assert {"is_initialized", "get_device_name", "default_generators"} <= asked, "in each of its forms"
    assert [name for name in sorted(asked) if not hasattr(module, name)] == []


def test_torch_accelerator_has_all_attributes_in_use() -> None:
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    asked = {name for source in sources for name in re.findall(r"torch\.accelerator\.(\w+)", source)}
    assert {"synchronize", "current_stream", "memory_allocated"} <= asked
    assert [name for name in sorted(asked) if not hasattr(torch.accelerator, name)] == []
