"""Which operations run next, decided by worker 0: a machine without I/O.

Workers submit operations by name, each in its own order. An operation is *ready* when all members of its process set
have submitted that name; workers that have joined count as having submitted every one. Ready operations get one order,
which all members follow, so no two of them ever wait for each other. Members that mean different things by a name, or
of which one is gone, get an error instead, all of them.

`decide` returns what was decided since the last call, with the ranks that have to hear of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from paceline.compat.horovod.mismatches import mismatch
from paceline.compat.horovod.requests import Kind, OpRequest, OpVerdict, Reduction

__all__ = ["Negotiation", "StalledOp"]

Key = tuple[int, str]  # the process set's number, and the name
GLOBAL = 0  # the process set of all workers
OVER_ALL = {Kind.ADD_SET, Kind.REMOVE_SET}


@dataclasses.dataclass(kw_only=True, slots=True)
class _Pending:
    since: float
    requests: dict[int, OpRequest] = dataclasses.field(default_factory=dict[int, OpRequest])
    is_ready: bool = False
    is_reported: bool = False  # as stalled


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StalledOp:
    """An operation that some members have submitted, and others have not for long."""

    name: str
    waited_s: float
    missing: tuple[int, ...]


class Negotiation:
    """The state of all process sets. `fusion_bytes`: all-reduces that are ready together travel together up to this."""

    def __init__(self, ranks: Sequence[int], *, fusion_bytes: int) -> None:
        self.sets: dict[int, tuple[int, ...]] = {GLOBAL: tuple(ranks)}
        self.gone: dict[int, str] = {}  # rank -> what became of it
        self._fusion_bytes = fusion_bytes
        self._pending: dict[Key, _Pending] = {}
        self._ready: list[Key] = []
        self._joined: dict[int, float] = {}  # in the order of joining
        self._decided: list[tuple[OpVerdict, tuple[int, ...]]] = []
        self._next_set, self._moved_at, self._failure = 1, 0.0, ""

    @property
    def is_over(self) -> bool:
        """Whether no worker is left."""
        return len(self.gone) == len(self.sets[GLOBAL])

    def submit(self, rank: int, requests: Iterable[OpRequest], *, now: float) -> None:
        """Take what a worker has submitted."""
        self._moved_at = now
        for request in requests:
            if request.kind == Kind.JOIN:
                self._join(rank, now)
                continue
            members = self.sets.get(request.set_id, ())
            lost = [one for one in members if one in self.gone]
            if self._failure or rank not in members:
                text = self._failure or f"process set {request.set_id} does not exist any more"
                self._fail(request, text, [rank])
            elif lost:
                self._fail(request, self._gone_text(lost), [rank])
            else:
                pending = self._pending.setdefault((request.set_id, request.name), _Pending(since=now))
                pending.requests[rank] = request
                self._look((request.set_id, request.name))

    def leave(self, rank: int) -> None:
        """A worker has shut down: what waits for it fails, and it hears when nothing more comes for it."""
        self._remove(rank, "has shut Horovod down")
        self._decided.append((OpVerdict(kind=Kind.SHUTDOWN), (rank,)))

    def lose(self, rank: int, reason: str) -> None:
        """A worker was lost: what waits for it fails, and so does all that comes."""
        if rank not in self.gone:
            self._remove(rank, reason)

    def fail(self, reason: str) -> None:
        """Nothing can run any more, on any worker."""
        if not self._failure:
            self._failure = reason
            self._fail_all([key for key, pending in self._pending.items() if not pending.is_ready], reason)
            self._decided.append((OpVerdict(kind=Kind.FAILED, error=reason), self._present(GLOBAL)))

    def stalled(self, now: float, *, after_s: float) -> list[StalledOp]:
        """Return the operations that wait for so long, each once."""
        found: list[StalledOp] = []
        for (_, name), pending, missing in self._waiting():
            if now - pending.since > after_s and not pending.is_reported:
                pending.is_reported = True
                found.append(StalledOp(name=name, waited_s=now - pending.since, missing=missing))
        return found

    def expire(self, now: float, *, limit_s: float) -> None:
        """Fail what waits for longer than `limit_s`. Workers that have joined wait as long as others do anything."""
        for key, pending, missing in list(self._waiting()):
            if now - pending.since > limit_s:
                named = ", ".join(map(str, missing))
                self._fail_all([key], f"{key[1]} waited {limit_s:.0f} s for ranks {named}, which have not submitted it")
        if self._joined and now - self._moved_at > limit_s:
            away = [rank for rank in self._present(GLOBAL) if rank not in self._joined]
            named = ", ".join(map(str, away))
            self._joined.clear()
            self.fail(f"join waited {limit_s:.0f} s for ranks {named}, which have done nothing")

    def decide(self) -> list[tuple[OpVerdict, tuple[int, ...]]]:
        """Return the verdicts since the last call, in the order in which they must be followed."""
        while self._ready:
            taken = self._alike()
            del self._ready[: len(taken)]
            self._run(taken)  # it may fail others that were ready: those of a process set that it removes
        present = self._present(GLOBAL)
        if self._joined and all(rank in self._joined for rank in present):
            last = list(self._joined)[-1]
            self._joined.clear()
            self._decided.append((OpVerdict(kind=Kind.JOIN, value=last), present))
        decided, self._decided = self._decided, []
        return decided

    def _waiting(self) -> Iterable[tuple[Key, _Pending, tuple[int, ...]]]:
        for key, pending in self._pending.items():
            if not pending.is_ready:
                yield key, pending, self._missing(key, pending)

    def _missing(self, key: Key, pending: _Pending) -> tuple[int, ...]:
        joined = self._joined if key[0] == GLOBAL else {}
        return tuple(rank for rank in self.sets[key[0]] if rank not in pending.requests and rank not in joined)

    def _present(self, set_id: int) -> tuple[int, ...]:
        return tuple(rank for rank in self.sets[set_id] if rank not in self.gone)

    def _look(self, key: Key) -> None:
        pending = self._pending[key]
        if not pending.is_ready and not self._missing(key, pending):
            pending.is_ready = True
            self._ready.append(key)

    def _join(self, rank: int, now: float) -> None:
        if self.gone or self._failure:
            text = self._failure or self._gone_text(list(self.gone))
            self._decided.append((OpVerdict(kind=Kind.JOIN, error=text), (rank,)))
            return
        self._joined[rank] = now
        for key in list(self._pending):
            if key[0] == GLOBAL:
                self._look(key)

    def _remove(self, rank: int, reason: str) -> None:
        self.gone[rank] = reason
        text = self._gone_text([rank])
        if self._joined:
            self._joined.pop(rank, None)
            waiting, self._joined = tuple(self._joined), {}
            self._decided.append((OpVerdict(kind=Kind.JOIN, error=text), waiting))
        # What is ready needs this worker's numbers as well, unless its members were told already.
        self._fail_all([key for key in self._pending if rank in self.sets[key[0]]], text)
        self._ready = [key for key in self._ready if key in self._pending]

    def _gone_text(self, ranks: Sequence[int]) -> str:
        return "; ".join(f"rank {rank} {self.gone[rank]}" for rank in ranks)

    def _fail(self, request: OpRequest, text: str, ranks: Iterable[int]) -> None:
        verdict = OpVerdict(kind=request.kind, names=(request.name,), set_id=request.set_id, error=text)
        self._decided.append((verdict, tuple(ranks)))

    def _fail_all(self, keys: Iterable[Key], text: str) -> None:
        for key in keys:
            pending = self._pending.pop(key)
            self._fail(next(iter(pending.requests.values())), text, pending.requests)

    def _alike(self) -> list[Key]:
        """Return the first key that is ready, and those behind it that travel with it."""
        first, taken = self._any(self._ready[0]), self._ready[:1]
        if first.kind != Kind.ALLREDUCE or first.reduction == Reduction.ADASUM or self._error(taken[0]):
            return taken
        num_bytes = first.num_bytes
        for key in itertools.islice(self._ready, 1, None):
            other = self._any(key)
            num_bytes += other.num_bytes
            if num_bytes > self._fusion_bytes or not _travels_with(first, other) or self._error(key):
                break
            taken.append(key)
        return taken

    def _any(self, key: Key) -> OpRequest:
        return next(iter(self._pending[key].requests.values()))

    def _error(self, key: Key) -> str:
        joined = [rank for rank in self._joined if rank not in self._pending[key].requests] if key[0] == GLOBAL else []
        return mismatch(self._pending[key].requests, has_joined=bool(joined), ranks=self.sets[key[0]])

    def _run(self, keys: Sequence[Key]) -> None:
        error = self._error(keys[0])
        if error:
            self._fail_all(keys, error)
            return
        taken = [self._pending.pop(key).requests for key in keys]
        firsts = [next(iter(requests.values())) for requests in taken]
        first, set_id = firsts[0], keys[0][0]
        ranks = self.sets[set_id]
        has_joined = any(len(requests) < len(ranks) for requests in taken)
        verdict = OpVerdict(
            kind=first.kind,
            names=tuple(one.name for one in firsts),
            set_id=set_id,
            reduction=first.reduction,
            prescale=first.prescale,
            postscale=first.postscale,
            root=first.root,
            device=first.device,
            dtypes=tuple(one.dtypes for one in firsts) if has_joined else (),
            shapes=tuple(one.shapes for one in firsts) if has_joined else (),
            lengths=_lengths(first.kind, [taken[0][rank] for rank in ranks if rank in taken[0]]),
            ranks=first.ranks,
            value=self._change_sets(first) if first.kind in OVER_ALL else -1,
        )
        self._decided.append((verdict, ranks))

    def _change_sets(self, request: OpRequest) -> int:
        """Add or remove a process set; returns its number, -1 where there is one of these ranks, or none to remove."""
        if request.kind == Kind.ADD_SET:
            if request.ranks in self.sets.values():
                return -1
            number, self._next_set = self._next_set, self._next_set + 1
            self.sets[number] = request.ranks
            return number
        number = request.root
        if number == GLOBAL or number not in self.sets:
            return -1
        self._fail_all([key for key in self._pending if key[0] == number], f"process set {number} was removed")
        self._ready = [key for key in self._ready if key in self._pending]
        del self.sets[number]
        return number


def _travels_with(one: OpRequest, other: OpRequest) -> bool:
    return (one.kind, one.set_id, one.reduction, one.prescale, one.postscale, one.device) == (
        other.kind,
        other.set_id,
        other.reduction,
        other.prescale,
        other.postscale,
        other.device,
    )


def _lengths(kind: str, requests: Sequence[OpRequest]) -> tuple[tuple[int, ...], ...]:
    if kind == Kind.ALLTOALL:
        return tuple(request.splits for request in requests)
    if kind == Kind.ALLGATHER:
        return tuple(
            tuple(request.shapes[place][0] for request in requests) for place in range(len(requests[0].shapes))
        )
    return ()
