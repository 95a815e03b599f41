"""DistributedDataParallel whose buckets are laid out once, in the order of the parameters.

PyTorch lays the buckets out again in the first forward after a backward, in the order in which that has finished
the gradients (`Reducer::rebuild_buckets`). A sum over three ranks or more depends on the layout. So a process that
resumes makes its first step with another order of sums than one that was not interrupted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.nn.parallel.distributed import DistributedDataParallel


def lay_out_once(init: Callable[..., None], given: inspect.BoundArguments) -> None:
    """Call DDP's `__init__` such that its buckets are final, and filled from the last parameter to the first.

    A collective, as `__init__` is.

    Args:
        given: its arguments, the object among them.
    """
    arguments = given.arguments
    ddp: Any = arguments["self"]
    build = ddp._build_params_for_reducer

    def build_reversed() -> tuple[list[Any], list[bool]]:
        parameters, expect_sparse = build()
        return parameters[::-1], expect_sparse[::-1]

    # With `find_unused_parameters` alone, the buckets are final anyway, and PyTorch reverses their list itself.
    if not arguments.get("find_unused_parameters") or arguments.get("static_graph"):
        vars(ddp)["_build_params_for_reducer"] = build_reversed
    try:
        init(*given.args, **given.kwargs)
    finally:
        vars(ddp).pop("_build_params_for_reducer", None)
    if not ddp._delay_all_reduce_all_params:  # else it has no buckets
        ddp.reducer._push_all_rebuilt_params()
        ddp.reducer._rebuild_buckets()


class FinalLayout(DistributedDataParallel):
    """DDP that lays out its buckets once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        init = DistributedDataParallel.__init__
        lay_out_once(init, inspect.signature(init).bind(self, *args, **kwargs))
