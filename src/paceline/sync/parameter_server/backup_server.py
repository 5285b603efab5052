"""A parameter server with backup workers: a step is taken with the gradients that arrived in time.

Gradients are kept by step and share. The first server also has the clock of each stream
(`paceline.schedule.backup_workers`): it hands out shares, and holds its answer to an arrived worker back until the end
of the step is known. Only the closer learns which shares are chosen; it makes all servers add these up, and step. Then
it reports the result to the first server, which sends it to all others as the *record* of the step. Gradients pushed
for a step that was taken are dropped.

The first server also keeps the model's buffers: those that chosen shares have changed are combined by their rules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.messages.tensor_messages import TensorMessage, TensorServer
from paceline.schedule.backup_workers import BackupClock, BackupShare, num_micro_of
from paceline.schedule.staleness_clock import Pause, Save, StreamEnd
from paceline.sync.parameter_server.served_buffers import ServedBuffers
from paceline.sync.parameter_server.served_parameters import ServerParameters
from paceline.sync.parameter_server.server import PassKey, PendingSum, Server, pass_key_of, places_of, squared_norm

__all__ = ["BackupWorkersServer"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Arrival:
    """The report of a share that arrived in time."""

    num_samples: int
    numbers: Sequence[float]  # to be summed
    used: Sequence[int]  # the places of the parameters for which it has a gradient
    buffers: Mapping[int, Tensor]  # those that it has changed


class _Stream:
    """The clock of one stream, and what is known of its steps."""

    def __init__(self, ordinal: int, header: Mapping[str, Any], *, drop: int) -> None:
        self.ordinal = ordinal
        self.clock = BackupClock(
            drop=drop,
            limit=header["limit"],
            workers=len(header["workers"]),
            num_micro=functools.partial(num_micro_of, epochs=header["epochs"], micros=header["micros"]),
            saves=range(*header["saves"]),
            writer=min(header["workers"]),
        )
        self.workers = set[int](header["workers"])  # those that take shares
        self.arrivals: dict[int, _Arrival] = {}  # by share, of the current step
        self.records: dict[int, dict[str, Any]] = {}  # by step: its result, for workers that will ask

    def sums(self) -> dict[str, Any]:
        """Return the sums over the chosen shares of the current step."""
        chosen = [self.arrivals[share] for share in self.clock.chosen]
        return {
            "shares": list(self.clock.chosen),
            "numbers": [sum(some) for some in zip(*(one.numbers for one in chosen), strict=True)],
            "used": sorted({place for one in chosen for place in one.used}),
        }

    def settle(
        self, *, taken: bool, norm: float, verdict: Mapping[str, Any] | None, without: int | None = None
    ) -> None:
        """The step is over; `without` as for the clock."""
        clock = self.clock
        self.records[clock.done] = {**self.sums(), "taken": taken, "norm": norm, "verdict": verdict}
        self.arrivals.clear()
        clock.settle(without=without)
        self.records = {number: one for number, one in self.records.items() if number >= clock.oldest}


class BackupWorkersServer(Server):
    """`drop` is the plan's; `buffers` those of the model, on the first server."""

    def __init__(
        self,
        part: ServerParameters,
        listener: TensorServer,
        *,
        is_deserted: Callable[[], bool],
        drop: int,
        buffers: Sequence[Tensor],
    ) -> None:
        super().__init__(part, listener, is_deserted=is_deserted)
        self._drop = drop
        self._streams: dict[str, _Stream] = {}
        self._buffers = ServedBuffers(buffers)
        self._norm = math.nan  # of the gradients of the step that was taken last
        self._held: list[tuple[bytes, Mapping[str, Any]]] = []  # questions that cannot be answered yet

    def _handle_other(self, caller: bytes, message: TensorMessage) -> None:
        header = message.header
        answer: dict[str, Any] | None = None
        match header["op"]:
            case "turn":
                self._abort_step(header)
                self._forget_held(caller)
                self._stream(header).clock.returned(header["worker"])  # others may have waited for that
                self._held.append((caller, header))
            case "arrive":
                answer = self._buffers.other_rule(header)
                if answer is None:
                    self._arrive(message)
                    self._held.append((caller, header))
            case "wish":
                self._stream(header).clock.request_pause()
            case "saved":
                self._stream(header).clock.saved(header["number"])
            case "noted":
                self._stream(header).clock.recorded(header["worker"])
            case "left":
                self._abort_step(header)
                self._forget_held(caller)
                self._stream(header).clock.lost(header["worker"])
                self._stream(header).workers.discard(header["worker"])
            case "stand":
                answer = {"number": self._stream(header).clock.done}
            case "awaited":
                answer = self._awaited(header)
            case "synced":  # what this caller had pushed before is here
                answer = {}
            case "add":
                answer = {"squared": self._add(header)}
            case "apply":
                self._norm = header["norm"]
                self._step(header)
                answer = {}
            case "settle":
                self._settle(header)
            case "weights":
                self._send_weights(caller, header, buffers=self._buffers.sent(every=False))
            case op:
                raise ValueError(f"a worker asked for {op!r}, which this server does not know")
        if answer is not None:
            self.listener.send(caller, {"call": header["call"], **answer})
        while self._answer_held():  # an answer may allow another one
            pass

    def _stream(self, header: Mapping[str, Any]) -> _Stream:
        name = header["stream"]
        if name not in self._streams:
            self._streams[name] = _Stream(len(self._streams), header, drop=self._drop)
        return self._streams[name]

    def _awaited(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Report the workers without a held request: the others wait for some of them."""
        stream = self._streams.get(header.get("stream", ""))
        if stream is None:
            return {"awaited": [], "done": 0}
        asking = {held["worker"] for _, held in self._held}
        return {"awaited": sorted(stream.workers - asking), "done": stream.clock.done}

    def _forget_held(self, caller: bytes) -> None:
        """Drop a worker's held request: a new message shows that its wait was interrupted."""
        self._held = [one for one in self._held if one[0] != caller]

    def _abort_step(self, header: Mapping[str, Any]) -> None:
        """End the step of a closer that asks for something else or leaves, because its program has caught an error. If
        the servers have taken the step nevertheless, it counts."""
        stream = self._stream(header)
        if stream.clock.closer != header["worker"]:
            return
        if self._last_step == (stream.ordinal, stream.clock.done, 0):
            self._combine(stream)
            stream.settle(taken=True, norm=self._norm, verdict=None, without=header["worker"])
        else:
            stream.settle(taken=False, norm=math.nan, verdict=None, without=header["worker"])

    def _pending_sum(self, pass_key: PassKey) -> PendingSum | None:
        return super()._pending_sum(pass_key) if pass_key > self._last_step else None  # others are late

    def _add(self, header: Mapping[str, Any]) -> float:
        """Add up the gradients of the chosen shares, in their order; return the square of the sum's norm."""
        pending = self._pending_sums.setdefault(pass_key_of(header), PendingSum())  # new where nothing of it is here
        chosen = set(header["shares"])
        for place in places_of(header):
            pushed = pending.pushed[place]
            pending.pushed[place] = {share: one for share, one in pushed.items() if share in chosen}
        pending.add_up(places_of(header))
        return squared_norm([pending.sums[place] for place in places_of(header)])

    def _arrive(self, message: TensorMessage) -> None:
        header = message.header
        stream = self._stream(header)
        arrival = _Arrival(
            num_samples=header["samples"],
            numbers=header["numbers"],
            used=header["used"],
            buffers=dict(zip(header["buffers"], message.tensors, strict=True)),
        )
        share = stream.clock.arrive(header["worker"])
        if share is not None:
            stream.arrivals[share.index] = arrival

    def _settle(self, header: Mapping[str, Any]) -> None:
        """The closer reports the result of the current step, when all servers have taken it."""
        stream = self._stream(header)
        if stream.clock.closer != header["worker"]:  # it was interrupted, and has asked for another share since
            return
        if header["taken"]:
            self._combine(stream)
        stream.settle(taken=header["taken"], norm=header["norm"], verdict=header["verdict"])

    def _combine(self, stream: _Stream) -> None:
        """Set the buffers to what the chosen shares make of them."""
        chosen = [stream.arrivals[share] for share in sorted(stream.clock.chosen)]
        self._buffers.combine([(one.num_samples, one.buffers) for one in chosen])

    def _answer_held(self) -> bool:
        """Answer what can be answered now; return whether that was anything."""
        held, self._held = self._held, []
        for caller, header in held:
            judge = self._answer_to_arrival if header["op"] == "arrive" else self._answer_to_turn
            answer = judge(self._stream(header), header)
            if answer is None:
                self._held.append((caller, header))
            else:
                self.listener.send(caller, {"call": header["call"], **answer})
        return len(self._held) < len(held)

    def _answer_to_arrival(self, stream: _Stream, header: Mapping[str, Any]) -> dict[str, Any] | None:
        """Answer a worker that has arrived: it closes the step, or gets the result."""
        number = header["number"]
        if stream.clock.closer == header["worker"] and stream.clock.done == number:
            return {"closes": True, **stream.sums()}
        if number == stream.clock.done and not stream.clock.is_idle:
            return None
        return {"closes": False, **stream.records[number]}

    def _answer_to_turn(self, stream: _Stream, header: Mapping[str, Any]) -> dict[str, Any] | None:
        """Answer a worker that asks for a share."""
        assigned = stream.clock.ask(header["worker"])
        if assigned is None:
            return None
        passed_over = stream.clock.claim_unrecorded(header["worker"])
        about = {"version": self.part.version, "passed_over": passed_over}
        match assigned:
            case BackupShare(number=number, index=index, count=count):
                share = {"number": number, "index": index, "count": count}
                return {**about, "turn": "share", **share, "walk": [stream.ordinal, number, 0]}
            case Save(number=number):
                return {**about, "turn": "save", "number": number}
            case Pause(number=number):
                return {**about, "turn": "pause", "number": number}
            case StreamEnd(has_left=has_left):
                return {**about, "turn": "over", "number": header["limit"], "has_left": has_left}
