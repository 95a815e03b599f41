"""The options of the two jobs, apart from their code: `--help` need not wait for PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

from msgspec import Meta

from hvd_trainer.config.checks import COMMON, Count, NonNegative, Positive
from hvd_trainer.config.options import TrainerOptions, TrainOptions

OptimizerName = Literal["adam", "adamw", "sgd"]
MIN_VOCABULARY = 1 + 256
"""Padding, and each byte."""


@dataclass(frozen=True)
class ImageOptions:
    """The data set."""

    dataset: Annotated[Literal["auto", "mnist", "digits"], COMMON] = "auto"
    """mnist, digits (a small real set that comes with this package), or auto: mnist if it can be had"""
    data_dir: Annotated[str | None, COMMON] = None
    """folder with MNIST as torchvision lays it out; None: a cache folder of yours"""
    repeat: Count = 12
    """digits only: how often an epoch trains on each (once would be 3 steps on 4 ranks)"""


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer."""

    optimizer: Annotated[OptimizerName, COMMON] = "adam"
    """how gradients become updates"""
    lr: Annotated[Positive | None, COMMON] = None
    """learning rate, before --lr-scaling (mnist: 4e-3; imdb: 1e-3, and 1e-4 for --preset reference)"""
    momentum: NonNegative | None = None
    """sgd only; None: 0.9"""
    weight_decay: NonNegative = 0.0
    """decay of the weights (adamw: decoupled)"""

    def mistakes(self) -> list[str]:
        """Return one message per mistake that no range on a field can say."""
        if self.momentum is None or self.optimizer == "sgd":
            return []
        return [f"--momentum {self.momentum} is for --optimizer sgd, not {self.optimizer}: leave one out"]


@dataclass(frozen=True)
class ModelOptions:
    """The model."""

    model: Annotated[Literal["cnn", "mlp", "quick"], COMMON] = "cnn"
    """the small convolutional network of the tutorials; two hidden layers; or one that learns quickest"""


MNIST_EPOCHS, MNIST_LR = 5, 4e-3
"""On 1 to 8 ranks they end above 98 %; three epochs on 4 ranks with 97.7 % at 2e-3, and 97.9 to 98.2 % at 4e-3."""


@dataclass(frozen=True)
class MnistOptions(TrainerOptions):
    """Train a small network on MNIST, on Horovod or on native DDP, under any launcher."""

    train: TrainOptions = field(default_factory=lambda: TrainOptions(epochs=MNIST_EPOCHS))
    data: ImageOptions = field(default_factory=ImageOptions)
    network: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=lambda: OptimizerOptions(lr=MNIST_LR))

    def mistakes(self) -> list[str]:
        mistakes = self.optimizer.mistakes()
        if self.data.dataset == "mnist" and self.data.repeat != ImageOptions.repeat:
            mistakes.append("--repeat is for the digits, not for --dataset mnist: leave one out")
        return mistakes


@dataclass(frozen=True)
class TextOptions:
    """The data set."""

    dataset: Annotated[Literal["imdb", "synthetic"], COMMON] = "imdb"
    """imdb (50,000 movie reviews), or synthetic: tokens drawn at random, to measure speed without data"""
    data_dir: Annotated[str | None, COMMON] = None
    """aclImdb_v1.tar.gz, the folder aclImdb that it unpacks to, or a folder with either; None: a cache folder of
    yours"""
    synthetic_reviews: Count = 10_000
    """synthetic only: how many to train on; a tenth as many to validate on"""


@dataclass(frozen=True)
class TextSizes:
    """The sizes of a Transformer."""

    layers: int
    d_model: int
    heads: int
    d_hid: int
    dropout: float
    sequence_length: int
    vocabulary: int


@dataclass(frozen=True)
class TextModelOptions:
    """The model. What is None is the preset's (small; reference)."""

    preset: Annotated[Literal["small", "reference"], COMMON] = "small"
    """small, for CPUs, or reference, for GPUs: 365 million parameters, best with --precision bf16, --batch-size 32
    and --warmup-epochs 1"""
    layers: Count | None = None
    """encoder layers (2; 12)"""
    d_model: Count | None = None
    """width of what they pass on (64; 2048)"""
    heads: Count | None = None
    """attention heads, which divide the width (2; 16)"""
    d_hid: Count | None = None
    """width of the hidden layer in each (128; 2048)"""
    dropout: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """share of values that are left out in training (0.2)"""
    sequence_length: Count | None = None
    """tokens of a review (256; 512)"""
    vocabulary: Annotated[int, Meta(ge=MIN_VOCABULARY)] | None = None
    """different tokens (8000; 30000)"""

    @property
    def sizes(self) -> TextSizes:
        """Return the sizes from which the model is built, those of the preset for what is None."""
        chosen = {name: value for name, value in vars(self).items() if value is not None and name != "preset"}
        return replace(PRESETS[self.preset], **chosen)


PRESETS = {
    # 0.6 million parameters: 87 % of the test reviews after two epochs, in all six minutes of CPU time.
    "small": TextSizes(
        layers=2, d_model=64, heads=2, d_hid=128, dropout=0.2, sequence_length=256, vocabulary=8000
    ),
    # 365 million parameters: the layers of PyTorch's tutorial on a Transformer in two pipelines at half their
    # width, and half as many again, so that 2, 3, 4, 6 and 12 stages get equal shares.
    "reference": TextSizes(
        layers=12, d_model=2048, heads=16, d_hid=2048, dropout=0.2, sequence_length=512, vocabulary=30000
    ),
}
PRESET_LR = {"small": 1e-3, "reference": 1e-4}


@dataclass(frozen=True)
class ImdbOptions(TrainerOptions):
    """Train a Transformer to tell good reviews of movies from bad ones, on either engine, under any launcher."""

    train: TrainOptions = field(default_factory=lambda: TrainOptions(epochs=2))
    data: TextOptions = field(default_factory=TextOptions)
    network: TextModelOptions = field(default_factory=TextModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)

    def filled(self) -> ImdbOptions:
        """Return these options with the preset's values for what is None."""
        network = replace(self.network, **asdict(self.network.sizes))
        lr = PRESET_LR[network.preset] if self.optimizer.lr is None else self.optimizer.lr
        return replace(self, network=network, optimizer=replace(self.optimizer, lr=lr))

    def mistakes(self) -> list[str]:
        mistakes, sizes = self.optimizer.mistakes(), self.network.sizes
        if sizes.d_model % sizes.heads:
            mistakes.append(f"--heads must divide --d-model, and {sizes.heads} does not divide {sizes.d_model}")
        if self.data.dataset == "synthetic" and self.data.data_dir is not None:
            mistakes.append("--dataset synthetic reads no data: leave out --data-dir")
        if self.data.dataset != "synthetic" and self.data.synthetic_reviews != TextOptions.synthetic_reviews:
            mistakes.append("--synthetic-reviews is for --dataset synthetic: leave one out")
        return mistakes
