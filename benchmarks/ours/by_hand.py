"""The MNIST job on hvd_trainer's engines and data, with its Trainer replaced by a loop by hand.

What ``python -m hvd_trainer.mnist`` takes longer than this is the Trainer's overhead.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy

from hvd_trainer import backends
from hvd_trainer.backends import EngineOptions
from hvd_trainer.data import LoaderPlan, make_loader
from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.models import conv_net
from hvd_trainer.jobs.options import ImageOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--backend", choices=["horovod", "ddp"], required=True)
    args = parser.parse_args()

    with backends.create(EngineOptions(backend=args.backend)) as backend:
        torch.manual_seed(0)
        images = load_images(ImageOptions("mnist", args.data_dir), backend)
        loader = make_loader(images.train, backend, LoaderPlan(128))
        bare = conv_net()
        model, optimizer = backend.prepare(bare, torch.optim.Adam(bare.parameters(), lr=1e-4))

        model.train()
        totals = torch.zeros(3, dtype=torch.float64, device=backend.device)
        for image, target in loader.epoch(0):
            with backend.gradient_sync(model, enabled=True):
                logits = model(image)
                loss = cross_entropy(logits, target)
                loss.backward()
            backend.step(optimizer)
            optimizer.zero_grad()
            totals[0] += loss.detach() * len(target)
            totals[1] += (logits.argmax(1) == target).sum()
            totals[2] += len(target)
        loss_sum, correct, count = backend.collectives.all_reduce(totals).tolist()
        if backend.world.is_first:
            print(f"loss {loss_sum / count:.4f}, accuracy {correct / count:.4f}")


if __name__ == "__main__":
    main()
