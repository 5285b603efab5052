"""Asynchronous updates with bounded staleness, the workers' side: each replica trains on whole batches by itself.

A replica asks the first server for a batch, gets the weights, trains on the batch, asks for permission, and sends its
gradient. So an update is always the mean over `Batch.size` samples, however many replicas there are. The first server
gets the update last, and counts it then. So weights that are sent afterwards contain it on all servers.

A worker that was asked to leave requests a pause from the first server; then all workers pause, or none.

A newcomer learns from the first server which batches are handed out, and from all servers the model's tensors. It needs
nothing from another worker. Each answer names lost workers. Workers report them to the other servers before they pull
weights, and record what a lost worker left unrecorded (`paceline.sync.parameter_server.async_server`).
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from paceline.comm.group import SingleWorkerGroup, WorkerGroup
from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.errors import SyncError
from paceline.plan import AllReduce, ParameterServer, Raw, Wire
from paceline.schedule.backup_workers import BackupShare
from paceline.schedule.parameter_placement import placed_on
from paceline.schedule.staleness_clock import AsyncBatch, AsyncStream, Pause, Save, StreamEnd
from paceline.sync.allreduce.buckets import LocalBucket, NamedParameter, SentBytes
from paceline.sync.allreduce.gradient_norm import gradients_here
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.sync.parameter_server.async_server import AsyncServer
from paceline.sync.parameter_server.client import ServerClient
from paceline.sync.parameter_server.embedding_tables import EmbeddingTables
from paceline.sync.parameter_server.served_buffers import BufferChanges
from paceline.sync.parameter_server.served_parameters import (
    ParameterGroups,
    ServerParameters,
    check_parameter_groups,
    options_of,
    parameter_groups_of,
    set_options,
)
from paceline.sync.parameter_server.server import ServerFactory
from paceline.sync.parameter_server.sync_updates import wire_dtype_of

__all__ = ["AsyncGradients", "PendingCommit"]


@dataclasses.dataclass(frozen=True, slots=True)
class PendingCommit:
    """A batch that counts, although its worker may have been lost before it could record that."""

    stream: str
    number: int
    is_skipped: bool


class _LeaveRequested(Exception):
    """This worker waits for a batch, and is asked to leave."""


class AsyncGradients(GradientReducer):
    """One replica's own gradients; it sends them to the servers instead of running the optimizer's step."""

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        *,
        models: Sequence[Module],
        sync: ParameterServer,
        wire: Wire,
        servers: ServerClient,
        worker_rank: int,
        tables: EmbeddingTables | None = None,
    ) -> None:
        super().__init__(
            parameters, group=SingleWorkerGroup(), sync=AllReduce(bucket_bytes=sync.bucket_bytes), wire=Raw()
        )
        self._tables = tables or EmbeddingTables(servers)
        self._by_rows = self._tables.settle(self._all)
        whole = {name: parameter for place, (name, parameter) in enumerate(self._all) if place not in self._by_rows}
        on = placed_on({name: one.numel() * one.element_size() for name, one in whole.items()}, servers=sync.servers)
        self.behind: int | None = None  # staleness of the last update: how many others its weights lacked, at most
        self.num_samples = 0  # of the current batch, on this replica
        self.is_sent = False  # servers may have some or all of its update, and it is not `recorded`
        self.pending_commits: list[PendingCommit] = []  # to be recorded by this worker, and removed from here
        self._servers, self._staleness, self._worker_rank = servers, sync.staleness, worker_rank
        self._name = _new_name(worker_rank)
        self._is_known = False  # to the servers
        self._num_losses = 0  # reported so far
        self._lost: list[str] = []  # names of lost workers that the other servers do not know of
        self._is_first_pull = True
        self._wire_dtype = wire_dtype_of(wire)
        self._server_of = [on.get(name) for name, _ in self._all]  # None: a table, of which all servers have rows
        self.buffers = BufferChanges(models, rules=lambda: self.buffer_rules())
        self._optimizers: tuple[Optimizer, ...] = ()
        self._registered_groups: ParameterGroups = ()
        self._stream: AsyncStream | None = None
        self._number = 0  # of the current batch
        self._is_settled = True  # the servers know whether it has an update
        self._sent = SentBytes()

    def begin(self, gradient_pass: int, *, step: int = 0, measures: bool = False) -> None:
        """Raises RuntimeError if this batch already has an update, or was skipped."""
        if gradient_pass and self._is_settled:
            raise RuntimeError(
                "step(batch) was called twice for one batch: under ParameterServer(staleness=...) a batch is one "
                "update, which is on the servers, or was skipped. Call it once for each batch, with all losses in one "
                "forward, or use staleness=0"
            )
        super().begin(gradient_pass, step=step, measures=measures)
        self._tables.begin()

    def land(self, *, scale: float) -> None:
        super().land(scale=scale)
        self._sent += SentBytes(num_sent=self._tables.end())

    def drop(self) -> None:
        super().drop()
        self._tables.give_up()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        factor = min(1.0, max_norm / (float(norm) + 1e-6))  # torch's formula; its function takes no sparse gradients
        for gradient in gradients_here(self.parameters):
            gradient.mul_(factor)

    def serve(self, optimizers: Sequence[Optimizer]) -> None:
        """Run these optimizers on the servers. Raises ValueError if others already run there."""
        if self._optimizers and self._optimizers != tuple(optimizers):
            raise ValueError("under ParameterServer one stepper trains a model: give it all optimizers at once")
        self._optimizers = tuple(optimizers)

    def meet(self, *, index: int, size: int) -> None:
        """Start the servers and connect to them; all workers must call it."""
        if not self._is_known:
            self.begin(0)  # finds out which parameters are trained
            self._tables.give_up()
            self._servers.meet(self._served_part, index=index, size=size, server=self._make_server())
            self._registered_groups = parameter_groups_of(self._optimizers)
            for optimizer in self._optimizers:
                optimizer.state.clear()  # the servers have it now
            self._tables.leave()
            self._register()
            self._is_known = True

    def join(self, stream: str) -> tuple[AsyncStream, bool]:
        """Connect to the servers, which others start; return how a stream's batches are handed out, and whether it is
        over.

        If it is not, it does not end before this worker has asked for a batch, or is lost.
        """
        self.meet(index=self._servers.count, size=1)
        told = self._ask_first({"op": "about", "stream": stream}).header
        for optimizer, groups in zip(self._optimizers, told["options"], strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                set_options(group, options)  # the run's options may differ from those of the script
        return AsyncStream.from_plain(told["dealt"]), bool(told["is_over"])

    def next(
        self, stream: AsyncStream, *, wants_pause: Callable[[], bool], is_called: Callable[[], bool] = lambda: False
    ) -> AsyncBatch | BackupShare | Save | Pause | StreamEnd | None:
        """Wait for the next task, and pull the weights for it; None: this worker has to leave, and has signed off from
        the servers.

        `wants_pause()`: whether all workers should pause. `is_called()`: whether this worker alone has to leave. Both
        are polled until there is an answer.
        """
        told = self._ask_for_more(stream, wants_pause=wants_pause, is_called=is_called)
        if told is None:
            return None
        self._handle_losses(told["losses"])
        self._pull()
        number = self._number = int(told["number"])
        self._is_settled, self.is_sent = told["turn"] != "batch", False
        match told["turn"]:
            case "batch":
                return AsyncBatch(number, int(told["base"]))
            case "save":
                return Save(number)
            case "pause":
                return Pause(number)
            case _:
                return StreamEnd(bool(told["has_left"]))

    def stand(self) -> int:
        """Pull the newest weights while no batch is in progress; return how many batches are done."""
        number = int(self._ask_first({"op": "stand"}).header["number"])
        self._pull()
        return number

    def refresh(self) -> None:
        """Pull the newest weights."""
        self._pull()

    def saved(self, number: int) -> None:
        """The state before this batch is saved."""
        self._servers.caller(0).send({"op": "saved", "number": number, **self._about()})

    def recorded(self) -> None:
        """All that this replica had to record is in its step log."""
        self.is_sent = False
        self._servers.caller(0).send({"op": "noted", **self._about()})

    def leave(self, *, is_broken: bool) -> None:
        """This replica takes no more batches: its current batch goes to another one. `is_broken`: servers may have some
        or all of its update, and it has recorded nothing."""
        self._servers.caller(0).send({"op": "left", "is_broken": is_broken, **self._about()})
        if is_broken:  # it continues under a new name
            self._name = _new_name(self._worker_rank)

    def give_back(self) -> None:
        """Return the current batch, as if this replica were lost, whatever it has sent of it; it continues under a new
        name."""
        self._servers.caller(0).send({"op": "gone", **self._about()})
        self._name = _new_name(self._worker_rank)
        self._register()

    def pass_over(self) -> None:
        """Skip the current batch if it has no update yet: it counts as used."""
        if not self._is_settled:
            self.is_sent = True
            self._ask_first({"op": "skip", "number": self._number})
            self._is_settled, self.is_sent = True, False

    @torch.no_grad()
    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the servers step with the gradients that are here."""
        began = time.perf_counter()
        check_parameter_groups(optimizers, self._registered_groups)
        options = [options_of(optimizer) for optimizer in optimizers]
        changed = self.buffers.changed()
        about_buffers, deltas = self.buffers.about(changed), self.buffers.deltas(changed)
        by_rows = self._rows_by_server()
        self._is_settled = self.is_sent = True  # from here on other workers may wait for this update
        self.buffers.require_one_rule(self._ask_first({"op": "permit", **about_buffers}).header)
        for number in (*range(1, self._servers.count), 0):
            places, flats = self._flats(number)
            tables, rows = by_rows[number]
            header: dict[str, Any] = {
                "op": "update",
                "number": self._number,
                "places": places,
                "tables": tables,
                "options": options,
                **(about_buffers if number == 0 else self.buffers.about({})),
                "is_last": number == 0,
            }
            tensors = [*flats, *rows, *(deltas if number == 0 else ())]
            caller = self._servers.caller(number)
            answer = self._checked(caller.answer(caller.begin({**header, **self._about()}, tensors)))
            self.behind = answer.header.get("behind")
        for _, parameter in self._all:
            parameter.grad = None
        self.waited_s += time.perf_counter() - began

    def fetch_state(self) -> None:
        """Fetch the state of the servers' optimizers into the optimizers here, for a checkpoint."""
        if self._servers.are_there:
            by_rows = self._servers.fetch_state(self._optimizers, [parameter for _, parameter in self._all])
            self._tables.fetch(self._optimizers, by_rows)

    def drop_state(self) -> None:
        """Drop what `fetch_state` fetched."""
        if self._servers.are_there:
            self._servers.drop_state(self._optimizers)
            self._tables.leave()

    @property
    def bytes(self) -> SentBytes:
        return self._sent

    def _ask_for_more(
        self, stream: AsyncStream, *, wants_pause: Callable[[], bool], is_called: Callable[[], bool]
    ) -> Mapping[str, Any] | None:
        """Wait for the next task from the first server; None: this worker has signed off."""
        self._stream, first, has_wished = stream, self._servers.caller(0), False

        def look() -> None:
            nonlocal has_wished
            if is_called():
                raise _LeaveRequested
            if not has_wished and wants_pause():
                has_wished = True
                first.send({"op": "wish", **self._about()})

        try:
            look()
            turn, about = {"op": "turn", "num_losses": self._num_losses}, self._about()
            answer = self._servers.ask_first(turn, about=about, worker_rank=self._worker_rank, meanwhile=look)
            return self._checked(answer).header
        except _LeaveRequested:
            first.send({"op": "gone", **self._about()})
            return None

    @torch.no_grad()
    def _pull(self) -> set[int]:
        """Pull all trained weights, and the buffers; the first time, all parameters of the models. Return the update
        counts of the servers."""
        places = self._places(all_of_them=self._is_first_pull)
        about = {"op": "weights", "lost": self._lost, **self._about()}
        ask = [{**about, "places": some, "is_first": self._is_first_pull and n == 0} for n, some in enumerate(places)]
        answers = [self._checked(one) for one in self._servers.ask(ask)]
        self._lost, self._is_first_pull = [], False
        for number, (some, answer) in enumerate(zip(places, answers, strict=True)):
            num_flats = self._servers.take(some, answer.tensors, [parameter for _, parameter in self._all])
            if number == 0:
                for which, value in zip(answer.header["buffers"], answer.tensors[num_flats:], strict=True):
                    self.buffers.here[which].copy_(value)
        self.buffers.begin()
        return {int(answer.header["version"]) for answer in answers}

    def _ask_first(self, question: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> TensorMessage:
        about = self._about()
        return self._checked(self._servers.ask_first(question, tensors, about=about, worker_rank=self._worker_rank))

    def _register(self) -> None:
        """Register this worker with the first server."""
        self._ask_first({"op": "hello"})

    def _checked(self, answer: TensorMessage) -> TensorMessage:
        if answer.header.get("is_lost"):
            raise SyncError(
                f"the parameter servers have given worker {self._worker_rank} up: its connection to the first one was "
                "closed, or another worker has replaced it"
            )
        return answer

    def _handle_losses(self, losses: Sequence[Mapping[str, Any]]) -> None:
        """Handle newly lost workers."""
        self._num_losses += len(losses)
        self._lost += [loss["name"] for loss in losses]
        self.pending_commits += [PendingCommit(*loss["unnoted"]) for loss in losses if loss["unnoted"] is not None]

    def _about(self) -> dict[str, Any]:
        sender = {"worker": self._worker_rank, "name": self._name}
        return sender if self._stream is None else {**sender, **self._stream.plain()}

    def _places(self, *, all_of_them: bool = False) -> list[list[int]]:
        """Return the trained parameters of each server, or all."""
        some = range(len(self._all)) if all_of_them else self._trained_places
        return [[place for place in some if self._server_of[place] == n] for n in range(self._servers.count)]

    def _flats(self, server: int) -> tuple[list[list[int]], list[Tensor]]:
        """Return the gradients for a server: places, and a flat tensor of each dtype."""
        by_dtype: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        for place in self._trained_places:
            gradient = self._all[place][1].grad
            if gradient is not None and self._server_of[place] == server:
                places, parts = by_dtype.setdefault(gradient.dtype, ([], []))
                places.append(place)
                parts.append(gradient.reshape(-1))
        flats = [torch.cat(parts) for _, parts in by_dtype.values()]
        sent = [flat if self._wire_dtype is None or flat.is_complex() else flat.to(self._wire_dtype) for flat in flats]
        self._sent += SentBytes(sum(one.nbytes for one in sent), sum(one.nbytes for one in flats))
        return [places for places, _ in by_dtype.values()], sent

    def _make_server(self) -> ServerFactory:
        return functools.partial(
            AsyncServer,
            staleness=self._staleness,
            buffers=self.buffers.here,
            options=[*map(options_of, self._optimizers)],
        )

    def _rows_by_server(self) -> list[tuple[list[int], list[Tensor]]]:
        """Return the gradients of tables for each server: their places, and for each the row numbers and the rows."""
        found: list[tuple[list[int], list[Tensor]]] = [([], []) for _ in range(self._servers.count)]
        for place, parameter in self._by_rows.items():
            if parameter.grad is None:
                continue
            for (places, tensors), more in zip(
                found, self._tables.split_by_server(parameter, wire_dtype=self._wire_dtype), strict=True
            ):
                places.append(place)
                tensors.extend(more)
                self._sent += SentBytes(num_sent=sum(one.nbytes for one in more))
            self._sent += SentBytes(num_raw=parameter.nbytes)
        return found

    def _staying(self, run: Sequence[NamedParameter], group: WorkerGroup) -> LocalBucket:
        return _AsyncBucket(run, tables=self._tables)

    def _served_part(self, server: int) -> ServerParameters:
        """Return what a server holds; called in its own process."""
        parts = {place: p for place, (_, p) in enumerate(self._all) if self._server_of[place] == server}
        here = {**parts, **self._by_rows}
        others = [p for place, (_, p) in enumerate(self._all) if place not in here]
        return ServerParameters(here, self._optimizers, elsewhere=others, rows=self._tables.rows_of(server))


class _AsyncBucket(LocalBucket):
    """A local bucket in which gradients of tables stay sparse, with each row once: they are sent as rows."""

    def __init__(self, parameters: Sequence[NamedParameter], *, tables: EmbeddingTables) -> None:
        super().__init__(parameters)
        self._tables = tables

    def depart(self, metadata: Sequence[float] = (), *, seed: int = 0) -> None:
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                parameter.grad = gradient.coalesce() if parameter in self._tables else gradient.to_dense()

    def scale(self, factor: float) -> None:
        for gradient in gradients_here(self.parameters):
            gradient.mul_(factor)


def _new_name(worker_rank: int) -> str:
    """Return a name that is unique in the run."""
    return f"{worker_rank}-{secrets.token_hex(8)}"
