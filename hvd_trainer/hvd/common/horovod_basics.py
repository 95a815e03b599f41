"""`horovod.common.basics`, whose object libraries and tests call in place of the functions of `horovod.torch`."""

from __future__ import annotations

from types import SimpleNamespace

from hvd_trainer.hvd.common import basics, process_sets
from hvd_trainer.hvd.common.process_sets import ProcessSet, global_process_set
from hvd_trainer.hvd.common.request import Op

__all__ = ["HorovodBasics", "ProcessSet", "global_process_set"]


class HorovodBasics(SimpleNamespace):
    """The functions of `basics`, and the kinds of reductions, as attributes.

    Args:
        pkg_path, args: Horovod's compiled module, of no account here.
    """

    def __init__(self, pkg_path: str, *args: str) -> None:
        super().__init__(
            **{name.capitalize(): op for name, op in vars(Op).items() if name.isupper()},
            **{name: getattr(basics, name) for name in basics.__all__},
            init=process_sets.init,
            shutdown=basics.shutdown,
        )

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of each process set by its id, the set of all ranks among them."""
        return {set_id: list(ranks) for set_id, ranks in basics.runtime().set_ranks.items()}
