"""torch's Store over the supervisor's key-value store, so process groups find each other without a listening port.

torch and gloo ask for keys from several threads. A wait polls, so no request blocks another one.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from paceline.comm.messages.json_channel import Channel
from paceline.errors import SyncError

__all__ = ["SupervisorStore"]

POLL_S = 0.002


class SupervisorStore(dist.Store):
    """Key-value store shared by all workers of a job; values are bytes.

    `check_wait()` is called while a wait goes on, and ends it by raising.
    """

    def __init__(
        self, channel: Channel, *, timeout_s: float, prefix: str = "", check_wait: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._channel = channel
        self._timeout_s = timeout_s
        self._prefix, self._check_wait = prefix, check_wait

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._channel.call("set", key=self._prefix + key, value=base64.b64encode(raw).decode())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return base64.b64decode(self._channel.call("get", key=self._prefix + key))

    def add(self, key: str, value: int) -> int:
        return int(self._channel.call("add", key=self._prefix + key, amount=value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._channel.call("check", keys=[self._prefix + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while not self.check(keys):
            if self._check_wait is not None:
                self._check_wait()
            if time.monotonic() > deadline:
                raise SyncError(f"waited {limit_s:.0f} s for {', '.join(keys)}: a peer has not come this far")
            time.sleep(POLL_S)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        coded = [
            base64.b64encode(v.encode() if isinstance(v, str) else bytes(v)).decode()
            for v in (expected_value, desired_value)
        ]
        return base64.b64decode(
            self._channel.call("compare_set", key=self._prefix + key, expected=coded[0], desired=coded[1])
        )

    def delete_key(self, key: str) -> bool:
        return bool(self._channel.call("delete", key=self._prefix + key))

    deleteKey = delete_key  # by this name torch's PrefixStore calls it

    def num_keys(self) -> int:
        return int(self._channel.call("num_keys"))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)
