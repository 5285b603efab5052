"""The errors that programs written for Horovod catch, with Horovod's names and places in the tree of errors."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "not_initialized"]


class HorovodInternalError(RuntimeError):
    """A collective failed: workers disagree about it, one was lost, or it was not done in time.

    `elastic.run` catches it, and begins again from the last commit.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic run have changed: `elastic.run` begins again without going back to the last commit.

    `skip_sync`: only hosts were removed, so the workers that are left agree already.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of a framework; never raised here, where nothing is built."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {installed_version} was there when Horovod was installed, and now {version} is")
        self.name, self.version, self.installed_version = name, version, installed_version


def not_initialized() -> str:
    """The text of Horovod's error before `init()`; programs look for it."""
    return "Horovod has not been initialized; use hvd.init()."
