"""Values that ranks send each other, as bytes.

Anybody on the network may have sent what arrives: nothing but plain values and tensors is made of it.
"""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from hvd_trainer.errors import BackendError, first_line
from hvd_trainer.utils.files import UNREADABLE
from hvd_trainer.utils.serialization import pack, unpack


def encode_object(value: Any) -> bytes:
    """Return a value as bytes; if it cannot be sent, bytes for which `decode_object` raises on each rank.

    An error here would end this rank alone: the others are on their way into the collective, and would wait in it.
    """
    try:
        return pack({"value": value})
    except (TypeError, ValueError) as error:
        return pack({"error": ascii(first_line(error))})


def decode_object(received: Tensor) -> Any:
    """Return the value that `encode_object` has made these bytes (uint8) of; its tensors are on the host.

    Raises:
        BackendError: it consists of more than plain values, or cannot be read.
    """
    try:
        content = unpack(received.cpu().numpy().tobytes())
        if "error" not in content:
            return content["value"]
        reason = content["error"]
    except (*UNREADABLE, SafetensorError) as error:
        reason = f"it cannot be read ({type(error).__name__})"
    raise BackendError(
        f"A rank has sent a value that ranks do not exchange: {reason}. They exchange numbers, texts, tensors, "
        f"and lists and dicts of them. If the optimizer's settings or a metric hold others, make numbers of them."
    )
