"""MNIST on several processes with PyTorch's DistributedDataParallel, written by hand.

Nothing here comes from ``hvd_trainer``: this is what one writes without it, with every line that
distributed training adds explained where it stands. ``plain_horovod.py`` is the same job on
Horovod; ``diff`` the two files to see what an engine really changes. Both give the same numbers.

    torchrun --nproc-per-node 2 examples/mnist/plain_ddp.py --data-dir ../shared/data/mnist
    torchrun --nproc-per-node 1 examples/mnist/plain_ddp.py       # the same job in one process
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

# Unused, and imported for a clean exit (see the end of main). DistributedDataParallel would import
# it otherwise, after the process group is made, and this module's functions have the group that
# exists when it is imported as a default argument: they would keep it alive for good.
import torch.distributed.nn.functional  # noqa: F401
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, dropout, max_pool2d, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """The small CNN of the PyTorch and Horovod tutorials: 21,840 parameters, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = relu(max_pool2d(self.conv1(x), 2))
        x = relu(max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = relu(self.fc1(x.flatten(1)))
        x = dropout(x, training=self.training)
        return self.fc2(x)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data", help="torchvision's MNIST root")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="per rank and micro-batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=["adam", "adamw", "sgd"], default="adam")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--max-norm", type=float, default=0.0, help="clip to this norm; 0: off")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=0, help="stop early; 0: whole epochs")
    parser.add_argument("--save", metavar="PATH", help="write the final weights (safetensors)")
    parser.add_argument("--json", metavar="PATH", help="write the results")
    return parser.parse_args()


def start() -> torch.device:
    """Join the job, and return the device of this rank."""
    # torchrun tells each process, through environment variables, its rank and where rank 0 is.
    # Without them there is nothing to join, and a missing rank must not quietly become rank 0 of 1.
    if "RANK" not in os.environ:
        raise SystemExit(
            "this script needs torchrun, which tells each process its rank (RANK is not set). "
            f"Type: torchrun --nproc-per-node 2 {sys.argv[0]}   (or 1, for a single process)"
        )
    local_rank = int(os.environ["LOCAL_RANK"])

    if torch.accelerator.is_available():
        # One GPU per process, chosen by the rank on this node. Without this line all processes
        # would use GPU 0. The remainder is for schedulers that show each process its own GPU only.
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        kind = torch.accelerator.current_accelerator().type
        device = torch.device(kind, torch.accelerator.current_device_index())
        # This call makes the process one of many. On NVIDIA's GPUs, NCCL exchanges tensors; given
        # the device, it connects at once, and an error in the set-up shows here and not in the
        # first step.
        dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
        return device

    # On CPUs the ranks of a node share its cores. torchrun sets OMP_NUM_THREADS to 1 for several
    # processes; other launchers set no limit, and PyTorch's default is every core for each rank.
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    # This call makes the process one of many. Gloo exchanges CPU tensors, over TCP.
    dist.init_process_group("gloo")
    return torch.device("cpu")


def load_mnist(root: str) -> tuple[datasets.MNIST, datasets.MNIST]:
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    # One process per node downloads, and the others wait: all of them writing the same files at
    # once corrupts them. Where the files are there already, nothing is fetched.
    if int(os.environ["LOCAL_RANK"]) == 0:
        datasets.MNIST(root, download=True)
    dist.barrier()
    return (
        datasets.MNIST(root, train=True, transform=transform),
        datasets.MNIST(root, train=False, transform=transform),
    )


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    common = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), **common)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **common)
    return torch.optim.SGD(model.parameters(), momentum=0.9, **common)


def windows(batches: Iterable[Batch], length: int) -> Iterator[list[Batch]]:
    """Cut an epoch into the micro-batches of each step; the last window may be shorter."""
    iterator = iter(batches)
    while window := list(itertools.islice(iterator, length)):
        yield window


def train_step(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    window: Sequence[Batch],
    device: torch.device,
    max_norm: float,
) -> tuple[torch.Tensor, int]:
    """One optimizer update. Returns this rank's summed loss (still on the device) and samples."""
    samples = sum(len(target) for _, target in window)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for number, (image, target) in enumerate(window, start=1):
        image, target = image.to(device), target.to(device)
        # The exchange between the ranks begins inside backward(), as the gradients appear. Only
        # the window's last micro-batch needs it: the ones before add up locally, under no_sync(),
        # which must hold for the forward pass as well.
        with contextlib.nullcontext() if number == len(window) else model.no_sync():
            loss = cross_entropy(model(image), target)
            # Weighted by its share of the window, so that the gradient is the mean over the
            # window's samples whatever their split, in a short last window too.
            (loss * (len(target) / samples)).backward()
        loss_sum += loss.detach() * len(target)
    # The last backward() has waited for the exchange. Each rank now holds the same gradient, the
    # mean over all ranks.
    if max_norm > 0:
        # Only now: clipping before the exchange would clip each rank's share by a different norm.
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum, samples


def evaluate(model: nn.Module, test: datasets.MNIST, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy over the test set, each sample counted once."""
    # DistributedSampler would repeat samples until all ranks have equally many, and so count some
    # twice. Nothing is exchanged within this loop, so that the shares may differ: take every
    # size-th sample, and exchange sums and a count at the end rather than averages.
    share = Subset(test, range(dist.get_rank(), len(test), dist.get_world_size()))
    loader = DataLoader(share, batch_size=1000, generator=torch.Generator())
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for image, target in loader:
            image, target = image.to(device), target.to(device)
            logits = model(image)
            sums[0] += cross_entropy(logits, target, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == target).sum()
            sums[2] += len(target)
    model.train()
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    loss, correct, count = sums.tolist()
    return loss / count, correct / count


def main() -> None:
    args = parse_args()
    device = start()
    train, test = load_mnist(args.data_dir)

    torch.manual_seed(args.seed)
    model = Net().to(device)
    optimizer = make_optimizer(args, model)

    # Every rank must begin with the same weights, whatever its random state was: wrapping the model
    # copies rank 0's to all. The wrapper also sees to the rest: from here on backward() averages
    # each gradient over the ranks, a bucket of them at a time, while the rest of the backward pass
    # is still running. The optimizer keeps working on the same parameters; it is new and equal on
    # all ranks, so that there is nothing to copy.
    ddp_model = DistributedDataParallel(model)

    # Each rank reads its own part of the data. The sampler pads by repeating a few samples, so
    # that all ranks take equally many steps: a rank that stopped early would leave the others
    # waiting in an exchange. The loader gets a generator of its own because it draws a number from
    # the global one otherwise, and so would change the dropout masks.
    sampler = DistributedSampler(
        train,
        num_replicas=dist.get_world_size(),
        rank=dist.get_rank(),
        shuffle=True,
        seed=args.seed,
    )
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, generator=torch.Generator())

    # The weights are the same on all ranks, the dropout masks must not be: each rank its own seed.
    torch.manual_seed(args.seed + 1 + dist.get_rank())

    result = {"backend": "ddp", "world_size": dist.get_world_size(), "epochs": []}
    steps_left = args.max_steps or None
    for epoch in range(args.epochs):
        if steps_left == 0:
            break
        # Without this every epoch has the first one's order.
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        losses, counts = [], []
        for window in itertools.islice(windows(loader, args.accumulate), steps_left):
            loss_sum, samples = train_step(ddp_model, optimizer, window, device, args.max_norm)
            losses.append(loss_sum)
            counts.append(samples)
        # A rank's own loss is that of its share of the data. One exchange per epoch, of sums and
        # counts, gives the loss of the whole; one per step would make all ranks wait each time.
        totals = torch.stack([torch.stack(losses), torch.tensor(counts).to(losses[0])])
        dist.all_reduce(totals, op=dist.ReduceOp.SUM)
        losses, counts = totals.cpu()
        seconds = time.perf_counter() - begin
        if steps_left is not None:
            steps_left -= len(losses)

        # The bare model: the wrapper would exchange BatchNorm's buffers in each forward pass, where
        # ranks with different numbers of batches would wait for each other.
        val_loss, val_accuracy = evaluate(model, test, device)
        row = {
            "epoch": epoch,
            "train_loss": float(losses.sum() / counts.sum()),
            "val_loss": val_loss,
            "val_accuracy": val_accuracy,
            "samples": int(counts.sum()),
            "samples_per_s": float(counts.sum() / seconds),
            "step_losses": (losses / counts).tolist(),
        }
        result["epochs"].append(row)
        # Every rank has the same numbers, so one of them prints, or each line would come N times.
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: train loss {row['train_loss']:.5f}, val loss {val_loss:.5f}, "
                f"val accuracy {val_accuracy:.2%}, {row['samples_per_s']:,.0f} images/s"
            )

    # And one writes: N processes writing one file at once would spoil it. Each has the same model.
    # Again the bare model, whose names have no "module." in front.
    if dist.get_rank() == 0 and args.save:
        save_file(model.state_dict(), args.save)
    if dist.get_rank() == 0 and args.json:
        with open(args.json, "w") as file:
            json.dump(result, file)

    # Leave together: a rank that ends while another still waits for it counts as a failure. The
    # wrapper goes first, because it holds on to the process group. Only when nothing does are
    # Gloo's threads stopped; one still busy with the last tensors while Python shuts down would
    # abort the process ("terminate called without an active exception"), with all work done.
    del ddp_model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
