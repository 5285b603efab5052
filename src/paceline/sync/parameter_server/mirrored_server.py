"""A parameter server and its mirror (hot standby): the mirror has everything that any worker was told.

So either of the two may be lost. Both are the same program. The server that workers ask sends the mirror, before it
answers any worker:

    copy      everything, when the mirror is new: weights, the optimizers' state, the sums of unfinished steps
    sums      the sums of a gradient pass, before their norm is sent: from then on no worker must push again
    follow    the step, as a worker has asked for it. Both take it at the same time, by the same code on the same
              numbers, so they stay bitwise equal; weights are sent when both have taken it

Only the server has gradients that were pushed but not summed; the workers still hold them, and push them again. A
worker that has lost the server asks the mirror to *take over*. From then on the mirror refuses messages of the old
server, which then ends. So if a server was cut off from only some of the workers, never do both go on. A mirror may
have fallen behind, because the server continued without it. It learns that from the first worker, and does not take
over.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.messages.tensor_messages import Secret, ServerLost, TensorClient, TensorMessage, TensorServer
from paceline.errors import SyncError
from paceline.sync.parameter_server.embedding_rows import pieces_of
from paceline.sync.parameter_server.served_parameters import ServerParameters
from paceline.sync.parameter_server.server import PassKey, Server, pass_key_of

__all__ = ["MirroredServer"]

PATIENCE = 0.5  # a server waits for its mirror this part of the workers' timeout, and then continues without it
ORPHANED_S = 60.0  # without its server and without a worker: in the first step no worker is connected to the mirror


FOLLOWED = ("walk", "factor", "max_value", "options", "places", "tables")  # what a mirror is told of a step


class _Superseded(SystemExit):
    """The mirror has taken over, so this server ends."""


@dataclasses.dataclass(slots=True)
class _Mirror:
    """A server's connection to its mirror."""

    number: int
    caller: TensorClient
    pass_key: PassKey = (-1, -1, -1)  # the pass of the newest sums that it has
    places: set[int] = dataclasses.field(default_factory=set[int])  # the parameters of those sums


class MirroredServer(Server):
    """One of the two. `secret`: of both. `timeout_s`: how long workers wait for an answer. A mirror that is silent for
    `silence_s` is lost."""

    def __init__(
        self,
        part: ServerParameters,
        listener: TensorServer,
        *,
        is_deserted: Callable[[], bool],
        secret: Secret,
        timeout_s: float,
        silence_s: float | None,
    ) -> None:
        super().__init__(part, listener, is_deserted=is_deserted)
        self._secret, self._timeout_s, self._silence_s = secret, timeout_s * PATIENCE, silence_s
        self._mirror: _Mirror | None = None
        self._follow_call: int | None = None  # the call that sent the mirror the current step
        self._has_warned = False  # that it has no mirror, since it last had one
        self._is_copy = False  # it has received a server's complete state
        self._has_taken_over = self._is_dismissed = False
        self._orphaned_at: float | None = None

    def serve(self) -> None:
        try:
            super().serve()
        except _Superseded:
            return
        finally:
            self._release_mirror()

    def _is_over(self) -> bool:
        if self._is_dismissed or not super()._is_over():
            self._orphaned_at = None
            return self._is_dismissed
        if not self._is_copy or self._has_taken_over:
            return True
        self._orphaned_at = self._orphaned_at or time.monotonic()
        return time.monotonic() - self._orphaned_at > ORPHANED_S

    # The server that workers ask.

    def _begin_mirroring(self, header: Mapping[str, Any]) -> None:
        """Send a new mirror everything. If that fails, the server keeps the one before, or none, and tells workers."""
        passes = self._pending_sums
        kept, tensors = self.part.state(with_rows=True)
        weights = self.part.weights(self.part.places)
        told = {
            "op": "copy",
            "version": self.part.version,
            "num_weights": len(weights),
            **kept,
            "walks": [[pass_key, [*one.sums]] for pass_key, one in passes.items()],
            "generation": self._generation,
            "stepped": self._last_step,
            "squared": self._squared,
        }
        sums = [piece for one in passes.values() for gradient in one.sums.values() for piece in pieces_of(gradient)]
        caller = None
        try:
            caller = TensorClient(
                header["endpoint"],
                self._secret,
                name=header["name"],
                timeout_s=self._timeout_s,
                silence_s=self._silence_s,
            )
            caller.answer(caller.begin(told, [*weights, *tensors, *sums]))
        except (SyncError, RuntimeError) as error:  # lost, or failed by itself, which need not happen here
            if not self._has_warned:
                print(f"this parameter server goes on without a mirror for now: {error}", file=sys.stderr)
            self._has_warned = True
            if caller is not None:
                caller.close(at_once=True)
        else:
            self._release_mirror()
            self._mirror = _Mirror(header["number"], caller)
            self._has_warned = False

    def _before_sum(self, pass_key: PassKey, places: Sequence[int]) -> None:
        mirror = self._mirror
        if mirror is None:
            return
        known = mirror.places if mirror.pass_key == pass_key else set[int]()
        new = [place for place in places if place not in known]
        if new or mirror.pass_key != pass_key:
            told = {"op": "sums", "walk": pass_key, "places": new, "squared": self._squared}
            sums = self._pending_sums[pass_key].sums
            self._await_mirror(
                mirror, mirror.caller.begin(told, [piece for place in new for piece in pieces_of(sums[place])])
            )
            mirror.pass_key, mirror.places = pass_key, known.union(new)

    def _before_step(self, header: Mapping[str, Any]) -> None:
        mirror = self._mirror
        if mirror is not None:
            told = {name: header[name] for name in FOLLOWED if name in header}
            self._follow_call = mirror.caller.begin({**told, "op": "follow"})

    def _after_step(self) -> None:
        if self._mirror is not None and self._follow_call is not None:
            self._await_mirror(self._mirror, self._follow_call)
        self._follow_call = None

    def _status(self) -> Mapping[str, Any]:
        return {"mirror": None if self._mirror is None else self._mirror.number}

    def _await_mirror(self, mirror: _Mirror, call: int) -> None:
        """Wait for the mirror's answer. A lost mirror is released, and the next answer to a worker reports that."""
        try:
            answer = mirror.caller.answer(call)
        except (ServerLost, RuntimeError):  # lost, or failed by itself, which need not happen here
            self._release_mirror()
            return
        if answer.header.get("refused"):
            raise _Superseded

    def _release_mirror(self) -> None:
        """Disconnect the mirror; it ends, unless it has taken over."""
        if self._mirror is not None:
            self._mirror.caller.send({"op": "end"})
            self._mirror.caller.close()
            self._mirror = None

    # The mirror.

    def _handle_other(self, caller: bytes, message: TensorMessage) -> None:
        header, told = message.header, dict[str, Any]()
        match header["op"]:
            case "mirror":
                self._begin_mirroring(header)
                return
            case "take_over":
                told = self._take_over(header)
            case "end":
                self._is_dismissed = not self._has_taken_over
                return
            case "copy" | "sums" | "follow" if self._has_taken_over:
                told = {"refused": True}
            case "copy":
                self._copy(message)
            case "sums":
                self._add_sums(pass_key_of(header), header["places"], iter(message.tensors))
                self._squared = header["squared"]
            case "follow":
                self._step(header)
            case _:
                super()._handle_other(caller, message)
                return
        self.listener.send(caller, {"call": header["call"], **told})

    def _take_over(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Answer instead of the server from now on, unless this mirror lacks anything that the worker was told."""
        was, lacks = self._has_taken_over, not self._is_copy or self.part.version < header["version"]
        self._has_taken_over = was or not lacks
        return {"lacks": lacks, "is_first": self._has_taken_over and not was}

    def _copy(self, message: TensorMessage) -> None:
        header, tensors = message.header, iter(message.tensors)
        self.part.fill([*itertools.islice(tensors, header["num_weights"])], header, tensors)
        self.part.version, self._squared = header["version"], header["squared"]
        self._generation, self._last_step = header["generation"], pass_key_of({"walk": header["stepped"]})
        self._pending_sums.clear()
        for pass_key, places in header["walks"]:
            self._add_sums(pass_key_of({"walk": pass_key}), places, tensors)
        self._is_copy = True

    def _add_sums(self, pass_key: PassKey, places: Sequence[int], pieces: Iterator[Tensor]) -> None:
        pending, rows = self._pending_sum(pass_key), self.part.rows
        for place in places:
            first = next(pieces)
            summed = rows.summed(place, first, next(pieces)) if place in rows else first
            if pending is not None:
                pending.sums[place] = summed
