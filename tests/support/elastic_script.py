"""A script for Horovod's elastic API that knows nothing of this package; each process records what it does.

python elastic_script.py FOLDER PAUSE_S [BATCH]    after this batch of epoch 1 a rank is killed, once

FOLDER/PROCESS    one line per event: begin SIZE EPOCH BATCH; told KIND; reset SIZE; epoch SAMPLE...;
                  weights DIGEST RATE
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY, RATE = 240, 4, 3, 6, 1e-6
folder, pause_s, kill_at = Path(sys.argv[1]), float(sys.argv[2]), int([*sys.argv, "-1"][3])
events = (folder / str(os.getpid())).open("w", buffering=1)
killed = folder.with_name("killed")


def record(*words):
    events.write(" ".join(map(str, words)) + "\n")


hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = torch.arange(SAMPLES)
sampler = hvd.elastic.ElasticSampler(data)


def kill_once(state):
    if (state.epoch, state.batch) == (1, kill_at) and not killed.exists():
        handle = hvd.allreduce_async(torch.ones(1_000_000), name="large")
        fewest = min(hvd.allgather_object(hvd.local_size()))
        if hvd.local_size() == fewest and hvd.local_rank() == fewest - 1:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.synchronize(handle)


@hvd.elastic.run
def train(state):
    record("begin", hvd.size(), state.epoch, state.batch)
    print(f"begins on {hvd.size()} ranks in epoch {state.epoch}", flush=True)
    while state.epoch < EPOCHS:
        for numbers in torch.utils.data.DataLoader(data, BATCH, sampler=state.sampler):
            optimizer.zero_grad()
            model(numbers.float().unsqueeze(1)).square().mean().backward()
            optimizer.step()
            state.sampler.record_batch(state.batch, BATCH)
            state.batch += 1
            state.seen = state.seen + hvd.allgather(numbers, name="numbers").tolist()
            kill_once(state)
            time.sleep(pause_s)
            if state.batch % COMMIT_EVERY == 0:
                state.commit()
        state.epochs = [*state.epochs, state.seen]
        state.seen = []
        state.epoch, state.batch = state.epoch + 1, 0
        state.sampler.set_epoch(state.epoch)
        state.commit()
        print(f"has trained epoch {state.epoch}", flush=True)


class State(hvd.elastic.TorchState):
    def on_hosts_updated(self, timestamp, update_res):
        record("told", int(update_res))
        super().on_hosts_updated(timestamp, update_res)


def on_reset():
    record("reset", hvd.size())
    for group in optimizer.param_groups:
        group["lr"] = RATE * hvd.size()


state = State(model, optimizer, sampler=sampler, epoch=0, batch=0, seen=[], epochs=[])
state.register_reset_callbacks([on_reset])
train(state)
for seen in state.epochs:
    record("epoch", *sorted(seen))
weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
record("weights", hashlib.sha256(weights).hexdigest(), round(optimizer.param_groups[0]["lr"] / RATE))
