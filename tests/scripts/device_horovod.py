"""The same as device_ddp.py for Horovod."""

import hashlib

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

hvd.init()
device = torch.device(torch.accelerator.current_accelerator().type, hvd.local_rank())
torch.accelerator.set_device_index(device.index)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
generator = torch.Generator().manual_seed(hvd.rank())
for step in range(5):
    inputs = torch.randn(16, 20, generator=generator)
    loss = cross_entropy(model(inputs.to(device)), (inputs[:, :4].argmax(1)).to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hvd.allreduce(loss.detach(), name=f"loss.{step}")
weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
if hvd.rank() == 0:
    print("weights", hashlib.sha256(weights).hexdigest()[:12], flush=True)
hvd.shutdown()
