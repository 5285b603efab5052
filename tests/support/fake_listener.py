"""A listener without sockets, for tests of what a parameter server answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.messages.tensor_messages import TensorMessage, TensorServer

__all__ = ["PASS_KEY", "PretendedListener"]


class PretendedListener(TensorServer):
    """Has the workers say what is given, one thing after the other, and notes what they are told."""

    def __init__(self, said: Sequence[tuple[bytes, TensorMessage]]) -> None:
        # Nothing of a real one is made: no socket, and so none to close.
        self.said = list(said)
        self.told: list[tuple[bytes, Mapping[str, Any], Sequence[Tensor]]] = []
        self.had_any = True

    @property
    def num_connected(self) -> int:
        return len(self.said)

    def receive(self, timeout_s: float) -> tuple[bytes, TensorMessage]:
        return self.said.pop(0)

    def send(self, peer: bytes, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        self.told.append((peer, header, [one.clone() for one in tensors]))


PASS_KEY = (0, 1, 0)
