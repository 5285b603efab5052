"""Parameter servers of the tests of their clients: they answer in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from paceline.comm.group import Disrupted
from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.sync.parameter_server.client import ServerClient

__all__ = ["Knowing", "PretendedServers"]


class PretendedServers(ServerClient):
    """One server that is slow to answer, while a member is lost."""

    def __init__(self) -> None:
        self.count = 1
        self.asked: list[str] = []
        self._is_met, self._groups = False, []

    @property
    def are_there(self) -> bool:
        return self._is_met

    def meet(self, *_: Any, **__: Any) -> None:
        self._is_met = True

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[TensorMessage]:
        self.asked.append(questions[0]["op"])
        if checks:
            raise Disrupted("a member was lost")
        return [TensorMessage({"entries": [], "written": []}) for _ in questions]


class Knowing(ServerClient):
    """A worker that has met one server, on another host."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(1, store=store, attempt=1, address="127.0.0.1", host="here", timeout_s=8.0, check=lambda: None)
        self._addresses["parameter server 0"] = {"host": "there", "pid": 4711}
