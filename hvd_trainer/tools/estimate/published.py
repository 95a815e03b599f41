"""List published speeds on several GPUs, each with its source; nothing here was measured by us.

A figure that the formula needs and a source lacks is assumed, and marked so beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hvd_trainer.tools.estimate.model import Setup
from hvd_trainer.tools.estimate.points import PIECE_MB, Point, count_pieces

DLPERF = "Oneflow-Inc/DLPerf, August and September 2020: 4 hosts, 8 V100 each, InfiniBand of 100 Gbit/s"
SPEEDS_100_GBIT = {4: (1, 4), 8: (1, 8), 16: (2, 8), 32: (4, 8)}
"""DLPerf's hosts and GPUs per host, by the number of GPUs. The tables here have 8, 16 and 32, which leaves out
that of TensorFlow 1 in fp16 (89 % on 8 GPUs, 72 % on 16), where the model would be off by 20 %."""
HOROVOD_512 = "horovod/horovod, docs/benchmarks.rst: 128 hosts, 4 Pascal GPUs each, 25 Gbit/s"
HOROVOD_FUSION_MB = 64.0
"""The default size of Horovod's fusion buffer."""
UNBUCKETED_MB = 1e6
"""The size of a piece where all gradients are sent at once."""


class Network(NamedTuple):
    """A neural network and its size."""

    name: str
    parameters: int

    @property
    def gradient_mb(self) -> float:
        return self.parameters * 4 / 2**20


# As torchvision's models have them, Inception V3 without its auxiliary classifier; BERT with its heads.
RESNET_50 = Network("ResNet-50", 25_557_032)
RESNET_101 = Network("ResNet-101", 44_549_160)
VGG_16 = Network("VGG-16", 138_357_544)
INCEPTION_V3 = Network("Inception V3", 23_834_568)
BERT_BASE = Network("BERT-Base", 110_106_428)


@dataclass(frozen=True)
class Series:
    """A published table: the same training on several numbers of GPUs."""

    code: str
    """whose code was run"""
    source: str
    engine: Literal["horovod", "ddp"]
    network: Network
    batch_size: int
    """per GPU"""
    alone: float
    """samples per second of one GPU"""
    efficiencies: Mapping[tuple[int, int], float]
    """by hosts and GPUs per host: a GPU's speed, divided by that of one alone"""
    link_gbit: float
    piece_mb: float
    trees: bool = True

    @property
    def name(self) -> str:
        return f"{self.code}, {self.network.name}"

    @cached_property
    def points(self) -> list[Point]:
        """The points of the table, those with the fewest GPUs first."""
        return [
            Point(
                self.engine,
                self._setup(hosts, per_host),
                self.compute_s / efficiency,
                self.name,
                f"{self.name}, {hosts * per_host} GPUs",
            )
            for (hosts, per_host), efficiency in self.efficiencies.items()
        ]

    @property
    def compute_s(self) -> float:
        return self.batch_size / self.alone

    def _setup(self, hosts: int, per_host: int) -> Setup:
        return Setup(
            hosts,
            per_host,
            self.link_gbit,
            self.compute_s,
            self.network.parameters * 4,
            count_pieces(self.network.gradient_mb, piece_mb=self.piece_mb),
            trees=self.trees,
        )


def _dlperf_series(
    code: str,
    engine: Literal["horovod", "ddp"],
    network: Network,
    batch_size: int,
    speeds: Mapping[int, float],
    piece_mb: float,
) -> Series:
    """Build a series from speeds by the number of GPUs."""
    alone = speeds[1]
    parts = {SPEEDS_100_GBIT[n]: speed / n / alone for n, speed in speeds.items() if n > 1}
    return Series(code, DLPERF, engine, network, batch_size, alone, parts, 100.0, piece_mb)


# The images per second of its report of August 2020 (reports/dlperf_benchmark_test_report_v1.md).
PYTORCH = _dlperf_series(
    *("pytorch/examples", "ddp", RESNET_50, 128),
    {1: 354.40, 8: 2719.07, 16: 5307.21, 32: 10632.33},
    PIECE_MB,
)
TENSORFLOW = _dlperf_series(
    *("TensorFlow 1", "horovod", RESNET_50, 128),
    {1: 362.44, 4: 1391.28, 8: 2721.98, 16: 5099.42, 32: 9514.64},
    HOROVOD_FUSION_MB,
)
MXNET = _dlperf_series(
    *("MXNet", "horovod", RESNET_50, 96),
    {1: 389.71, 8: 2947.72, 16: 5684.68, 32: 10419.21},
    HOROVOD_FUSION_MB,
)
# Those of the tables in NVIDIADeepLearningExamples/, whose PyTorch jobs use Apex's DDP, which sends pieces while
# backward goes on as PyTorch's does; but BERT's are told to send all at once (message_size=250000000).
NVIDIA = _dlperf_series(
    *("NVIDIA", "ddp", RESNET_50, 128),
    {1: 367.29, 4: 1449.48, 8: 2887.65, 16: 5716.79, 32: 10917.09},
    PIECE_MB,
)
NVIDIA_AMP = _dlperf_series(
    *("NVIDIA AMP", "ddp", RESNET_50, 256),
    {1: 802.9, 4: 3137.44, 8: 6154.66, 16: 11991.94, 32: 22551.16},
    PIECE_MB,
)
NVIDIA_BERT_32 = _dlperf_series(
    *("NVIDIA, batch 32", "ddp", BERT_BASE, 32),
    {1: 119.6, 4: 457.72, 8: 921.32, 16: 1499.4, 32: 2885.81},
    UNBUCKETED_MB,
)
NVIDIA_BERT_48 = _dlperf_series(
    *("NVIDIA, batch 48", "ddp", BERT_BASE, 48),
    {1: 121.94, 4: 464.66, 8: 928.01, 16: 1584.32, 32: 3039.3},
    UNBUCKETED_MB,
)


def _horovod_512_series(network: Network, alone: float, efficiency: float) -> Series:
    """Build a series from the efficiency on 128 hosts with 4 GPUs each, where NCCL had no trees yet.

    Args:
        alone: images per second of one P100 with batch 64, which the source does not give.
        efficiency: as published.
    """
    parts = {(128, 4): efficiency}
    return Series(
        "Horovod", HOROVOD_512, "horovod", network, 64, alone, parts, 25.0, HOROVOD_FUSION_MB, trees=False
    )


# One P100, batch 64, made-up data, May 2017: tensorflow/tensorflow, docs_src/performance/benchmarks.md. It has no
# ResNet-101: that lies between its ResNet-50 (219/s) and ResNet-152 (91.8/s) as their floating-point operations do
# (3.8, 7.6 and 11.3 billion: He et al. 2016), assumed.
LARGE = (
    _horovod_512_series(INCEPTION_V3, 142.0, 0.90),
    _horovod_512_series(RESNET_101, 129.0, 0.90),
    _horovod_512_series(VGG_16, 154.0, 0.68),
)
TABLES = (PYTORCH, NVIDIA, NVIDIA_AMP, NVIDIA_BERT_32, NVIDIA_BERT_48, TENSORFLOW, MXNET)
SERIES = (*TABLES, *LARGE)


def published_points(engine: str) -> list[Point]:
    """Return all published points of an engine."""
    return [point for series in SERIES if series.engine == engine for point in series.points]
