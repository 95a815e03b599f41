"""The second job: a Transformer on IMDB's movie reviews. `horovodrun -np 4 python -m hvd_trainer.imdb --help`"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from torch import nn

from hvd_trainer.config.checks import at_least, more_than
from hvd_trainer.config.options import TrainerOptions, TrainOptions
from hvd_trainer.jobs.optimizers import OptimizerName, make_optimizer
from hvd_trainer.jobs.reviews.dataset import TextOptions, load_texts
from hvd_trainer.jobs.reviews.tokenizer import LEAST_VOCABULARY
from hvd_trainer.jobs.transformer import TextSizes, transformer
from hvd_trainer.observe.metrics import accuracy
from hvd_trainer.training.trainer import Trainer


@dataclass(frozen=True)
class TextModelOptions:
    """The model and its optimizer. What is None is the preset's (small; reference)."""

    preset: Literal["small", "reference"] = "small"
    """small, for CPUs, or reference, for GPUs: 365 million parameters, to which --precision bf16, --batch-size 32
    and --warmup-epochs 1 suit"""
    layers: int | None = None
    """encoder layers (2; 12)"""
    d_model: int | None = None
    """width of what they pass on (64; 2048)"""
    heads: int | None = None
    """attention heads, which divide the width (2; 16)"""
    d_hid: int | None = None
    """width of the hidden layer in each (128; 2048)"""
    dropout: float | None = None
    """share of values that are left out in training (0.2)"""
    sequence_length: int | None = None
    """tokens of a review (256; 512)"""
    vocabulary: int | None = None
    """different tokens (8000; 30000)"""
    optimizer: OptimizerName = "adam"
    """how gradients become updates"""
    lr: float | None = None
    """learning rate, before --lr-scaling (1e-3; 1e-4)"""
    momentum: float = 0.9
    """sgd only"""
    weight_decay: float = 0.0
    """decay of the weights (adamw: decoupled)"""

    def filled(self) -> TextModelOptions:
        """The same with the preset's values for what is None."""
        preset = PRESETS[self.preset]
        open_ones = [entry.name for entry in fields(self) if getattr(self, entry.name) is None]
        return replace(self, **{name: getattr(preset, name) for name in open_ones})

    @property
    def sizes(self) -> TextSizes:
        """What the model is built from."""
        whole = self.filled()
        return TextSizes(**{entry.name: getattr(whole, entry.name) for entry in fields(TextSizes)})

    def mistakes(self) -> list[str]:
        """What is wrong, one text per mistake."""
        sizes = self.sizes
        found = [
            *at_least(
                1,
                layers=sizes.layers,
                d_model=sizes.d_model,
                heads=sizes.heads,
                d_hid=sizes.d_hid,
                sequence_length=sizes.sequence_length,
            ),
            *at_least(LEAST_VOCABULARY, vocabulary=sizes.vocabulary),
            *at_least(0, dropout=sizes.dropout, momentum=self.momentum, weight_decay=self.weight_decay),
            *more_than(0, lr=self.lr),
        ]
        if sizes.dropout >= 1:
            found.append(f"--dropout must be less than 1, not {sizes.dropout}")
        if sizes.heads > 0 and sizes.d_model % sizes.heads:
            found.append(f"--heads must divide --d-model, and {sizes.heads} does not divide {sizes.d_model}")
        return found


PRESETS = {
    # 0.6 million parameters: 87 % of the test reviews after two epochs, in all six minutes of CPU time.
    "small": TextModelOptions(
        layers=2,
        d_model=64,
        heads=2,
        d_hid=128,
        dropout=0.2,
        sequence_length=256,
        vocabulary=8000,
        lr=1e-3,
    ),
    # 365 million parameters: the layers of PyTorch's tutorial on a Transformer in two pipelines at half their
    # width, and half as many again, so that 2, 3, 4, 6 and 12 stages get equal shares.
    "reference": TextModelOptions(
        layers=12,
        d_model=2048,
        heads=16,
        d_hid=2048,
        dropout=0.2,
        sequence_length=512,
        vocabulary=30000,
        lr=1e-4,
    ),
}


@dataclass(frozen=True)
class ImdbOptions(TrainerOptions):
    """Train a Transformer to tell good reviews of movies from bad ones, on either engine, under any launcher."""

    train: TrainOptions = field(default_factory=lambda: TrainOptions(epochs=2))
    data: TextOptions = field(default_factory=TextOptions)
    network: TextModelOptions = field(default_factory=TextModelOptions)

    def mistakes(self) -> list[str]:
        found = [*super().mistakes(), *self.network.mistakes()]
        found += at_least(1, synthetic_reviews=self.data.synthetic_reviews)
        if self.data.dataset == "synthetic" and self.data.data_dir is not None:
            found.append("--dataset synthetic reads no data: leave out --data-dir")
        return found


def train(options: ImdbOptions) -> None:
    """Runs the job in this process, as one rank of however many there are."""
    network = options.network.filled()
    with Trainer(replace(options, network=network)) as trainer:
        texts = load_texts(
            options.data,
            trainer.backend,
            vocabulary=network.sizes.vocabulary,
            sequence_length=network.sizes.sequence_length,
            seed=options.train.seed,
            say=trainer.say,
        )
        trainer.say(texts.note)
        model = transformer(network.sizes)
        assert network.lr is not None
        optimizer = make_optimizer(
            model,
            network.optimizer,
            lr=network.lr,
            momentum=network.momentum,
            weight_decay=network.weight_decay,
            device=trainer.device,
            options=options,
        )
        loss = nn.functional.cross_entropy
        trainer.fit(model, optimizer, loss, texts.train, texts.test, metrics={"accuracy": accuracy})
        if trainer.log.folder is not None and texts.tokenizer is not None:
            # Without it nobody could ask the weights about another review.
            (trainer.log.folder / "tokenizer.json").write_text(texts.tokenizer)
