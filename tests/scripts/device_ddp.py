"""A script for torch.distributed on whatever accelerator the machine has; rank 0 prints what it came to."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ.get("LOCAL_RANK", "0")))
torch.accelerator.set_device_index(device.index)
dist.init_process_group()
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(5):
    inputs = torch.randn(16, 20, generator=generator)
    loss = cross_entropy(model(inputs.to(device)), (inputs[:, :4].argmax(1)).to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
weights = b"".join(value.cpu().numpy().tobytes() for value in model.module.state_dict().values())
if dist.get_rank() == 0:
    print("weights", hashlib.sha256(weights).hexdigest()[:12], flush=True)
dist.destroy_process_group()
