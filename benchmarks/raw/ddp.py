"""MNIST on DistributedDataParallel as tutorials write it: torchvision, transforms, a DataLoader."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from benchmarks.raw.cnn import Net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(42)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = datasets.MNIST(args.data_dir, train=True, transform=transform)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=128, sampler=sampler, num_workers=args.workers)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    model.train()
    sampler.set_epoch(0)
    for step, (image, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}/{len(loader)}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
