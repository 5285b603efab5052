"""A stand-in for NCCL: a communicator that behaves as its documentation says when members are lost, with CPU tensors.

What is kept of the documentation ("Fault Tolerance", and `ncclCommAbort`, `ncclCommInitRankConfig`,
`ncclCommGetAsyncError` in "Communicator Creation and Management Functions"):

 - Collectives are enqueued, and run one after the other, on a thread that stands for the stream.
 - A work's `wait` returns at once: it has the stream wait, not the host. What comes next in the stream, or reads a
   number on the host, waits (`FakeWork.reach`, `read_after_waits`). Who reads without it finds nan.
 - One in which a member is lost never ends, and no error tells so. What waits for it waits for ever.
 - `abort` ends what hangs here, on this member only. Its tensors hold anything then (nan), and its works count as
   completed: nothing marks them.
 - After it, every call raises.
 - `connect` waits for ever for a member that does not come, unless it is aborted.

`quiet=False`: a closed connection is told by `error`, as NCCL does where its network notices one.
`error_completes=True`: a collective in which a member is lost ends by itself, with anything as result. Its work then
raises RuntimeError when it is asked whether it has completed, as torch's watch over NCCL has it.
`late_connect=True`: nothing ends a `connect` but the others, or `LATE_S`, and `abort` waits for it. So it is where
torch waits for members with its lock held.
`abort_fails`, when set: an abort raises, and what it was to end does not count as completed.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.devices import abortable_group

__all__ = ["FakeNccl", "read_after_waits"]

LATE_S = 60.0


class FakeWork:
    """A collective in the queue."""

    def __init__(self, do: Callable[[], None], results: Sequence[Tensor]) -> None:
        self.do, self.results = do, results
        self.ended = threading.Event()
        self.failure: str | None = None

    def wait(self) -> None:
        """Have the stream wait: returns at once."""

    def reach(self) -> None:
        """Wait as the stream does, before what comes next in it; an abort ends that without an error."""
        while not self.ended.wait(0.005):
            pass

    def is_completed(self) -> bool:
        if self.ended.is_set() and self.failure is not None:
            raise RuntimeError(self.failure)
        return self.ended.is_set()


class _Reached(abortable_group._DeviceTransfer):
    """A transfer after whose `wait` the stream's next work, or a host that reads, waits for the collective."""

    _copies: Sequence[tuple[Tensor, Tensor]]

    def wait(self) -> None:
        copies, self._copies = self._copies, ()
        super().wait()
        work: Any = self._work
        work.reach()
        for target, found in copies:
            target.detach().copy_(found)


def read_after_waits() -> tuple[Any, str, Any]:
    """What to patch where tensors are used after `wait`, without `settle`: owner, name and value.

    All that transfers find out themselves comes before the host waits for the device, as with NCCL."""
    return abortable_group, "_DeviceTransfer", _Reached


class FakeNccl:
    """One member's end. Member 0 takes what all send, and answers each with everything."""

    def __init__(
        self,
        store: dist.Store,
        *,
        index: int,
        size: int,
        quiet: bool = True,
        error_completes: bool = False,
        late_connect: bool = False,
        **_: Any,
    ) -> None:
        self._store, self._index, self._size, self._is_quiet = store, index, size, quiet
        self._error_completes, self._connects_late = error_completes, late_connect
        self._lock = threading.Lock()  # of a late connect
        self.abort_fails = False
        self._sockets: dict[int, socket.socket] = {}
        self._aborted = threading.Event()
        self._error: str | None = None
        self._num_begun = self._num_ended = 0
        self._queue: queue.SimpleQueue[FakeWork | None] = queue.SimpleQueue()
        self._stream = threading.Thread(target=self._run, name="fake-stream", daemon=True)

    def connect(self) -> None:
        with self._lock if self._connects_late else contextlib.nullcontext():
            self._connect(time.monotonic() + LATE_S)

    def _connect(self, deadline: float) -> None:
        if self._index == 0:
            name = f"\0fake-nccl-{secrets.token_hex(8)}"  # an abstract name: nothing is left in the file system
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(name)
                listener.listen(self._size)
                listener.settimeout(0.01)
                self._store.set("fake_nccl", name.removeprefix("\0"))
                while len(self._sockets) < self._size - 1:
                    self._refuse_aborted()
                    if time.monotonic() > deadline:
                        raise RuntimeError("NCCL timeout: a member has not come")
                    try:
                        link, _ = listener.accept()
                    except TimeoutError:
                        continue
                    link.setblocking(True)
                    self._sockets[struct.unpack("<q", _take(link, 8))[0]] = link
        else:
            link = socket.socket(socket.AF_UNIX)
            link.connect(b"\0" + self._store.get("fake_nccl"))
            link.sendall(struct.pack("<q", self._index))
            self._sockets[0] = link
        for other in sorted(self._sockets):  # all have come: member 0 lets the others go on
            if self._index == 0:
                self._sockets[other].sendall(b"!")
            elif not self._received(lambda: _take(self._sockets[0], 1)):
                raise RuntimeError("the communicator was aborted while it was made")
        self._refuse_aborted()
        self._stream.start()

    def all_reduce(self, tensor: Tensor) -> FakeWork:
        own = tensor.clone()
        return self._enqueue(lambda: tensor.copy_(_sum(self._everything(own))), [tensor])

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor]) -> FakeWork:
        own = tensor.clone()

        def do() -> None:
            for target, part in zip(out, self._everything(own), strict=True):
                target.copy_(part)

        return self._enqueue(do, out)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor) -> FakeWork:
        given = torch.stack(list(parts))

        def do() -> None:
            out.copy_(_sum([rows[self._index] for rows in self._everything(given)]))

        return self._enqueue(do, [out])

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor]) -> FakeWork:
        given = [part.clone() for part in parts]

        def do() -> None:
            for target, rows in zip(out, self._everything(given), strict=True):
                target.copy_(rows[self._index])

        return self._enqueue(do, out)

    def broadcast(self, tensor: Tensor, source: int) -> FakeWork:
        own = tensor.clone()
        results = [] if source == self._index else [tensor]  # the source's own is only read

        def do() -> None:
            sent = self._everything(own)[source]
            for target in results:
                target.copy_(sent)

        return self._enqueue(do, results)

    @property
    def is_busy(self) -> bool:
        """Whether a collective has not ended."""
        return self._num_begun > self._num_ended

    def error(self) -> str | None:
        return None if self._is_quiet or self._aborted.is_set() else self._error

    def abort(self) -> None:
        """End what hangs here, and wait for it."""
        with self._lock if self._connects_late else contextlib.nullcontext():
            self._aborted.set()
        self._queue.put(None)
        for link in list(self._sockets.values()):
            with contextlib.suppress(OSError):  # the other end is gone
                link.shutdown(socket.SHUT_RDWR)
        if self._stream.is_alive():
            self._stream.join()
        for link in self._sockets.values():
            link.close()
        if self.abort_fails:
            raise RuntimeError("NCCL error: unhandled cuda error")

    def _enqueue(self, do: Callable[[], Any], results: Sequence[Tensor]) -> FakeWork:
        self._refuse_aborted()
        work = FakeWork(do, results)
        _fill(results)  # what is read before it has ended is anything
        self._num_begun += 1
        self._queue.put(work)
        return work

    def _refuse_aborted(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("NCCL error: the communicator was aborted")

    @torch.inference_mode()
    def _run(self) -> None:
        """The stream: one collective after the other; after an abort each ends at once, with anything as result."""
        while (work := self._queue.get()) is not None or not self._aborted.is_set():
            if work is not None:
                if not self._received(work.do) and not self._aborted.is_set():
                    work.failure = f"NCCL's watch: {self._error}"
                self._end(work)
        while not self._queue.empty():
            if (work := self._queue.get()) is not None:
                self._end(work)

    def _end(self, work: FakeWork) -> None:
        if self._aborted.is_set() and self.abort_fails:
            work.failure = "NCCL's watch: unhandled cuda error"
        if self._aborted.is_set() or work.failure is not None:
            _fill(work.results)
        self._num_ended += 1
        work.ended.set()

    def _received(self, do: Callable[[], Any]) -> bool:
        """Do something that needs all members; False: aborted. Where one is lost, nothing ends it but an abort, or
        with `error_completes` an error."""
        try:
            do()
        except (OSError, EOFError) as lost:
            self._error = f"a connection was closed: {type(lost).__name__}"
            if not (self._error_completes and self._stream.is_alive()):
                self._aborted.wait()
            return False
        return True

    def _everything(self, own: Any) -> list[Any]:
        """What each member gives, in their order."""
        if self._index == 0:
            parts = [own, *(_receive(self._sockets[other]) for other in range(1, self._size))]
            for other in range(1, self._size):
                _send(self._sockets[other], parts)
            return [_receive_back(one) for one in parts]
        _send(self._sockets[0], own)
        return _receive(self._sockets[0])


def _fill(results: Sequence[Tensor]) -> None:
    for tensor in results:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In the order of the members, so that all of them have the same bits."""
    return functools.reduce(torch.add, parts)


def _packed(value: Any) -> Any:
    """Tensors as numpy arrays of bytes, with type and shape."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return ("tensor", flat.tobytes(), str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return [_packed(one) for one in value]


def _unpacked(value: Any) -> Any:
    if isinstance(value, tuple):
        _, data, dtype, shape = value
        flat = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        return flat.view(getattr(torch, dtype)).view(shape)
    return [_unpacked(one) for one in value]


def _receive_back(value: Any) -> Any:
    """The same copy that the others get."""
    return _unpacked(_packed(value))


def _send(link: socket.socket, value: Any) -> None:
    data = pickle.dumps(_packed(value))
    link.sendall(struct.pack("<q", len(data)) + data)


def _receive(link: socket.socket) -> Any:
    (length,) = struct.unpack("<q", _take(link, 8))
    return _unpacked(pickle.loads(_take(link, length)))


def _take(link: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = link.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
