"""The IMDB job's network and the options of its sizes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvd_trainer import parse
from hvd_trainer.config.rules import check
from hvd_trainer.errors import OptionError
from hvd_trainer.jobs.options import PRESETS, ImdbOptions, TextModelOptions, TextSizes
from hvd_trainer.jobs.transformer import PADDING, transformer

VOCABULARY, LENGTH = 300, 16
TINY = TextSizes(
    layers=2, d_model=8, heads=2, d_hid=12, dropout=0.0, sequence_length=LENGTH, vocabulary=VOCABULARY
)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(1)
    return transformer(TINY)


def some_ids(*lengths: int) -> torch.Tensor:
    ids = torch.randint(2, VOCABULARY, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(3))
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = PADDING
    return ids


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_all_blocks_return_the_same_type(model: nn.Sequential, precision: torch.dtype) -> None:
    """Any block may begin a pipeline stage, in any precision."""
    assert [name for name, _ in model.named_children()] == ["embedding", "layer0", "layer1", "head"]
    ids = some_ids(16, 5, 1)
    *blocks, head = model
    value: Any = ids
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        for block in blocks:
            value = block(value)
            hidden, padding = value
            assert (hidden.shape, hidden.dtype) == ((3, LENGTH, TINY.d_model), torch.float32)
            assert torch.equal(padding, (ids == PADDING).float())
        logits = head(value)
    assert logits.shape == (3, 2)
    loss = nn.functional.cross_entropy(logits.float(), torch.tensor([0, 1, 0]))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.dtype == torch.float32, name


def test_blocks_share_nothing_and_have_no_buffers(model: nn.Sequential) -> None:
    """Tied weights would need both ends in one stage; buffers of floats are averaged over ranks."""
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(places) == len(set(places))
    assert not list(model.buffers())
    ids = some_ids(16, 5)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), model(ids))


def test_padding_does_not_change_the_logits(model: nn.Sequential) -> None:
    ids = some_ids(16, 9, 4, 1)
    together = model(ids)
    for row, length in enumerate((16, 9, 4, 1)):
        alone = model(ids[row : row + 1, :length])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)


def test_text_without_tokens_has_finite_logits(model: nn.Sequential) -> None:
    logits = model(some_ids(0, 16))
    assert torch.equal(logits[0], model.head.classes.bias)
    logits.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_training_and_evaluation_compute_alike(model: nn.Sequential) -> None:
    """nn.TransformerEncoderLayer computes differently in evaluation."""
    ids = some_ids(16, 7)
    trained = model.train()(ids)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), trained)
    dropping = transformer(replace(TINY, dropout=0.5))
    assert not torch.equal(dropping.train()(ids), dropping.eval()(ids))


def test_transformer_learns_with_deterministic_operations(model: nn.Sequential) -> None:
    ids, label = some_ids(6)[:, :6], torch.tensor([1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), label)
            loss.backward()
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss.item() < 0.05
    assert torch.equal(model.embedding.token.weight[PADDING], torch.zeros(TINY.d_model))


# Options.


def test_typed_options_override_the_preset(tmp_path: Path) -> None:
    assert TextModelOptions().sizes == TextSizes(2, 64, 2, 128, 0.2, 256, 8000)
    typed = parse(ImdbOptions, ["--preset", "reference", "--layers", "3", "--lr", "0.5"]).filled()
    reference = PRESETS["reference"]
    assert (typed.network.layers, typed.optimizer.lr) == (3, 0.5)
    assert typed.network.sizes == replace(reference, layers=3)
    file = tmp_path / "job.yaml"
    file.write_text("preset: reference\nheads: 8\n")
    both = parse(ImdbOptions, ["--config", str(file), "--heads", "4"]).filled()
    assert (both.network.heads, both.network.layers, both.optimizer.lr) == (4, 12, 1e-4)


def test_presets_are_complete_and_of_their_size() -> None:
    for name, count in (("small", 595_586), ("reference", 364_732_418)):
        network = TextModelOptions(preset=name)  # type: ignore[arg-type]
        options = ImdbOptions(network=network).filled()
        assert None not in (options.optimizer.lr, *vars(options.network).values())
        with torch.device("meta"):
            assert sum(p.numel() for p in transformer(options.network.sizes).parameters()) == count


def test_all_mistakes_are_reported_at_once() -> None:
    wrong = ["--layers=0", "--heads=3", "--dropout=1", "--vocabulary=10", "--lr=0", "--synthetic-reviews=0"]
    options = parse(ImdbOptions, [*wrong, "--dataset=synthetic", "--data-dir=x", "--epochs=0"])
    with pytest.raises(OptionError) as caught:
        check(options)
    for words in (
        "--layers must be a whole number, 1 or more, or None, not 0",
        "--heads must divide --d-model, and 3 does not divide 64",
        "--dropout must be a number, 0 or more, less than 1, or None, not 1.0",
        "--vocabulary must be a whole number, 257 or more, or None, not 10",
        "--lr must be a number, more than 0",
        "--synthetic-reviews must be a whole number, 1 or more",
        "leave out --data-dir",
        "--epochs must be a whole number, 1 or more",
    ):
        assert words in str(caught.value)
