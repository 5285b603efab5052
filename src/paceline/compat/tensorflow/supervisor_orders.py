"""What the supervisor tells a task, heard by a thread: messages that are no replies, and its loss."""

from __future__ import annotations

import queue
import threading
from typing import Any

from paceline.comm.messages.json_channel import Channel, ChannelClosed

__all__ = ["SupervisorOrders"]


class SupervisorOrders:
    """Listens at a task's channel from now on; the channel's `call` goes on working in other threads."""

    def __init__(self, channel: Channel) -> None:
        self.is_lost = False  # the supervisor has gone
        self._channel = channel
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        channel.begin_listening()
        threading.Thread(target=self._listen, name="paceline-orders", daemon=True).start()

    def take(self, wait_s: float) -> dict[str, Any] | None:
        """Return the next order; None where none comes within `wait_s` seconds."""
        try:
            return self._orders.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        try:
            while True:
                for order in self._channel.take():
                    self._orders.put(order)
        except ChannelClosed:
            self.is_lost = True
