"""Train a Transformer on IMDB's movie reviews: `horovodrun -np 4 python -m hvd_trainer.imdb --help`."""

from __future__ import annotations

from pathlib import Path

from hvd_trainer.jobs.options import ImdbOptions
from hvd_trainer.training.job import run_job

__all__ = ["ImdbOptions", "train"]


def train(options: ImdbOptions) -> None:
    """Run the job in this process, as one rank of however many there are."""
    # PyTorch takes seconds to import: --help and a mistyped option must not wait for it.
    from torch.nn.functional import cross_entropy

    from hvd_trainer.jobs.optimizers import make_optimizer
    from hvd_trainer.jobs.reviews.dataset import load_texts
    from hvd_trainer.jobs.transformer import transformer
    from hvd_trainer.observe.metrics import accuracy
    from hvd_trainer.observe.run_folder import TOKENIZER
    from hvd_trainer.training.trainer import Trainer
    from hvd_trainer.utils.files import write_atomically

    options = options.filled()
    sizes = options.network.sizes
    with Trainer(options) as trainer:
        texts = load_texts(
            options.data,
            trainer.backend,
            vocabulary=sizes.vocabulary,
            sequence_length=sizes.sequence_length,
            seed=options.train.seed,
            say=trainer.say,
        )
        trainer.say(texts.note)
        model = transformer(sizes)
        optimizer = make_optimizer(model, options.optimizer, device=trainer.device, options=options)
        trainer.fit(model, optimizer, cross_entropy, texts.train, texts.test, metrics={"accuracy": accuracy})
        if trainer.world.is_first and options.log.log_dir is not None and texts.tokenizer is not None:
            # Without it nobody could ask the weights about another review.
            write_atomically(Path(options.log.log_dir).expanduser() / TOKENIZER, texts.tokenizer)


if __name__ == "__main__":
    run_job(ImdbOptions, train)
