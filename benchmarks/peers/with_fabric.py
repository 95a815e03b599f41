"""A training by Lightning Fabric, under torchrun."""

from __future__ import annotations

import os

from lightning_fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.peers.jobs import make, parse


def main() -> None:
    args = parse(__doc__)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    job = make(args.job, args.data_dir)
    loader = fabric.setup_dataloaders(DataLoader(job.data, job.batch_size, shuffle=True))
    model, optimizer = fabric.setup(job.model, job.optimizer)
    model.train()
    for image, target in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(image), target)
        fabric.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    main()
