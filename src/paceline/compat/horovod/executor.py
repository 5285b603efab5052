"""Carries out verdicts, in their order, on the tensors that this worker has submitted.

A thread that waits for a result does it itself, so no other thread has to wake up; while none waits, a thread of the
executor does.

A member that has joined takes part in all-reduces with zeros. Tensors on a GPU are copied into host memory and back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.compat.horovod.errors import HorovodInternalError
from paceline.compat.horovod.member_group import MemberGroup
from paceline.compat.horovod.pending_op import PendingOp
from paceline.compat.horovod.requests import Kind, OpVerdict, dtype_of

__all__ = ["Executor"]

log = logging.getLogger("paceline.horovod")


class Executor:
    """`take(set_id, name)` hands over this worker's operation, None where it has submitted none. `meet(set_id, ranks)`
    makes the group of a process set. `fail(reason)` is told what broke a collective, and `observe` when one runs."""

    def __init__(
        self,
        *,
        rank: int,
        take: Callable[[int, str], PendingOp | None],
        meet: Callable[[int, Sequence[int]], MemberGroup],
        fail: Callable[[str], None],
        observe: Callable[[OpVerdict, float, float], None],
    ) -> None:
        self._rank, self._take, self._meet, self._fail, self._observe = rank, take, meet, fail, observe
        self._groups: dict[int, MemberGroup] = {}
        self._news = threading.Condition()
        self._queue: deque[OpVerdict | None] = deque()  # None: the end
        self._is_busy, self._num_waiting = False, 0  # a verdict is being carried out; threads that wait for a result
        self._running: list[PendingOp] = []
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._serve, name="paceline-horovod", daemon=True)
        self.has_ended = threading.Event()

    def begin(self, group: MemberGroup) -> None:
        """Start the thread; `group`: of all workers."""
        self._groups[0] = group
        self._thread.start()

    def follow(self, verdict: OpVerdict) -> None:
        """Have a verdict carried out after those before it."""
        with self._news:
            self._queue.append(verdict)
            self._news.notify_all()

    def help_until_done(self, op: PendingOp) -> None:
        """Carry out verdicts in the calling thread until an operation is done."""
        while not op.is_done:
            with self._news:
                self._num_waiting += 1
                try:
                    self._news.wait_for(lambda: op.is_done or self._has_work())
                finally:
                    self._num_waiting -= 1
                if op.is_done:
                    self._news.notify_all()  # the next verdict is the thread's again
                    return
                verdict = self._begin_next()
            if verdict is not None:
                self._carry_out(verdict)

    def end(self) -> None:
        """End the thread after what is in the queue."""
        with self._news:
            self._queue.append(None)
            self._news.notify_all()

    def abort(self, error: HorovodInternalError) -> None:
        """Fail the operation that runs, and end the thread; it leaves all groups."""
        for op in list(self._running):
            op.fail(error)
        for group in list(self._groups.values()):
            group.abort()
        with self._news:
            self._queue.clear()
        self.end()

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._has_end() or (self._has_work() and not self._num_waiting))
                    if self._has_end():
                        return
                    verdict = self._begin_next()
                if verdict is not None:
                    self._carry_out(verdict)
        finally:
            for group in self._groups.values():
                group.close()
            self.has_ended.set()

    def _has_end(self) -> bool:
        """Whether the thread is to end now."""
        return not self._is_busy and bool(self._queue) and _is_end(self._queue[0])

    def _has_work(self) -> bool:
        return not self._is_busy and bool(self._queue) and not _is_end(self._queue[0])

    def _begin_next(self) -> OpVerdict | None:
        self._is_busy = True
        return self._queue.popleft()

    def _carry_out(self, verdict: OpVerdict) -> None:
        try:
            if verdict.kind != Kind.FAILED:
                self._follow_one(verdict)
        finally:
            with self._news:
                self._is_busy = False
                self._news.notify_all()

    def _follow_one(self, verdict: OpVerdict) -> None:
        names = verdict.names or (Kind.JOIN,)
        ops = [self._take(verdict.set_id, name) for name in names]
        self._running = [op for op in ops if op is not None]
        if verdict.error:
            for op in self._running:
                op.fail(HorovodInternalError(verdict.error))
            return
        began = time.perf_counter()
        try:
            # Only in inference mode can tensors be written to that were made in it; results are made outside.
            with torch.no_grad():
                self._run(verdict, ops)
        except BaseException as error:  # of any kind: it is raised where the result is waited for
            reason = f"{verdict.kind} of {', '.join(names)[:200]} has failed: {str(error) or type(error).__name__}"
            for op in self._running:
                op.fail(HorovodInternalError(reason))
            self._fail(reason)
            if not isinstance(error, Exception):  # an interrupt of the thread that helps: others may wait as well
                raise
        finally:
            self._running = []
        self._observe(verdict, began, time.perf_counter())

    def _run(self, verdict: OpVerdict, ops: Sequence[PendingOp | None]) -> None:
        op = ops[0]
        if verdict.kind == Kind.ALLREDUCE:
            self._all_reduce(verdict, ops)
            return
        if verdict.kind == Kind.ADD_SET:
            if verdict.value >= 0 and self._rank in verdict.ranks:
                self._groups[verdict.value] = self._meet(verdict.value, verdict.ranks)
            result: object = verdict.value
        elif verdict.kind == Kind.REMOVE_SET:
            if (group := self._groups.pop(verdict.value, None)) is not None:
                group.close()
            result = verdict.value
        elif verdict.kind == Kind.JOIN:
            result = verdict.value
        elif verdict.kind == Kind.BARRIER:
            self._groups[verdict.set_id].barrier()
            result = None
        elif op is None:
            raise RuntimeError(f"rank {self._rank} has not submitted {verdict.names}")
        else:
            result = self._move(verdict, op)
        if op is not None:
            op.complete(result)

    def _move(self, verdict: OpVerdict, op: PendingOp) -> object:
        """Run an operation that moves tensors, and return its result."""
        group = self._groups[verdict.set_id]
        op.settle_inputs()
        devices = [tensor.device for tensor in op.inputs]
        inputs = [tensor.detach().cpu().contiguous() for tensor in op.inputs]
        if verdict.kind == Kind.BROADCAST:
            for given, target in zip(inputs, op.outputs, strict=True):
                row = _row_of(target, given)
                group.broadcast(row, verdict.root)
                _write(target, row)
            return _as_given(op, op.outputs)
        if verdict.kind == Kind.ALLGATHER:
            found = [group.all_gather(one, lengths) for one, lengths in zip(inputs, verdict.lengths, strict=True)]
        elif verdict.kind == Kind.ALLTOALL:
            found = [group.all_to_all(one, verdict.lengths) for one in inputs]
        else:
            found = [
                group.reduce_scatter(
                    one, reduction=verdict.reduction, prescale=verdict.prescale, postscale=verdict.postscale
                )
                for one in inputs
            ]
        results = [one.to(device) for one, device in zip(found, devices, strict=True)]
        if verdict.kind == Kind.ALLTOALL:
            return results[0], torch.tensor([row[group.index] for row in verdict.lengths], dtype=torch.int32)
        return _as_given(op, results)

    def _all_reduce(self, verdict: OpVerdict, ops: Sequence[PendingOp | None]) -> None:
        group = self._groups[verdict.set_id]
        rows: list[Tensor] = []
        targets: list[Tensor | None] = []
        for place, op in enumerate(ops):
            if op is None:
                for dtype, shape in zip(verdict.dtypes[place], verdict.shapes[place], strict=True):
                    rows.append(torch.zeros(shape, dtype=dtype_of(dtype)).view(-1))
                    targets.append(None)
                continue
            op.settle_inputs()
            for given, target in zip(op.inputs, op.outputs, strict=True):
                rows.append(_row_of(target, given))
                targets.append(target)
        group.all_reduce(rows, reduction=verdict.reduction, prescale=verdict.prescale, postscale=verdict.postscale)
        for row, target in zip(rows, targets, strict=True):
            if target is not None:
                _write(target, row)
        for op in ops:
            if op is not None:
                op.complete(_as_given(op, op.outputs))


def _is_end(verdict: OpVerdict | None) -> bool:
    return verdict is None or verdict.kind == Kind.SHUTDOWN


def _row_of(target: Tensor, given: Tensor) -> Tensor:
    """Return the numbers given, flat: in the target's own memory where that lies in one piece."""
    plain = target.detach()
    if plain.device.type == "cpu" and plain.is_contiguous() and not plain.is_inference():
        if given.data_ptr() != plain.data_ptr() or not given.is_contiguous():
            plain.copy_(given.detach())
        return plain.view(-1)
    return given.detach().cpu().contiguous().clone().view(-1)


def _write(target: Tensor, row: Tensor) -> None:
    """Write numbers to the target, unless they are there."""
    if target.device.type != "cpu" or target.data_ptr() != row.data_ptr():
        with torch.inference_mode(target.is_inference()):
            target.detach().copy_(row.view(target.shape))


def _as_given(op: PendingOp, results: Sequence[Tensor]) -> object:
    return tuple(results) if op.is_grouped else results[0]
