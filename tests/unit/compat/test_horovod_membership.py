"""Which workers a session of an elastic Horovod program has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.group import Disrupted
from paceline.compat.horovod import basics, membership
from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.membership import NEVER, PresentWorker, SessionMembers, open_among_present
from paceline.compat.horovod.process_sets import ProcessSet
from paceline.errors import SyncError
from paceline.worker import program_worker
from present_workers import present_worker


class Members:
    """Stands in for the consensus of workers 0 and 1, of which this one is worker 0. `tells`: what comes of each time
    that all tell who they are, a number of generations that have formed since or an error."""

    def __init__(self, tells: list[int | Exception]) -> None:
        self.tells, self.generation, self.dropped = tells, 3, list[str]()
        self.ranks, self.planned, self.holds = (0, 1), None, False
        self.elastic = "yes"

    def attach(self, holder: object) -> None: ...

    def begin_steps(self) -> None: ...

    def hold(self) -> None: ...

    def run(self, operation: Callable[[], Any]) -> Any:
        came = self.tells.pop(0) if self.tells else 0
        if isinstance(came, Exception):
            raise came
        present = operation()
        self.generation += came
        return present

    def gather_objects(self, own: PresentWorker) -> list[PresentWorker]:
        return [own, present_worker(1, generation=own.generation)]

    def drop(self, disruption: Disrupted) -> None:
        assert sys.exc_info() == (None, None, None)  # else the failed session's sockets stay open while it waits
        self.dropped.append(str(disruption))
        self.generation += 1


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_num_opened": 0, "_needs_sync": True, "_present": (), "_state_since": NEVER}.items():
        monkeypatch.setattr(membership, name, value)


def opened(members: Members, open_one: Callable[[SessionMembers], Any] = lambda members: members) -> Any:
    place: Any = SimpleNamespace(
        consensus=members, group=members, assignment=SimpleNamespace(rank=0, host_index=0, joins=False)
    )
    return open_among_present(place, open_one, count_steps=lambda: 0)


@pytest.mark.parametrize(
    ("since", "ranks"),
    [
        ([NEVER, NEVER, NEVER], (0, 1, 2)),  # at the beginning
        ([NEVER, 0.0, 0.0], (1, 2, 0)),  # worker 0 was lost, and has come again
        ([3.0, 0.0, 1.0], (1, 2, 0)),  # and stays behind those that were there before
    ],
)
def test_workers_that_have_the_state_come_first(since: list[float], ranks: tuple[int, ...]) -> None:
    present = [present_worker(rank, host=rank % 2, state_since=one) for rank, one in enumerate(since)]
    found = SessionMembers.among(present, 0, generation=5)
    assert found.ranks == ranks
    assert (found.rank, found.cross_size, found.is_homogeneous) == (ranks.index(0), 2, False)
    assert (found.local_rank, found.local_size) == ([rank for rank in ranks if rank != 1].index(0), 2)


def test_what_was_told_before_the_same_members_formed_again_is_told_again() -> None:
    members = Members([1, 0])
    assert opened(members).name == "generation_4/1"
    assert members.tells == []


def test_a_wait_that_takes_too_long_is_no_end_of_a_healthy_worker() -> None:
    members = Members([SyncError("waited too long for the other workers")])
    assert opened(members).name == "generation_4/2"
    assert members.dropped == ["waited too long for the other workers"]


def test_a_session_that_does_not_open_is_left_before_the_next_generation_forms() -> None:
    members = Members([])
    fails = [Disrupted("worker 1 is lost")]

    def open_one(members: SessionMembers) -> SessionMembers:
        if fails:
            raise fails.pop()
        return members

    assert opened(members, open_one).name == "generation_4/2"
    assert members.dropped == ["worker 1 is lost"]


def test_who_waits_in_the_sync_is_known_once_the_session_is_open() -> None:
    membership.plan_sync(False)
    opened(Members([]))
    assert not membership.may_skip_sync()  # worker 1 does not skip it
    assert not membership.has_newcomers_only()


def test_an_elastic_run_takes_no_process_sets_at_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basics, "open_worker", lambda **_: None)
    monkeypatch.setattr(program_worker, "_places", [SimpleNamespace(consensus=Members([]))])
    with pytest.raises(ValueError, match=r"hvd\.add_process_set\(\) at the start of"):
        basics.init(process_sets=[ProcessSet([0])])
    assert not sessions.is_open()
