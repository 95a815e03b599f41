"""Train on files by DistributedDataParallel, with a DataLoader, torchdata, or NVIDIA's DALI."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from benchmarks.raw.files import CROP, MEAN, STD, Small, data_set, normalise

BATCH = 64


def by_data_loader(folder: Path, kind: str, *, pixels: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """One loader process, as in PyTorch's tutorials; `pixels`: bytes, normalised a batch at a time."""
    data = data_set(folder, kind, pixels=pixels)
    sampler: Any = DistributedSampler(data)  # type: ignore[arg-type]
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=1)
    return ((normalise(x) if pixels else x, y) for x, y in loader)


def by_torchdata(folder: Path, kind: str, *, pixels: bool) -> Iterable[tuple[Tensor, Tensor]]:
    """One loader process, by torchdata's nodes; `pixels` as for `by_data_loader`."""
    from torchdata.nodes import Batcher, Loader, ParallelMapper, SamplerWrapper

    data = data_set(folder, kind, pixels=pixels)
    sampler: Any = DistributedSampler(data)  # type: ignore[arg-type]

    def load(indices: list[int]) -> Any:
        whole = getattr(data, "__getitems__", None)
        return default_collate([data[index] for index in indices] if whole is None else whole(indices))

    batches: Any = ParallelMapper(
        Batcher(SamplerWrapper(sampler), BATCH, drop_last=False), load, num_workers=1, method="process"
    )
    return ((normalise(x) if pixels else x, y) for x, y in Loader(batches))


def by_dali(folder: Path, shard: int, num_shards: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One pass of DALI's pipeline on the CPU, with one thread of its own; a batch has memory of its own."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=seed, exec_dynamic=True)  # type: ignore[untyped-decorator]
    def images() -> Any:
        encoded, labels = fn.readers.file(
            file_root=str(folder / "images"),
            random_shuffle=True,
            shard_id=shard,
            num_shards=num_shards,
            name="files",
        )
        pixels = fn.decoders.image_random_crop(encoded, device="cpu", output_type=types.RGB)
        return fn.crop_mirror_normalize(
            fn.resize(pixels, size=[CROP, CROP]),
            mirror=fn.random.coin_flip(),
            dtype=types.FLOAT,
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            output_layout="CHW",
        ), labels

    pipeline = images()
    pipeline.build()
    size = -(-pipeline.reader_meta("files")["epoch_size"] // num_shards)
    for begin in range(0, size, BATCH):
        x, y = (torch.from_dlpack(tensors.as_tensor()) for tensors in pipeline.run())
        count = min(BATCH, size - begin)
        yield x[:count], y[:count].flatten().long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--kind", choices=["images", "tokens"], required=True)
    parser.add_argument("--loader", choices=["DataLoader", "torchdata", "DALI"], required=True)
    parser.add_argument("--pixels", action="store_true", help="normalise a batch of bytes at once")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Small(args.kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if args.loader == "DALI":
        batches: Iterable[tuple[Tensor, Tensor]] = by_dali(
            args.data_dir, dist.get_rank(), dist.get_world_size(), seed=dist.get_rank()
        )
    else:
        make_batches = by_data_loader if args.loader == "DataLoader" else by_torchdata
        batches = make_batches(args.data_dir, args.kind, pixels=args.pixels)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
