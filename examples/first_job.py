from torch import nn, optim

from hvd_trainer import Trainer, TrainerOptions, accuracy, run_job
from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.options import ImageOptions


def main(options: TrainerOptions) -> None:
    with Trainer(options) as trainer:
        digits = load_images(ImageOptions(dataset="digits"), trainer.backend)
        model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        loss = nn.functional.cross_entropy
        trainer.fit(model, optimizer, loss, digits.train, digits.test, metrics={"accuracy": accuracy})


if __name__ == "__main__":
    run_job(TrainerOptions, main)
