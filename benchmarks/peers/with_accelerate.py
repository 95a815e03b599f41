"""A training by Hugging Face Accelerate.

`accelerate launch --cpu --num_processes 2` starts one process; torchrun starts as many as it is asked for.
"""

from __future__ import annotations

from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.peers.jobs import make, parse


def main() -> None:
    args = parse(__doc__)
    accelerator = Accelerator(cpu=True)
    job = make(args.job, args.data_dir)
    loader = DataLoader(job.data, job.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, loader)
    model.train()
    for image, target in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(image), target)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
