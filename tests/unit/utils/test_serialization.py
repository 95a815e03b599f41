"""Plain values and tensors as JSON and safetensors: equal after reading, and nothing else can be read."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvd_trainer.backends.collectives import decode_object, encode_object
from hvd_trainer.errors import BackendError
from hvd_trainer.utils import pieces
from hvd_trainer.utils.files import UNREADABLE
from hvd_trainer.utils.serialization import flatten, pack, to_json, unflatten, unpack


def assert_equal(found: Any, expected: Any) -> None:
    """Compare types, too, the order of dictionaries and the bits of tensors."""
    if isinstance(expected, Tensor):
        assert type(found) is Tensor
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        bits = [
            tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            for tensor in (found, expected)
        ]
        assert bits[0].equal(bits[1])
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert_equal(list(found), list(expected))
        assert_equal(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(expected, float | complex):
        assert repr(found) == repr(expected)  # nan, and the sign of 0
    else:
        assert found == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, -(2**200), "text \ud800", 1e-310, -0.0, math.inf, -math.inf, math.nan],
        ((), [(1, [2])], {"a": ({},)}),
        {0: "int", "0": "str", None: 1, (1, 2.5): 2, True: 3},
        {"$tensor": "x", "plain": {"$": 1}},
        [b"", b"\0\xff", bytearray(b"abc"), complex(-0.0, math.nan)],
        [OrderedDict(b=1, a=2), Counter({30: 1, 60: 2}), torch.Size([1, 2]), {1, 2}],
        [torch.bfloat16, torch.device("cuda:1")],
    ],
)
def test_plain_values_keep_their_types(value: Any) -> None:
    assert_equal(unpack(pack(value)), value)
    tree, tensors = flatten(value)
    assert_equal(unflatten(json.loads(to_json(tree)), tensors), value)


DTYPES = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_tensors_of_every_dtype_are_equal() -> None:
    content = torch.arange(64, dtype=torch.uint8)
    for dtype in DTYPES:
        if str(dtype).startswith(("torch.q", "torch.bcomplex")):
            continue
        tensor = content % 2 == 0 if dtype == torch.bool else content.view(dtype)
        value = {"all": tensor, "one": tensor[0], "none": tensor[:0], "matrix": tensor.view(2, -1)}
        assert_equal(unpack(pack(value)), value)


def test_tensors_of_every_layout_are_equal() -> None:
    image = torch.randn(2, 3, 4, 5)
    value = {
        "transposed": image.transpose(1, 3),
        "expanded": torch.ones(1, 2).expand(3, 2),
        "every second": torch.arange(10)[::2],
        "the same": [image, image, image[0]],
        "parameter": nn.Parameter(torch.ones(2)),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "its imaginary part": torch.randn(3, dtype=torch.complex64).conj().imag,
        "complex image": image.to(torch.complex128).contiguous(memory_format=torch.channels_last),
        "without elements": [torch.empty(0, 4), torch.empty(2, 0, 3).mT],
    }
    found = unpack(pack(value))
    assert_equal(found, value)
    for name in ("transposed", "complex image"):
        assert found[name].stride() == value[name].stride(), "the order in memory is kept"
    assert_equal(unpack(pack(image)), image)


def test_names_of_tensors_are_their_paths() -> None:
    """Readers of a checkpoint's safetensors find the weights by name; equal paths get names of their own."""
    one = torch.ones(1)
    value = {"model": {"fc.weight": one}, 1: [one], "1": [one], "1/0": one, "__metadata__": one}
    assert list(flatten(value)[1]) == ["model/fc.weight", "1/0", "1/0'", "1/0''", "__metadata__'"]
    assert_equal(unpack(pack(value)), value)


def test_dense_tensors_are_not_copied() -> None:
    tensors = [torch.ones(3), torch.ones(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)]
    assert [t.data_ptr() for t in flatten(tensors)[1].values()] == [t.data_ptr() for t in tensors]


def test_numpy_numbers_become_python_numbers() -> None:
    """Schedules that are computed with NumPy return learning rates of NumPy's types."""
    value = {np.int64(3): [np.float64(0.5), np.float32(0.25), np.bool_(True), np.str_("x")]}
    assert_equal(unpack(pack(value)), {3: [0.5, 0.25, True, "x"]})


class Foreign:
    """A type that cannot be written."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"optimizer": {"groups": [{}, {"schedule": Foreign()}]}},
            "optimizer/groups/1/schedule is of type test_s",
        ),
        (Foreign(), r"it is of type test_serialization\.Foreign"),
        ([lambda: 0], "0 is of type builtins.function"),
        ({"a": np.zeros(2)}, r"a is of type numpy\.ndarray"),
        ({"a": np.longdouble(1)}, r"a is of type numpy\.longdouble"),
        ({"a": torch.eye(2).to_sparse()}, "a is a sparse"),
        ({"a": torch.ones(2, device="meta")}, "a is .* without contents"),
    ],
)
def test_flatten_names_unsupported_values(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        flatten(value)


def test_flatten_refuses_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="nested too deeply, or contains itself"):
        flatten(value)


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    lambda o: lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    lambda o: lr_scheduler.ReduceLROnPlateau(o),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(o, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]),
]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler:UserWarning")
@pytest.mark.parametrize("make", SCHEDULERS)
def test_scheduler_states_are_restored(make: Callable[[Any], Any]) -> None:
    """MultiStepLR has a Counter, ReduceLROnPlateau an infinity, LambdaLR closures that are not in its state."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(2):
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    assert_equal(unpack(pack(scheduler.state_dict())), scheduler.state_dict())


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizer_states_are_equal(kind: Any) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = kind([parameter])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_equal(unpack(pack(optimizer.state_dict())), optimizer.state_dict())


# What was not written by `pack`.

REFUSED = (*UNREADABLE, SafetensorError)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "b"},
        [{"$tensor": "a"}, {"$tensor": "a"}],  # one tensor again and again would unfold to more than the file
        [],  # a tensor that nothing refers to
        {"$tensor": "a", "more": 1},
        {"$code": "a"},
        {"$tensor": ["a"]},
        [{"$tensor": "a"}, {"$float": [1]}],
        [{"$tensor": "a"}, {"$dtype": "load"}],
        [{"$tensor": "a"}, {"$dict": [[[1], 2]]}],
        [{"$tensor": "a"}, {"$dict": 3}],
        [{"$tensor": "a"}, {"$bytes": "text"}],
        [{"$tensor": "a"}, {"$complex": [1, 2, 3]}],
        {"$permuted": [{"$tensor": "a"}, [0, 0]]},
        {"$viewed": [{"$tensor": "a"}, {"$dtype": "float64"}, [10**12]]},
    ],
)
def test_unflatten_refuses_invalid_trees(tree: Any) -> None:
    with pytest.raises(REFUSED):
        unflatten(tree, {"a": torch.ones(2)})


@pytest.mark.parametrize(
    "tree", ["[" * 100_000, "9" * 5000, '"\\', "\xff", '{"$tuple":[' * 20_000 + "]}" * 20_000]
)
def test_unpack_refuses_hostile_json(tree: str) -> None:
    text = tree.encode("latin-1")
    with pytest.raises(REFUSED):
        unpack(len(text).to_bytes(8, "big") + text)


def with_header(header: Any, content: bytes = bytes(8)) -> bytes:
    """Return a packed tensor `a` whose safetensors have this header."""
    tree = b'{"$tensor":"a"}'
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(tree).to_bytes(8, "big") + tree + len(text).to_bytes(8, "little") + text + content


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "header",
    [
        entry(shape=[10**12]),
        entry(shape=[2**63, 2**63]),
        entry(data_offsets=[0, 10**12]),
        entry(data_offsets=[0, 10**12], shape=[25 * 10**10]),
        entry(data_offsets=[4, 12]),
        entry(dtype="F4"),
        entry(dtype="F8_E8M0", shape=[8]),
        entry(dtype="pickle"),
        {**entry(), "b": entry()["a"]},
        {},
        b"[" * 100_000,
    ],
)
def test_unpack_refuses_wrong_headers(header: Any) -> None:
    """The sizes in a header are compared with the content before memory is taken for them."""
    assert_equal(unpack(with_header(entry())), torch.zeros(2))
    with pytest.raises(REFUSED):
        unpack(with_header(header))


def test_unpack_refuses_wrong_header_lengths() -> None:
    whole = with_header(entry())
    for length in (0, 3, 2**31, 2**63, 2**64 - 1):
        with pytest.raises(REFUSED):
            unpack(whole[:23] + length.to_bytes(8, "little") + whole[31:])


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_unpack_survives_any_bytes(seed: int, cut: float) -> None:
    """Data changed at random or cut off are read as plain values, or refused by an error that callers expect."""
    draws = random.Random(seed)
    changed = bytearray(pack({"a": torch.zeros(3), "b": [1, (2.5, "x", b"y")], 3: {math.inf}}))
    for _ in range(draws.randint(1, 4)):
        changed[draws.randrange(len(changed))] = draws.randrange(256)
    for data in (bytes(changed), bytes(changed[: int(cut * len(changed))])):
        with suppress(*REFUSED):
            unpack(data)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "it cannot be read"),
        (pack([1, 2]), "it cannot be read"),
        (pack({"else": 1}), "it cannot be read"),
        (b"\x80\x04cos\nsystem\n.", "it cannot be read"),
        (pack({"value": {"$tensor": "a"}, "follow": {"a": ["save", 3]}}), "it cannot be read"),
        (pack({"value": {"$tensor": "a"}, "follow": {"a": ["float32", -3]}}), "it cannot be read"),
        (pack({"value": 1, "follow": {"a": ["float32", 3]}}), "it cannot be read"),
        (encode_object({"optimizer": [Foreign()]})[0], "optimizer/0 is of type test_serialization.Foreign"),
    ],
)
def test_decode_object_refuses_malformed_messages(sent: bytes, words: str) -> None:
    """Each rank raises, also where the sender could not send: otherwise the others would wait."""
    with pytest.raises(BackendError, match=words):
        decode_object(torch.tensor(list(sent), dtype=torch.uint8), torch.Tensor.zero_)
    header, following = encode_object({3: (1,)})
    assert decode_object(torch.tensor(list(header), dtype=torch.uint8), torch.Tensor.zero_) == {3: (1,)}
    assert following == []


def test_large_tensors_follow_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2 GiB in one message aborted Horovod, which counts its bytes in an int."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2**14)
    value = {
        "large": torch.randn(3, 5000).t(),
        "small": [torch.arange(number, dtype=torch.int16) for number in range(300)],
        "kinds": (torch.randn(70, dtype=torch.complex128), torch.zeros(2, 0), torch.tensor(True).expand(1), b"x"),
    }
    header, tensors = encode_object(value)
    sent: list[Tensor] = []
    pieces.move_in_pieces(tensors, lambda piece: sent.append(piece.clone()), receives=False)
    total = sum(tensor.nbytes for tensor in tensors)
    assert len(header) < 2**14
    assert max(map(len, sent)) <= 2**14
    assert total / 2**14 <= len(sent) <= 2 * total / 2**14
    received = iter(sent)
    found = decode_object(torch.tensor(list(header), dtype=torch.uint8), lambda piece: piece.copy_(next(received)))
    assert_equal(found, value)
    assert next(received, None) is None
