"""How an engine exchanges gradients: one name for one thing on both engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineOptions:
    """How the engine exchanges gradients. One name for one thing on both engines."""

    backend: Literal["horovod", "ddp", "single", "data-parallel"] = "horovod"
    """the engine that exchanges gradients: Horovod, native PyTorch DDP, or none in one process; to compare with,
    also torch.nn.DataParallel: one process with all GPUs, where --batch-size is per GPU"""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """where to train: cuda is NVIDIA's and AMD's GPUs, xpu Intel's; auto takes a GPU per rank if there are any"""
    timeout_s: float = 60.0
    """once it trains, how long a rank may not get on (in seconds) before the job ends with all ranks' stacks"""
    startup_timeout_s: float = 300.0
    """the same for the start, saving and callbacks; and how long a single exchange may take"""
    init_method: str | None = None
    """where ranks that were started by hand meet: env://, tcp://HOST:PORT or file:///PATH"""
    network_interface: str | None = None
    """the network card that joins the nodes, such as eth1: for the ranks' meeting, Gloo and NCCL; None: the one
    on the route to rank 0's node"""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """format of the gradients on the wire (powersgd: ddp only)"""
    threads: int | None = None
    """CPU threads of each rank; None: as OMP_NUM_THREADS says, else its share of the cores (another number adds in
    another order, so that last bits differ)"""
    bucket_mb: float = 25.0
    """gradients are exchanged in buckets of this size, in MB, while backward goes on"""
    sync_batch_norm: bool = False
    """batch norm over the global batch instead of each rank's own"""
    find_unused_parameters: bool = False
    """allow steps in which some parameters get no gradient; they then stay as they are"""
    transport: Literal["auto", "gloo", "nccl", "xccl"] = "auto"
    """ddp only: the library that moves the bytes; auto is nccl on GPUs (Intel's: xccl) and gloo on CPUs"""
    static_graph: bool = False
    """ddp only: promise that every step uses the same parameters in the same order"""
    bucket_views: bool = True
    """ddp only: let gradients be parts of the buckets, so that they need not be copied"""
    powersgd_rank: int = 1
    """ddp only: rank of the approximation in powersgd compression"""
    adasum: bool = False
    """horovod only: combine gradients by Adasum instead of averaging (needs Horovod built with MPI)"""
    num_groups: int | None = None
    """horovod only: allreduce the gradients in this many groups instead of by bucket_mb"""
    autotune: bool = False
    """horovod only: let Horovod tune its own fusion and cycle time while training"""
    cache_capacity: int | None = None
    """horovod only: how many exchanges it remembers, so that the ranks need not agree on each again (its own
    default: 1024; 0: none)"""
    cycle_time_ms: float | None = None
    """horovod only: let its background thread look for work once in so many ms (default: when there is some, if
    install-horovod has built it, else every ms)"""
