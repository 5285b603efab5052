"""What `hvd.elastic` commits and gives back, without other workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.compat.horovod import progress
from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.elastic_run import MAX_RESETS, run_fn
from paceline.compat.horovod.elastic_state import State, TorchState
from paceline.compat.horovod.errors import HorovodInternalError


class KeptFile:
    """Stands in for the file of commits."""

    def __init__(self, commit: Any = None) -> None:
        self.commit, self.reads = commit, 0

    def read(self) -> Any:
        self.reads += 1
        return self.commit

    def write(self, commit: Any) -> None:
        self.commit = commit


class PlainState(State):
    """Keeps nothing."""

    def __init__(self) -> None:
        super().__init__(bcast_object=lambda value: value)

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


def state_of_rank(rank: int, file: KeptFile, monkeypatch: pytest.MonkeyPatch, *, told: Any = None) -> Any:
    """A state of this rank; rank 0 tells the others `told`."""
    monkeypatch.setattr(sessions, "current_session", lambda: SimpleNamespace(rank=rank))
    state: Any = TorchState(history=["begin"])

    def broadcast(value: Any) -> Any:
        assert value is not None  # an object is matched by its type, which all ranks must give
        return value if rank == 0 else told

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
    state = state_of_rank(rank, file, monkeypatch, told=7)
    assert (file.reads, progress.count()) == ((1, 7) if rank == 0 else (0, 7))
    assert state.history == (["begin", "kept"] if rank == 0 else ["begin"])  # `sync` follows


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
