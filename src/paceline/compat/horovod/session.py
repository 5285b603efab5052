"""What `hvd.init()` opens and `hvd.shutdown()` closes: this worker's part in the operations of all.

The run's worker stays open beneath it (`open_worker`). So `init()` works again after `shutdown()`: all workers begin a
new session, the one of the same number.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import torch.distributed as dist

from paceline.comm.group import Disrupted
from paceline.comm.peer_sockets.meeting import connect_members
from paceline.comm.peer_sockets.process_group import listening_address
from paceline.compat.horovod.control import ControlLimits, ControlThread
from paceline.compat.horovod.errors import HorovodInternalError, not_initialized
from paceline.compat.horovod.executor import Executor
from paceline.compat.horovod.member_group import MemberGroup
from paceline.compat.horovod.membership import SessionMembers, open_among_present, why_over
from paceline.compat.horovod.negotiation import Negotiation
from paceline.compat.horovod.pending_op import PendingOp
from paceline.compat.horovod.requests import Kind, OpVerdict
from paceline.compat.horovod.timeline import Timeline
from paceline.compat.horovod.variables import HorovodVariables
from paceline.worker.program_worker import ProgramPlace, at_program_end, program_place

__all__ = ["Session", "close_session", "current_session", "is_open", "open_session"]

BATCH_BYTES = 16 << 20  # of submitted tensors: what is sent to the coordinator at once
LEAVE_S = 30.0  # for which `shutdown` waits for what is still decided
GLOBAL = 0

_numbers = itertools.count()  # of the sessions of this process
_current: list[Session] = []  # none or one


def open_session(ranks: Sequence[int] | None = None, *, count_steps: Callable[[], int] = lambda: 0) -> Session:
    """Open the session of these ranks (None: of all) if none is open, and return it; all of them must call this.
    `count_steps()`: those that the program has taken.

    Raises ValueError where this worker is not one of the ranks, or the run is elastic and ranks are given.
    """
    if not _current:
        place, number = program_place(), next(_numbers)
        if number == 0:
            at_program_end(close_session, after_error=_finish_timeline)  # programs need not call hvd.shutdown()
        if place.consensus.elastic is None:
            _current.append(Session(place, SessionMembers.fixed(place, ranks, number)))
        elif ranks is None:
            _current.append(open_among_present(place, lambda members: Session(place, members), count_steps=count_steps))
        else:
            raise ValueError(
                "hvd.init(comm) takes no ranks in an elastic run, whose workers come and go: leave them out"
            )
    return _current[0]


def close_session() -> None:
    """Close the session, if one is open."""
    if _current:
        _current.pop().close()


def _finish_timeline() -> None:
    if _current:
        _current[0].timeline.stop()


def is_open() -> bool:
    return bool(_current)


def current_session() -> Session:
    """Return the open session. Raises ValueError where there is none."""
    if not _current:
        raise ValueError(not_initialized())
    return _current[0]


class Session:
    """One worker's part. Ranks are those of the session, whose members may be a part of the run's workers.

    Raises Disrupted where a worker is lost before all have met.
    """

    def __init__(self, place: ProgramPlace, members: SessionMembers) -> None:
        self.variables = HorovodVariables.read()
        self.rank, self.size = members.rank, len(members.ranks)
        self.local_rank, self.local_size = members.local_rank, members.local_size
        self.cross_rank, self.cross_size = members.cross_rank, members.cross_size
        self.is_homogeneous = members.is_homogeneous
        self.sets: dict[int, tuple[int, ...]] = {GLOBAL: tuple(range(self.size))}
        self.failure = ""
        self.emit = place.emit
        self._timeout_s = place.job.timeout_s
        self._why_over = functools.partial(why_over, place.consensus)
        self._store = dist.PrefixStore(f"paceline/horovod/{members.name}", place.shared)
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, str], PendingOp] = {}
        self._unnamed: Counter[tuple[int, str]] = Counter()
        self._num_joins, self._is_closing = 0, False
        self.timeline = Timeline(is_written=self.rank == 0)
        self._executor = Executor(
            rank=self.rank, take=self._take, meet=self._meet, fail=self.fail, observe=self.timeline.ran
        )
        self._executor.begin(self._meet(GLOBAL, self.sets[GLOBAL]))
        try:
            self._control = self._connect()
        except BaseException:
            self._executor.abort(HorovodInternalError("the workers have not met"))
            raise
        if self.variables.timeline not in ("", "DYNAMIC"):
            self.timeline.start(self.variables.timeline, marks_cycles=self.variables.marks_cycles)

    def submit(self, op: PendingOp, *, is_urgent: bool = False) -> None:
        """Submit an operation. Raises ValueError where one of its name is under way, HorovodInternalError where nothing
        runs any more."""
        request = op.request
        with self._lock:
            if self.failure:
                raise HorovodInternalError(self.failure)
            key = (request.set_id, request.name)
            if key in self._pending:
                raise ValueError(
                    f"Duplicate tensor name {request.name}: an operation of this name is under way. Give each another "
                    "name, or wait for the first with synchronize()"
                )
            self._pending[key] = op
            op.help_until_done = self._executor.help_until_done
        self.timeline.began(request)
        self._control.submit(request, is_urgent=is_urgent)

    def name_for(self, kind: str, name: str | None, set_id: int) -> str:
        """Return the name by which an operation is matched. Those without a name are matched by their order."""
        if name is not None:
            return f"{kind}.{name}"
        with self._lock:
            self._unnamed[set_id, kind] += 1
            return f"{kind}.noname.{self._num_joins}.{self._unnamed[set_id, kind]}"

    def flush(self) -> None:
        """Have what was submitted sent now: somebody waits for it."""
        self._control.flush()

    def fail(self, reason: str) -> None:
        """Fail everything that is under way, and all that comes; all other workers hear of it."""
        with self._lock:
            is_news, self.failure = not self.failure, self.failure or reason
            waiting, self._pending = list(self._pending.values()), {}
        for op in waiting:
            op.fail(HorovodInternalError(self.failure))
        if is_news:
            self._executor.abort(HorovodInternalError(self.failure))
            if not self._is_closing:
                self._control.report_failure(reason)

    def close(self) -> None:
        """Leave: what is still decided is carried out first, and what waits for others fails, there as well."""
        self._is_closing = True
        self._control.leave()
        if not self.failure:
            self._executor.has_ended.wait(LEAVE_S)
        self.fail("Horovod has been shut down")
        self._control.end()
        if self.rank > 0:
            self._control.join(LEAVE_S)
        self.timeline.stop()

    def _connect(self) -> ControlThread:
        """Meet the coordinator, which is rank 0."""
        sockets = connect_members(
            dist.PrefixStore("control", self._store),
            index=self.rank,
            size=self.size,
            address=listening_address(),
            timeout_s=self._timeout_s,
            check=self._check,
        )
        for peer in [peer for peer in sockets if self.rank and peer]:
            sockets.pop(peer).close()
        limits = ControlLimits(
            cycle_s=self.variables.cycle_s,
            warn_s=self.variables.warn_s,
            stall_s=self.variables.stall_s or self._timeout_s,
            batch_bytes=BATCH_BYTES,
        )
        negotiation = None
        if self.rank == 0:
            negotiation = Negotiation(range(self.size), fusion_bytes=self.variables.fusion_bytes)
        return ControlThread(
            sockets,
            rank=self.rank,
            coordinator=0,
            negotiation=negotiation,
            limits=limits,
            follow=self._follow,
            fail=self.fail,
            why_over=self._why_over,
        )

    def _follow(self, verdict: OpVerdict) -> None:
        self.timeline.decided(verdict)
        self._executor.follow(verdict)

    def _take(self, set_id: int, name: str) -> PendingOp | None:
        """Hand over an operation that runs now. The names of all process sets and all joins follow the verdicts."""
        with self._lock:
            if name == Kind.JOIN:
                self._num_joins += 1
                self._unnamed.clear()
            return self._pending.pop((set_id, name), None)

    def _meet(self, set_id: int, ranks: Sequence[int]) -> MemberGroup:
        return MemberGroup.meet(
            dist.PrefixStore(f"set/{set_id}", self._store),
            ranks,
            self.rank,
            num_local_workers=self.local_size,
            is_one_host=self.cross_size == 1,
            timeout_s=self._timeout_s,
            why_ended=lambda: self.failure or self._why_over() or None,
        )

    def _check(self) -> None:
        """Raise Disrupted where the workers that meet are not those of now."""
        if reason := self._why_over():
            raise Disrupted(reason)
