"""A server of replicas that do not wait for each other: each update is applied as it comes.

The first server also has the clock (`paceline.schedule.clock`), of each stream: it deals batches, permits updates, and
holds an answer back until the clock allows it. It also keeps the buffers of the model: a replica tells by how much its
batch has changed them, and that is added to what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.messages import Listener, Message
from paceline.schedule.clock import Clock, Over, Pause, Save, Turn
from paceline.sync.serving import Part, Server

__all__ = ["DealingServer"]


class DealingServer(Server):
    """`staleness` is the plan's; `buffers` those of the model, on the first server."""

    def __init__(
        self,
        part: Part,
        listener: Listener,
        *,
        is_deserted: Callable[[], bool],
        staleness: int | None,
        buffers: Sequence[Tensor],
    ) -> None:
        super().__init__(part, listener, is_deserted=is_deserted)
        self._staleness = staleness
        self._clocks: dict[str, Clock] = {}
        self._buffers = [buffer.detach().clone() for buffer in buffers]
        self._changed: set[int] = set()  # of them
        self._held: list[tuple[bytes, Mapping[str, Any]]] = []  # questions that the clock has not answered

    def _take_other(self, caller: bytes, message: Message) -> None:
        header = message.header
        match header["op"]:
            case "turn" | "permit":
                self._held.append((caller, header))
            case "wish":
                self._clock(header).wish()
            case "saved":
                self._clock(header).saved(header["number"])
            case "stand":
                self.listener.send(caller, {"call": header["call"], "number": self._clock(header).num_dealt})
            case "left":
                self._clock(header).lost(header["worker"])
            case "update":
                self._update(caller, message)
            case "weights":
                changed = {number: self._buffers[number].clone() for number in sorted(self._changed)}
                self._tell_weights(caller, header, buffers=changed)
            case op:
                raise ValueError(f"a worker asked for {op!r}, which this server does not know")
        while self._answer_held():  # an answer may allow another one
            pass

    def _clock(self, header: Mapping[str, Any]) -> Clock:
        stream = header["stream"]
        if stream not in self._clocks:
            self._clocks[stream] = Clock(
                staleness=self._staleness,
                limit=header["limit"],
                workers=header["workers"],
                saves=range(*header["saves"]),
                writer=header["writer"],
            )
        return self._clocks[stream]

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
        clock, worker = self._clock(header), header["worker"]
        if header["op"] == "permit":
            behind = clock.permit(worker)
            return None if behind is None else {"behind": behind}
        match clock.ask(worker):
            case None:
                return None
            case Turn(number=number, base=base):
                return {"turn": "batch", "number": number, "base": base}
            case Save(number=number):
                return {"turn": "save", "number": number}
            case Pause(number=number):
                return {"turn": "pause", "number": number}
            case Over():
                return {"turn": "over", "number": header["limit"]}

    def _update(self, caller: bytes, message: Message) -> None:
        """Have the optimizers step with one replica's gradients, and its change of the buffers added."""
        header, gradients, tensors = message.header, dict[int, Tensor](), iter(message.tensors)
        for places in header["places"]:  # of each dtype
            flat, offset = next(tensors), 0
            for place in places:
                count = self.part.numel(place)
                gradients[place] = self.part.like(place, flat[offset : offset + count])
                offset += count
        for number in header["buffers"]:
            self._buffers[number].add_(next(tensors))
            self._changed.add(number)
        self.part.step(gradients, header["options"])
        if header["is_last"]:  # all other servers have it
            self._clock(header).finish(header["worker"])
        self.listener.send(caller, {"call": header["call"]})
