"""The errors of `horovod.common.exceptions`, which scripts catch by these names."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks asked for different things, a rank is gone, or the job has been shut down.

    Elastic training restores the last committed state after it.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """The hosts of an elastic job have changed; the state of this rank is still valid.

    Args:
        skip_sync: whether the ranks that stay need not synchronise their state again.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message of `HorovodVersionMismatchError`."""
    return (
        f"{name} {version} is installed, and the module in use was built for {name} {installed_version}. Install "
        f"that version, or build the module again."
    )


class HorovodVersionMismatchError(ImportError):
    """A framework's version is not the one that Horovod was built for; not raised here, where nothing is built."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
