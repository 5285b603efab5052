"""torch's process groups over `PeerLinks`: the collectives of CPU tensors between processes that have met.

Members that a stranger can neither join nor listen to (`comm/peer_sockets/meeting.py`) take the place of gloo, whose
ports accept any process. Sums add up in the order of the members, so all have the same bits. Small tensors go straight
from each member to each other one; large ones are split, so that every member sums one part for all.

Collectives run in the order of the calls (`comm/op_queue.py`); transfers between two members run by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.op_queue import OpQueue, QueuedWork
from paceline.comm.own_backends import add_backend
from paceline.comm.peer_sockets.flat_tensors import bytes_of, cut, fill, flat_of, require_even, target_for
from paceline.comm.peer_sockets.links import LinkTransfer, PeerLinks, PeerLost
from paceline.comm.peer_sockets.meeting import connect_members
from paceline.comm.peer_sockets.reductions import operation_of, reduced

__all__ = ["NAME", "PeerProcessGroup", "create_peer_group", "listen_at", "listening_address", "register_peer_backend"]

NAME = "paceline_peers"  # of the back end of torch.distributed
DIRECT_BYTES = 1 << 18  # of all members' tensors: up to here each member sums for itself
COLLECTIVE = 1 << 62  # added to the tags of collectives, which users' own tags never reach

TorchGroup: Any = dist.ProcessGroup  # torch passes arguments by position; its stubs use other argument names
Pair = tuple[int, Tensor]  # a member, and what is sent to it or received from it

_listens_at: str | None = None


def listen_at(address: str | None) -> None:
    """Set where the groups that torch makes from now on meet: this host's address; None: all workers are on this
    host, and no port is opened."""
    global _listens_at
    _listens_at = address


def listening_address() -> str | None:
    """Return what `listen_at` has set."""
    return _listens_at


def register_peer_backend() -> str:
    """Make these groups a back end of torch.distributed for CPU tensors, and return its name."""
    add_backend(NAME, _create_for_torch)
    return NAME


def create_peer_group(
    store: dist.Store, *, index: int, size: int, address: str | None, timeout_s: float, check: Callable[[], None]
) -> PeerProcessGroup:
    """Meet the other members and return the group; the arguments and errors are those of `connect_members`."""
    met = connect_members(store, index=index, size=size, address=address, timeout_s=timeout_s, check=check)
    return PeerProcessGroup(PeerLinks(met), index=index, size=size, timeout_s=timeout_s)


def _create_for_torch(wanted: Any, _: Any) -> PeerProcessGroup:
    return create_peer_group(
        wanted.store,
        index=wanted.group_rank,
        size=wanted.group_size,
        address=_listens_at,
        timeout_s=wanted.timeout.total_seconds(),
        check=_nothing,
    )


class PeerProcessGroup(TorchGroup):
    """A process group over sockets. Methods have torch's names, arguments and effects."""

    _device_types = (torch.device("cpu"),)  # torch's own is of back ends that a group of its own kind has

    def __init__(self, links: PeerLinks, *, index: int, size: int, timeout_s: float) -> None:
        super().__init__(index, size)
        self._links, self._index, self._size, self._timeout_s = links, index, size, timeout_s
        self._queue = OpQueue(name="paceline-peer-collectives")
        self._count, self._memory = 0, torch.empty(0, dtype=torch.uint8)
        self._torch_name = self._description = ""
        weakref.finalize(self, _close, links, self._queue).atexit = False  # pyrefly: ignore[missing-attribute]

    def _get_backend(self, device: torch.device) -> Any:
        return self  # what torch's own groups keep for a device

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._torch_name = name

    def getGroupName(self) -> str:
        return self._torch_name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        """Leave the group; members that wait for this worker get an error."""
        _close(self._links, self._queue)

    abort = shutdown

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        sent = flat_of(tensors[0])
        return _TransferWork(self, self._links.send(peer, bytes_of(sent), tag=tag), sent, tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        target = target_for(tensors[0])
        return _TransferWork(self, self._links.receive(peer, bytes_of(target), tag=tag), target, tensors, fills=True)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        raise NotImplementedError("this back end receives from a named worker only: use dist.recv(tensor, src=rank)")

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank

        def do(tag: int) -> None:
            for tensor in tensors:
                self._broadcast(tensor, root, tag)

        return self._begin(do, tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        name = operation_of(opts)

        def do(tag: int) -> None:
            for tensor in tensors:
                self._sum(tensor, name, tag)

        return self._begin(do, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        name, root = operation_of(opts), opts.rootRank

        def do(tag: int) -> None:
            for tensor in tensors:
                own = flat_of(tensor)
                if self._index != root:
                    self._exchange([(root, own)], [], tag)
                    continue
                rows = self._rows(own)
                self._exchange([], [(peer, rows[peer]) for peer in self._others()], tag)
                fill(tensor, reduced(rows.unbind(), name))

        return self._begin(do, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def do(tag: int) -> None:
            for row, one in zip(outputs, inputs, strict=True):
                self._gather(one, row, tag)

        return self._begin(do, outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def do(tag: int) -> None:
            for place, one in enumerate(inputs):
                self._gather(one, [row[place] for row in outputs], tag)

        return self._begin(do, outputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, one in zip(outputs, inputs, strict=True):
            require_even(output, one, self._size, "all_gather_single")

        def do(tag: int) -> None:
            for output, one in zip(outputs, inputs, strict=True):
                whole = target_for(output)
                self._gather(one, whole.chunk(self._size) if whole.numel() else [whole] * self._size, tag)
                fill(output, whole)

        return self._begin(do, outputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        root = opts.rootRank

        def do(tag: int) -> None:
            if self._index != root:
                self._exchange([(root, flat_of(inputs[0]))], [], tag)
                return
            targets = [target_for(one) for one in outputs[0]]
            targets[root].copy_(flat_of(inputs[0]))
            self._exchange([], [(peer, targets[peer]) for peer in self._others()], tag)
            for one, found in zip(outputs[0], targets, strict=True):
                fill(one, found)

        return self._begin(do, outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        root = opts.rootRank

        def do(tag: int) -> None:
            target = target_for(outputs[0])
            if self._index == root:
                target.copy_(flat_of(inputs[0][root]))
                self._exchange([(peer, flat_of(inputs[0][peer])) for peer in self._others()], [], tag)
            else:
                self._exchange([], [(root, target)], tag)
            fill(outputs[0], target)

        return self._begin(do, outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        name = operation_of(opts)

        def do(tag: int) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                fill(output, self._scatter([flat_of(part) for part in parts], name, tag))

        return self._begin(do, outputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        name = operation_of(opts)
        for output, one in zip(outputs, inputs, strict=True):
            require_even(one, output, self._size, "reduce_scatter_single")

        def do(tag: int) -> None:
            for output, one in zip(outputs, inputs, strict=True):
                parts = flat_of(one).split(output.numel()) if output.numel() else [flat_of(one)] * self._size
                fill(output, self._scatter(parts, name, tag))

        return self._begin(do, outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def do(tag: int) -> None:
            targets = [target_for(one) for one in outputs]
            self._exchange_all([flat_of(one) for one in inputs], targets, tag)
            for one, found in zip(outputs, targets, strict=True):
                fill(one, found)

        return self._begin(do, outputs, opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_lengths: list[int], input_lengths: list[int], opts: Any = None
    ) -> dist.Work:
        for tensor, lengths in ((output, output_lengths), (input, input_lengths)):
            if not lengths and len(tensor) % self._size:
                raise ValueError(f"all_to_all_single: {len(tensor)} rows do not divide among {self._size} workers")

        def do(tag: int) -> None:
            target = target_for(output)
            parts = cut(flat_of(input), input, input_lengths, self._size)
            self._exchange_all(parts, cut(target, output, output_lengths, self._size), tag)
            fill(output, target)

        return self._begin(do, [output], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._begin(lambda tag: self._sum(torch.zeros(1), "SUM", tag), [], opts)

    def monitored_barrier(self, *_: Any) -> None:
        self.barrier().wait()

    # torch 2.13's names of some, which 2.11 does not have
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def finish(self, transfer: LinkTransfer, limit_s: float | None) -> None:
        """Wait for a transfer; `limit_s` None: for as long as the group's own limit. Raises DistBackendError."""
        limit_s = self._timeout_s if limit_s is None else limit_s
        try:
            if self._links.wait(transfer, limit_s):
                return
        except PeerLost as error:
            raise dist.DistBackendError(f"ProcessGroup: {error}") from None
        raise dist.DistBackendError(f"a transfer timed out after {limit_s:g} s: other workers have not called it")

    def _others(self) -> list[int]:
        """The other members, beginning with the next one: so not all send to the same member first."""
        return [(self._index + step) % self._size for step in range(1, self._size)]

    def _begin(self, do: Callable[[int], None], result: Any, opts: Any) -> dist.Work:
        self._count += 1
        tag = COLLECTIVE + self._count

        @torch.inference_mode()  # only in this mode can tensors be written to that were made in it
        def run() -> None:
            do(tag)

        is_awaited = opts is not None and not getattr(opts, "asyncOp", True)
        return QueuedWork(self._queue.begin(run, result=result, is_awaited=is_awaited))

    def _exchange(self, sends: Sequence[Pair], receives: Sequence[Pair], tag: int) -> None:
        begun = [self._links.receive(peer, bytes_of(one), tag=tag) for peer, one in receives]
        begun += [self._links.send(peer, bytes_of(one), tag=tag) for peer, one in sends]
        for transfer in begun:
            self.finish(transfer, None)

    def _exchange_all(self, parts: Sequence[Tensor], targets: Sequence[Tensor], tag: int) -> None:
        targets[self._index].copy_(parts[self._index])
        others = self._others()
        self._exchange([(peer, parts[peer]) for peer in others], [(peer, targets[peer]) for peer in others], tag)

    def _rows(self, own: Tensor) -> Tensor:
        rows = torch.empty(self._size, own.numel(), dtype=own.dtype)
        rows[self._index] = own
        return rows

    def _gather(self, tensor: Tensor, out: Sequence[Tensor], tag: int) -> None:
        own, targets = flat_of(tensor), [target_for(one) for one in out]
        targets[self._index].copy_(own)
        others = self._others()
        self._exchange([(peer, own) for peer in others], [(peer, targets[peer]) for peer in others], tag)
        for one, found in zip(out, targets, strict=True):
            fill(one, found)

    def _scatter(self, parts: Sequence[Tensor], name: str, tag: int) -> Tensor:
        """Return the reduction of all members' part `index`."""
        rows = self._rows(parts[self._index])
        others = self._others()
        self._exchange([(peer, parts[peer]) for peer in others], [(peer, rows[peer]) for peer in others], tag)
        return reduced(rows.unbind(), name)

    def _sum(self, tensor: Tensor, name: str, tag: int) -> None:
        own = flat_of(tensor)
        if self._size == 1:
            return
        if self._size * own.nbytes <= DIRECT_BYTES or own.numel() < self._size:
            rows = self._rows(own)
            others = self._others()
            self._exchange([(peer, own) for peer in others], [(peer, rows[peer]) for peer in others], tag)
            fill(tensor, reduced(rows.unbind(), name))
            return
        parts, others = own.tensor_split(self._size), self._others()
        rows = dict(zip(others, self._room_for(len(others), parts[self._index]), strict=True))
        self._exchange([(peer, parts[peer]) for peer in others], list(rows.items()), tag)
        rows[self._index] = parts[self._index]
        fill(parts[self._index], reduced([rows[member] for member in range(self._size)], name))
        self._exchange([(peer, parts[self._index]) for peer in others], [(peer, parts[peer]) for peer in others], tag)
        fill(tensor, own)

    def _room_for(self, count: int, like: Tensor) -> Tensor:
        """Return rows like a tensor, in memory that stays: fresh memory would take longer than the sum."""
        num_bytes = count * like.nbytes
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes].view(like.dtype).view(count, -1)

    def _broadcast(self, tensor: Tensor, root: int, tag: int) -> None:
        """Send along a binomial tree: every member that has the tensor passes it on."""
        place, target = (self._index - root) % self._size, target_for(tensor)
        if place == 0:
            target = flat_of(tensor)
        reach = 1
        while reach <= place:
            reach *= 2
        if place:
            source = place - reach // 2
            self._exchange([], [((source + root) % self._size, target)], tag)
            fill(tensor, target)
        sends: list[Pair] = []
        while place + reach < self._size:
            sends.append(((place + reach + root) % self._size, target))
            reach *= 2
        self._exchange(sends, [], tag)


class _TransferWork(dist.Work):
    """The `Work` of a transfer between two members."""

    def __init__(
        self, group: PeerProcessGroup, transfer: LinkTransfer, moved: Tensor, tensors: list[Tensor], fills: bool = False
    ) -> None:
        super().__init__()
        self._group, self._transfer, self._moved, self._tensors, self._fills = group, transfer, moved, tensors, fills

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._group.finish(self._transfer, timeout.total_seconds() or None)
        if self._fills:
            self._fills = False
            with torch.inference_mode():
                fill(self._tensors[0], self._moved)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        return self._transfer.is_done

    def is_success(self) -> bool:
        return self._transfer.is_done and not self._transfer.error

    def result(self) -> Any:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()


def _close(links: PeerLinks, queue: OpQueue) -> None:
    queue.close()
    links.close()


def _nothing() -> None:
    """The default check: only the transfer itself ends a wait."""
