"""A script in the style of PyTorch Lightning's examples."""

import argparse
import tempfile

import pytorch_lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    pytorch_lightning.seed_everything(42)
    dataset = TensorDataset(torch.randn(512, 20), torch.randint(10, (512,)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=args.devices,
            strategy="ddp",
            max_epochs=args.epochs,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        trainer.fit(Classifier(), DataLoader(dataset, batch_size=16, shuffle=True))
