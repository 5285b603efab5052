"""A parameter server: holds some of a model's parameters, and runs the user's own optimizers on them.

Replicas push their gradients for a gradient pass, which is named by a *pass key*: generation of the members, step,
number of the pass in the step. When the gradients of all replicas have arrived, the server adds them up in the order of
the replicas. So the sum does not depend on the order of arrival. It then answers all requests for the sum's norm. Next,
the replicas report that the step counts, with a factor for the gradients and the optimizers' options. The first such
report makes the optimizers step, and all replicas get the weights. A pass that was given up, because a member was lost,
is dropped when a newer generation pushes.

Nothing here knows how the process was started, or which other servers exist.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.messages.tensor_messages import TensorMessage, TensorServer
from paceline.sync.parameter_server.embedding_rows import summed_rows
from paceline.sync.parameter_server.served_parameters import ServerParameters

__all__ = ["PassKey", "PendingSum", "Server", "ServerFactory", "pass_key_of", "places_of", "squared_norm"]

POLL_S = 0.2

PassKey = tuple[int, int, int]


@dataclasses.dataclass(slots=True)
class PendingSum:
    """What was pushed for a gradient pass: for each parameter, the gradient of each replica."""

    pushed: dict[int, dict[int, Tensor]] = dataclasses.field(default_factory=dict[int, dict[int, Tensor]])
    sums: dict[int, Tensor] = dataclasses.field(default_factory=dict[int, Tensor])

    def has_all(self, places: Sequence[int], replicas: int) -> bool:
        return all(place in self.sums or len(self.pushed.get(place, ())) == replicas for place in places)

    def add_up(self, places: Sequence[int]) -> None:
        for place in places:
            if place not in self.sums:
                parts = self.pushed.pop(place)
                ordered = [parts[replica] for replica in sorted(parts)]
                if ordered[0].is_sparse:
                    self.sums[place] = summed_rows(ordered)
                    continue
                first, *others = ordered
                for other in others:
                    first.add_(other)
                self.sums[place] = first


class ServerFactory(Protocol):
    """Makes a server in its process."""

    def __call__(
        self, part: ServerParameters, listener: TensorServer, *, is_deserted: Callable[[], bool]
    ) -> Server: ...


class Server:
    """Answers requests, one after the other, until all clients have disconnected."""

    def __init__(self, part: ServerParameters, listener: TensorServer, *, is_deserted: Callable[[], bool]) -> None:
        """`is_deserted()`: no client has connected, and none will."""
        self.part, self.listener = part, listener
        self._is_deserted = is_deserted
        self._pending_sums: dict[PassKey, PendingSum] = {}
        self._generation = -1  # the newest that has pushed
        self._last_step: PassKey = (-1, -1, -1)
        self._squared = 0.0  # the last answer: the sum's norm, squared
        self._waiting: list[tuple[bytes, TensorMessage]] = []  # for sums
        self._sent_weights: tuple[int, tuple[int, ...], list[Tensor]] = (-1, (), [])  # version, places, copies
        self._callers: set[bytes] = set()

    def serve(self) -> None:
        """Return when all clients have disconnected. An error is reported to all of them, and raised."""
        try:
            while not self._is_over():
                got = self.listener.receive(POLL_S)
                if got is not None:
                    self._callers.add(got[0])
                    self._handle(*got)
                self._poll()
        except Exception:  # the process's boundary: the workers raise it
            for caller in self._callers:
                self.listener.send(caller, {"failed": traceback.format_exc()})
            raise

    def _is_over(self) -> bool:
        if self.listener.num_connected > 0:
            return False
        return self.listener.had_any or self._is_deserted()

    def _handle(self, caller: bytes, message: TensorMessage) -> None:
        header = message.header
        match header["op"]:
            case "push":
                self._push(header, message.tensors[0])
            case "push_rows":
                self._push_rows(header, message.tensors)
            case "rows" | "piece":
                told = self.part.rows.read(header, message.tensors)
                self.listener.send(caller, {"call": header["call"], "version": self.part.version}, [told])
            case "sum":
                self._waiting.append((caller, message))
            case "step":
                self._step(header)
                self._send_weights(caller, header)
            case "state":
                kept, tensors = self.part.state()
                about = {"call": header["call"], "rows": self.part.rows.entries(), "version": self.part.version}
                self.listener.send(caller, {**about, **kept}, tensors)
            case _:
                self._handle_other(caller, message)
        self._answer_sums()

    def _poll(self) -> None:
        """Called between messages, at least every `POLL_S`."""

    def _handle_other(self, caller: bytes, message: TensorMessage) -> None:
        raise ValueError(f"a worker asked for {message.header['op']!r}, which this server does not know")

    def _push(self, header: Mapping[str, Any], flat: Tensor) -> None:
        pending, offset = self._pending_sum(pass_key_of(header)), 0
        if pending is None:
            return
        for place in header["places"]:
            count = self.part.numel(place)
            gradient = self.part.like(place, flat[offset : offset + count])
            pending.pushed.setdefault(place, {})[header["replica"]] = gradient
            offset += count

    def _push_rows(self, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        pending, place = self._pending_sum(pass_key_of(header)), header["place"]
        if pending is not None:
            pending.pushed.setdefault(place, {})[header["replica"]] = self.part.rows.gradient(place, *tensors)

    def _pending_sum(self, pass_key: PassKey) -> PendingSum | None:
        """Return the pending sum of a pass that receives a gradient, and drop older passes. None: it was given up."""
        if pass_key[0] < self._generation:
            return None
        if pass_key[0] > self._generation:
            self._generation = pass_key[0]
            self._pending_sums.clear()
            self._waiting.clear()
        # All replicas have voted on the steps before the last one; what is left of them was not taken.
        for old in [one for one in self._pending_sums if one[1] < pass_key[1] - 1]:
            del self._pending_sums[old]
        return self._pending_sums.setdefault(pass_key, PendingSum())

    def _answer_sums(self) -> None:
        """Answer all requests for sums that are complete."""
        still: list[tuple[bytes, TensorMessage]] = []
        for caller, message in self._waiting:
            header = message.header
            if pass_key_of(header) == self._last_step:  # a faster worker's report made the step before this request
                self.listener.send(caller, {"call": header["call"], "squared": self._squared})
                continue
            places = places_of(header)
            pending = self._pending_sums.setdefault(pass_key_of(header), PendingSum())
            if not pending.has_all(places, header["replicas"]):
                still.append((caller, message))
                continue
            pending.add_up(places)
            self._squared = squared_norm([pending.sums[place] for place in places])
            self._before_sum(pass_key_of(header), places)
            self.listener.send(caller, {"call": header["call"], "squared": self._squared})
        self._waiting = still

    def _step(self, header: Mapping[str, Any]) -> None:
        """Take the step, unless another worker's report has already done so."""
        pass_key = pass_key_of(header)
        if pass_key == self._last_step:
            return
        pending = self._pending_sums.pop(pass_key)
        pending.add_up(places_of(header))
        gradients = {place: pending.sums[place].mul_(header["factor"]) for place in places_of(header)}
        if (largest := header.get("max_value")) is not None:
            for gradient in gradients.values():
                (gradient.values() if gradient.is_sparse else gradient).clamp_(-largest, largest)
        self._before_step(header)
        self.part.step(gradients, header["options"])
        self._last_step = pass_key
        self._after_step()
        for old in [one for one in self._pending_sums if one[:2] < pass_key[:2]]:
            del self._pending_sums[old]

    def _before_sum(self, pass_key: PassKey, places: Sequence[int]) -> None:
        """Called when the sums of these parameters are complete, before their norm is sent."""

    def _before_step(self, header: Mapping[str, Any]) -> None:
        """Called before the optimizers step."""

    def _after_step(self) -> None:
        """Called after the optimizers have stepped, before any answer is sent."""

    def _status(self) -> Mapping[str, Any]:
        """Return fields that describe this server, to be sent with its weights."""
        return {}

    def _send_weights(
        self, caller: bytes, header: Mapping[str, Any], *, buffers: Mapping[int, Tensor] | None = None
    ) -> None:
        """Send the requested weights, and `buffers` by their numbers."""
        about, more = (self.part.version, tuple(header["places"])), buffers or {}
        if self._sent_weights[:2] != about:
            self._sent_weights = (*about, self.part.weights(header["places"]))
        told = {"call": header["call"], "version": self.part.version, "buffers": [*more], **self._status()}
        self.listener.send(caller, told, [*self._sent_weights[2], *more.values()])


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """Return the square of the gradients' joint norm."""
    norms = [torch.linalg.vector_norm(_numbers(one), dtype=torch.float64) for one in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def _numbers(gradient: Tensor) -> Tensor:
    """Return the real numbers of which a gradient consists."""
    values = gradient.values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def places_of(header: Mapping[str, Any]) -> list[int]:
    """Return the parameters that a request is about, and the tables, of which all servers have rows."""
    return [*header["places"], *header.get("tables", ())]


def pass_key_of(header: Mapping[str, Any]) -> PassKey:
    generation, step, number = header["walk"]
    return int(generation), int(step), int(number)
