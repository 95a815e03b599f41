"""A script in the style of Accelerate's examples."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

accelerator = Accelerator(cpu=True)
torch.manual_seed(42)
dataset = TensorDataset(torch.randn(512, 20), torch.randint(10, (512,)))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
loader = DataLoader(dataset, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(args.epochs):
    model.train()
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
