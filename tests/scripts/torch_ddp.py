"""A script in the style of PyTorch's DDP tutorial for torchrun; it resumes from its snapshot with --snapshot."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.train_data, self.optimizer, self.snapshot_path = train_data, optimizer, snapshot_path
        self.model, self.epochs_run = model, 0
        if snapshot_path and os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(model)

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(source), targets)
            loss.backward()
            self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and self.snapshot_path:
                snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(snapshot, self.snapshot_path + ".new")
                os.replace(self.snapshot_path + ".new", self.snapshot_path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--snapshot", default=None)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    dataset = TensorDataset(torch.randn(512, 20), torch.randint(10, (512,)))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(dataset, args.batch_size, sampler=DistributedSampler(dataset))
    Trainer(model, loader, optimizer, args.snapshot).train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
