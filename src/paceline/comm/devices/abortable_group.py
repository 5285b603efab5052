"""The group of a generation whose workers have a device each: collectives on a communicator, aborted from outside.

A collective on a device ends never when a member is lost, and the host may be inside a call that waits for the device
(a loss that is read, say). So a thread watches: when the generation is over, or nothing has come for too long, it notes
why, and then aborts the communicator. The kernels end, the host's call returns, and whatever it returns is void,
because the note was there before. That order is what makes a result that counts recognizable.

Waits for a transfer are the stream's, not the host's, so the device has always work. The host waits before everything
that it says to the others: a vote, an object or a barrier begins when all collectives before it have ended well. So no
member votes for a sum that it does not have.

Communicators are never repaired. Each member aborts its own, and the next generation makes another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.devices.communicator import Communicator, CommunicatorWork
from paceline.comm.devices.routed_group import RoutedGroup
from paceline.comm.group import CompletedTransfer, Disrupted, Transfer, WorkerGroup, first_line
from paceline.errors import SyncError
from paceline.host_memory import is_out_of_memory

__all__ = ["AbortableGroup"]

WATCH_S = 0.02  # between two looks of the thread
SPIN_S, REST_S = 0.0001, 0.001  # between two looks of a waiting host: at first, and after SPINS of them
SPINS = 50
ABORT_S = 30.0  # for a communicator to end what runs: after that its tensors are used again


@dataclasses.dataclass(frozen=True, slots=True)
class _Enqueued:
    """A collective that has not ended, as far as the host knows."""

    work: CommunicatorWork
    what: str
    deadline: float
    kept: Sequence[Tensor]  # the device reads and writes them until it ends


class AbortableGroup(RoutedGroup):
    """Two or more workers: tensors of `device` on a communicator that is connected, everything else on `base`.

    `check` raises Disrupted when the generation is over; the watching thread calls it, too.
    """

    def __init__(
        self,
        base: WorkerGroup,
        communicator: Communicator,
        *,
        device: torch.device,
        check: Callable[[], None],
        timeout_s: float,
    ) -> None:
        super().__init__(base, device=device)
        self._communicator, self._check, self._timeout_s = communicator, check, timeout_s
        self._pending: deque[_Enqueued] = deque()
        self._failure: SyncError | None = None  # set before the communicator is aborted
        self._abort_failure: str | None = None
        self._ends = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="paceline-watch-device", daemon=True)
        self._watcher.start()

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        if not self._is_on_device(tensor):
            return super().all_reduce(tensor, what=what)
        if tensor.numel() == 0:
            return CompletedTransfer()
        if tensor.is_contiguous():
            return self._begin(lambda: self._communicator.all_reduce(tensor.detach()), what, [tensor])
        flat = tensor.detach().contiguous()
        return self._begin(lambda: self._communicator.all_reduce(flat), what, [flat], [(tensor, flat)])

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        if not self._is_on_device(tensor):
            return super().begin_all_gather(tensor, out, what=what)
        return self._begin(lambda: self._communicator.all_gather(tensor, out.unbind()), what, [tensor, out])

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        if not self._is_on_device(rows):
            return super().begin_all_to_all(rows, out, what=what)
        return self._begin(lambda: self._communicator.all_to_all(rows.unbind(), out.unbind()), what, [rows, out])

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        if not self._is_on_device(tensor):
            super().all_gather(tensor, out, what=what)
            return
        self._begin(lambda: self._communicator.all_gather(tensor, out), what, [tensor, *out]).wait()

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        if not self._is_on_device(out):
            super().reduce_scatter(parts, out, what=what)
            return
        self._begin(lambda: self._communicator.reduce_scatter(parts, out), what, [*parts, out]).wait()

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        if not self._is_on_device(parts[0]):
            super().all_to_all(parts, out, what=what)
            return
        self._begin(lambda: self._communicator.all_to_all(parts, out), what, [*parts, *out]).wait()

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        if not self._is_on_device(tensor):
            super().broadcast(tensor, source=source, what=what)
            return
        self._begin(lambda: self._communicator.broadcast(tensor.detach(), source), what, [tensor]).wait()

    def settle(self) -> None:
        """Return when every collective so far has ended well on this member's device; otherwise raise Disrupted."""
        looks = 0
        while self._pending:
            self.raise_if_over()
            if self._has_ended(self._pending[0]):
                self._pending.popleft()
                continue
            looks += 1
            time.sleep(SPIN_S if looks < SPINS else REST_S)
        self.raise_if_over()  # what was aborted counts as completed, too
        super().settle()

    def raise_if_over(self) -> None:
        """Raise why the communicator was aborted, or is about to be."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def close(self) -> None:
        """Abort the communicator, and wait until nothing of it runs: the next one may use the same tensors. Raises
        SyncError where the device still may write to some of them; these are kept then."""
        self._end(Disrupted("this group of workers was closed: nothing can be sent any more"))
        self._watcher.join(ABORT_S)
        super().close()
        if self._watcher.is_alive() or self._abort_failure is not None:
            with contextlib.suppress(SyncError):
                self._drop_ended()
            if self._pending:
                how = f" ({self._abort_failure})" if self._abort_failure else f" within {ABORT_S:g} s"
                raise SyncError(  # its first words say that the program did nothing wrong: the others go on
                    f"lost contact with a peer, and this worker's device did not end its collectives{how}, "
                    f"{self._pending[0].what} for one. So its tensors may still be written: this worker has to end; "
                    "the others go on without it"
                )
        self._pending.clear()

    def _for_host(self, tensor: Tensor | None) -> WorkerGroup:
        self.settle()
        return self.base

    def _begin(
        self,
        start: Callable[[], CommunicatorWork],
        what: str,
        kept: Sequence[Tensor],
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Transfer:
        self.raise_if_over()
        try:
            work = start()
        except RuntimeError as error:  # torch has no narrower type; the communicator may have been aborted meanwhile
            if is_out_of_memory(error):  # no member is lost: with fewer samples there would be room
                raise
            raise self._end(Disrupted(f"lost contact with a peer during {what}: {first_line(error)}")) from error
        self._pending.append(_Enqueued(work, what, time.monotonic() + self._timeout_s, kept))
        self._drop_ended()
        return _DeviceTransfer(self, work, copies)

    def _drop_ended(self) -> None:
        """Forget collectives that have ended, so that their tensors are freed; an abort is found by `settle`."""
        while self._pending and self._has_ended(self._pending[0]):
            self._pending.popleft()

    def _has_ended(self, one: _Enqueued) -> bool:
        """Whether the device is done with it. Raises why the generation is over, where it has ended by an error."""
        try:
            return one.work.is_completed()
        except RuntimeError as error:
            raise self._end(Disrupted(f"lost contact with a peer in {one.what}: {first_line(error)}")) from error

    def _end(self, failure: SyncError) -> SyncError:
        """Note why the generation's communicator is of no use any more, and have the thread abort it. Returns what to
        raise: the first such reason."""
        if self._failure is None:
            self._failure = failure
        self._ends.set()
        return type(self._failure)(str(self._failure))

    def _watch(self) -> None:
        while not self._ends.wait(WATCH_S):
            try:
                self._check()
                self._look_for_errors()
            except SyncError as failure:
                self._end(failure)
            except Exception as error:  # whatever the look raises: the training thread must not wait for ever
                self._end(SyncError(f"the watch over this worker's device has failed: {first_line(error)}"))
        try:
            self._communicator.abort()
        except Exception as error:  # torch raises what NCCL returns
            self._abort_failure = first_line(error)

    def _look_for_errors(self) -> None:
        error = self._communicator.error()
        if error is not None:
            raise Disrupted(f"lost contact with a peer: {error}")
        try:
            oldest = self._pending[0]
        except IndexError:
            return
        if not self._has_ended(oldest) and time.monotonic() > oldest.deadline:
            raise SyncError(f"waited too long for the other workers in {oldest.what}")


class _DeviceTransfer:
    """A collective under way: `wait` has the current stream wait, and raises what is known on the host by then."""

    def __init__(
        self, group: AbortableGroup, work: CommunicatorWork, copies: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._group, self._work, self._copies = group, work, copies

    def wait(self) -> None:
        self._group.raise_if_over()
        try:
            self._work.wait()
        except RuntimeError as error:
            self._group.raise_if_over()
            raise Disrupted(f"lost contact with a peer: {first_line(error)}") from error
        self._group.raise_if_over()
        copies, self._copies = self._copies, ()
        for target, found in copies:
            target.detach().copy_(found)
