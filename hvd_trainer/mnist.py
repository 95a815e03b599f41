"""Train a small network on MNIST on all ranks: `horovodrun -np 4 python -m hvd_trainer.mnist --help`."""

from __future__ import annotations

from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.training.job import run_job

__all__ = ["MnistOptions", "train"]


def train(options: MnistOptions) -> None:
    """Run the job in this process, as one rank of however many there are."""
    # PyTorch takes seconds to import: --help and a mistyped option must not wait for it.
    from torch.nn.functional import cross_entropy

    from hvd_trainer.jobs.images import load_images
    from hvd_trainer.jobs.models import MODELS
    from hvd_trainer.jobs.optimizers import make_optimizer
    from hvd_trainer.observe.metrics import accuracy
    from hvd_trainer.training.trainer import Trainer

    with Trainer(options) as trainer:
        images = load_images(options.data, trainer.backend)
        trainer.say(images.note)
        model = MODELS[options.network.model]()
        optimizer = make_optimizer(model, options.optimizer, device=trainer.device, options=options)
        trainer.fit(model, optimizer, cross_entropy, images.train, images.test, metrics={"accuracy": accuracy})


if __name__ == "__main__":
    run_job(MnistOptions, train)
