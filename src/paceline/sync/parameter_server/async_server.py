"""A server of replicas that do not wait for each other: each update is applied as it comes.

The first server also has the clock (`paceline.schedule.staleness_clock`), of each stream: it deals batches, permits
updates, and holds an answer back until the clock allows it. It also keeps the buffers of the model: a replica tells by
how much its batch has changed them, and that is added to what is here.

Each update is applied once on each server, whoever dies when. It is done when the first server, which gets it last, has
it. Where a worker dies before that, its batch is dealt again; a server that has its update leaves the one of the second
try out. That a worker is lost the first server sees by its connection; the others are told with the next question for
weights. From then on nothing that it has said counts, so weights that are told afterwards have its update or never
will. Where it dies when its update is done, and may not be in its books, the others are asked to note it in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.messages.tensor_messages import TensorMessage, TensorServer
from paceline.schedule.staleness_clock import DealtBatch, DealtStream, Pause, Save, StalenessClock, StreamEnd
from paceline.sync.parameter_server.server import Server, ServerParameters

__all__ = ["AsyncServer"]

StreamBatch = tuple[str, int]  # stream, and number in it


class AsyncServer(Server):
    """`staleness` is the plan's; `buffers` those of the model, on the first server.

    Workers have a rank and a *name*, which nobody else ever has: who replaces another one may have its rank.
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
        self._dealt: dict[str, DealtStream] = {}  # of each stream, as the first who asked has said
        self._buffers = [buffer.detach().clone() for buffer in buffers]
        self._changed: set[int] = set()  # of them
        self._options = options  # those of the last update
        self._held: list[tuple[bytes, Mapping[str, Any]]] = []  # questions that the clock has not answered
        self._here: dict[int, tuple[bytes, str]] = {}  # workers by rank: connection and name
        self._lost_ranks: set[int] = set()  # nobody who has joined a loop is there in their place
        self._applied: dict[str, StreamBatch] = {}  # by name: the last update that is here
        self._gone: dict[str, StreamBatch | None] = {}  # names of who is lost, and the same
        self._unnoted: dict[str, tuple[str, int, bool]] = {}  # by name: done, skipped, and perhaps not in its books yet
        self._losses: list[dict[str, Any]] = []  # in order: whose they are, and what they leave to be noted

    def _look(self) -> None:
        """Notice who is there no longer."""
        gone = [worker for worker, (caller, _) in self._here.items() if not self.listener.is_connected(caller)]
        for worker in gone:
            self._lose(worker)
        if gone:
            self._answer_all()

    def _take_other(self, caller: bytes, message: TensorMessage) -> None:
        header = message.header
        if header["name"] in self._gone:  # it was given up, or another one has come in its place
            if "call" in header:
                self.listener.send(caller, {"call": header["call"], "is_lost": True})
            return
        match header["op"]:
            case "hello":
                self._meet(caller, header)
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
                self._clock(header).wish()
            case "saved":
                self._clock(header).saved(header["number"])
            case "stand":
                self.listener.send(caller, {"call": header["call"], "number": self._clock(header).num_dealt})
            case "noted":
                self._unnoted.pop(header["name"], None)
                self._clock(header).noted(header["worker"])
            case "left":
                self._clock(header).left(header["worker"])
                if header["is_broken"]:  # what it has said of the batch in hand is worth as much as a lost one's word
                    self._lose(header["worker"])
            case "gone":
                self._lose(header["worker"])
            case "update":
                self._update(caller, message)
            case "skip":
                self._clock(header).skip(header["worker"])
                self._done(header, is_skipped=True)
                self.listener.send(caller, {"call": header["call"]})
            case "weights":
                for name in header["lost"]:
                    self._forget(name)
                numbers = range(len(self._buffers)) if header["is_first"] else sorted(self._changed)
                told = {number: self._buffers[number].clone() for number in numbers}
                self._tell_weights(caller, header, buffers=told)
            case op:
                raise ValueError(f"a worker asked for {op!r}, which this server does not know")
        self._answer_all()

    def _meet(self, caller: bytes, header: Mapping[str, Any]) -> None:
        """A worker has come, or says so again; whoever had its rank before is lost."""
        worker = header["worker"]
        if worker in self._here and self._here[worker][1] != header["name"]:
            self._lose(worker)
        self._here[worker] = caller, header["name"]
        self.listener.send(caller, {"call": header["call"]})

    def _lose(self, worker: int) -> None:
        """A worker is there no longer."""
        caller, name = self._here.pop(worker)
        self._lost_ranks.add(worker)
        self._forget(name)
        self._losses.append({"name": name, "unnoted": self._unnoted.pop(name, None)})
        self._held = [one for one in self._held if one[0] != caller]
        for clock in self._clocks.values():
            clock.lost(worker)

    def _forget(self, name: str) -> None:
        """What this worker has said, and is not done yet, does not count any more."""
        self._gone.setdefault(name, self._applied.pop(name, None))

    def _clock(self, header: Mapping[str, Any]) -> StalenessClock:
        stream = header["stream"]
        if stream not in self._clocks:
            dealt = self._dealt[stream] = DealtStream.from_plain(header)
            self._clocks[stream] = StalenessClock(
                staleness=self._staleness,
                limit=dealt.limit,
                workers={*dealt.workers} - self._lost_ranks,
                saves=range(*dealt.saves),
            )
        return self._clocks[stream]

    def _awaited(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Who has asked for nothing that is held back: the others wait for some of them."""
        clock = self._clocks.get(header.get("stream", ""))
        if clock is None:
            return {"awaited": [], "done": 0}
        asking = {held["worker"] for _, held in self._held}
        return {"awaited": sorted(clock.workers - asking), "done": clock.done}

    def _answer_all(self) -> None:
        while self._answer_held():  # an answer may allow another one
            pass

    def _answer_held(self) -> bool:
        """Answer what the clock allows now; returns whether that was anything."""
        held, self._held = self._held, []
        for caller, header in held:
            answer = self._judged(header)
            if answer is None:
                self._held.append((caller, header))
            else:
                self.listener.send(caller, {"call": header["call"], **answer})
        return len(self._held) < len(held)

    def _judged(self, header: Mapping[str, Any]) -> dict[str, Any] | None:
        if header["op"] == "about":
            dealt = self._dealt.get(header["stream"])
            if dealt is None:
                return None
            return {"dealt": dealt.plain(), "is_over": not self._let_in(header), "options": self._options}
        clock, worker = self._clock(header), header["worker"]
        if header["op"] == "permit":
            return None if clock.permit(worker) is None else {}
        losses = self._losses[header["num_losses"] :]
        match clock.ask(worker):
            case None:
                return None
            case DealtBatch(number=number, base=base):
                return {"turn": "batch", "number": number, "base": base, "losses": losses}
            case Save(number=number):
                return {"turn": "save", "number": number, "losses": losses}
            case Pause(number=number):
                return {"turn": "pause", "number": number, "losses": losses}
            case StreamEnd(has_left=has_left):
                return {"turn": "over", "number": header["limit"], "has_left": has_left, "losses": losses}

    def _let_in(self, header: Mapping[str, Any]) -> bool:
        """Have all in this loop wait for who came later, unless it is over: the others may be in a later one by then,
        and wait there for nobody who has not reached it."""
        clock, worker = self._clocks[header["stream"]], header["worker"]
        if not clock.is_over:
            clock.join(worker)
            self._lost_ranks.discard(worker)  # and it goes with the others from loop to loop
        return not clock.is_over

    def _update(self, caller: bytes, message: TensorMessage) -> None:
        """Have the optimizers step with one replica's gradients, and its change of the buffers added."""
        header, gradients, tensors = message.header, dict[int, Tensor](), iter(message.tensors)
        for places in header["places"]:  # of each dtype
            flat, offset = next(tensors), 0
            for place in places:
                count = self.part.numel(place)
                gradients[place] = self.part.like(place, flat[offset : offset + count])
                offset += count
        for place in header.get("tables", ()):
            gradients[place] = self.part.rows.gradient(place, next(tensors), next(tensors))
        for number in header["buffers"]:
            buffer, change = self._buffers[number], next(tensors)
            buffer.copy_(buffer + change > 0 if buffer.dtype == torch.bool else buffer + change)
            self._changed.add(number)
        batch: StreamBatch = header["stream"], header["number"]
        if batch not in self._gone.values():  # otherwise who had the batch before has brought it as far as here
            self.part.step(gradients, header["options"])
            self._options = header["options"]
        self._applied[header["name"]] = batch
        told: dict[str, Any] = {"call": header["call"]}
        if header["is_last"]:  # all other servers have it
            told["behind"] = self._clock(header).finish(header["worker"])
            self._done(header, is_skipped=False)
        self.listener.send(caller, told)

    def _done(self, header: Mapping[str, Any], *, is_skipped: bool) -> None:
        self._unnoted[header["name"]] = header["stream"], header["number"], is_skipped
