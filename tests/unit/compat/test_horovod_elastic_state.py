"""What `hvd.elastic` commits and gives back, without other workers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from paceline.compat.horovod import progress
from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.elastic_run import MAX_RESETS, run_fn
from paceline.compat.horovod.elastic_state import State, TorchState
from paceline.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from paceline.compat.horovod.membership import NEVER, PresentWorker, SessionMembers
from paceline.worker import program_worker
from paceline.worker.membership.clean_exit import CleanExit


class KeptFile:
    """Stands in for the file of commits."""

    def __init__(self, commit: Any = None) -> None:
        self.commit, self.reads = commit, 0

    def read(self) -> Any:
        self.reads += 1
        return self.commit

    def write(self, commit: Any) -> None:
        self.commit, self.is_settled = commit, False

    def wait(self) -> None:
        self.is_settled = True


class PlainState(State):
    """Keeps nothing."""

    def __init__(self) -> None:
        super().__init__(bcast_object=lambda value: value)

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


@pytest.fixture(autouse=True)
def consensus(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Of a run that this process has joined."""
    found = mock.Mock(elastic=None, planned=None, finish=None, generation=0)
    monkeypatch.setattr(program_worker, "_places", [SimpleNamespace(consensus=found)])
    return found


def state_of_rank(rank: int, file: KeptFile, monkeypatch: pytest.MonkeyPatch, *, told: Sequence[Any] = ()) -> Any:
    """A state of this rank; rank 0 tells the others `told`, one after the other."""
    left = iter(told)
    monkeypatch.setattr(sessions, "is_open", lambda: True)
    monkeypatch.setattr(sessions, "current_session", lambda: SimpleNamespace(rank=rank))
    state: Any = TorchState(history=["begin"])

    def broadcast(value: Any) -> Any:
        assert value is not None  # an object is matched by its type, which all ranks must give
        return value if rank == 0 else next(left)

    state._bcast_object = broadcast
    state.keep_in(file)
    return state


def test_a_commit_holds_what_was_there_whatever_the_program_changes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeptFile()
    state = state_of_rank(0, file, monkeypatch)
    state.sync()
    state.history.append("lost")
    state.restore()
    assert state.history == ["begin"]
    state.history.append("kept")
    state.commit()
    for _ in range(2):
        state.history.append("lost")
        assert file.commit["objects"]["history"] == ["begin", "kept"]  # a thread may be writing it now
        state.restore()
        assert state.history == ["begin", "kept"]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_reads_the_commit(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_counted", 0)
    file = KeptFile({"copies": {}, "objects": {"history": ["begin", "kept"]}, "steps": 7})
    kept = {"history": ["begin", "kept"]}
    state = state_of_rank(rank, file, monkeypatch, told=[7, kept, 9, kept])
    for steps in (7, 9):  # the second time it is not read again
        state.sync()
        assert (file.reads, progress.count()) == (1 if rank == 0 else 0, steps)
        assert state.history == kept["history"]
        progress.begin_at(9)


def test_what_is_gone_back_is_counted(monkeypatch: pytest.MonkeyPatch, consensus: mock.Mock) -> None:
    monkeypatch.setattr(progress, "_counted", 4)
    state = state_of_rank(0, KeptFile(), monkeypatch)
    state.sync()
    progress.begin_at(6)
    state.restore()
    assert progress.count() == 4
    consensus.undo.assert_called_once_with(2)


@pytest.mark.parametrize(("members", "skips_sync"), [((0, 1, 2), False), ((0,), True), ((0, 2), False)])
def test_a_commit_raises_what_becomes_of_the_workers(
    monkeypatch: pytest.MonkeyPatch, consensus: mock.Mock, members: tuple[int, ...], skips_sync: bool
) -> None:
    state = state_of_rank(0, KeptFile(), monkeypatch)
    state.commit()
    consensus.ranks, consensus.planned = (0, 1), SimpleNamespace(members=members)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is skips_sync


def test_where_the_run_is_to_stop_a_commit_is_the_end(monkeypatch: pytest.MonkeyPatch, consensus: mock.Mock) -> None:
    file = KeptFile()
    state = state_of_rank(0, file, monkeypatch)
    consensus.finish = SimpleNamespace(exit_code=75)
    with pytest.raises(CleanExit) as end:
        state.commit()
    assert end.value.code == 75
    assert file.is_settled


@pytest.mark.parametrize(
    ("since", "ranks"),
    [
        ([NEVER, NEVER, NEVER], (0, 1, 2)),  # at the beginning
        ([NEVER, 0.0, 0.0], (1, 2, 0)),  # worker 0 was lost, and has come again
        ([3.0, 0.0, 1.0], (1, 2, 0)),  # and stays behind those that were there before
    ],
)
def test_workers_that_have_the_state_come_first(since: list[float], ranks: tuple[int, ...]) -> None:
    present = [
        PresentWorker(rank=rank, host=rank % 2, state_since=one, num_opened=1, planned=-1)
        for rank, one in enumerate(since)
    ]
    found = SessionMembers.among(present, 0, generation=5)
    assert found.ranks == ranks
    assert (found.rank, found.cross_size, found.is_homogeneous) == (ranks.index(0), 2, False)
    assert (found.local_rank, found.local_size) == ([rank for rank in ranks if rank != 1].index(0), 2)


@pytest.mark.parametrize("commits", [True, False])
def test_failures_in_a_row_are_limited_and_those_after_a_commit_are_not(commits: bool) -> None:
    calls: list[int] = []

    def train(state: State) -> int:
        calls.append(len(calls))
        if commits:
            state.commit()
        if len(calls) <= 2 * MAX_RESETS:
            raise HorovodInternalError("a collective has failed")
        return len(calls)

    wrapped = run_fn(train, lambda: None)
    if commits:
        assert wrapped(PlainState()) == 2 * MAX_RESETS + 1
        return
    with pytest.raises(HorovodInternalError):
        wrapped(PlainState())
    assert len(calls) == MAX_RESETS + 1
