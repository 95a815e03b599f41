"""How fast it is here: figures for the report, beside what we aim at. None of them fails a test."""

from __future__ import annotations

from pathlib import Path

import device_checks
import pytest
from records import lines
from ways_to_train import ENGINES, TEXTS

from gpu import speed
from gpu.machine import ON_CUDA, InRanks, Record, cuda_only

pytestmark = pytest.mark.gpu
WAYS = (
    *((engine, model, "") for engine in ("single", *ENGINES) for model in ("quick", "mlp")),
    ("single", "quick", "--compile reduce-overhead"),
    ("single", "resnet", "--precision bf16"),
    ("single", "resnet", "--precision bf16 --channels-last"),
    ("single", "resnet", "--precision bf16 --channels-last --compile default"),
)


@pytest.mark.parametrize(
    ("engine", "model", "text"),
    [pytest.param(*way, marks=[cuda_only] if way[2] else []) for way in WAYS],
    indirect=["engine"],
)
def test_step(engine: str, model: str, text: str, in_ranks: InRanks, record_property: Record) -> None:
    """We aim at 50 us more than a loop by hand, and for ResNet-50 at 98 % of its images per second."""
    (by_hand,) = in_ranks(1, speed.step_by_hand, model, text.split())
    (ours,) = in_ranks(1, speed.step_by_trainer, model, ["--backend", engine, *text.split()])
    record_property("step by hand, us", round(by_hand, 1))
    record_property("more by the Trainer, us", round(ours - by_hand, 1))


def test_save(in_ranks: InRanks, record_property: Record, tmp_path: Path) -> None:
    """The first save takes the memory; at a later one we aim at the time of two copies to the host and 10 ms."""
    size = device_checks.LARGE if ON_CUDA else device_checks.SMALL
    text = f"{TEXTS} {size} --optimizer adamw --backend single --save-every-steps 5"
    stalls = {}
    for saves in (1, 4):
        log_dir = tmp_path / str(saves)
        way = f"{text} --save-every-epochs None --keep-best None --max-steps {5 * saves}"
        in_ranks(1, device_checks.same_bits, "imdb", [way], str(log_dir), ["as queued"])
        stalls[saves] = lines(log_dir / "0-0", "end")[0]["save_stall_s"]
    record_property("weights and state, MB", round(3 * (log_dir / "0-0/model.safetensors").stat().st_size / 2**20))
    record_property("stall of the first save, s", round(stalls[1], 3))
    record_property("of a later one, s", round((stalls[4] - stalls[1]) / 3, 3))
