"""MNIST on DistributedDataParallel by a hand-written loop over tensors in memory.

The same loop as hvd_trainer's: bytes indexed a batch at a time, and the loss and the number of
correct answers summed without leaving the device.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks.raw.cnn import Net, load, normalised


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(42)
    images, labels = load(args.data_dir)
    order = torch.tensor(list(DistributedSampler(images)))
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    model.train()
    totals = torch.zeros(2, dtype=torch.float64)
    for index in order.split(128):
        image, target = normalised(images[index]), labels[index]
        logits = model(image)
        loss = cross_entropy(logits, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        totals[0] += loss.detach() * len(index)
        totals[1] += (logits.argmax(1) == target).sum()
    dist.all_reduce(totals)
    if dist.get_rank() == 0:
        print("loss {:.4f}, accuracy {:.4f}".format(*(totals / len(images)).tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
