"""The arithmetic of the MNIST job and nothing else: what no engine can be faster than.

Each rank trains on its own first batch again and again: no data to fetch, nothing to exchange, as
many steps of the same sizes as a real epoch. The ranks wait for each other once, so that they
compete for the cores during the whole of the time measured. As in hvd_trainer, freed memory stays
with the process: else the floor was 25 to 70 % higher in most runs, and not in others.

``--exchange`` adds one all-reduce of as many numbers as there are gradients to each step: what no
engine on Gloo can be faster than.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.raw.cnn import Net, load, normalised
from hvd_trainer.backends.malloc import keep_freed_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--exchange", action="store_true")
    args = parser.parse_args()

    keep_freed_memory(os.environ)
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    images, labels = load(args.data_dir)
    share = -(-len(images) // dist.get_world_size())
    image, target = normalised(images[:128]), labels[:128]
    model = Net()
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    model.train()
    dist.barrier()
    for begin in range(0, share, 128):
        size = min(128, share - begin)
        loss = cross_entropy(model(image[:size]), target[:size])
        loss.backward()
        if args.exchange:
            dist.all_reduce(gradients)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
