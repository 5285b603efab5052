"""The coordinator's side of the run's register: it writes there what another one needs to take over.

A new generation is announced only after it is in the register. That a host has joined is written with the next turn of
the event loop, so that a thousand hosts that join at once are a few writes. The other hosts also keep a copy of the
key-value store.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from paceline.launch.coordinator.head_register import HeadRecord, HeadRegister, Superseded
from paceline.launch.coordinator.remote_hosts import RemoteHost, RemoteHosts

__all__ = ["Leadership"]

GENERATIONS = "paceline/generation_"  # keys by which the members of one generation meet: another one makes its own


class Leadership:
    """Writes the register of a run; while it has none, which is where no other host sees it, it does nothing."""

    def __init__(
        self,
        remote_hosts: RemoteHosts,
        *,
        attempt: int,
        host: str,
        state: Callable[[], Mapping[str, Any]],
        store: Callable[[], Mapping[str, str]],
        superseded: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """`state()` is what another coordinator takes over, `store()` what other hosts keep of the key-value store.
        `superseded(reason)` is called once another coordinator leads the run."""
        self._remote_hosts, self._attempt, self._host = remote_hosts, attempt, host
        self._state, self._store, self._superseded, self._say = state, store, superseded, say
        self.register: HeadRegister | None = None
        self.record: HeadRecord | None = None  # what this coordinator has written there
        self._is_disk_lost = False  # it could not be reached at the last try
        self._is_due = False

    def enter(self, register: HeadRegister, *, address: str, before: HeadRecord | None) -> None:
        """Enter this coordinator, which listens at `address`. `before` is what this process wrote in the attempt
        before, or as it took over. Raises OSError, and Superseded where another one leads the run.
        """
        self.register = register
        if before is not None:
            self.record = dataclasses.replace(before, attempt=self._attempt, state=self._state())
            register.update(self.record)
        else:
            run, state = secrets.token_hex(16), self._state()
            self.record = HeadRecord(
                run=run, attempt=self._attempt, epoch=0, host=self._host, address=address, state=state
            )
            register.begin(self.record)
        for remote_host in self._remote_hosts:
            self.tell(remote_host)

    def leave(self) -> None:
        """Have no register any more."""
        self.register = None

    def tell(self, remote_host: RemoteHost) -> None:
        """Tell a host which register is this run's, and what is in the key-value store beside it."""
        if self.register is not None and self.record is not None:
            remote_host.link.send({"op": "register", "run": self.record.run, "epoch": self.record.epoch})
            self.hand_store(remote_host)

    def publish(self) -> bool:
        """Write what another coordinator needs; False where the disk cannot be reached now, or another one leads the
        run, which ends this one."""
        self._is_due = False
        if self.register is None or self.record is None:
            return True
        record = dataclasses.replace(self.record, state=self._state())
        try:
            self.register.update(record)
        except Superseded as other:
            self._superseded(str(other))
            return False
        except OSError as error:
            if not self._is_disk_lost:
                self._say(f"the run's register cannot be written, and is tried again: {error}")
            self._is_disk_lost = True
            return False
        self.record, self._is_disk_lost = record, False
        return True

    def publish_soon(self) -> None:
        """Write it with the next `tick`."""
        self._is_due = True

    def tick(self) -> None:
        if self._is_due:
            self.publish()

    def kept(self, key: str, value: str | None) -> None:
        """The key-value store has changed: other hosts keep a copy of it."""
        if self.register is not None and not key.startswith(GENERATIONS):
            self._remote_hosts.broadcast({"op": "kept", "key": key, "value": value})

    def hand_store(self, remote_host: RemoteHost) -> None:
        """Give a host the copy of the key-value store."""
        if self.register is not None:
            for key, value in self._store().items():
                if not key.startswith(GENERATIONS):
                    remote_host.link.send({"op": "kept", "key": key, "value": value})
