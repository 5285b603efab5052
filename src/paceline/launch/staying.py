"""What a supervisor keeps from one start of the workers to the next, besides the warm parent."""

from __future__ import annotations

import dataclasses
import socket

from paceline.launch.signals import Signals
from paceline.launch.vaults import Vaults

__all__ = ["Staying"]


@dataclasses.dataclass(kw_only=True)
class Staying:
    """Whoever makes it closes it."""

    signals: Signals
    vaults: Vaults = dataclasses.field(default_factory=Vaults)  # the workers' states
    listener: socket.socket | None = None  # the head's: hosts that come again wait there
    host_index: int = 0  # this host's

    def close(self) -> None:
        """Let go of it all."""
        self.vaults.close()
        if self.listener is not None:
            self.listener.close()
            self.listener = None
