"""MNIST on Horovod as its tutorial writes it: torchvision, transforms, a DataLoader, defaults."""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from benchmarks.raw.cnn import Net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = datasets.MNIST(args.data_dir, train=True, transform=transform)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=128, sampler=sampler, num_workers=args.workers)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # The tutorial's call, with its flaw (a step with zero gradients): it is what users have.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    model.train()
    sampler.set_epoch(0)
    for step, (image, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and hvd.rank() == 0:
            print(f"step {step}/{len(loader)}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
