"""A training by PyTorch Ignite, on native PyTorch or on Horovod."""

from __future__ import annotations

import ignite.distributed as idist
from ignite.engine import create_supervised_trainer
from torch.nn.functional import cross_entropy

from benchmarks.peers.jobs import make, parse


def train(local_rank: int, name: str, data_dir: str | None) -> None:
    """Runs in each process."""
    job = make(name, data_dir)
    # It divides the batch among the processes.
    loader = idist.auto_dataloader(job.data, batch_size=job.batch_size * idist.get_world_size(), shuffle=True)
    model, optimizer = idist.auto_model(job.model), idist.auto_optim(job.optimizer)
    create_supervised_trainer(model, optimizer, cross_entropy, device=idist.device()).run(loader, max_epochs=1)


def main() -> None:
    args = parse(__doc__, "gloo", "horovod")
    with idist.Parallel(backend=args.engine) as parallel:
        parallel.run(train, args.job, args.data_dir)


if __name__ == "__main__":
    main()
