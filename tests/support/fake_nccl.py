"""A stand-in for NCCL: a communicator that behaves as its documentation says when members are lost, with CPU tensors.

What is kept of the documentation ("Fault Tolerance", and `ncclCommAbort`, `ncclCommInitRankConfig`,
`ncclCommGetAsyncError` in "Communicator Creation and Management Functions"):

 - Collectives are enqueued, and run one after the other, on a thread that stands for the stream.
 - One in which a member is lost never ends, and no error tells so. What waits for it waits for ever.
 - `abort` ends what hangs here, on this member only. Its tensors hold anything then (nan), and its works count as
   completed: nothing marks them.
 - After it, every call raises.
 - `connect` waits for ever for a member that does not come, unless it is aborted.

`quiet=False`: a closed connection is told by `error`, as NCCL does where its network notices one.
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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["FakeNccl"]


class FakeWork:
    """A collective in the queue."""

    def __init__(self, do: Callable[[], None], results: Sequence[Tensor], aborted: threading.Event) -> None:
        self.do, self.results, self._aborted = do, results, aborted
        self.ended = threading.Event()

    def wait(self) -> None:
        """Wait as the stream would, so that what comes next finds the numbers; an abort ends that without an error."""
        while not self.ended.wait(0.005):
            pass

    def is_completed(self) -> bool:
        return self.ended.is_set()


class FakeNccl:
    """One member's end. Member 0 takes what all send, and answers each with everything."""

    def __init__(self, store: dist.Store, *, index: int, size: int, quiet: bool = True, **_: Any) -> None:
        self._store, self._index, self._size, self._is_quiet = store, index, size, quiet
        self._sockets: dict[int, socket.socket] = {}
        self._aborted = threading.Event()
        self._error: str | None = None
        self._num_begun = self._num_ended = 0
        self._queue: queue.SimpleQueue[FakeWork | None] = queue.SimpleQueue()
        self._stream = threading.Thread(target=self._run, name="fake-stream", daemon=True)

    def connect(self) -> None:
        if self._index == 0:
            name = f"\0fake-nccl-{secrets.token_hex(8)}"  # an abstract name: nothing is left in the file system
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(name)
                listener.listen(self._size)
                listener.settimeout(0.01)
                self._store.set("fake_nccl", name.removeprefix("\0"))
                while len(self._sockets) < self._size - 1:
                    self._refuse_aborted()
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
        def do() -> None:
            parts = self._everything(tensor)
            tensor.copy_(_sum(parts))

        return self._enqueue(do, [tensor])

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor]) -> FakeWork:
        def do() -> None:
            for target, part in zip(out, self._everything(tensor), strict=True):
                target.copy_(part)

        return self._enqueue(do, out)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor) -> FakeWork:
        def do() -> None:
            own = [rows[self._index] for rows in self._everything(torch.stack(list(parts)))]
            out.copy_(_sum(own))

        return self._enqueue(do, [out])

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor]) -> FakeWork:
        def do() -> None:
            for target, rows in zip(out, self._everything(list(parts)), strict=True):
                target.copy_(rows[self._index])

        return self._enqueue(do, out)

    def broadcast(self, tensor: Tensor, source: int) -> FakeWork:
        return self._enqueue(lambda: tensor.copy_(self._everything(tensor)[source]), [tensor])

    @property
    def is_busy(self) -> bool:
        """Whether a collective has not ended."""
        return self._num_begun > self._num_ended

    def error(self) -> str | None:
        return None if self._is_quiet or self._aborted.is_set() else self._error

    def abort(self) -> None:
        """End what hangs here, and wait for it."""
        self._aborted.set()
        self._queue.put(None)
        for link in list(self._sockets.values()):
            with contextlib.suppress(OSError):  # the other end is gone
                link.shutdown(socket.SHUT_RDWR)
        if self._stream.is_alive():
            self._stream.join()
        for link in self._sockets.values():
            link.close()

    def _enqueue(self, do: Callable[[], Any], results: Sequence[Tensor]) -> FakeWork:
        self._refuse_aborted()
        work = FakeWork(do, results, self._aborted)
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
                self._received(work.do)
                self._end(work)
        while not self._queue.empty():
            if (work := self._queue.get()) is not None:
                self._end(work)

    def _end(self, work: FakeWork) -> None:
        if self._aborted.is_set():
            for tensor in work.results:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        self._num_ended += 1
        work.ended.set()

    def _received(self, do: Callable[[], Any]) -> bool:
        """Do something that needs all members; False: aborted. Where one is lost, nothing ends it but an abort."""
        try:
            do()
        except (OSError, EOFError) as lost:
            self._error = f"a connection was closed: {type(lost).__name__}"
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
