"""The process groups of an elastic run: built anew for each generation of members, and aborted without waiting.

Three facts about gloo shape this. The loss of a peer reaches only its direct neighbors; all others wait until the
group's own timeout. A group cannot be shrunk. And destroying one blocks while a transfer is pending. So a wait here
checks for changes every few milliseconds, and an abandoned group is destroyed by a thread that may block. A transfer of
an abandoned group may still write into its tensor, so the caller must not use that tensor for anything else.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.allreduce.scheduled_group import backend_group_of
from paceline.comm.flight_recorder import APART, FlightRecorder
from paceline.comm.group import (
    Disrupted,
    Group,
    SingleWorkerGroup,
    Transfer,
    WorkerGroup,
    first_line,
    from_bytes,
    room_for_object,
    to_bytes,
)
from paceline.comm.peer_sockets.process_group import PeerProcessGroup, create_peer_group
from paceline.errors import SyncError

__all__ = ["ElasticGroup", "GenerationGroup", "connect_backend", "generation_name"]

WAIT_SLICE = timedelta(milliseconds=20)
POLL_S = 0.002


class GenerationGroup(Group):
    """A group of one generation; a lost peer or a newer generation raises `Disrupted` in every wait."""

    def __init__(
        self,
        backend: Any,
        *,
        device: torch.device,
        check: Callable[[], None],
        timeout_s: float,
        objects_on: torch.device | None = None,
    ) -> None:
        super().__init__(backend, device=device, objects_on=objects_on)
        self._backend: Any = backend
        self._check, self._timeout_s = check, timeout_s

    def _begin_sum(self, tensor: Tensor, what: str) -> Transfer:
        return self._begin(lambda: self._backend.allreduce([tensor], dist.AllreduceOptions()), what)

    def _begin_gather(self, tensor: Tensor, out: Tensor, what: str) -> Transfer:
        return self._begin(lambda: self._backend.allgather([list(out.unbind())], [tensor]), what)

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        return self._begin(lambda: self._backend.alltoall_base(out.view(-1), rows.view(-1), [], []), what)

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._begin(lambda: self._backend.broadcast([tensor], options), what).wait()

    def _do(self, start: Callable[[Any], dist.Work], what: str) -> None:
        self._begin(lambda: start(self._backend), what).wait()

    def send(self, tensor: Tensor, *, to: int, what: str) -> None:
        """Send to one member; blocks until the tensor was sent."""
        self._transfer_to_peer(lambda: self._backend.send([tensor], to, 0), what)

    def receive(self, tensor: Tensor, *, source: int, what: str) -> None:
        """Overwrite `tensor` with what one member sends; blocks."""
        self._transfer_to_peer(lambda: self._backend.recv([tensor], source, 0), what)

    def _transfer_to_peer(self, start: Callable[[], dist.Work], what: str) -> None:
        """Run a transfer with one member. A thread waits for it, and is abandoned if `check` raises.

        This thread must not wait with a timeout itself: when one expires, gloo closes all connections.
        """
        done: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

        def transfer() -> None:
            try:
                start().wait()
                done.put(None)
            except RuntimeError as error:  # torch has no narrower type for a lost peer
                done.put(error)

        self._check()
        threading.Thread(target=transfer, name="paceline-transfer", daemon=True).start()
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                error = done.get(timeout=POLL_S)
            except queue.Empty:
                self._check()
                if time.monotonic() > deadline:
                    raise SyncError(f"waited too long for the other worker in {what}") from None
                continue
            if error is not None:
                raise Disrupted(f"lost contact with a peer during {what}: {first_line(error)}") from error
            return

    def close(self) -> None:
        super().close()
        references = [self._backend]
        del self._backend
        if isinstance(references[0], PeerProcessGroup):
            references[0].shutdown()  # its pending transfers end at once
        _destroy_in_background(references)

    def _begin(self, start: Callable[[], dist.Work], what: str) -> Transfer:
        self._check()
        try:
            return _AbortableTransfer(start(), what, self._check, self._timeout_s)
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            raise Disrupted(f"lost contact with a peer during {what}: {first_line(error)}") from error


class _AbortableTransfer:
    """A transfer in flight, whose wait calls `check` again and again."""

    def __init__(self, work: dist.Work, what: str, check: Callable[[], None], timeout_s: float) -> None:
        self._work: dist.Work | None = work
        self._what, self._check = what, check
        self._deadline = time.monotonic() + timeout_s

    def wait(self) -> None:
        while self._work is not None:
            try:
                self._work.wait(WAIT_SLICE)
                self._work = None
            except RuntimeError as error:
                text = first_line(error)
                if "timed out" not in text.lower():
                    work, self._work = self._work, None
                    del work
                    raise Disrupted(f"lost contact with a peer during {self._what}: {text}") from None
                self._check()
                if time.monotonic() > self._deadline:
                    raise SyncError(f"waited too long for the other workers in {self._what}") from None


class ElasticGroup:
    """The group of an elastic run, which forwards to the group of the current generation.

    A *newcomer* is in no group yet: nothing is transferred, and its index is -1. Collectives are recorded in the flight
    recorder, which has joined the group of each generation (`generation_name`) before.
    """

    def __init__(
        self,
        group: WorkerGroup | None,
        *,
        generation: int,
        ranks: Sequence[int] = (),
        recorder: FlightRecorder | None = None,
        name: str | None = None,
    ) -> None:
        self.generation = generation
        self.ranks = tuple(ranks)  # worker ranks by index in the current group; empty for a newcomer
        self._group: WorkerGroup | None = group
        self._recorder = FlightRecorder.unread() if recorder is None else recorder
        self._name = name  # of the group in the flight recorder; None: the run's own
        self._is_apart = False

    @property
    def index(self) -> int:
        return -1 if self._group is None else self._group.index

    @property
    def size(self) -> int:
        return 1 if self._group is None else self._group.size

    @property
    def shares_memory(self) -> bool:
        return self._current().shares_memory

    @property
    def hosts(self) -> tuple[int, ...]:
        return (0,) if self._group is None else self._group.hosts

    @property
    def is_newcomer(self) -> bool:
        return self._group is None

    def take(self, group: WorkerGroup, generation: int, *, ranks: Sequence[int]) -> None:
        """Make this group, of these workers, the current one, and abandon the one before."""
        before, self._group, self.generation, self.ranks = self._group, group, generation, tuple(ranks)
        if before is not None:
            before.close()

    def detach(self, rank: int) -> None:
        """Record in the flight recorder that this worker, of that rank, is in no group with others for now."""
        self._is_apart = True
        self._recorder.join(APART, [rank], is_main=True)

    def join(self) -> None:
        """Record that this worker is in the group again after `detach`; all members count their calls anew."""
        if self._is_apart and not self.is_newcomer:
            self._recorder.join(generation_name(self.generation), self.ranks, is_main=True)
        self._is_apart = False

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        group = self._current()
        if group.size == 1:
            return group.all_reduce(tensor, what=what)
        call = self._recorder.enter("all_reduce", what, dtype=tensor.dtype, numel=tensor.numel(), group=self._name)
        return _RecordedGroupTransfer(group.all_reduce(tensor, what=what), self._recorder, call)

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        group = self._current()
        if group.size == 1:
            return group.begin_all_gather(tensor, out, what=what)
        call = self._recorder.enter("all_gather", what, dtype=tensor.dtype, numel=tensor.numel(), group=self._name)
        return _RecordedGroupTransfer(group.begin_all_gather(tensor, out, what=what), self._recorder, call)

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        group = self._current()
        if group.size == 1:
            return group.begin_all_to_all(rows, out, what=what)
        call = self._recorder.enter("all_to_all", what, dtype=rows.dtype, numel=rows.numel(), group=self._name)
        return _RecordedGroupTransfer(group.begin_all_to_all(rows, out, what=what), self._recorder, call)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._current().allocate(numel, dtype=dtype, device=device)

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        with self._recorded("all_gather", what, tensor):
            self._current().all_gather(tensor, out, what=what)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        with self._recorded("reduce_scatter", what, out):
            self._current().reduce_scatter(parts, out, what=what)

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        with self._recorded(
            "all_to_all", what
        ):  # without a size: members may send as much as they have, and mean one call
            self._current().all_to_all(parts, out, what=what)

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        with self._recorded("broadcast", what, tensor):
            self._current().broadcast(tensor, source=source, what=what)

    def gather_objects(self, value: Any) -> list[Any]:
        with self._recorded("gather_objects"):
            return self._current().gather_objects(value)

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        with self._recorded("broadcast_object"):
            return self._current().broadcast_object(value, source=source)

    def barrier(self) -> None:
        with self._recorded("barrier"):
            self._current().barrier()

    def settle(self) -> None:
        self._current().settle()

    def meet(self, value: Any) -> list[Any]:
        """Gather objects from all members that have joined a new generation."""
        with self._recorded("gather_objects"):
            return self._current().gather_objects(value)

    def send_object(self, value: Any, *, to: int) -> None:
        """Send a picklable value, tensors and all, to one member."""
        group, payload = self._transport(), to_bytes(value)
        group.send(torch.tensor([payload.numel()]), to=to, what="the size of a state")
        group.send(payload, to=to, what="a state")

    def receive_object(self, *, source: int) -> Any:
        """Return what `send_object` of member `source` sends."""
        group = self._transport()
        size = torch.zeros(1, dtype=torch.int64)
        group.receive(size, source=source, what="the size of a state")
        payload = room_for_object(int(size), f"the state that worker {source} sends")
        group.receive(payload, source=source, what="a state")
        return from_bytes(payload, group.objects_on)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _transport(self) -> GenerationGroup:
        """Return the current group's own transport from one member to another."""
        group = backend_group_of(self._current())
        if not isinstance(group, GenerationGroup):
            raise SyncError("this group's members are fixed, so it has no newcomers to send a state to")
        return group

    def _current(self) -> WorkerGroup:
        return SINGLE_WORKER if self._group is None else self._group

    @contextlib.contextmanager
    def _recorded(self, kind: str, what: str = "", tensor: Tensor | None = None) -> Iterator[None]:
        """Record a blocking collective. After an error the flight recorder still shows it, as the possible cause."""
        if self.size == 1:
            yield
            return
        numel, dtype = (0, None) if tensor is None else (tensor.numel(), tensor.dtype)
        self._recorder.wait(self._recorder.enter(kind, what, dtype=dtype, numel=numel, group=self._name))
        yield
        self._recorder.leave()


class _RecordedGroupTransfer:
    """A transfer whose wait is shown in the flight recorder."""

    def __init__(self, transfer: Transfer, recorder: FlightRecorder, call: int) -> None:
        self._transfer, self._recorder, self._call = transfer, recorder, call

    def wait(self) -> None:
        self._recorder.wait(self._call)
        self._transfer.wait()
        self._recorder.leave()


def generation_name(generation: int) -> str:
    """Return the name of the run's own group in the flight recorder."""
    return f"generation {generation}"


def connect_backend(
    store: dist.Store,
    *,
    index: int,
    size: int,
    timeout_s: float,
    check: Callable[[], None],
    address: str | None = None,
    over_gloo: bool = False,
) -> Any:
    """Build the back end of a generation by a rendezvous through `store`; blocks until all members are there.

    `address`: of this host, where members are on several; None: all are on this host, and no port is opened.
    `over_gloo`: between hosts over gloo, which neither encrypts nor authenticates. Raises Disrupted, and what `check`
    raises.
    """
    if address is None or not over_gloo:
        return create_peer_group(store, index=index, size=size, address=address, timeout_s=timeout_s, check=check)
    return _connect_gloo(store, index=index, size=size, timeout_s=timeout_s, check=check)


def _connect_gloo(store: dist.Store, *, index: int, size: int, timeout_s: float, check: Callable[[], None]) -> Any:
    """Build a gloo group of a generation.

    The rendezvous runs in a thread, which is abandoned when `check()` raises: gloo itself would wait for a lost peer
    until its timeout.
    """
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def meet() -> None:
        try:
            done.put(dist.ProcessGroupGloo(store, index, size, timedelta(seconds=timeout_s)))
        except BaseException as error:  # any kind: it is raised in the waiting caller
            done.put(error)

    threading.Thread(target=meet, name="paceline-rendezvous", daemon=True).start()
    while True:
        try:
            met = done.get(timeout=POLL_S)
        except queue.Empty:
            check()
            continue
        if isinstance(met, Disrupted):
            raise met
        if isinstance(met, BaseException):
            check()
            raise Disrupted(f"the workers could not all meet: {first_line(met)}") from met
        return met


def _destroy_in_background(references: list[Any]) -> None:
    """Drop the last reference to a back end in a thread, because that blocks while a transfer is pending."""
    threading.Thread(target=references.clear, name="paceline-close", daemon=True).start()


SINGLE_WORKER = SingleWorkerGroup()
