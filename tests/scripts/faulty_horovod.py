"""A script in the style of Horovod's pytorch_mnist.py, on random points; with a mistake if asked for."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--fault", default="none")
args = parser.parse_args()
fault = args.fault if hvd.__name__ == "horovod.torch" or args.fault.endswith("on both") else "none"

hvd.init()
torch.manual_seed(42 + (hvd.rank() if fault == "seed by rank on both" else 0))
points = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(points, points[:, :4].argmax(dim=1))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8 * (hvd.size() if fault == "batch" else 1), sampler=sampler)

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (hvd.size() if fault == "rate" else 1), momentum=0.5)
if fault != "seed by rank on both":
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if fault != "no exchange":
    # A step of zero gradients, whose state DistributedOptimizer drops.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        op=hvd.Sum if fault == "sum" else hvd.Average,
        compression=hvd.Compression.fp16 if fault == "compression" else hvd.Compression.none,
    )

if fault == "dropout":
    torch.rand(1)
for epoch in range(args.epochs):
    model.train()
    if fault != "no set_epoch":
        sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        if args.fault == "clipping" and fault == "none":
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    model.eval()
    for data, target in DataLoader(dataset, batch_size=20):  # not under no_grad, as in many scripts
        accuracy = hvd.allreduce((model(data).argmax(dim=1) == target).float().mean())
if hvd.rank() == 0:
    print(f"accuracy {accuracy.item():.2f}")
