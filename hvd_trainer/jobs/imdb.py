"""Train a Transformer on IMDB's movie reviews."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from hvd_trainer.jobs.optimizers import make_optimizer
from hvd_trainer.jobs.options import ImdbOptions
from hvd_trainer.jobs.reviews.dataset import load_texts
from hvd_trainer.jobs.transformer import transformer
from hvd_trainer.observe.metrics import accuracy
from hvd_trainer.training.trainer import Trainer


def train(options: ImdbOptions) -> None:
    """Run the job in this process, as one rank of however many there are."""
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
        if trainer.world.is_first and options.log.log_dir is not None and texts.tokenizer is not None:
            # Without it nobody could ask the weights about another review.
            (Path(options.log.log_dir).expanduser() / "tokenizer.json").write_text(texts.tokenizer)
