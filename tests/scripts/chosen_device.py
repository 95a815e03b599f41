"""Choose a GPU or none before `init_process_group`, and print which one is current after that."""

import os
import sys

import torch
import torch.distributed as dist

backend, chosen = sys.argv[1:]
kind = torch.accelerator.current_accelerator().type
module = torch.get_device_module(kind)
rank = int(os.environ["RANK"])
if chosen == "other":
    module.set_device(1 - rank)
dist.init_process_group(backend)
print(f"rank {rank}:", module.current_device() if module.is_initialized() else "no device", flush=True)
dist.destroy_process_group()
