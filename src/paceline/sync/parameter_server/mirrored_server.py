"""A parameter server and its mirror: the mirror has all that a worker was ever told of, so either may be lost.

Both are the same program. The one that workers ask tells the other, before it tells any worker:

    copy      everything, when the mirror is new: weights, what the optimizers keep, the sums of steps under way
    sums      the sums of a walk, before their norm is told: from then on no worker need send its gradients again
    follow    the step, as a worker has asked for it. Both take it at the same time, by the same code on the same
              numbers, so they stay equal to the last bit; weights are told when both have taken it

What was pushed, and not summed, only one has: the workers still hold it, and push it again. A worker that has lost the
server asks the mirror to *take over*. From then on that one refuses what the other may still say, which ends by it: so
where a server was only cut off from some of the workers, no two of them ever go on. A mirror that has fallen behind,
because the server went on without it, is told so by the first worker, and does not take over.
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
from paceline.sync.parameter_server.server import PassKey, Server, ServerParameters, pass_key_of

__all__ = ["MirroredServer"]

PATIENCE = 0.5  # of what workers wait for a server: so long it waits for its mirror, and then goes on without
ORPHANED_S = 60.0  # without its server and without a worker: in the first step none has met its mirror yet


class _Superseded(SystemExit):
    """The mirror has taken over: this server has nothing more to say, and nobody to say it to."""


@dataclasses.dataclass(slots=True)
class _Mirror:
    """What a server has of its mirror."""

    number: int
    caller: TensorClient
    walk: PassKey = (-1, -1, -1)  # whose sums it has last got, and of which parameters
    places: set[int] = dataclasses.field(default_factory=set[int])


class MirroredServer(Server):
    """One of the two. `secret` is that of both, `timeout_s` what workers wait for an answer; a mirror that is not heard
    for `silence_s` is lost."""

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
        self._following: int | None = None  # the call by which the mirror was told of the step under way
        self._has_told = False  # that there can be no mirror, since there was one
        self._is_copy = False  # of a server, which has said everything
        self._has_taken_over = self._is_dismissed = False
        self._orphaned_at: float | None = None

    def serve(self) -> None:
        try:
            super().serve()
        except _Superseded:
            return
        finally:
            self._let_go()

    def _is_over(self) -> bool:
        if self._is_dismissed or not super()._is_over():
            self._orphaned_at = None
            return self._is_dismissed
        if not self._is_copy or self._has_taken_over:
            return True
        self._orphaned_at = self._orphaned_at or time.monotonic()
        return time.monotonic() - self._orphaned_at > ORPHANED_S

    # The side of the one that workers ask.

    def _begin_mirroring(self, header: Mapping[str, Any]) -> None:
        """Tell a new mirror everything; where that fails there is the one before, or none, as the workers are told."""
        walks = self._gatherings
        kept, tensors = self.part.state(with_rows=True)
        weights = self.part.weights(self.part.places)
        told = {
            "op": "copy",
            "version": self.part.version,
            "num_weights": len(weights),
            **kept,
            "walks": [[walk, [*one.sums]] for walk, one in walks.items()],
            "generation": self._generation,
            "stepped": self._stepped,
            "squared": self._squared,
        }
        sums = [piece for one in walks.values() for gradient in one.sums.values() for piece in pieces_of(gradient)]
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
        except (SyncError, RuntimeError) as error:  # gone, or failed by itself: what it cannot do, this one may
            if not self._has_told:
                print(f"this parameter server goes on without a mirror for now: {error}", file=sys.stderr)
            self._has_told = True
            if caller is not None:
                caller.close(at_once=True)
        else:
            self._let_go()
            self._mirror = _Mirror(header["number"], caller)
            self._has_told = False

    def _before_sum(self, walk: PassKey, places: Sequence[int]) -> None:
        mirror = self._mirror
        if mirror is None:
            return
        known = mirror.places if mirror.walk == walk else set[int]()
        new = [place for place in places if place not in known]
        if new or mirror.walk != walk:
            told = {"op": "sums", "walk": walk, "places": new, "squared": self._squared}
            sums = self._gatherings[walk].sums
            self._hear(mirror, mirror.caller.begin(told, [piece for place in new for piece in pieces_of(sums[place])]))
            mirror.walk, mirror.places = walk, known.union(new)

    def _before_step(self, header: Mapping[str, Any]) -> None:
        mirror = self._mirror
        if mirror is not None:
            told = {name: header[name] for name in ("walk", "factor", "options", "places", "tables") if name in header}
            self._following = mirror.caller.begin({**told, "op": "follow"})

    def _after_step(self) -> None:
        if self._mirror is not None and self._following is not None:
            self._hear(self._mirror, self._following)
        self._following = None

    def _tells(self) -> Mapping[str, Any]:
        return {"mirror": None if self._mirror is None else self._mirror.number}

    def _hear(self, mirror: _Mirror, call: int) -> None:
        """Wait until the mirror has it. One that is lost is let go of, and the next worker that asks is told so."""
        try:
            answer = mirror.caller.answer(call)
        except (ServerLost, RuntimeError):  # gone, or failed by itself: what it cannot do, this one may
            self._let_go()
            return
        if answer.header.get("refused"):
            raise _Superseded

    def _let_go(self) -> None:
        """Have no mirror any more; the one that there was ends, unless it has taken over."""
        if self._mirror is not None:
            self._mirror.caller.send({"op": "end"})
            self._mirror.caller.close()
            self._mirror = None

    # The mirror's side.

    def _take_other(self, caller: bytes, message: TensorMessage) -> None:
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
                super()._take_other(caller, message)
                return
        self.listener.send(caller, {"call": header["call"], **told})

    def _take_over(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """From now on answer in the other's place, if nothing is lacking that the worker was told."""
        was, lacks = self._has_taken_over, not self._is_copy or self.part.version < header["version"]
        self._has_taken_over = was or not lacks
        return {"lacks": lacks, "is_first": self._has_taken_over and not was}

    def _copy(self, message: TensorMessage) -> None:
        header, tensors = message.header, iter(message.tensors)
        self.part.fill([*itertools.islice(tensors, header["num_weights"])], header, tensors)
        self.part.version, self._squared = header["version"], header["squared"]
        self._generation, self._stepped = header["generation"], pass_key_of({"walk": header["stepped"]})
        self._gatherings.clear()
        for walk, places in header["walks"]:
            self._add_sums(pass_key_of({"walk": walk}), places, tensors)
        self._is_copy = True

    def _add_sums(self, walk: PassKey, places: Sequence[int], pieces: Iterator[Tensor]) -> None:
        gathering, rows = self._gathering(walk), self.part.rows
        for place in places:
            first = next(pieces)
            summed = rows.summed(place, first, next(pieces)) if place in rows else first
            if gathering is not None:
                gathering.sums[place] = summed
