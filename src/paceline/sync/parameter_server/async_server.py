"""A parameter server with bounded staleness (stale synchronous parallel): each update is applied when it arrives.

The first server also has the staleness clock of each stream (`paceline.schedule.staleness_clock`): it hands out
batches, permits updates, and holds an answer back until the clock allows it. It also keeps the model's buffers
(`paceline.sync.parameter_server.served_buffers`): a replica sends by how much its batch has changed them.

Each update is applied exactly once on each server, whenever a worker is lost. An update is done when the first server,
which gets it last, has it. If a worker is lost before that, its batch is handed out again, and a server that already
has its update skips the update of the second attempt. The first server notices a loss by the closed connection; the
others learn of it with the next request for weights. From then on no earlier message of that worker counts. So weights
that are sent afterwards either contain its update or never will.

A worker may be lost when its update is done, but perhaps not recorded in its step log. Then the others are asked to
record it in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.messages.tensor_messages import TensorMessage, TensorServer
from paceline.schedule.staleness_clock import AsyncBatch, AsyncStream, Pause, Save, StalenessClock, StreamEnd
from paceline.sync.parameter_server.served_buffers import ServedBuffers
from paceline.sync.parameter_server.served_parameters import ServerParameters
from paceline.sync.parameter_server.server import Server

__all__ = ["AsyncServer"]

StreamBatch = tuple[str, int]  # stream, and number in it


class AsyncServer(Server):
    """`staleness` is the plan's; `buffers` those of the model, on the first server.

    Workers have a rank and a *name*. The name is unique in the run: a replacement has another name, but may have the
    same rank.
    """

    def __init__(
        self,
        part: ServerParameters,
        listener: TensorServer,
        *,
        is_deserted: Callable[[], bool],
        staleness: int | None,
        buffers: Sequence[Tensor],
        options: Sequence[Sequence[Mapping[str, Any]]] = (),
    ) -> None:
        """`options`: of each optimizer's groups, when the loop begins."""
        super().__init__(part, listener, is_deserted=is_deserted)
        self._staleness = staleness
        self._clocks: dict[str, StalenessClock] = {}
        self._stream_of: dict[str, AsyncStream] = {}  # by name, as the first request described it
        self._buffers = ServedBuffers(buffers)
        self._options = options  # those of the last update
        self._held: list[tuple[bytes, Mapping[str, Any]]] = []  # requests that the clock has not answered
        self._connected: dict[int, tuple[bytes, str]] = {}  # workers by rank: connection and name
        self._lost_ranks: set[int] = set()  # ranks without a worker that has joined a loop
        self._applied: dict[str, StreamBatch] = {}  # by name: the last update that is here
        self._lost: dict[str, StreamBatch | None] = {}  # the same of lost workers
        self._unrecorded: dict[str, tuple[str, int, bool]] = {}  # by name: stream, number, whether skipped
        self._losses: list[dict[str, Any]] = []  # in order: names of lost workers, and what they left unrecorded

    def _poll(self) -> None:
        """Notice workers whose connection was closed."""
        lost = [worker for worker, (caller, _) in self._connected.items() if not self.listener.is_connected(caller)]
        for worker in lost:
            self._worker_lost(worker)
        if lost:
            self._answer_all()

    def _handle_other(self, caller: bytes, message: TensorMessage) -> None:
        header = message.header
        if header["name"] in self._lost:  # it was given up, or another one has come in its place
            if "call" in header:
                self.listener.send(caller, {"call": header["call"], "is_lost": True})
            return
        match header["op"]:
            case "hello":
                self._register(caller, header)
            case "turn":
                clock = self._clock(header)
                clock.join(header["worker"])
                clock.returned(header["worker"])  # others may have waited for that
                self._lost_ranks.discard(header["worker"])
                self._held.append((caller, header))
            case "permit" | "about":
                self._held.append((caller, header))
            case "awaited":
                self.listener.send(caller, {"call": header["call"], **self._awaited(header)})
            case "wish":
                self._clock(header).request_pause()
            case "saved":
                self._clock(header).saved(header["number"])
            case "stand":
                self.listener.send(caller, {"call": header["call"], "number": self._clock(header).num_begun})
            case "noted":
                self._unrecorded.pop(header["name"], None)
                self._clock(header).recorded(header["worker"])
            case "left":
                self._clock(header).left(header["worker"])
                if header["is_broken"]:  # its messages about the current batch count as those of a lost worker
                    self._worker_lost(header["worker"])
            case "gone":
                self._worker_lost(header["worker"])
            case "update":
                self._update(caller, message)
            case "skip":
                self._clock(header).skip(header["worker"])
                self._done(header, is_skipped=True)
                self.listener.send(caller, {"call": header["call"]})
            case "weights":
                for name in header["lost"]:
                    self._forget(name)
                self._send_weights(caller, header, buffers=self._buffers.sent(every=header["is_first"]))
            case op:
                raise ValueError(f"a worker asked for {op!r}, which this server does not know")
        self._answer_all()

    def _register(self, caller: bytes, header: Mapping[str, Any]) -> None:
        """A worker has connected, or repeats its greeting; another worker of the same rank is lost."""
        worker = header["worker"]
        if worker in self._connected and self._connected[worker][1] != header["name"]:
            self._worker_lost(worker)
        self._connected[worker] = caller, header["name"]
        self.listener.send(caller, {"call": header["call"]})

    def _worker_lost(self, worker: int) -> None:
        """Handle the loss of a worker."""
        caller, name = self._connected.pop(worker)
        self._lost_ranks.add(worker)
        self._forget(name)
        self._losses.append({"name": name, "unnoted": self._unrecorded.pop(name, None)})
        self._held = [one for one in self._held if one[0] != caller]
        for clock in self._clocks.values():
            clock.lost(worker)

    def _forget(self, name: str) -> None:
        """Ignore what this worker has sent and has not finished."""
        self._lost.setdefault(name, self._applied.pop(name, None))

    def _clock(self, header: Mapping[str, Any]) -> StalenessClock:
        stream = header["stream"]
        if stream not in self._clocks:
            about = self._stream_of[stream] = AsyncStream.from_plain(header)
            self._clocks[stream] = StalenessClock(
                staleness=self._staleness,
                limit=about.limit,
                workers={*about.workers} - self._lost_ranks,
                saves=range(*about.saves),
            )
        return self._clocks[stream]

    def _awaited(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Report the workers without a held request: the others wait for some of them."""
        clock = self._clocks.get(header.get("stream", ""))
        if clock is None:
            return {"awaited": [], "done": 0}
        asking = {held["worker"] for _, held in self._held}
        return {"awaited": sorted(clock.workers - asking), "done": clock.done}

    def _answer_all(self) -> None:
        while self._answer_held():  # an answer may allow another one
            pass

    def _answer_held(self) -> bool:
        """Answer what the clock allows now; return whether there was anything."""
        held, self._held = self._held, []
        for caller, header in held:
            answer = self._answer_of(header)
            if answer is None:
                self._held.append((caller, header))
            else:
                self.listener.send(caller, {"call": header["call"], **answer})
        return len(self._held) < len(held)

    def _answer_of(self, header: Mapping[str, Any]) -> dict[str, Any] | None:
        if header["op"] == "about":
            about = self._stream_of.get(header["stream"])
            if about is None:
                return None
            return {"dealt": about.plain(), "is_over": not self._admit(header), "options": self._options}
        clock, worker = self._clock(header), header["worker"]
        if header["op"] == "permit":
            other = self._buffers.other_rule(header)
            return other or (None if clock.permit(worker) is None else {})
        losses = self._losses[header["num_losses"] :]
        match clock.ask(worker):
            case None:
                return None
            case AsyncBatch(number=number, base=base):
                return {"turn": "batch", "number": number, "base": base, "losses": losses}
            case Save(number=number):
                return {"turn": "save", "number": number, "losses": losses}
            case Pause(number=number):
                return {"turn": "pause", "number": number, "losses": losses}
            case StreamEnd(has_left=has_left):
                return {"turn": "over", "number": header["limit"], "has_left": has_left, "losses": losses}

    def _admit(self, header: Mapping[str, Any]) -> bool:
        """Make all workers in this loop wait for a newcomer; return False if the loop is over. The others may then be
        in a later loop, where they wait only for workers that have reached it."""
        clock, worker = self._clocks[header["stream"]], header["worker"]
        if not clock.is_over:
            clock.join(worker)
            self._lost_ranks.discard(worker)  # it takes part in later loops, too
        return not clock.is_over

    def _update(self, caller: bytes, message: TensorMessage) -> None:
        """Make the optimizers step with one replica's gradients, and add its changes to the buffers."""
        header, gradients, tensors = message.header, dict[int, Tensor](), iter(message.tensors)
        for places in header["places"]:  # of each dtype
            flat, offset = next(tensors), 0
            for place in places:
                count = self.part.numel(place)
                gradients[place] = self.part.like(place, flat[offset : offset + count])
                offset += count
        for place in header.get("tables", ()):
            gradients[place] = self.part.rows.gradient(place, next(tensors), next(tensors))
        self._buffers.add(header["buffers"], header["rules"], [*tensors])
        batch: StreamBatch = header["stream"], header["number"]
        if batch not in self._lost.values():  # otherwise a lost worker's update of this batch was applied here
            self.part.step(gradients, header["options"])
            self._options = header["options"]
        self._applied[header["name"]] = batch
        told: dict[str, Any] = {"call": header["call"]}
        if header["is_last"]:  # all other servers have it
            told["behind"] = self._clock(header).finish(header["worker"])
            self._done(header, is_skipped=False)
        self.listener.send(caller, told)

    def _done(self, header: Mapping[str, Any], *, is_skipped: bool) -> None:
        self._unrecorded[header["name"]] = header["stream"], header["number"], is_skipped
