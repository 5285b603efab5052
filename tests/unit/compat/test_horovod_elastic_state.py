"""What `hvd.elastic` commits and gives back, without other workers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from paceline.compat.horovod import membership, progress
from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.elastic_run import MAX_RESETS, _sync, run_fn
from paceline.compat.horovod.elastic_state import State, TorchState
from paceline.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from paceline.compat.horovod.membership import NEVER
from paceline.errors import CheckpointError, RunFileError
from paceline.worker import program_worker
from paceline.worker.membership.clean_exit import CleanExit
from present_workers import present_worker


class KeptFile:
    """Stands in for the file of commits."""

    def __init__(self, commit: Any = None) -> None:
        self.commit, self.reads = commit, 0
        self.error: Exception | None = None

    def read(self) -> Any:
        self.reads += 1
        return self.commit

    def write(self, commit: Any) -> None:
        self.commit, self.is_settled = commit, False

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        self.is_settled = True


class PlainState(State):
    """Keeps nothing."""

    def __init__(self) -> None:
        super().__init__(bcast_object=lambda value: value)
        self.syncs = 0

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None:
        self.syncs += 1


@pytest.fixture(autouse=True)
def consensus(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Of a run that this process has joined."""
    found = mock.Mock(elastic=None, planned=None, finish=None, generation=0)
    monkeypatch.setattr(membership, "_needs_sync", True)
    monkeypatch.setattr(membership, "_present", ())
    monkeypatch.setattr(membership, "_state_since", NEVER)
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


def test_a_commit_that_could_not_be_written_is_an_error_where_all_leave(
    monkeypatch: pytest.MonkeyPatch, consensus: mock.Mock
) -> None:
    file = KeptFile()
    state = state_of_rank(0, file, monkeypatch)
    consensus.finish, file.error = SimpleNamespace(exit_code=75), RunFileError("no space left")
    with pytest.raises(RunFileError, match="no space left"):
        state.commit()


def test_after_a_sync_that_has_failed_the_next_rank_0_begins_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_counted", 0)
    file = KeptFile({"copies": {}, "objects": {"history": ["begin", "kept"]}, "steps": 7})
    state = state_of_rank(1, file, monkeypatch, told=[7])

    def broadcast(value: Any) -> Any:
        if isinstance(value, dict):
            raise HorovodInternalError("rank 0 is lost before it has sent its state")
        return 7

    state._bcast_object = broadcast
    with pytest.raises(HorovodInternalError):
        state.sync()
    state.restore()
    assert state.history == ["begin"]
    monkeypatch.setattr(sessions, "current_session", lambda: SimpleNamespace(rank=0))
    state._bcast_object = lambda value: value
    state.sync()
    assert (state.history, progress.count(), file.reads) == (["begin", "kept"], 7, 1)
    state.sync()
    assert file.reads == 1


@pytest.mark.parametrize(("is_newcomer", "fails"), [(True, True), (False, False)])
def test_newcomers_alone_do_not_begin_without_a_commit(
    monkeypatch: pytest.MonkeyPatch, is_newcomer: bool, fails: bool
) -> None:
    monkeypatch.setattr(sessions, "current_session", lambda: SimpleNamespace(rank=0))
    monkeypatch.setattr(membership, "_present", (present_worker(is_newcomer=is_newcomer),))
    state = PlainState()
    wrapped = run_fn(lambda state: "done", lambda: None)
    if fails:
        with pytest.raises(CheckpointError, match="All workers that had the state"):
            wrapped(state)
        assert state.syncs == 0
    else:
        assert (wrapped(state), state.syncs) == ("done", 1)


def test_newcomers_alone_begin_from_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeptFile({"copies": {}, "objects": {"history": ["begin", "kept"]}, "steps": 7})
    state = state_of_rank(0, file, monkeypatch)
    monkeypatch.setattr(membership, "_present", (present_worker(is_newcomer=True),))
    _sync(state)
    assert state.history == ["begin", "kept"]


@pytest.mark.parametrize("newcomer_is_there", [True, False])
def test_where_a_newcomer_waits_in_the_sync_no_other_worker_skips_it(
    monkeypatch: pytest.MonkeyPatch, newcomer_is_there: bool
) -> None:
    """Only a removal was announced, but the session that forms may have a newcomer as well."""
    own_needs: list[bool] = []
    state = PlainState()

    def reset() -> None:
        own_needs.append(membership._needs_sync)
        others = (present_worker(needs_sync=False), present_worker(rank=1, needs_sync=newcomer_is_there))
        monkeypatch.setattr(membership, "_present", others)

    def train(state: State) -> str:
        if not own_needs:
            raise HostsUpdatedInterrupt(skip_sync=True)
        return "done"

    assert run_fn(train, reset)(state) == "done"
    assert (own_needs, state.syncs) == ([False], 2 if newcomer_is_there else 1)


def test_after_a_failure_this_worker_tells_that_it_needs_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    own_needs: list[bool] = []

    def train(state: State) -> str:
        if not own_needs:
            raise HorovodInternalError("rank 0 is lost in the broadcast of a commit")
        return "done"

    run_fn(train, lambda: own_needs.append(membership._needs_sync))(PlainState())
    assert own_needs == [True]


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
