"""MNIST on Horovod by a hand-written loop over tensors in memory: memory_ddp.py's counterpart."""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from benchmarks.raw.cnn import Net, load, normalised


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--num-groups", type=int, default=0, help="0: each gradient on its own")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    images, labels = load(args.data_dir)
    order = torch.tensor(list(DistributedSampler(images, hvd.size(), hvd.rank())))
    model = Net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-4),
        named_parameters=model.named_parameters(),
        num_groups=args.num_groups,
    )

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
    totals = hvd.allreduce(totals, op=hvd.Sum)
    if hvd.rank() == 0:
        print("loss {:.4f}, accuracy {:.4f}".format(*(totals / len(images)).tolist()))


if __name__ == "__main__":
    main()
