"""The parameter servers of a run, as a worker reaches them: who starts which, where they are, and how all are asked.

The first workers start them, one each as far as they go, and tell their endpoints and secrets over the run's board. A
server that is there stays the same for the whole attempt, whoever comes and goes.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.messages import Caller, Message
from paceline.errors import SyncError
from paceline.sync.server_process import fork_server
from paceline.sync.serving import MakeServer, Part, Server

__all__ = ["Servers"]

KEY = "paceline/servers/{attempt}/{number}"
POLL_S = 0.005
END_S = 3.0  # until a server that this worker has started has noticed that all are gone


class Servers:
    """One worker's connections to all servers."""

    def __init__(
        self,
        count: int,
        *,
        store: dist.Store,
        attempt: int,
        address: str,
        host: str,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        """`store` is the run's board, `address` that of this host as others see it. `check()` is called in waits, and
        ends them by raising."""
        self.count = count
        self._store, self._attempt, self._address, self._host = store, attempt, address, host
        self._timeout_s, self._check = timeout_s, check
        self._callers: list[Caller] = []
        self._started: list[int] = []  # process numbers

    @property
    def are_there(self) -> bool:
        """Whether this worker has met all of them."""
        return len(self._callers) == self.count

    def meet(
        self, part: Callable[[int], Part], *, index: int, size: int, largest_bytes: int, server: MakeServer = Server
    ) -> None:
        """Start those that are this worker's to start, with what `part(number)` gives in them, and connect to all.

        No tensor of more than `largest_bytes` is sent to a server.
        """
        for number in range(index, self.count, size):
            key = KEY.format(attempt=self._attempt, number=number)
            if not self._store.check([key]):
                secret = secrets.token_bytes(32)
                pid, endpoint = fork_server(
                    lambda number=number: part(number),
                    address=self._address,
                    secret=secret,
                    largest_bytes=largest_bytes,
                    server=server,
                )
                self._started.append(pid)
                about = {"endpoint": endpoint, "secret": secret.hex(), "pid": pid, "host": self._host}
                self._store.set(key, json.dumps(about))
        for number in range(len(self._callers), self.count):  # where a member was lost meanwhile, some are met already
            about = self._found(number)
            self._callers.append(
                Caller(
                    about["endpoint"],
                    bytes.fromhex(about["secret"]),
                    name=f"parameter server {number} (pid {about['pid']} on {about['host']})",
                    timeout_s=self._timeout_s,
                    check=self._check,
                )
            )

    def caller(self, number: int) -> Caller:
        return self._callers[number]

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[Message]:
        """Ask each server its question, all at once; returns the answers, in their order.

        Without `checks` only the servers' end and the time limit end the wait, whoever else is lost meanwhile.
        """
        calls = [caller.begin(question) for caller, question in zip(self._callers, questions, strict=True)]
        return [caller.answer(call, checks=checks) for caller, call in zip(self._callers, calls, strict=True)]

    def take(self, places: Sequence[int], flats: Sequence[Tensor], parameters: Sequence[Parameter]) -> int:
        """Overwrite parameters by the weights that a server has told; returns how many tensors these were."""
        kinds = [*dict.fromkeys(parameters[place].dtype for place in places)]
        by_dtype, offsets = dict(zip(kinds, flats, strict=False)), dict.fromkeys(kinds, 0)
        for place in places:
            parameter = parameters[place]
            offset, count = offsets[parameter.dtype], parameter.numel()
            parameter.copy_(by_dtype[parameter.dtype][offset : offset + count].view(parameter.shape))
            offsets[parameter.dtype] += count
        return len(kinds)

    def fetch_state(self, optimizers: Sequence[Optimizer], parameters: Sequence[Parameter]) -> None:
        """Put the state that the servers have into these optimizers."""
        for answer in self.ask([{"op": "state"}] * self.count, checks=False):  # a member's loss does not end a save
            tensors = iter(answer.tensors)
            for number, place, key, is_tensor, value in answer.header["entries"]:
                optimizers[number].state[parameters[place]][key] = next(tensors) if is_tensor else value

    def close(self) -> None:
        """Leave them; those that this worker has started are waited for a moment, and end with the last caller."""
        for caller in self._callers:
            caller.close()
        self._callers = []
        deadline = time.monotonic() + END_S
        while self._started and time.monotonic() < deadline:
            self._started = [pid for pid in self._started if os.waitpid(pid, os.WNOHANG)[0] == 0]
            if self._started:
                time.sleep(POLL_S)  # a child that has left its parent's session tells nobody but waitpid

    def _found(self, number: int) -> dict[str, Any]:
        key, deadline = KEY.format(attempt=self._attempt, number=number), time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            self._check()
            if time.monotonic() > deadline:
                raise SyncError(f"parameter server {number} was not started within {self._timeout_s:.0f} s")
            time.sleep(POLL_S)  # a board's wait would not look for lost members
        return json.loads(self._store.get(key))
