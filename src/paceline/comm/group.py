"""Process groups as Paceline uses them: collectives of tensors and small objects, over a process group of torch.

`Group` wraps a torch process group; `SingleWorkerGroup` is the group of one worker. Callers need not distinguish them.
All workers of a group must make the same calls in the same order, with tensors of the same shape and type.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import SyncError
from paceline.host_memory import free_bytes
from paceline.units import bytes_text

__all__ = [
    "CompletedTransfer",
    "Disrupted",
    "Group",
    "PeerTensor",
    "SingleWorkerGroup",
    "Transfer",
    "WorkerGroup",
    "copy_into",
]


GLOO_SUFFIX = re.compile(r"\s*GLHF!.*", re.DOTALL)

DIRECT_SUM_BYTES = 1 << 18  # of all members' tensors: up to here a sum is nothing but latency
DIRECT_BYTES = 8 << 20  # sent or received by a member at once; above it bandwidth counts, which a ring uses as well
FIRST_BYTES, LENGTH_BYTES = 4096, 8  # of an object's first message, which is enough for most objects
FIRST_PAYLOAD_BYTES = FIRST_BYTES - LENGTH_BYTES
SMALL_OBJECT_BYTES = 64 << 20  # for which every host has room
SIGNATURE_BYTES = 32  # at the beginning of an object; zeros where nothing is signed
_object_key = b""


PeerTensor = tuple[int, Tensor]  # another member's index, and the tensor that is sent to it or received from it


class Disrupted(SyncError):
    """The group has ended: a member was lost, or the run goes on with other members. Discard the transfer's result."""


class Transfer(Protocol):
    """A transfer in flight: `wait` returns when the tensor holds the result."""

    def wait(self) -> None: ...


class WorkerGroup(Protocol):
    """What `Group`, `SingleWorkerGroup` and `paceline.comm.shared_memory.shared_group.SharedGroup` have in common."""

    @property
    def index(self) -> int:
        """This worker's place in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of workers in the group."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether CPU tensors go through shared memory."""
        ...

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each member, as a number; 0 if the group does not know the hosts."""
        ...

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros, 1-D, in memory from which `all_reduce` is fastest; all workers must allocate the same."""
        ...

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        """Begin to replace `tensor` by its sum over the group, in place."""
        ...

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        """Begin to fill row k of `out` with the tensor of member k, 1-D and equally long everywhere; contiguous."""
        ...

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        """Begin to send row k to member k, and to fill row k of `out` with what it sends here; contiguous."""
        ...

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        """Fill `out[k]` with the tensor of member k; all are contiguous, of one shape; blocks."""
        ...

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        """Fill `out` with the sum over all members of `parts[index]` (`index` of this one); contiguous; blocks."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        """Send `parts[k]` to member k, and fill `out[k]` with what it sends here; contiguous; blocks."""
        ...

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        """Overwrite `tensor` with the source's, in place; blocks."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return all members' values, by index, on every worker; values are pickled; blocks."""
        ...

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        """Return the source's value on every worker; it is pickled; blocks."""
        ...

    def barrier(self) -> None:
        """Return when all members have called it."""
        ...

    def settle(self) -> None:
        """Return when everything that was begun here has ended well on this worker; otherwise raise Disrupted.

        A transfer's `wait` may be the device's alone, so a host reads no result of a device before this."""
        ...

    def close(self) -> None:
        """Release the transport; nothing may be sent afterwards."""
        ...


class CompletedTransfer:
    """A transfer that has nothing to wait for."""

    def wait(self) -> None:
        return


class SingleWorkerGroup:
    """The group of one worker."""

    index = 0
    size = 1
    shares_memory = False
    hosts = (0,)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        return CompletedTransfer()

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        out[0].copy_(tensor)
        return CompletedTransfer()

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        out.copy_(rows)
        return CompletedTransfer()

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        out[0].copy_(tensor)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        out.copy_(parts[0])

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        out[0].copy_(parts[0])

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        return

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return value

    def barrier(self) -> None:
        return

    def settle(self) -> None:
        return

    def close(self) -> None:
        return


class Group:
    """Two or more workers, over a torch process group for tensors of the CPU and of `device`.

    Objects travel as CPU tensors, so they need no GPU, and a blocking call waits on the host, not in a stream. CUDA
    tensors within an object arrive on `device`, the receiver's own.

    gloo sums and gathers in rings, whose 2 (n - 1) and n - 1 steps follow each other, and in each step the sender waits
    for the receiver's answer. Between distant hosts this latency dominates for small tensors. So each member sends
    small tensors straight to each other member, all at once.
    """

    shares_memory = False

    def __init__(
        self, process_group: dist.ProcessGroup, *, device: torch.device, objects_on: torch.device | None = None
    ) -> None:
        """`objects_on`: where CUDA tensors within objects arrive, if not on `device`."""
        self.index = process_group.rank()
        self.size = process_group.size()
        self.hosts = (0,) * self.size
        self._group: dist.ProcessGroup | None = process_group
        self.device, self.objects_on = device, objects_on or device

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        is_small = 0 < self.size * tensor.nbytes <= DIRECT_SUM_BYTES
        if tensor.device.type != "cpu" or tensor.dtype == torch.bool or not is_small:
            return self._begin_sum(tensor, what)
        own = tensor.detach().reshape(-1)
        rows = torch.empty(self.size, own.numel(), dtype=own.dtype)
        return _GatherThenSum(self.begin_all_gather(own, rows, what=what), rows, tensor)

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        if tensor.device.type != "cpu":
            return self._begin_gather(tensor, out, what)
        own, out = tensor.detach().view(torch.uint8), out.view(torch.uint8)  # gloo does not know all types
        if self.size == 2 or not 0 < self.size * own.numel() <= DIRECT_BYTES:
            return self._begin_gather(own, out, what)
        return self.begin_all_to_all(own.expand(self.size, -1).contiguous(), out, what=what)

    def _begin_sum(self, tensor: Tensor, what: str) -> Transfer:
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            raise _lost(what, error) from error
        return _PendingCollective(work, what) if work is not None else CompletedTransfer()

    def _begin_gather(self, tensor: Tensor, out: Tensor, what: str) -> Transfer:
        try:
            # `all_gather_single` is its name from torch 2.13 on, which warns of the other one.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work = gather(out.view(-1), tensor, group=self._group, async_op=True)
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            raise _lost(what, error) from error
        return _PendingCollective(work, what) if work is not None else CompletedTransfer()

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        try:
            work = dist.all_to_all_single(out.view(-1), rows.view(-1), group=self._group, async_op=True)
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            raise _lost(what, error) from error
        return _PendingCollective(work, what) if work is not None else CompletedTransfer()

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        self._do(lambda group: group.allgather([list(out)], [tensor]), what)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        self._do(lambda group: group.reduce_scatter([out], [list(parts)]), what)

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        sent = torch.cat([part.reshape(-1) for part in parts])
        received = sent.new_empty(sum(one.numel() for one in out))
        lengths = [[one.numel() for one in side] for side in (out, parts)]
        self._do(lambda group: group.alltoall_base(received, sent, *lengths), what)
        for one, found in zip(out, received.split(lengths[0]), strict=True):
            one.copy_(found.view(one.shape))

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        try:
            dist.broadcast(tensor, group=self._group, group_src=source)
        except RuntimeError as error:
            raise _lost(what, error) from error

    def gather_objects(self, value: Any) -> list[Any]:
        payload = to_bytes(value)
        firsts = torch.empty(self.size, FIRST_BYTES, dtype=torch.uint8)
        self.begin_all_gather(_first_message(payload), firsts, what="gathered objects").wait()
        parts: list[Tensor] = []
        for index, first in enumerate(firsts):
            is_own = index == self.index
            part, rest = (payload, payload[FIRST_PAYLOAD_BYTES:]) if is_own else _parse_first(first, index)
            if len(rest):
                self.broadcast(rest, source=index, what="gathered objects")
            parts.append(part)
        return [from_bytes(part, self.objects_on) for part in parts]

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        is_source = self.index == source
        payload = to_bytes(value if is_source else None)
        first = _first_message(payload)
        self.broadcast(first, source=source, what="broadcast object")
        part, rest = (payload, payload[FIRST_PAYLOAD_BYTES:]) if is_source else _parse_first(first, source)
        if len(rest):
            self.broadcast(rest, source=source, what="broadcast object")
        return value if is_source else from_bytes(part, self.objects_on)

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1), what="barrier").wait()

    def settle(self) -> None:
        return  # its waits are the host's; in a stream, what comes next waits, and members do not change

    def post(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], *, tag: int) -> list[dist.Work]:
        """Begin transfers with single members, all at once; return one for each, or, on a GPU, one for all.

        Do not wait for them with a timeout: when one expires, gloo closes all connections.
        """
        group: Any = self._group
        if group is None:
            raise SyncError("this group of workers was closed: nothing can be sent any more")
        if self.device.type == "cpu":
            begun = [group.recv([tensor], peer, tag) for peer, tensor in receives]
            return begun + [group.send([tensor], peer, tag) for peer, tensor in sends]
        each = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
        each += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
        return dist.batch_isend_irecv(each)

    def close(self) -> None:
        # The last reference joins gloo's threads. One that still drops a finished transfer's tensors while Python is
        # being finalized would end the process by std::terminate.
        self._group = None

    def _do(self, start: Callable[[Any], dist.Work], what: str) -> None:
        """Run a collective to its end; on a GPU, until the stream's later work waits for it."""
        try:
            start(self._group).wait()
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            raise _lost(what, error) from error


class _PendingCollective:
    """A pending collective; a lost peer surfaces in `wait` as SyncError."""

    def __init__(self, work: dist.Work, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(self._what, error) from error


class _GatherThenSum:
    """A transfer of one row from each member, whose sum is written to a tensor. All members add in the same order, so
    they have the same bits."""

    def __init__(self, transfer: Transfer, rows: Tensor, tensor: Tensor) -> None:
        self._transfer, self._rows, self._tensor = transfer, rows, tensor

    def wait(self) -> None:
        self._transfer.wait()
        first, *others = self._rows.unbind()
        for row in others:
            first += row
        copy_into(self._tensor, first.view(self._tensor.size()))


def _first_message(payload: Tensor) -> Tensor:
    """Return the first message of an object: its number of bytes, and as many of them as fit."""
    first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
    first[:LENGTH_BYTES] = torch.tensor([payload.numel()]).view(torch.uint8)
    first[LENGTH_BYTES : LENGTH_BYTES + payload.numel()] = payload[:FIRST_PAYLOAD_BYTES]
    return first


def _parse_first(first: Tensor, source: int) -> tuple[Tensor, Tensor]:
    """Return an object's bytes, as far as they have arrived, and the part of them that is still to be filled."""
    length = int(first[:LENGTH_BYTES].view(torch.int64))
    part = room_for_object(length, f"an object of worker {source}")
    part[:FIRST_PAYLOAD_BYTES] = first[LENGTH_BYTES : LENGTH_BYTES + length]
    return part, part[FIRST_PAYLOAD_BYTES:]


def room_for_object(num_bytes: int, what: str) -> Tensor:
    """Return room for so many bytes, which another worker has announced. Raises SyncError where this host has less."""
    free = free_bytes() if num_bytes > SMALL_OBJECT_BYTES else None
    if num_bytes < 0 or (free is not None and num_bytes > free):
        raise SyncError(
            f"{what} is announced with {num_bytes:,} bytes"
            + ("" if free is None else f", and this host has {bytes_text(free)} of memory left")
        )
    return torch.empty(num_bytes, dtype=torch.uint8)


def _lost(what: str, error: RuntimeError) -> SyncError:
    return SyncError(f"lost contact with a peer during {what}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line of torch's message, without gloo's greeting."""
    lines = GLOO_SUFFIX.sub("", str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def sign_objects(key: bytes) -> None:
    """Sign objects that this process sends, and refuse those that are not signed: for groups over a back end that
    accepts connections of any process, such as gloo. All workers need the same key."""
    global _object_key
    _object_key = key


def to_bytes(value: Any) -> Tensor:
    stream = io.BytesIO(bytes(SIGNATURE_BYTES))
    stream.seek(SIGNATURE_BYTES)
    torch.save(value, stream, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    payload = torch.from_numpy(np.frombuffer(stream.getvalue(), dtype=np.uint8).copy())
    if _object_key:
        payload[:SIGNATURE_BYTES] = torch.frombuffer(bytearray(_signature(payload)), dtype=torch.uint8)
    return payload


def from_bytes(payload: Tensor, device: torch.device) -> Any:
    def place(storage: Any, location: str) -> Any:
        return storage.to(device=device) if location.startswith("cuda") else storage

    if _object_key and not hmac.compare_digest(payload[:SIGNATURE_BYTES].numpy().tobytes(), _signature(payload)):
        raise SyncError(
            "an object arrived that no worker of this run has sent: another program reaches the workers' ports. "
            "Nothing in it was read"
        )
    # The bytes come from a worker of the same run: over a connection that has proved it, or signed.
    pickled = io.BytesIO(payload[SIGNATURE_BYTES:].numpy().tobytes())
    return torch.load(pickled, map_location=place, weights_only=False)


def _signature(payload: Tensor) -> bytes:
    made = hmac.new(_object_key, b"paceline object\0", hashlib.sha256)  # no signature of another kind is one of these
    made.update(payload[SIGNATURE_BYTES:].numpy().data)
    return made.digest()


def total(group: WorkerGroup, values: Sequence[float], *, what: str, device: torch.device | None = None) -> list[float]:
    """Return the element-wise sums of `values` over the group, in float64; blocks."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    group.all_reduce(sums, what=what).wait()
    return sums.tolist()


@torch.inference_mode()  # only in this mode can tensors be written to that were made in it, as in evaluation
def copy_into(target: Tensor, numbers: Tensor) -> None:
    """Fill `target`."""
    target.copy_(numbers)
