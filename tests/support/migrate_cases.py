"""Scripts for Horovod, and what `migrate` makes of them: by the names that the table of rules gives to its tests."""

from __future__ import annotations

CASES: dict[str, tuple[str, str]] = {
    "init": (
        """\
import torch

import horovod.torch as hvd

hvd.init()
if torch.cuda.is_available():
    # Horovod: pin GPU to local rank.
    torch.cuda.set_device(hvd.local_rank())
""",
        """\
import os
import torch

import torch.distributed as dist

dist.init_process_group()
if torch.cuda.is_available():
    # Pin GPU to local rank.
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

dist.destroy_process_group()
""",
    ),
    "world": (
        """\
import horovod.torch as thvd
from horovod.torch import cross_rank as node, local_rank

local = local_rank(), thvd.local_size()
print(thvd.rank(), thvd.size(), node(), thvd.cross_size(), thvd.is_initialized())
print(thvd.nccl_built(), thvd.gloo_built(), thvd.mpi_built())
count = thvd.size


def log(hvd, text):
    if hvd.rank() == 0:
        print(text)


log(thvd, "begin")
thvd.barrier()
""",
        """\
import os
import torch.distributed as dist

local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
print(dist.get_rank(), dist.get_world_size(), int(os.environ["GROUP_RANK"]), dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"]), dist.is_initialized())
print(dist.is_nccl_available(), dist.is_gloo_available(), dist.is_mpi_available())
count = dist.get_world_size


def log(text):
    if dist.get_rank() == 0:
        print(text)


log("begin")
dist.barrier()
""",
    ),
    "shutdown": (
        """\
import torch

import horovod.torch as hvd



def main():
    hvd.init()
    train()
    hvd.shutdown()
""",
        """\
import torch

import torch.distributed as dist



def main():
    dist.init_process_group()
    train()
    dist.destroy_process_group()
""",
    ),
    "end": (
        """\
import torch

import horovod.torch as hvd



def main():
    hvd.init()
    model = Net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), named_parameters=model.named_parameters())
    for data in load():
        loss = model(data).mean()
        loss.backward()
        optimizer.step()
    return model
""",
        """\
import torch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP



def main():
    dist.init_process_group()
    model = Net()
    ddp_model = DDP(model, broadcast_buffers=False)
    optimizer = SGD(model.parameters())
    for data in load():
        loss = ddp_model(data).mean()
        loss.backward()
        optimizer.step()

    dist.destroy_process_group()
    return model
""",
    ),
    "optimizer": (
        """\
import torch
import horovod.torch as hvd


def train(model, optimizer, loader):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "weights.pt")


def evaluate(model, loader):
    model.eval()
    return [model(data) for data, _ in loader]


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters())
    # Horovod: broadcast parameters.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, loader)
    evaluate(model, loader)
    torch.save(model.state_dict(), "weights.pt")
""",
        """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, optimizer, loader):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()
    torch.save(model.module.state_dict(), "weights.pt")


def evaluate(model, loader):
    model.eval()
    return [model(data) for data, _ in loader]


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Broadcast parameters.
    ddp_model = DDP(model, broadcast_buffers=False)
    train(ddp_model, optimizer, loader)
    evaluate(model, loader)
    torch.save(model.state_dict(), "weights.pt")
""",
    ),
    "optimizer of a class": (
        """\
import torch
import horovod.torch as hvd


class Job:
    def __init__(self, net):
        self.net = net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=self.net.named_parameters())

    def step(self, data):
        self.net(data).mean().backward()
        self.optimizer.step()

    def save(self):
        torch.save(self.net.state_dict(), "weights.pt")
""",
        """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Job:
    def __init__(self, net):
        self.net = net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.ddp_net = DDP(self.net, broadcast_buffers=False)

    def step(self, data):
        self.ddp_net(data).mean().backward()
        self.optimizer.step()

    def save(self):
        torch.save(self.net.state_dict(), "weights.pt")
""",
    ),
    "optimizer under a condition": (
        """\
import torch

import horovod.torch as hvd



def main(args):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.distributed:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    model(1).backward()
    optimizer.step()
""",
        """\
import torch

from torch.nn.parallel import DistributedDataParallel as DDP



def main(args):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp_model = model
    if args.distributed:
        ddp_model = DDP(model, broadcast_buffers=False)
    ddp_model(1).backward()
    optimizer.step()
""",
    ),
    "broadcast parameters": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(model, optimizer, loader)
model.load_state_dict(torch.load("best.pt"))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
""",
        """\
import torch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(ddp_model, optimizer, loader)
model.load_state_dict(torch.load("best.pt"))
for tensor in model.state_dict().values():
    dist.broadcast(tensor.detach(), src=0)
""",
    ),
    "optimizer state": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(model, optimizer, loader)
""",
        """\
import torch

from torch.nn.parallel import DistributedDataParallel as DDP

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(ddp_model, optimizer, loader)
""",
    ),
    "optimizer state after a load": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
if hvd.rank() == 0:
    optimizer.load_state_dict(torch.load('optimizer.pt'))
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(model, optimizer, loader)
""",
        """\
import torch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if dist.get_rank() == 0:
    optimizer.load_state_dict(torch.load('optimizer.pt'))
states = [optimizer.state_dict()]
dist.broadcast_object_list(states, src=0)
optimizer.load_state_dict(states[0])
ddp_model = DDP(model, broadcast_buffers=False)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(ddp_model, optimizer, loader)
""",
    ),
    "passes in a loop": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.passes)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        for i in range(0, len(data), 8):
            loss = loss_of(model(data[i:i + 8]), target[i:i + 8]) / args.passes
            loss.backward()
        optimizer.step()


train(model, optimizer, loader)
""",
        """\
import contextlib
import torch

from torch.nn.parallel import DistributedDataParallel as DDP

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        for i in range(0, len(data), 8):
            with model.no_sync() if i + 8 < len(data) else contextlib.nullcontext():
                loss = loss_of(model(data[i:i + 8]), target[i:i + 8]) / args.passes
                loss.backward()
        optimizer.step()


train(ddp_model, optimizer, loader)
""",
    ),
    "passes by number": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=4)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for number, (data, target) in enumerate(loader):
        loss = loss_of(model(data), target) / 4
        loss.backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


train(model, optimizer, loader)
""",
        """\
import contextlib
import torch

from torch.nn.parallel import DistributedDataParallel as DDP

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)


def train(model, optimizer, loader):
    for number, (data, target) in enumerate(loader):
        with contextlib.nullcontext() if (number + 1) % 4 == 0 else model.no_sync():
            loss = loss_of(model(data), target) / 4
            loss.backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


train(ddp_model, optimizer, loader)
""",
    ),
    "sum of gradients": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(model, optimizer, loader)
""",
        """\
import torch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def sum_gradients(state, bucket):
    \"\"\"Sum the gradients over all ranks, in place of DDP's average.\"\"\"
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda summed: summed.value()[0])


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)
ddp_model.register_comm_hook(None, sum_gradients)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(ddp_model, optimizer, loader)
""",
    ),
    "predivide": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), gradient_predivide_factor=args.factor)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(model, optimizer, loader)
""",
        """\
import torch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def average_gradients(factor, bucket):
    \"\"\"Average the gradients over all ranks, dividing by the factor before the sum, and by the rest after it.\"\"\"
    work = dist.all_reduce(bucket.buffer().div_(factor), async_op=True)
    return work.get_future().then(lambda summed: summed.value()[0].mul_(factor / dist.get_world_size()))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)
ddp_model.register_comm_hook(args.factor, average_gradients)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(ddp_model, optimizer, loader)
""",
    ),
    "compression": (
        """\
import torch

import horovod.torch as hvd

compression = hvd.Compression.fp16 if args.fp16 else hvd.Compression.none
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
    compression=compression)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(model, optimizer, loader)
""",
        """\
import torch

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP


def average_gradients(state, bucket):
    \"\"\"Average the gradients over all ranks, dividing after the sum.\"\"\"
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda summed: summed.value()[0].div_(dist.get_world_size()))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)
if args.fp16:
    ddp_model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(average_gradients))


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(ddp_model, optimizer, loader)
""",
    ),
    "compression in bf16": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.bf16)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(model, optimizer, loader)
""",
        """\
import torch

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP


def average_gradients(state, bucket):
    \"\"\"Average the gradients over all ranks, dividing after the sum.\"\"\"
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda summed: summed.value()[0].div_(dist.get_world_size()))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)
ddp_model.register_comm_hook(None, default_hooks.bf16_compress_wrapper(average_gradients))


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()


train(ddp_model, optimizer, loader)
""",
    ),
    "synchronize": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # Do not wait again.
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        torch.cuda.synchronize()


train(model, optimizer, loader)
""",
        """\
import torch

from torch.nn.parallel import DistributedDataParallel as DDP

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        torch.cuda.synchronize()


train(ddp_model, optimizer, loader)
""",
    ),
    "allreduce": (
        """\
import torch

import horovod.torch as hvd



def metric_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name)
    return avg_tensor.item()


total = hvd.allreduce(total, op=hvd.Sum)
print(hvd.allreduce(loss, average=True), hvd.allreduce(-loss, op=hvd.Max))
if hvd.allreduce(torch.tensor(stop), average=False) > 0:
    leave()
""",
        """\
import torch

import torch.distributed as dist



def metric_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = tensor.clone()
    dist.all_reduce(avg_tensor)
    avg_tensor /= dist.get_world_size()
    return avg_tensor.item()


total = total.detach().clone()
dist.all_reduce(total)
reduced = loss.detach().clone()
dist.all_reduce(reduced)
reduced /= dist.get_world_size()
reduced_2 = (-loss).detach().clone()
dist.all_reduce(reduced_2, op=dist.ReduceOp.MAX)
print(reduced, reduced_2)
reduced = torch.tensor(stop)
dist.all_reduce(reduced)
if reduced > 0:
    leave()
""",
    ),
    "in place": (
        """\
import torch

import horovod.torch as hvd

for p in model.parameters():
    hvd.allreduce_(p.grad)
    hvd.broadcast_(p.data, root_rank=0)
""",
        """\
import torch

import torch.distributed as dist

for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()
    dist.broadcast(p.data, src=0)
""",
    ),
    "grouped": (
        """\
import torch

import horovod.torch as hvd

means = hvd.grouped_allreduce(values, name="values")
hvd.grouped_allreduce_(values, op=hvd.Sum)
rows = hvd.grouped_allgather(values)
parts = hvd.grouped_reducescatter(values, op=hvd.Sum)
""",
        """\
import torch

import torch.distributed as dist

means = [tensor.detach().clone() for tensor in values]
for tensor in means:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()
for tensor in values:
    dist.all_reduce(tensor)
rows = []
for tensor in values:
    parts_2 = [None] * dist.get_world_size()
    dist.all_gather_object(parts_2, tensor.detach().cpu())
    rows.append(torch.cat(parts_2).to(tensor.device))
reduced = [tensor.detach().clone() for tensor in values]
for tensor in reduced:
    dist.all_reduce(tensor)
parts = [tensor.tensor_split(dist.get_world_size())[dist.get_rank()] for tensor in reduced]
""",
    ),
    "allgather": (
        """\
import torch

import horovod.torch as hvd

rows = hvd.allgather(rows)
n = hvd.allgather(torch.tensor([len(rows)])).sum().item()
""",
        """\
import torch

import torch.distributed as dist

gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, rows.detach().cpu())
rows = torch.cat(gathered).to(rows.device)
sent = torch.tensor([len(rows)])
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, sent.detach().cpu())
n = torch.cat(gathered).to(sent.device).sum().item()
""",
    ),
    "broadcast": (
        """\
import torch

import horovod.torch as hvd

epoch = hvd.broadcast(torch.tensor(epoch), root_rank=0, name="epoch").item()
weights = hvd.broadcast(weights, 1)
""",
        """\
import torch

import torch.distributed as dist

received = torch.tensor(epoch)
dist.broadcast(received, src=0)
epoch = received.item()
weights = weights.detach().clone()
dist.broadcast(weights, src=1)
""",
    ),
    "reducescatter": (
        """\
import torch

import horovod.torch as hvd

part = hvd.reducescatter(rows, op=hvd.Sum)
""",
        """\
import torch

import torch.distributed as dist

reduced = rows.detach().clone()
dist.all_reduce(reduced)
part = reduced.tensor_split(dist.get_world_size())[dist.get_rank()]
""",
    ),
    "alltoall": (
        """\
import torch

import horovod.torch as hvd

rows = hvd.alltoall(sent)
""",
        """\
import torch

import torch.distributed as dist

rows = torch.empty_like(sent)
dist.all_to_all_single(rows, sent)
""",
    ),
    "objects": (
        """\
import torch

import horovod.torch as hvd

state = hvd.broadcast_object(state, root_rank=0)
names = hvd.allgather_object(name)
""",
        """\
import torch

import torch.distributed as dist

received = [state]
dist.broadcast_object_list(received, src=0)
state = received[0]
names = [None] * dist.get_world_size()
dist.all_gather_object(names, name)
""",
    ),
    "handles": (
        """\
import torch

import horovod.torch as hvd



def overlap(rows):
    handle = hvd.allreduce_async(rows)
    work()
    mean = hvd.synchronize(handle)
    sent = hvd.broadcast_async_(rows, 0)
    work()
    hvd.synchronize(sent)
    return mean
""",
        """\
import torch

import torch.distributed as dist



def overlap(rows):
    reduced = rows.detach().clone()
    handle = dist.all_reduce(reduced, async_op=True)
    work()
    handle.wait()
    reduced /= dist.get_world_size()
    mean = reduced
    sent = dist.broadcast(rows, src=0, async_op=True)
    work()
    sent.wait()
    return mean
""",
    ),
    "batch norm": (
        """\
import torch

import horovod.torch as hvd

layer = hvd.SyncBatchNorm(16)
""",
        """\
import torch

layer = torch.nn.SyncBatchNorm(16)
""",
    ),
    "join": (
        """\
import torch

import horovod.torch as hvd

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(model, optimizer, loader):
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()
    hvd.join()


train(model, optimizer, loader)
""",
        """\
import torch

from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp_model = DDP(model, broadcast_buffers=False)


def train(model, optimizer, loader):
    with Join([model]):
        for data, target in loader:
            optimizer.zero_grad()
            loss = loss_of(model(data), target)
            loss.backward()
            optimizer.step()


train(ddp_model, optimizer, loader)
""",
    ),
    "elastic sampler": (
        """\
import torch

import horovod.torch as hvd

sampler = hvd.elastic.ElasticSampler(dataset, shuffle=False)
""",
        """\
import torch

sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
""",
    ),
    "two handles": (
        """\
import torch

import horovod.torch as hvd



def overlap(rows, columns):
    first = hvd.allreduce_async(rows)
    second = hvd.allreduce_async(columns)
    return hvd.synchronize(first), hvd.synchronize(second)
""",
        """\
import torch

import torch.distributed as dist



def overlap(rows, columns):
    reduced = rows.detach().clone()
    first = dist.all_reduce(reduced, async_op=True)
    reduced_2 = columns.detach().clone()
    second = dist.all_reduce(reduced_2, async_op=True)
    first.wait()
    reduced /= dist.get_world_size()
    second.wait()
    reduced_2 /= dist.get_world_size()
    return reduced, reduced_2
""",
    ),
    "wrapped if there are several": (
        """\
import torch
import horovod.torch as hvd


def build(args):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    if hvd.size() > 1:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return model, optimizer


def main(args):
    model, optimizer = build(args)
    for data in load():
        model(data).mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), "weights.pt")
""",
        """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def build(args):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp_model = DDP(model, broadcast_buffers=False)
    return ddp_model, optimizer


def main(args):
    model, optimizer = build(args)
    for data in load():
        model(data).mean().backward()
        optimizer.step()
    torch.save(model.module.state_dict(), "weights.pt")
""",
    ),
    "horovodrun": (
        """\
#!/bin/sh
horovodrun -np 4 -H localhost:4 python train.py --epochs 3
horovodrun --num-proc 2 \\
    python -m job
""",
        """\
#!/bin/sh
torchrun --nproc-per-node 4 train.py --epochs 3
torchrun --nproc-per-node 2 -m job
""",
    ),
    "model returned": (
        """\
import torch
import horovod.torch as hvd


def build(args):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, optimizer


def main(args):
    model, optimizer = build(args)
    for data in load():
        model(data).mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), "weights.pt")
""",
        """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def build(args):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp_model = DDP(model, broadcast_buffers=False)
    return ddp_model, optimizer


def main(args):
    model, optimizer = build(args)
    for data in load():
        model(data).mean().backward()
        optimizer.step()
    torch.save(model.module.state_dict(), "weights.pt")
""",
    ),
    "no unneeded import": (
        """\
try:
    import horovod.torch as hvd
except ImportError:
    hvd = None

import torch


def size():
    return hvd.size()
""",
        """\

import torch
import torch.distributed as dist


def size():
    return dist.get_world_size()
""",
    ),
}
