"""Nested plain values and tensors as JSON and safetensors: for checkpoints, and for what ranks send each other.

    {"w": tensor, "betas": (0.9, inf)}
    tree      {"w": {"$tensor": "w"}, "betas": {"$tuple": [0.9, {"$float": "inf"}]}}
    tensors   {"w": tensor}

A type that JSON does not have is an object with one key, which begins with `$`. Reading builds the types in
`MAKERS` and no others, so no content can run code. Each tensor is referred to once, and safetensors compares the
sizes in its header with the length of the file before it allocates: a short file cannot claim a large tensor.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import TensorSpec, serialize
from safetensors.torch import load
from torch import Tensor, nn

PLAIN = (type(None), bool, int, str)
NATIVE = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
"""Types that safetensors both writes and reads; tensors of others, such as complex128, are kept as their bytes."""
CODES = {
    TensorSpec(dtype=str(dtype).removeprefix("torch."), shape=[0], data_ptr=0, data_len=0).dtype: dtype
    for dtype in NATIVE
}
"""PyTorch types by their names in the safetensors format."""
SEQUENCES: dict[Any, str] = {tuple: "$tuple", set: "$set", torch.Size: "$size"}
MAPPINGS: dict[Any, str] = {dict: "$dict", OrderedDict: "$ordered_dict", Counter: "$counter"}
MAKERS: Mapping[str, Callable[[Any], Any]] = {
    **{tag: kind for kind, tag in (SEQUENCES | MAPPINGS).items()},
    "$counter": lambda items: Counter(dict(items)),
    "$float": float,
    "$complex": lambda parts: complex(*parts),
    "$bytes": lambda tensor: tensor.numpy().tobytes(),
    "$bytearray": lambda tensor: bytearray(tensor.numpy().tobytes()),
    "$dtype": lambda name: _dtype(name),
    "$device": torch.device,
    "$permuted": lambda parts: parts[0].permute(parts[1]),
    "$viewed": lambda parts: parts[0].view(parts[1]).view(parts[2]),
}
"""What is made of the value of an object with this key."""


def flatten(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a value into a tree that JSON can hold and its tensors.

    Args:
        value: None, booleans, numbers (NumPy's become Python's), strings, bytes, tensors, `torch.dtype`,
            `torch.device`, and dicts, lists, tuples and sets of them; an `OrderedDict`, `Counter` or `torch.Size`
            stays one.

    Returns:
        The tree, and the tensors by their path in it: detached, contiguous, on their device. A dense tensor is
        not copied.

    Raises:
        TypeError: something in it is of another type, and the message names its path and its type; or it is nested
            too deeply.
    """
    tensors: dict[str, Tensor] = {}
    try:
        return _flatten(value, "", tensors), tensors
    except RecursionError as error:
        raise TypeError("it is nested too deeply, or contains itself") from error


def unflatten(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the value that `flatten` has split.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError, AttributeError: these come from no value.
        RecursionError: the tree is nested too deeply.
    """
    left = dict(tensors)
    value = _unflatten(tree, left)
    if left:
        raise ValueError(f"nothing refers to the tensor {min(left)!r}")
    return value


def to_json(tree: Any) -> bytes:
    """Return a tree from `flatten` as JSON.

    Raises:
        ValueError: an integer has more digits than Python reads.
    """
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return where safetensors finds contiguous host tensors, which must live until it has written them."""
    return {
        name: TensorSpec(
            dtype=_name(tensor.dtype), shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes
        )
        for name, tensor in tensors.items()
    }


def pack(value: Any) -> bytes:
    """Return a value as bytes: the length of the tree's JSON (8 bytes), the JSON, and safetensors if it has any.

    Raises:
        TypeError, ValueError: as `flatten` and `to_json`.
    """
    return pack_tree(*flatten(value))


def pack_tree(tree: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """Return what `flatten` has made of a value as bytes, as `pack` does."""
    text = to_json(tree)
    on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
    return b"".join([len(text).to_bytes(8, "big"), text, serialize(tensor_specs(on_host)) if on_host else b""])


def unpack(data: bytes) -> Any:
    """Return the value that `pack` has made bytes of; its tensors are on the host.

    Raises:
        SafetensorError, and as `unflatten`: `pack` has not made them.
    """
    return unflatten(*unpack_tree(data))


def unpack_tree(data: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Return the tree and the tensors of which `pack_tree` has made bytes; errors as of `unpack`."""
    end = 8 + int.from_bytes(data[:8], "big")
    tensors = data[end:]
    return json.loads(data[8:end]), load(tensors) if tensors else {}


def describe(tensor: Tensor) -> list[Any]:
    """Return type and shape of a tensor from `flatten`, as JSON can hold them."""
    return [_name(tensor.dtype), *tensor.shape]


def empty(description: Sequence[Any], device: str = "cpu") -> Tensor:
    """Return a tensor of a type and shape from `describe`.

    Raises:
        TypeError, ValueError, RuntimeError: it is none.
    """
    dtype, *shape = description
    return torch.empty(shape, dtype=_dtype(dtype), device=device)


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is Tensor or kind is nn.Parameter:
        return _flatten_tensor(value, path, tensors)
    if kind is list:
        return _flatten_items(value, path, tensors)
    if kind in SEQUENCES:
        return {SEQUENCES[kind]: _flatten_items(value, path, tensors)}
    if kind in MAPPINGS:
        return _flatten_mapping(value, path, tensors)
    if kind is bytes or kind is bytearray:
        content = (
            torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        )
        return {f"${kind.__name__}": _flatten_tensor(content, path, tensors)}
    if kind is complex:
        return {"$complex": _flatten_items((value.real, value.imag), path, tensors)}
    if kind is torch.dtype:
        return {"$dtype": _name(value)}
    if kind is torch.device:
        return {"$device": str(value)}
    if isinstance(value, np.generic) and type(number := value.item()) in (bool, int, float, complex, str, bytes):
        return _flatten(number, path, tensors)
    raise TypeError(f"{path or 'it'} is of type {kind.__module__}.{kind.__qualname__}")


def _flatten_items(items: Any, path: str, tensors: dict[str, Tensor]) -> list[Any]:
    # A shortcut for numbers: the state of Python's random has 625.
    return [
        item if type(item) in PLAIN else _flatten(item, _join(path, number), tensors)
        for number, item in enumerate(items)
    ]


def _flatten_mapping(mapping: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if type(mapping) is dict and all(type(key) is str and not key.startswith("$") for key in mapping):
        return {key: _flatten(item, _join(path, key), tensors) for key, item in mapping.items()}
    pairs = [
        [_flatten(key, path, tensors), _flatten(item, _join(path, key), tensors)] for key, item in mapping.items()
    ]
    return {MAPPINGS[type(mapping)]: pairs}


def _flatten_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"{path or 'it'} is a sparse or quantized tensor, or one without contents")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # Of channels_last, say, the order in memory is kept: its dimensions by falling stride are contiguous.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    is_permuted = not tensor.is_contiguous() and tensor.permute(order).is_contiguous()
    tensor = tensor.permute(order) if is_permuted else tensor.contiguous()
    shape, dtype = list(tensor.shape), tensor.dtype
    if dtype not in NATIVE:
        tensor = tensor.view(-1).view(torch.uint8)
    name = path
    while name in tensors or name == "__metadata__":  # which safetensors has for itself
        name += "'"
    tensors[name] = tensor
    reference: Any = {"$tensor": name}
    if dtype not in NATIVE:
        reference = {"$viewed": [reference, {"$dtype": _name(dtype)}, shape]}
    if is_permuted:
        inverse = sorted(range(len(order)), key=order.__getitem__)
        reference = {"$permuted": [reference, inverse]}
    return reference


def _unflatten(tree: Any, left: dict[str, Any]) -> Any:
    """Build a value; take each tensor that it refers to out of `left`, for it may have no second place."""
    if isinstance(tree, list):
        return [item if type(item) in PLAIN else _unflatten(item, left) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {key: _unflatten(item, left) for key, item in tree.items()}
    (content,) = tree.values()
    return left.pop(content) if tag == "$tensor" else MAKERS[tag](_unflatten(content, left))


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no type of tensors")
    return dtype
