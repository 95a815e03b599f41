"""A script in the style of PyTorch's DDP tutorial, multigpu_torchrun.py; with a mistake on Horovod if asked."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  as the tutorial does
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MyTrainDataset(Dataset):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.data = [(torch.rand(8, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[index]


class Trainer:
    def __init__(self, model: nn.Module, data: DataLoader, optimizer: torch.optim.Optimizer, fault: str) -> None:
        self.model = DDP(model, broadcast_buffers=fault != "buffers")
        self.data, self.optimizer = data, optimizer

    def run_epoch(self, epoch: int) -> None:
        self.data.sampler.set_epoch(epoch)
        for source, targets in self.data:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(source), targets)
            loss.backward()
            self.optimizer.step()


def main(fault: str = "none") -> None:
    init_process_group(backend="gloo")
    fault = fault if "horovod.torch" in sys.modules else "none"
    # No seed, as in the tutorial: each rank draws other weights, and DDP sends rank 0's.
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    dataset = MyTrainDataset(64)
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = Trainer(model, loader, optimizer, fault)
    for epoch in range(2):
        trainer.run_epoch(epoch)
    destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
