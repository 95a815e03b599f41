"""A script in the style of Lightning Fabric's examples."""

import argparse

import lightning_fabric
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--devices", type=int, default=2)
args = parser.parse_args()

fabric = lightning_fabric.Fabric(accelerator="cpu", devices=args.devices, strategy="ddp")
fabric.launch()
fabric.seed_everything(42)
dataset = TensorDataset(torch.randn(512, 20), torch.randint(10, (512,)))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=16, shuffle=True))

for _ in range(args.epochs):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
